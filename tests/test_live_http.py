"""The HTTP surface of a running system: the `openai` client, streams of text, and bad input that must leave no trace."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from tests.goldens import load_goldens
from tests.live import MODEL, NUM_PAGES, SETTINGS, Client, vocabulary

pytestmark = pytest.mark.live

GOLDENS = {golden.name: golden for golden in load_goldens()}
CAPITAL = GOLDENS["chat-capital"]
ANSWER = "The capital of France is Paris."


@pytest.fixture
def openai_client(pair: Client) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{pair.url}/v1", api_key="none", max_retries=0, http_client=httpx.Client(trust_env=False, timeout=120.0)
    ) as client:
        yield client


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(model=MODEL, messages=CAPITAL.messages, temperature=0, **fields)  # type: ignore[arg-type]


def test_the_reference_question_is_answered_as_by_the_reference(openai_client: openai.OpenAI) -> None:
    answer = ask(openai_client)
    [choice] = answer.choices
    assert (choice.message.content, choice.finish_reason) == (ANSWER, "stop")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (37, 8, 45)


def test_the_reference_question_is_answered_in_a_stream(openai_client: openai.OpenAI) -> None:
    chunks = list(ask(openai_client, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == ANSWER
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert len(chunks) > 5, "an answer of several tokens comes in several pieces"
    assert (chunks[-1].choices, chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == ([], 37, 8)


def test_the_answer_can_be_cut_multiplied_and_measured(openai_client: openai.OpenAI) -> None:
    stopped = ask(openai_client, stop=["France"])
    assert (stopped.choices[0].message.content, stopped.choices[0].finish_reason) == ("The capital of ", "stop")
    short = ask(openai_client, max_completion_tokens=3)
    assert (short.choices[0].message.content, short.choices[0].finish_reason) == ("The capital of", "length")
    twice = ask(openai_client, n=2)
    assert [choice.message.content for choice in twice.choices] == [ANSWER, ANSWER]
    assert twice.usage.completion_tokens == 16
    first = ask(openai_client, logprobs=True, top_logprobs=5).choices[0].logprobs.content[0]
    assert [first.token, *(entry.token for entry in first.top_logprobs)][:2] == ["The", "The"]
    assert first.logprob == pytest.approx(CAPITAL.first_top5[0][1], abs=2e-3)


def test_the_legacy_endpoint_takes_text_and_echoes_it(openai_client: openai.OpenAI) -> None:
    golden = GOLDENS["story"]
    answer = openai_client.completions.create(model=MODEL, prompt=golden.text or "", echo=True, temperature=0, max_tokens=24)
    assert answer.choices[0].text == (golden.text or "") + vocabulary().text(golden.output_ids)


def test_the_model_is_listed_and_text_goes_to_tokens_and_back(openai_client: openai.OpenAI, pair: Client) -> None:
    assert [model.id for model in openai_client.models.list()] == [MODEL]
    tokenized = pair.post("/tokenize", {"messages": CAPITAL.messages}).json()
    assert tokenized["tokens"] == CAPITAL.prompt_ids
    assert pair.post("/detokenize", {"tokens": CAPITAL.output_ids[:-1]}).json()["prompt"] == ANSWER


@pytest.mark.parametrize("name", ["emoji", "hindi", "chinese", "chat-emoji"])
def test_characters_of_several_tokens_are_streamed_whole(name: str, pair: Client) -> None:
    golden = GOLDENS[name]
    body = {"model": MODEL, "prompt": golden.prompt_ids, "max_tokens": 24, "temperature": 0, "stream": True}
    with pair.http.stream("POST", "/v1/completions", json=body) as response:
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    pieces = [json.loads(event)["choices"][0]["text"] for event in events[:-1]]
    assert events[-1] == "[DONE]"
    assert "".join(pieces) == vocabulary().text(golden.output_ids)
    assert not any("\ufffd" in piece for piece in pieces[:-1])
    assert len([piece for piece in pieces if piece]) > 3


CONTEXT = (NUM_PAGES - 1) * 16 + 1
GOOD = {"model": MODEL, "prompt": [504, 3575], "max_tokens": 2, "temperature": 0}
BAD: list[tuple[dict[str, Any], int]] = [
    ({"prompt": []}, 400),
    ({"prompt": ""}, 400),
    ({"prompt": [[]]}, 400),
    ({"prompt": [49152]}, 400),
    ({"prompt": [-1]}, 400),
    ({"prompt": [1.5]}, 400),
    ({"prompt": [504] * CONTEXT}, 400),
    ({"prompt": [504] * (CONTEXT - 2), "max_tokens": 3}, 400),
    ({"prompt": [504] * 50_000}, 400),
    ({"prompt": None}, 400),
    ({"max_tokens": 0}, 400),
    ({"max_tokens": -5}, 400),
    ({"max_tokens": 10**12}, 400),
    ({"max_tokens": "many"}, 400),
    ({"temperature": 3}, 400),
    ({"top_p": 0}, 400),
    ({"n": 1000}, 400),
    ({"logprobs": 21}, 400),
    ({"stop": [""]}, 400),
    ({"logit_bias": {"50000": 1}}, 400),
    ({"seed": 2**70}, 400),
    ({"unknown_field": 1}, 400),
    ({"tools": [{"type": "function"}]}, 400),
    ({"model": "another"}, 404),
]


def check_refusal(response: httpx.Response, status: int) -> None:
    assert response.status_code == status, f"{response.status_code}: {response.text[:300]}"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"], error
    assert len(error["message"]) < 1000


def test_bad_input_is_refused_in_words_and_the_server_goes_on(pair: Client) -> None:
    before = pair.sample("pdjax_router_requests_total")
    for change, status in BAD:
        for stream in (False, True):
            check_refusal(pair.post("/v1/completions", {**GOOD, **change, "stream": stream}), status)
    for body in (b"{", b"\xff\xfe", b"[" * 100_000, b"null", b""):
        check_refusal(pair.http.post("/v1/completions", content=body, headers={"content-type": "application/json"}), 400)
    check_refusal(pair.http.post("/v1/chat/completions", content=b"x" * (10 << 20)), 413)
    check_refusal(pair.http.get("/v1/nothing"), 404)
    check_refusal(pair.http.get("/v1/completions"), 405)
    assert pair.sample("pdjax_router_requests_total") == before, "bad input does not reach the router"
    assert pair.complete(GOOD["prompt"], max_tokens=2).usage["completion_tokens"] == 2


def test_the_largest_request_that_fits_is_served(pair: Client) -> None:
    prompt = (GOLDENS["long"].prompt_ids * 2)[: CONTEXT - 2]
    assert pair.complete(prompt, max_tokens=2, ignore_eos=True).usage["total_tokens"] == CONTEXT


def test_bytes_that_are_no_http_do_no_harm(pair: Client) -> None:
    address = urlsplit(pair.url)
    negative_length = b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n"
    for garbage in (b"\x00" * 1000, negative_length, b"GET / HTTP/9.9\r\n\r\n", b"PRI * HTTP/2.0\r\n"):
        with socket.create_connection((address.hostname, address.port), 10.0) as connection:
            connection.sendall(garbage)
    assert pair.complete(GOOD["prompt"], max_tokens=2).usage["completion_tokens"] == 2


def test_the_settings_of_the_tests_are_those_that_the_limits_here_follow_from(pair: Client) -> None:
    assert SETTINGS["engine.num_pages"] == NUM_PAGES
    [model] = pair.http.get("/v1/models").json()["data"]
    assert model["max_model_len"] == CONTEXT
