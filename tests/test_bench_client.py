"""The benchmark's HTTP client: what it times, and what it makes of every kind of answer."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
from collections.abc import Callable
from typing import Any

import pytest

from pdjax.benchmarks.client import Endpoint, Event, RequestFailed, Sample, Stream, measure, model_name, parse_url, stream_completion
from tests.scripted_server import OK, chunk, readings, serving, token, usage


def stream_of(endpoint: Endpoint, clock: Callable[[], float], timeout_s: float = 30.0) -> Stream:
    return asyncio.run(stream_completion(endpoint, b"{}", clock, timeout_s))


# The client


def test_every_event_gets_the_time_at_which_its_bytes_were_read() -> None:
    pieces = [OK, chunk(b"data: a\n\ndata: b\n\n"), chunk(b"data: half"), chunk(b" and half\n\n"), chunk(b""), b""]
    with serving(*pieces) as endpoint:
        stream = stream_of(endpoint, readings(10.0, 10.5, 11.0, 11.25))
    assert stream == Stream(10.0, [Event(10.5, b"a"), Event(10.5, b"b"), Event(11.25, b"half and half")])


def test_lines_that_carry_no_data_are_skipped() -> None:
    with serving(OK, chunk(b": ping\r\n\r\nevent: x\r\ndata: a\r\n\r\n"), chunk(b"")) as endpoint:
        assert stream_of(endpoint, readings(0.0, 1.0)).events == [Event(1.0, b"a")]


@pytest.mark.parametrize("header", [b"Content-Length: 9\r\n", b""], ids=["of known length", "until the end of the connection"])
def test_a_body_without_chunks_is_read(header: bytes) -> None:
    with serving(b"HTTP/1.1 200 OK\r\n" + header + b"\r\ndata: a\n\n") as endpoint:
        assert stream_of(endpoint, itertools.count().__next__).events[0].data == b"a"


def test_an_http_error_is_reported_with_status_and_body() -> None:
    reply = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 4\r\n\r\nfull"
    with serving(reply) as endpoint, pytest.raises(RequestFailed, match="HTTP 429: full"):
        stream_of(endpoint, readings(0.0))


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ((OK, b"20\r\ndata: cut"), "closed or garbled"),
        ((OK, b"zz\r\n"), "not an HTTP answer"),
        ((b"SSH-2.0\r\n\r\n",), "no HTTP/1.x status line"),
        ((b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\ncut",), "closed or garbled"),
        ((), "closed or garbled"),
    ],
)
def test_an_answer_that_is_cut_off_or_garbled_is_one_failed_request(pieces: tuple[bytes, ...], message: str) -> None:
    with serving(*pieces) as endpoint, pytest.raises(RequestFailed, match=message):
        stream_of(endpoint, itertools.count().__next__)


def test_a_server_that_is_not_there_is_one_failed_request() -> None:
    with serving() as endpoint:
        pass
    with pytest.raises(RequestFailed, match="connection failed"):
        stream_of(endpoint, readings(0.0))


def test_a_server_that_never_answers_fails_at_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = Endpoint("127.0.0.1", listener.getsockname()[1], "", False)
        with pytest.raises(RequestFailed, match=r"no complete answer within 0\.2 s"):
            stream_of(endpoint, readings(0.0), timeout_s=0.2)


def test_the_model_is_the_first_that_the_server_lists() -> None:
    with serving() as endpoint:
        assert asyncio.run(model_name(endpoint, 30.0)) == "scripted"


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("http://localhost:8000", Endpoint("localhost", 8000, "", False)),
        ("http://localhost:8000/", Endpoint("localhost", 8000, "", False)),
        ("http://[::1]:8000/v1/", Endpoint("::1", 8000, "", False)),
        ("https://host/proxy/v1", Endpoint("host", 443, "/proxy", True)),
    ],
)
def test_urls_are_taken_with_and_without_v1(url: str, endpoint: Endpoint) -> None:
    assert parse_url(url) == endpoint


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://", "http://host:99999"])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"URL|[Pp]ort"):
        parse_url(url)


# What a stream means


def events(*messages: tuple[float, dict[str, Any]], done_s: float | None) -> list[Event]:
    parsed = [Event(time_s, json.dumps(message).encode()) for time_s, message in messages]
    return parsed if done_s is None else [*parsed, Event(done_s, b"[DONE]")]


def test_latencies_are_those_worked_out_by_hand() -> None:
    stream = Stream(10.0, events((10.5, token()), (11.5, token("")), (11.75, token("x", "length")), (11.75, usage(3, 16)), done_s=12.0))
    assert measure(stream, 3) == Sample(ttft_s=0.5, itl_s=(1.0, 0.25), e2e_s=2.0, output_tokens=3, cached_tokens=16)
    assert measure(stream, 3).handoff_s == 1.0


def test_an_event_that_only_ends_the_answer_is_no_token() -> None:
    stream = Stream(0.0, events((1.0, token()), (2.0, token("", "length")), done_s=2.0))
    assert measure(stream, 1) == Sample(ttft_s=1.0, itl_s=(), e2e_s=2.0, output_tokens=1, cached_tokens=None)
    assert measure(stream, 1).handoff_s is None


@pytest.mark.parametrize(
    ("stream_events", "message"),
    [
        (events((1.0, token()), done_s=None), r"without \[DONE\]"),
        ([], r"without \[DONE\]"),
        (events(done_s=1.0), "without a token"),
        (events((1.0, token()), (1.0, usage(1)), done_s=1.0), "answer of 1 tokens, expected 2"),
        (events((1.0, token()), (2.0, {"error": {"message": "worker gone"}}), done_s=2.0), "error event: .*worker gone"),
        ([Event(1.0, b"{broken"), Event(1.0, b"[DONE]")], "no JSON: {broken"),
        ([Event(1.0, b"[1]"), Event(1.0, b"[DONE]")], "no object"),
    ],
)
def test_an_incomplete_answer_is_a_failed_request(stream_events: list[Event], message: str) -> None:
    with pytest.raises(RequestFailed, match=message):
        measure(Stream(0.0, stream_events), 2)
