"""The `prompt` field: text, texts, token ids or lists of token ids, each checked as early and as cheaply as possible."""

from __future__ import annotations

import asyncio
import reprlib
from typing import Any, NamedTuple

from pdjax.api.backend import ModelCard
from pdjax.api.errors import ContextLengthExceeded
from pdjax.api.tokenizer import Tokenizer
from pdjax.errors import BadRequest

THREAD_CHARS = 4096
"""Longer texts are tokenized in a thread, so that they do not hold up the tokens of other requests."""


class Prompt(NamedTuple):
    """`text` None: the client sent token ids."""

    ids: list[int]
    text: str | None


class PromptReader:
    """Turns text into token ids, refusing what cannot fit before it is tokenized."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._longest_token_bytes = max(len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size))

    async def read(self, field: Any, card: ModelCard) -> list[Prompt]:
        """Every prompt of a completion request, from `split_prompts`. Raises BadRequest."""
        return [
            Prompt(await self._document(item, card, name), item) if isinstance(item, str) else Prompt(check_ids(item, card, name), None)
            for name, item in field
        ]

    async def _document(self, text: str, card: ModelCard, param: str) -> list[int]:
        """Token ids of a text that no chat template has rendered."""
        ids = await self.encode(text, card, param)
        return check_ids([*self._tokenizer.first_ids, *ids], card, param) if self._tokenizer.first_ids else ids

    async def encode(self, text: str, card: ModelCard, param: str) -> list[int]:
        """Token ids of `text`. Raises BadRequest where it is empty, ContextLengthExceeded where it cannot fit."""
        if not text:
            raise BadRequest(f"{param} is empty", param)
        limit = prompt_limit(card)
        if len(text) > limit * self._longest_token_bytes:
            raise ContextLengthExceeded(f"{param} has {len(text)} characters, more than {limit} tokens can hold", param)
        ids = await asyncio.to_thread(self._tokenizer.encode, text) if len(text) > THREAD_CHARS else self._tokenizer.encode(text)
        return check_ids(ids, card, param)


def split_prompts(field: Any) -> list[tuple[str, Any]]:
    """The single prompts of a `prompt` field, each with its name for error messages; nothing but their number is certain yet."""
    if isinstance(field, str):
        return [("prompt", field)]
    if not isinstance(field, list) or not field:
        raise BadRequest("prompt must be a text, token ids, or a list of either, and not empty", "prompt")
    if isinstance(field[0], (str, list)):
        kind = type(field[0])
        if not all(isinstance(item, kind) for item in field):
            raise BadRequest("prompt mixes texts and token ids", "prompt")
        return [(f"prompt[{index}]", item) for index, item in enumerate(field)]
    return [("prompt", field)]


def check_ids(ids: list[Any], card: ModelCard, param: str) -> list[int]:
    """`ids` itself, if it is a prompt that the model can take. Raises BadRequest naming the first id at fault."""
    if not ids:
        raise BadRequest(f"{param} is empty", param)
    limit = prompt_limit(card)
    if len(ids) > limit:
        raise ContextLengthExceeded(f"{param} has {len(ids)} tokens, this server takes at most {limit}", param)
    check_vocabulary(ids, card.vocab_size, param)
    return ids


def check_vocabulary(ids: list[Any], vocab_size: int, param: str) -> None:
    """Raises BadRequest naming the first of `ids` that is no token id."""
    for index, token in enumerate(ids):
        if type(token) is not int:
            raise BadRequest(f"{param}[{index}] must be an integer, got {reprlib.repr(token)}", param)
        if not 0 <= token < vocab_size:
            raise BadRequest(f"{param}[{index}]: token id {token} is outside the vocabulary of {vocab_size} tokens", param)


def prompt_limit(card: ModelCard) -> int:
    """Longest prompt, in tokens: one output token has to fit behind it."""
    return min(card.max_prompt_tokens, card.max_context_tokens - 1)
