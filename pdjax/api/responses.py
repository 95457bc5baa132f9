"""What clients get: the responses and stream chunks of OpenAI's API, as structs that are encoded in about a microsecond."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType


class Reply(msgspec.Struct, frozen=True):
    """Base of every struct here."""


class PromptTokensDetails(Reply, frozen=True, kw_only=True):
    """`cached_tokens` None: not known, because a stop string ended the work before the workers had told."""

    cached_tokens: int | None


class Usage(Reply, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(Reply, frozen=True, kw_only=True):
    """Parallel lists, one entry an output token, and one a prompt token where the answer echoes the prompt. `text_offset` counts characters
    from the start of the answer, echo included. The first token of a prompt has no log probability and no alternatives."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None] | None


class TopLogprob(Reply, frozen=True, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Reply, frozen=True, kw_only=True):
    token: str
    logprob: float | None
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Reply, frozen=True, kw_only=True):
    content: list[TokenLogprob]


class Choice(Reply, frozen=True, kw_only=True):
    index: int
    finish_reason: Literal["stop", "length"] | None
    stop_reason: int | str | None


class CompletionChoice(Choice, frozen=True, kw_only=True):
    """Of a whole answer and of a chunk alike."""

    text: str
    logprobs: CompletionLogprobs | None


class ChatMessage(Reply, frozen=True, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str


class ChatChoice(Choice, frozen=True, kw_only=True):
    message: ChatMessage
    logprobs: ChatLogprobs | None


class ChatDelta(Reply, frozen=True, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(Choice, frozen=True, kw_only=True):
    delta: ChatDelta
    logprobs: ChatLogprobs | None


class Answer(Reply, frozen=True, kw_only=True):
    """`usage` is unset in chunks of a stream that was not asked for it, None in the chunks before the last of one that was."""

    id: str
    object: Literal["text_completion", "chat.completion", "chat.completion.chunk"]
    created: int
    model: str
    choices: list[CompletionChoice] | list[ChatChoice] | list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET


class Model(Reply, frozen=True, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "pdjax"
    max_model_len: int


class ModelList(Reply, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]


class Tokenized(Reply, frozen=True, kw_only=True):
    tokens: list[int]
    count: int
    max_model_len: int


class Detokenized(Reply, frozen=True, kw_only=True):
    prompt: str


class Status(Reply, frozen=True, kw_only=True):
    status: Literal["ok", "ready"]
