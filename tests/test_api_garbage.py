"""Whatever a client sends, it gets an answer or a 4xx in OpenAI's shape, and the server goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdjax.api.schemas import SAMPLING_FIELDS, UNSUPPORTED_DEFAULTS
from tests.fake_backend import EOS, MODEL, Served, serve

PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
SETTINGS = settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
OTHER_FIELDS = {"echo", "stream", "stream_options", "top_logprobs", "best_of", "messages", "tokens"}
FIELDS = sorted(SAMPLING_FIELDS | UNSUPPORTED_DEFAULTS.keys() | OTHER_FIELDS)

scalars = st.none() | st.booleans() | st.integers() | st.integers(-3, 300) | st.floats() | st.text(max_size=8)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4), max_leaves=8
)
messages = st.lists(st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "tool"]), "content": values}) | values, max_size=3)
bodies = st.fixed_dictionaries(
    {"model": st.just(MODEL) | values},
    optional={"prompt": values | st.lists(st.integers(0, 258), max_size=60), "messages": messages, "tokens": values}
    | {name: values for name in FIELDS if name not in ("messages", "tokens")},
)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve() as served:
        served.backend.script = lambda prompt: [*b"abc", EOS] + [65] * 64
        yield served
        served.backend.wait_until_open(0)


def check(served: Served, path: str, content: bytes) -> None:
    response = served.http.post(path, content=content)
    assert response.status_code in (200, 400, 404), (content, response.status_code, response.text)
    if response.status_code != 200:
        assert_error_shape(response)


def assert_error_shape(response: httpx.Response) -> None:
    error: dict[str, Any] = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error" and len(error["message"]) < 2000


@SETTINGS
@given(path=st.sampled_from(PATHS), content=st.binary(max_size=64))
def test_any_bytes_get_a_4xx(served, path, content):
    check(served, path, content)


@SETTINGS
@given(path=st.sampled_from(PATHS), body=values)
def test_any_json_gets_a_4xx(served, path, body):
    check(served, path, json.dumps(body).encode())


@SETTINGS
@given(path=st.sampled_from(PATHS), body=bodies)
def test_any_values_in_known_fields_get_an_answer_or_a_4xx(served, path, body):
    check(served, path, json.dumps(body).encode())


@SETTINGS
@given(name=st.sampled_from(FIELDS), value=values)
def test_any_value_in_one_field_of_a_good_request_gets_an_answer_or_a_4xx(served, name, value):
    check(served, "/v1/completions", json.dumps({"model": MODEL, "prompt": "A", name: value}).encode())
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "A"}], name: value}
    check(served, "/v1/chat/completions", json.dumps(chat).encode())
