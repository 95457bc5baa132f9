"""Every refusal: its status, its shape, the field it names; and that nothing reached the backend."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from pdjax.config.schema import ServerConfig
from pdjax.errors import DeadlineExceeded, NoWorker, OverCapacity, WorkerFailed
from tests.fake_backend import EOS, MODEL, VOCAB_SIZE, WAIT_S, Served, serve

COMPLETION = {"model": MODEL, "prompt": "A"}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "A"}]}
MAX_BODY_BYTES = 100_000


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serve(ServerConfig(default_max_tokens=20, max_body_bytes=MAX_BODY_BYTES)) as served:
        yield served


@pytest.fixture
def served(server: Served) -> Iterator[Served]:
    server.backend.reset()
    yield server
    server.backend.wait_until_open(0)


def error_of(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert body.keys() == {"error"} and body["error"].keys() == {"message", "type", "param", "code"}
    assert response.headers["content-type"] == "application/json"
    [request_id] = response.headers.get_list("x-request-id")
    assert re.fullmatch("(req|cmpl|chatcmpl)-[0-9a-f]{32}", request_id)
    return body["error"]


def refusal(served: Served, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    """The error that `body` gets, which must not have cost any work; the server goes on."""
    content = body if isinstance(body, (bytes, str)) else json.dumps(body)
    response = served.http.post(path, content=content)
    assert response.status_code == status, response.text
    assert served.backend.calls == []
    assert served.http.get("/health").status_code == 200
    return error_of(response)


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [""]}, "prompt[0]"),
        ({"prompt": [[65], []]}, "prompt[1]"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ["a", [65]]}, "prompt"),
        ({"prompt": [65, VOCAB_SIZE]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [65.0]}, "prompt"),
        ({"prompt": [65, "a"]}, "prompt"),
        ({"prompt": [[65], [65, 10**30]]}, "prompt[1]"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -3}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"max_tokens": 5.0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 64}, "max_tokens"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"n": 9, "prompt": ["a", "b"]}, "n"),
        ({"prompt": ["a"] * 17}, "prompt"),
        ({"n": 2, "best_of": 3}, "best_of"),
        ({"best_of": 2}, "best_of"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"seed": 1.5}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop": "x" * 1025}, "stop"),
        ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": list(range(21))}, "stop_token_ids"),
        ({"stop_token_ids": list(range(20))}, "stop_token_ids"),
        ({"logit_bias": {"259": 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"65": 101}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"echo": True, "logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"echo": 1}, "echo"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"what": 1}}, "stream_options.what"),
        ({"suffix": "x"}, "suffix"),
        ({"frobnicate": 1}, "frobnicate"),
        ({"frobnicate": None}, "frobnicate"),
        ({"sampling": {"n": 1}}, "sampling"),
        ({"messages": []}, "messages"),
        ({"model": 5}, "model"),
        ({"model": None}, "model"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_completion_field_is_named(served, fields, param, stream):
    streaming = {"stream": True} if stream and "stream_options" not in fields else {}
    error = refusal(served, "/v1/completions", COMPLETION | streaming | fields)
    assert (error["type"], (error["param"] or "").split("[")[0]) == ("invalid_request_error", param.split("[")[0])
    assert param in error["message"]


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [5]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "x", "name": "bob"}]}, "messages[0].name"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "messages[0].content[0].text"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"functions": [{}]}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"echo": True}, "echo"),
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": True}, "top_logprobs"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ({"n": 17}, "n"),
        ({"unknown": 1}, "unknown"),
    ],
)
def test_a_bad_chat_field_is_named(served, fields, param):
    error = refusal(served, "/v1/chat/completions", CHAT | fields)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert param in error["message"]


@pytest.mark.parametrize(
    "path, body",
    [
        ("/v1/completions", COMPLETION | {"prompt": "x" * 49}),
        ("/v1/completions", COMPLETION | {"prompt": [65] * 49}),
        ("/v1/completions", COMPLETION | {"prompt": "x" * 50_000}),
        ("/v1/completions", COMPLETION | {"prompt": "x" * 40, "max_tokens": 25}),
        ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": "x" * 49}]}),
    ],
)
def test_what_does_not_fit_the_context_has_a_code_of_its_own(served, path, body):
    assert refusal(served, path, body)["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"null",
        b"\xff\xfe",
        b'{"model": "fake-model", "prompt": "\\ud800"}',
        b'{"model": "fake-model", "prompt": "\xed\xa0\x80"}',
        b'{"model": "fake-model", "prompt": "A", "temperature": NaN}',
        b'{"model": "fake-model", "prompt": "A", "temperature": Infinity}',
        b'{"model": "fake-model", "prompt": "A", "temperature": 1e999}',
        b'{"model": "fake-model", "prompt": "A", "seed": ' + b"9" * 5000 + b"}",
        b"[" * 50_000,
        b'{"prompt":' * 5_000 + b"1" + b"}" * 5_000,
    ],
)
def test_a_body_that_is_no_json_object_is_refused(served, body):
    refusal(served, "/v1/completions", body)


def test_an_unknown_model_is_a_404(served):
    with pytest.raises(openai.NotFoundError) as caught:
        served.client().completions.create(model="other", prompt="A")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize(
    "method, path, status",
    [("GET", "/v1/nothing", 404), ("POST", "/v1/completions/", 404), ("GET", "/v1/completions", 405), ("POST", "/health", 405)],
)
def test_unknown_routes_and_methods_have_the_shape_of_errors(served, method, path, status):
    response = served.http.request(method, path)
    assert (response.status_code, error_of(response)["type"]) == (status, "invalid_request_error")


def test_a_body_announced_too_large_is_refused_unread(served):
    with socket.create_connection(("127.0.0.1", served.port), timeout=WAIT_S) as connection:
        connection.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {10 << 30}\r\n\r\n".encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")


def test_a_body_of_unknown_length_is_refused_once_it_is_too_large(served):
    def parts() -> Iterator[bytes]:
        yield b'{"model": "fake-model", "prompt": "'
        for _ in range(200):
            yield b"x" * 1000

    response = served.http.post("/v1/completions", content=parts())
    assert (response.status_code, error_of(response)["code"]) == (413, "request_too_large")


def test_a_large_body_is_refused_with_413(served):
    assert refusal(served, "/v1/completions", COMPLETION | {"prompt": "x" * 10_000_000}, 413)["code"] == "request_too_large"


@pytest.mark.parametrize(
    "error, status, code",
    [
        (OverCapacity("all queues are full", retry_after_s=2.5), 429, "over_capacity"),
        (NoWorker("no decode worker"), 503, "no_worker"),
        (WorkerFailed("decode died"), 502, "worker_failed"),
        (DeadlineExceeded("too late"), 504, "deadline_exceeded"),
        (RuntimeError("secret detail"), 500, "internal_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_a_failure_before_the_first_token_is_a_status(served, error, status, code, stream, n):
    served.backend.fail_at, served.backend.error = 0, error
    response = served.http.post("/v1/completions", json=COMPLETION | {"stream": stream, "n": n})
    assert (response.status_code, error_of(response)["code"]) == (status, code)
    assert "secret" not in response.text


def test_over_capacity_says_when_to_come_back_and_the_client_does(served):
    served.backend.fail_at, served.backend.error = 0, OverCapacity("full", retry_after_s=0.01)
    response = served.http.post("/v1/completions", json=COMPLETION)
    assert (response.headers["retry-after"], response.headers["retry-after-ms"]) == ("1", "10")
    with pytest.raises(openai.RateLimitError):
        served.client(max_retries=2).completions.create(model=MODEL, prompt="A")
    assert len(served.backend.calls) == 1 + 3


def test_a_request_past_its_deadline_is_not_repeated_by_the_client(served):
    served.backend.fail_at, served.backend.error = 0, DeadlineExceeded("too late")
    with pytest.raises(openai.InternalServerError):
        served.client(max_retries=2).completions.create(model=MODEL, prompt="A")
    assert len(served.backend.calls) == 1


@pytest.mark.parametrize("error, code", [(WorkerFailed("decode died"), "worker_failed"), (RuntimeError("secret detail"), "internal_error")])
@pytest.mark.parametrize("path, body", [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)])
@pytest.mark.parametrize("n", [1, 2])
def test_a_failure_in_mid_stream_is_an_error_event_and_no_clean_end(served, error, code, path, body, n):
    served.backend.fail_at, served.backend.error = 3, error
    response = served.http.post(path, json=body | {"stream": True, "n": n})
    events = response.text.strip().split("\n\n")
    last = json.loads(events[-1].removeprefix("data: "))
    assert (response.status_code, last["error"]["code"]) == (200, code)
    assert "[DONE]" not in response.text and '"finish_reason":"' not in response.text and "secret" not in response.text
    assert len(events) > 1


def test_the_client_library_raises_what_an_error_event_says(served):
    served.backend.fail_at, served.backend.error = 2, WorkerFailed("decode died")
    with pytest.raises(openai.APIError, match="decode died"):
        list(served.client().completions.create(model=MODEL, prompt="A", stream=True))


def test_a_failure_after_some_tokens_is_a_status_where_nothing_was_streamed(served):
    served.backend.fail_at, served.backend.error = 3, WorkerFailed("decode died")
    response = served.http.post("/v1/completions", json=COMPLETION | {"n": 2})
    assert (response.status_code, error_of(response)["code"]) == (502, "worker_failed")


def test_a_backend_that_ends_without_an_end_is_a_failure(served):
    served.backend.script = lambda prompt: [65]
    response = served.http.post("/v1/completions", json=COMPLETION)
    assert (response.status_code, error_of(response)["code"]) == (500, "internal_error")


@pytest.mark.parametrize(
    "path, body, param",
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "A", "messages": CHAT["messages"]}, "prompt"),
        ("/tokenize", {"prompt": ""}, "prompt"),
        ("/tokenize", {"prompt": "A", "what": 1}, "what"),
        ("/detokenize", {"tokens": [VOCAB_SIZE]}, "tokens"),
        ("/detokenize", {"tokens": [EOS, "a"]}, "tokens"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ],
)
def test_the_tokenizers_endpoints_refuse_in_the_same_way(served, path, body, param):
    assert refusal(served, path, body)["param"] == param


def test_an_unexpected_exception_is_logged_in_full_under_the_id_that_the_client_is_told(served, caplog):
    served.backend.fail_at = 0
    response = served.http.post("/v1/completions", json=COMPLETION)
    assert response.status_code == 500
    assert "secret detail" in caplog.text and "Traceback" in caplog.text
    assert f"{response.headers['x-request-id']} failed unexpectedly" in caplog.text


@pytest.mark.parametrize("path, body", [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fail_at", [None, 0, 3])
def test_good_and_bad_answers_carry_the_id_under_which_the_request_was_worked_on(served, path, body, stream, fail_at):
    served.backend.fail_at, served.backend.error = fail_at, WorkerFailed("decode died")
    response = served.http.post(path, json=body | {"stream": stream})
    [call] = served.backend.calls
    assert [f"{told}-0" for told in response.headers.get_list("x-request-id")] == [call.request_id]


@pytest.mark.parametrize("path", ["/health", "/v1/completions", "/nowhere"])
def test_every_answer_to_anything_else_carries_an_id_of_its_own(served, path):
    ids = {served.http.get(path).headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3 and all(each.startswith("req-") for each in ids)
