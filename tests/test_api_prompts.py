"""Reading prompts: what is refused before it is tokenized, and that long texts are read outside the event loop."""

from __future__ import annotations

import asyncio
import threading

import pytest

from pdjax.api.errors import ContextLengthExceeded
from pdjax.api.prompts import PromptReader, check_ids, split_prompts
from pdjax.api.tokenizer import Tokenizer
from pdjax.errors import BadRequest
from tests.fake_backend import CARD, byte_tokenizer

LARGE = CARD._replace(max_context_tokens=20_000, max_prompt_tokens=20_000)


class Watched:
    """The tokenizer's face, noting in which thread it encodes."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size
        self.token_bytes = tokenizer.token_bytes
        self.threads: list[threading.Thread] = []

    def encode(self, text: str) -> list[int]:
        self.threads.append(threading.current_thread())
        return self._tokenizer.encode(text)


@pytest.mark.parametrize("length, is_in_loop", [(4096, True), (4097, False)])
def test_long_texts_are_tokenized_outside_the_event_loop(length, is_in_loop):
    tokenizer = Watched(byte_tokenizer())
    ids = asyncio.run(PromptReader(tokenizer).encode("x" * length, LARGE, "prompt"))
    assert ids == [ord("x")] * length
    assert (tokenizer.threads == [threading.main_thread()]) == is_in_loop


def test_a_text_that_cannot_fit_is_refused_without_being_tokenized():
    tokenizer = Watched(byte_tokenizer())
    limit = CARD.max_prompt_tokens * len("<turn>")  # the vocabulary's longest token
    with pytest.raises(ContextLengthExceeded, match=f"{limit + 1} characters, more than 48 tokens"):
        asyncio.run(PromptReader(tokenizer).encode("x" * (limit + 1), CARD, "prompt"))
    assert tokenizer.threads == []


def test_a_text_of_the_longest_tokens_fits_up_to_the_limit():
    ids = asyncio.run(PromptReader(byte_tokenizer()).encode("<turn>" * 48, CARD, "prompt"))
    assert len(ids) == 48


@pytest.mark.parametrize(
    "field, names",
    [("a", ["prompt"]), ([1, 2], ["prompt"]), (["a", "b"], ["prompt[0]", "prompt[1]"]), ([[1], [2]], ["prompt[0]", "prompt[1]"])],
)
def test_single_prompts_keep_their_place_as_their_name(field, names):
    assert [name for name, _ in split_prompts(field)] == names


def test_the_first_bad_id_is_named_with_its_place():
    with pytest.raises(BadRequest, match=r"prompt\[2\]: token id 259 is outside the vocabulary of 259 tokens"):
        check_ids([1, 2, 259, -1], CARD, "prompt")


def test_a_prompt_may_be_as_long_as_the_pools_but_must_leave_room_for_one_token():
    assert len(check_ids([1] * 48, CARD, "prompt")) == 48
    tight = CARD._replace(max_context_tokens=48)
    assert len(check_ids([1] * 47, tight, "prompt")) == 47
    with pytest.raises(ContextLengthExceeded, match="48 tokens, this server takes at most 47"):
        check_ids([1] * 48, tight, "prompt")
