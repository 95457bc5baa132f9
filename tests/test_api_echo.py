"""echo together with logprobs on /v1/completions: the prompt's log probabilities, as evaluation harnesses read them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from openai.types import CompletionChoice

from tests.fake_backend import EOS, HELLO, MODEL, TURN, Served, serve


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serve() as served:
        yield served


@pytest.fixture
def served(server: Served) -> Iterator[Served]:
    server.backend.reset()
    yield server
    server.backend.wait_until_open(0)


def echoed(served: Served, **fields: Any) -> CompletionChoice:
    return served.client().completions.create(model=MODEL, echo=True, **fields).choices[0]


def test_the_first_prompt_token_has_no_logprob_and_the_answer_follows_the_prompt(served):
    choice = echoed(served, prompt="Hey", max_tokens=2, logprobs=2)
    assert choice.text == "Heyab"
    assert choice.logprobs.tokens == ["H", "e", "y", "a", "b"]
    assert choice.logprobs.token_logprobs == [None, -1.0, -2.0, -0.125, -0.25]
    assert choice.logprobs.text_offset == [0, 1, 2, 3, 4]
    assert choice.logprobs.top_logprobs == [
        None,
        {"e": -1.0, "d": -1.25},
        {"y": -2.0, "x": -2.25},
        {"a": -0.125, "`": -0.375},
        {"b": -0.25, "a": -0.5},
    ]


def test_max_tokens_zero_scores_the_prompt_and_nothing_else(served):
    answer = served.client().completions.create(model=MODEL, prompt="Hey", echo=True, max_tokens=0, logprobs=1)
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("Hey", "length", None)
    assert choice.logprobs.tokens == ["H", "e", "y"]
    assert choice.logprobs.token_logprobs == [None, -1.0, -2.0]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 0, 3)


def test_max_tokens_zero_hides_an_end_that_the_model_chose(served):
    served.backend.script = lambda prompt: [EOS]
    assert echoed(served, prompt="Hey", max_tokens=0, logprobs=0).finish_reason == "length"


def test_max_tokens_zero_without_logprobs_is_the_prompt(served):
    choice = echoed(served, prompt="Hey", max_tokens=0)
    assert (choice.text, choice.logprobs) == ("Hey", None)


def test_the_backend_is_asked_for_as_many_alternatives_of_the_prompt_as_of_the_answer(served):
    for fields, wanted in (({"logprobs": 3}, 3), ({"logprobs": 0}, 0), ({}, None)):
        echoed(served, prompt="Hey", **fields)
        assert served.backend.calls[-1].sampling.prompt_logprobs == wanted
    served.client().completions.create(model=MODEL, prompt="Hey", logprobs=3)
    assert served.backend.calls[-1].sampling.prompt_logprobs is None


def test_a_prompt_of_one_token_has_one_entry_without_a_logprob(served):
    choice = echoed(served, prompt="H", max_tokens=1, logprobs=1)
    assert choice.logprobs.token_logprobs == [None, -0.125]
    assert choice.logprobs.top_logprobs[0] is None


def test_without_alternatives_there_is_no_list_of_them(served):
    assert echoed(served, prompt="Hey", logprobs=0).logprobs.top_logprobs is None


def test_offsets_count_characters_of_the_echo_whatever_the_tokens_are(served):
    served.backend.script = lambda prompt: [*"é".encode(), 65]
    choice = echoed(served, prompt=[TURN, HELLO, *"ä!".encode()], max_tokens=3, logprobs=0)
    assert choice.text == "<turn>hello ä!éA"
    assert choice.logprobs.tokens == ["<turn>", "hello ", "bytes:\\xc3", "bytes:\\xa4", "!", "bytes:\\xc3", "bytes:\\xa9", "A"]
    assert choice.logprobs.text_offset == [0, 6, 12, 12, 13, 14, 14, 15]


def test_every_choice_of_every_prompt_has_its_own_prompt_in_front(served):
    answer = served.client().completions.create(model=MODEL, prompt=["AB", "CDE"], n=2, echo=True, max_tokens=0, logprobs=0)
    assert [choice.logprobs.tokens for choice in answer.choices] == [["A", "B"]] * 2 + [["C", "D", "E"]] * 2


@pytest.mark.parametrize("max_tokens", [0, 4])
def test_a_stream_gives_the_prompt_first_and_adds_up_to_the_whole_answer(served, max_tokens):
    fields: dict[str, Any] = {"prompt": "Hey, you there", "max_tokens": max_tokens, "logprobs": 2}
    whole = echoed(served, **fields)
    chunks = [chunk.choices[0] for chunk in served.client().completions.create(model=MODEL, echo=True, stream=True, **fields)]
    assert chunks[0].text == "Hey, you there"
    assert "".join(chunk.text for chunk in chunks) == whole.text
    parts = [chunk.logprobs for chunk in chunks if chunk.logprobs is not None]
    for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        assert [value for part in parts for value in getattr(part, name)] == getattr(whole.logprobs, name)
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]


def test_a_refusal_before_the_first_token_is_still_a_status(served):
    served.backend.ready = False
    body = {"model": MODEL, "prompt": "Hey", "echo": True, "logprobs": 1, "stream": True}
    assert served.http.post("/v1/completions", json=body).status_code == 503
