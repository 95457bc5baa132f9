"""How an answer is drawn from the model: the parameters of the Python API, which the HTTP requests share field by field."""

from __future__ import annotations

import secrets
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass

from pdjax.api.backend import ModelCard
from pdjax.api.errors import ContextLengthExceeded
from pdjax.errors import BadRequest
from pdjax.protocol import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, MAX_TOP_LOGPROBS, Sampling

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
SEED_BITS = 63
"""Workers take seeds of 63 bits, which fit every integer on the wire and in a metadata row."""


def _as_strings(value: Any) -> Any:
    return (value,) if isinstance(value, str) else _as_tuple(value)


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _with_int_keys(value: Any) -> Any:
    """JSON objects have string keys; token ids are integers."""
    if not isinstance(value, dict):
        return value
    return {int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key: bias for key, bias in value.items()}


StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
TokenId = Annotated[int, Field(ge=0)]
Bias = Annotated[float, Field(ge=-100, le=100)]


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid", strict=True, allow_inf_nan=False))
class SamplingParams:
    """Parameters of one request, with OpenAI's names, meanings and defaults where it has them, vLLM's elsewhere.

    `max_tokens` None: the server's default, clipped to what fits the context. `min_tokens` keeps stop tokens away, not stop strings.
    `top_k` 0 or -1: no limit. `logprobs` None: none wanted; 0: each output token's; k: also the k best. `prompt_logprobs`: the same of
    the prompt's tokens, but for the first; with them `max_tokens` may be 0. `stop` strings end the answer and are not part of it.
    Raises pydantic's ValidationError (a ValueError) naming field, limit and value.
    """

    n: int = Field(1, ge=1)
    max_tokens: int | None = Field(None, ge=0)
    min_tokens: int = Field(0, ge=0)
    ignore_eos: bool = False
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)
    min_p: float = Field(0.0, ge=0, le=1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)
    logit_bias: Annotated[dict[TokenId, Bias], BeforeValidator(_with_int_keys), Field(max_length=MAX_LOGIT_BIAS)] = Field(
        default_factory=dict
    )
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Annotated[tuple[StopString, ...], BeforeValidator(_as_strings), Field(max_length=MAX_STOP_STRINGS)] = ()
    stop_token_ids: Annotated[tuple[TokenId, ...], BeforeValidator(_as_tuple), Field(max_length=MAX_STOP_TOKEN_IDS)] = ()
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)

    @model_validator(mode="after")
    def _min_fits_max(self) -> SamplingParams:
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise ValueError("max_tokens 0 asks for nothing without prompt_logprobs")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} exceeds max_tokens {self.max_tokens}")
        return self

    def to_sampling(self, card: ModelCard, prompt_tokens: int, default_max_tokens: int, choice: int = 0) -> Sampling:
        """Resolve every default for one sequence of a prompt of `prompt_tokens`; `choice` counts the answers to one prompt.

        Raises BadRequest where the model has no such token or the context no such room.
        """
        self._check_token_ids(card)
        max_tokens = self._resolve_max_tokens(card, prompt_tokens, default_max_tokens)
        if self.min_tokens > max_tokens:
            raise BadRequest(f"min_tokens {self.min_tokens} exceeds max_tokens, here {max_tokens}", "min_tokens")
        seed = secrets.randbits(SEED_BITS) if self.seed is None else (self.seed + choice) % (1 << SEED_BITS)
        return Sampling(
            max_tokens=max(1, max_tokens),
            min_tokens=self.min_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=min(max(self.top_k, 0), card.vocab_size),
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=dict(self.logit_bias),
            seed=seed,
            stop_token_ids=self._all_stop_token_ids(card),
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
        )

    def _check_token_ids(self, card: ModelCard) -> None:
        for name, ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            for token in ids:
                if token >= card.vocab_size:
                    raise BadRequest(f"{name}: token id {token} is outside the vocabulary of {card.vocab_size} tokens", name)

    def _all_stop_token_ids(self, card: ModelCard) -> tuple[int, ...]:
        model_ids = () if self.ignore_eos else card.eos_token_ids
        ids = tuple(dict.fromkeys(model_ids + self.stop_token_ids))
        if len(ids) > MAX_STOP_TOKEN_IDS:
            raise BadRequest(
                f"stop_token_ids: {len(ids)} with the model's end-of-sequence tokens, at most {MAX_STOP_TOKEN_IDS}", "stop_token_ids"
            )
        return ids

    def _resolve_max_tokens(self, card: ModelCard, prompt_tokens: int, default_max_tokens: int) -> int:
        limit = min(card.max_prompt_tokens, card.max_context_tokens - 1)
        if prompt_tokens > limit:
            raise ContextLengthExceeded(f"the prompt has {prompt_tokens} tokens, this server takes at most {limit}", "prompt")
        room = card.max_context_tokens - prompt_tokens
        if self.max_tokens is None:
            return min(default_max_tokens, room)
        if self.max_tokens > room:
            raise ContextLengthExceeded(
                f"prompt of {prompt_tokens} tokens + max_tokens {self.max_tokens} exceed the context of {card.max_context_tokens} tokens",
                "max_tokens",
            )
        return self.max_tokens
