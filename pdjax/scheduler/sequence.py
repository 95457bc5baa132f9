"""What the schedulers know of one sequence: how far its answer has come, and when the answer ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pdjax.protocol import Sampling, SequenceRequest


def answer_end(token: int, index: int, sampling: Sampling) -> Literal["stop", "length"] | None:
    """Why the answer ends with `token`, its output token number `index` (from 0); None where it goes on."""
    if token in sampling.stop_token_ids and index + 1 >= sampling.min_tokens:
        return "stop"
    if index + 1 >= sampling.max_tokens:
        return "length"
    return None


@dataclass(slots=True, eq=False)
class Answer:
    """A sequence as far as it is known on the host: the request's prompt, then every token that has been read since.

    `num_scored`: rows of prompt log probabilities (`prompt_logprobs.py`) that have been told.
    """

    request: SequenceRequest
    tokens: list[int] = field(default_factory=list)
    num_scored: int = 0

    @classmethod
    def start(cls, request: SequenceRequest) -> Answer:
        return cls(request, list(request.prompt))

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def next_index(self) -> int:
        """Index, from the start of the answer and over all attempts, of the token that comes next."""
        return self.index_at(len(self.tokens))

    def index_at(self, position: int) -> int:
        """Index in the answer of the token at `position` of the sequence."""
        return self.request.num_prior + position - len(self.request.prompt)

    def split(self) -> tuple[list[int], list[int]]:
        """The client's prompt and the output so far, that of earlier attempts included."""
        num_prompt = len(self.request.prompt) - self.request.num_prior
        return self.tokens[:num_prompt], self.tokens[num_prompt:]


def longest_tokens(request: SequenceRequest) -> int:
    """Tokens of the client's prompt and of the longest answer that the request allows."""
    return len(request.prompt) - request.num_prior + request.sampling.max_tokens


def refuse_reason(request: SequenceRequest, pool_tokens_needed: int, pool_tokens: int, max_context_tokens: int) -> str | None:
    """Why a worker can never serve `request`, naming value and limit; None where it can.

    `pool_tokens_needed`: the most tokens whose KV this worker will hold for it at a time, out of `pool_tokens`.
    """
    if not request.prompt:
        return "the prompt is empty"
    if not 0 <= request.num_prior < len(request.prompt):
        return f"num_prior {request.num_prior} does not fit a prompt of {len(request.prompt)} tokens"
    if request.num_prior >= request.sampling.max_tokens:
        return f"max_tokens {request.sampling.max_tokens} is reached by the {request.num_prior} tokens given before"
    if (longest := longest_tokens(request)) > max_context_tokens:
        return f"prompt and max_tokens make {longest} tokens, the context holds {max_context_tokens}"
    if pool_tokens_needed > pool_tokens:
        return f"the sequence needs KV for {pool_tokens_needed} tokens, the pool holds {pool_tokens}"
    return None
