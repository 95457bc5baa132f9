"""Requests become work: checks everything that can be checked, then hands a stream of events and its wording to the handlers."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import NamedTuple

from pdjax.api.backend import Backend, ModelCard
from pdjax.api.chat_template import ChatTemplate
from pdjax.api.errors import InvalidField, ModelNotFound
from pdjax.api.generation import Delta, generate_text, plan
from pdjax.api.logprobs import LogprobWriter
from pdjax.api.merge import merge
from pdjax.api.meter import Meter
from pdjax.api.prompts import Prompt, PromptReader, check_vocabulary, split_prompts
from pdjax.api.responses import Detokenized, Tokenized
from pdjax.api.schemas import ChatMessage, ChatRequest, CompletionRequest, DetokenizeRequest, GenerationRequest, TokenizeRequest
from pdjax.api.tokenizer import Tokenizer
from pdjax.api.writers import DONE, AnswerHead, AnswerWriter, ChatWriter, CompletionWriter
from pdjax.config.schema import ServerConfig
from pdjax.errors import BadRequest
from pdjax.observe.http_metrics import HttpMetrics

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for /v1/completions."""


class Arrival(NamedTuple):
    """When a request came: `clock` from time.perf_counter(), for intervals; `deadline_s` seconds since the epoch."""

    clock: float
    deadline_s: float

    @property
    def time_left_s(self) -> float:
        return max(0.0, self.deadline_s - time.time())


class Job(NamedTuple):
    """A checked request. Nothing runs before `events` is iterated; whoever holds the job closes `events`."""

    head: AnswerHead
    events: AsyncGenerator[tuple[int, Delta], None]
    num_choices: int
    writer: AnswerWriter
    meter: Meter

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events."""
        async with aclosing(self.events):
            async for index, delta in self.events:
                self.meter.observe(index, delta)
                if chunk := self.writer.chunk(index, delta):
                    yield chunk
        if self.head.include_usage:
            yield self.writer.usage_chunk(self.meter.usage())
        yield DONE

    async def whole(self) -> bytes:
        """The answer as one body."""
        choices: list[list[Delta]] = [[] for _ in range(self.num_choices)]
        async with aclosing(self.events):
            async for index, delta in self.events:
                self.meter.observe(index, delta)
                choices[index].append(delta)
        return self.writer.whole(choices, self.meter.usage())


class Service:
    """Everything that the endpoints do with text. Methods raise BadRequest, or NoWorker while no worker has told its limits."""

    def __init__(
        self, backend: Backend, tokenizer: Tokenizer, chat_template: ChatTemplate | None, server: ServerConfig, metrics: HttpMetrics
    ):
        self._backend = backend
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._max_choices = server.max_choices
        self._default_max_tokens = server.default_max_tokens
        self._metrics = metrics
        self._prompts = PromptReader(tokenizer)

    async def complete(self, request: CompletionRequest, arrival: Arrival) -> Job:
        card = self._card(request.model)
        fields = split_prompts(request.prompt)
        self._check_num_choices(len(fields), request.sampling.n)
        prompts = await self._prompts.read(fields, card)
        head = _head("cmpl", card, request)
        echoes = [self._echo(prompt) if request.echo else "" for prompt in prompts for _ in range(request.sampling.n)]
        writer = CompletionWriter(head, echoes, self._logprobs(request))
        return self._job(head, request, card, [prompt.ids for prompt in prompts], COMPLETION_MAX_TOKENS, writer, arrival)

    async def chat(self, request: ChatRequest, arrival: Arrival) -> Job:
        card = self._card(request.model)
        self._check_num_choices(1, request.sampling.n)
        prompt = await self._prompts.encode(self._render(request.messages, True), card, "messages")
        head = _head("chatcmpl", card, request)
        writer = ChatWriter(head, self._logprobs(request))
        return self._job(head, request, card, [prompt], self._default_max_tokens, writer, arrival)

    async def tokenize(self, request: TokenizeRequest) -> Tokenized:
        card = self._card(request.model)
        if request.messages is not None:
            tokens = await self._prompts.encode(self._render(request.messages, request.add_generation_prompt), card, "messages")
        else:
            tokens = await self._prompts.encode(request.prompt or "", card, "prompt")
        return Tokenized(tokens=tokens, count=len(tokens), max_model_len=card.max_context_tokens)

    def detokenize(self, request: DetokenizeRequest) -> Detokenized:
        card = self._card(request.model)
        check_vocabulary(request.tokens, card.vocab_size, "tokens")
        return Detokenized(prompt=self._tokenizer.decode(request.tokens))

    def _job(
        self,
        head: AnswerHead,
        request: GenerationRequest,
        card: ModelCard,
        prompts: Sequence[list[int]],
        default_max_tokens: int,
        writer: AnswerWriter,
        arrival: Arrival,
    ) -> Job:
        sequences = plan(card, prompts, request.sampling, default_max_tokens, head.id, arrival.deadline_s)
        events = merge([generate_text(self._backend, self._tokenizer, sequence) for sequence in sequences])
        meter = Meter(self._metrics, [len(prompt) for prompt in prompts], request.sampling.n, arrival.clock)
        return Job(head, events, len(sequences), writer, meter)

    def _card(self, model: str | None) -> ModelCard:
        card = self._backend.model_card()
        if model is not None and model != card.name:
            raise ModelNotFound(model, card.name)
        return card

    def _check_num_choices(self, num_prompts: int, n: int) -> None:
        if num_prompts * n > self._max_choices:
            param = "n" if n > 1 else "prompt"
            raise InvalidField(
                f"{num_prompts} prompts with {n} answers each are {num_prompts * n}, at most {self._max_choices} are allowed",
                param,
                "invalid_value",
            )

    def _render(self, messages: Sequence[ChatMessage], add_generation_prompt: bool) -> str:
        if self._chat_template is None:
            raise BadRequest("this model has no chat template", "messages")
        return self._chat_template.render([message.for_template() for message in messages], add_generation_prompt)

    def _echo(self, prompt: Prompt) -> str:
        return self._tokenizer.decode(prompt.ids) if prompt.text is None else prompt.text

    def _logprobs(self, request: GenerationRequest) -> LogprobWriter | None:
        num_top = request.sampling.logprobs
        return None if num_top is None else LogprobWriter(self._tokenizer, num_top)


def _head(prefix: str, card: ModelCard, request: GenerationRequest) -> AnswerHead:
    return AnswerHead(f"{prefix}-{uuid.uuid4().hex}", int(time.time()), card.name, request.include_usage)
