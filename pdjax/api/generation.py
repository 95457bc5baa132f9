"""From prompts and parameters to streams of text: what the HTTP surface and the Python API have in common."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Literal, NamedTuple

from pdjax.api.backend import Backend, ModelCard, ScoredPrompt
from pdjax.api.detokenizer import TextStream
from pdjax.api.sampling_params import SamplingParams
from pdjax.api.tokenizer import Tokenizer
from pdjax.errors import WorkerFailed
from pdjax.protocol import Finished, PromptToken, Sampling, TokenOut


class TextRequest(NamedTuple):
    """One sequence to generate. `stop` are strings, `named_stop_ids` the stop tokens that the client itself asked for.

    `is_prompt_only`: the client wants no output; workers make one token all the same, which is dropped here.
    """

    request_id: str
    prompt: list[int]
    sampling: Sampling
    stop: tuple[str, ...]
    named_stop_ids: tuple[int, ...]
    deadline_s: float
    is_prompt_only: bool = False


class Finish(NamedTuple):
    """How an answer ended. `stop_reason`: the client's stop string or stop token; None at the model's own end or at the length limit.

    `cached_tokens`: prompt tokens that were not computed; None where a stop string ended the work before the workers had told.
    """

    reason: Literal["stop", "length"]
    stop_reason: int | str | None
    cached_tokens: int | None


class PromptPart(NamedTuple):
    """The next tokens of the prompt with their log probabilities; `text_offsets`: where in the prompt, in characters, each begins."""

    tokens: list[PromptToken]
    text_offsets: list[int]


class PromptReader:
    """Follows a prompt, as it is told part by part, through its text."""

    def __init__(self, tokenizer: Tokenizer):
        self._text = TextStream(tokenizer, skip_special_tokens=False)

    def part(self, tokens: list[PromptToken]) -> PromptPart:
        offsets = []
        for token in tokens:
            offsets.append(self._text.num_chars)
            self._text.push(token.token)
        return PromptPart(tokens, offsets)


class Delta(NamedTuple):
    """One step of an answer: at most one more token, the text that is now certain, and at the end how it ended.

    Where prompt log probabilities are asked for, the first steps of an answer carry a `prompt` part each, and nothing else.

    `text` may be empty (half a character, the possible start of a stop string) and may come later than its token. The token that stops
    an answer counts as a token and has no text. `text_offset`: where in the answer, in characters, the token's text begins.
    """

    text: str
    token: TokenOut | None = None
    text_offset: int = 0
    finish: Finish | None = None
    prompt: PromptPart | None = None


def plan(
    card: ModelCard,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    default_max_tokens: int,
    request_id: str,
    deadline_s: float,
) -> list[TextRequest]:
    """The sequences of one request: `params.n` for each prompt, in order. Raises BadRequest before any work."""
    requests = []
    for prompt in prompts:
        for choice in range(params.n):
            sampling = params.to_sampling(card, len(prompt), default_max_tokens, choice)
            sequence_id = f"{request_id}-{len(requests)}"
            is_prompt_only = params.max_tokens == 0
            requests.append(TextRequest(sequence_id, prompt, sampling, params.stop, params.stop_token_ids, deadline_s, is_prompt_only))
    return requests


async def generate_text(backend: Backend, tokenizer: Tokenizer, request: TextRequest) -> AsyncGenerator[Delta, None]:
    """Generate one sequence; the last `Delta` has its `finish`. Raises what `Backend.generate` raises.

    The backend's work has stopped when the last `Delta` is given, and whenever this generator is closed.
    """
    text = TextStream(tokenizer, request.stop)
    prompt = PromptReader(tokenizer)
    is_prompt_due = request.sampling.prompt_logprobs is not None
    stop_ids = frozenset(request.sampling.stop_token_ids)
    last: Delta | None = None
    cached_tokens: int | None = None
    source = backend.generate(request.request_id, request.prompt, request.sampling, request.deadline_s)
    async with aclosing(source) as events:
        async for event in events:
            if is_prompt_due:  # not before the backend has said something: until then it may refuse the request
                is_prompt_due = False
                yield Delta("", prompt=prompt.part([PromptToken(0, request.prompt[0], None)]))
            if isinstance(event, ScoredPrompt):
                yield Delta("", prompt=prompt.part(event.tokens))
                continue
            if isinstance(event, Finished):
                last = Delta(text.finish(), finish=_finish(event, request))
                break
            if request.is_prompt_only:
                continue
            if event.index == 0:
                cached_tokens = event.cached_tokens
            offset = text.num_chars
            piece = "" if event.token in stop_ids else text.push(event.token)
            if text.stopped is not None:
                last = Delta(piece, event, offset, Finish("stop", text.stopped, cached_tokens))
                break
            yield Delta(piece, event, offset)
    if last is None:
        raise WorkerFailed(f"the tokens of {request.request_id} broke off without an end")
    yield last


def _finish(event: Finished, request: TextRequest) -> Finish:
    assert event.reason != "handed_off", f"{request.request_id}: a hand-over is no end of an answer"
    if request.is_prompt_only:
        return Finish("length", None, event.cached_tokens)
    stop_reason = event.stop_token if event.stop_token in request.named_stop_ids else None
    return Finish(event.reason, stop_reason, event.cached_tokens)
