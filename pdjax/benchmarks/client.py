"""A lean HTTP client that times streamed completions: asyncio streams, one connection a request, nothing parsed while tokens arrive.

Every event of a stream gets the time at which its bytes were read. What the events mean is worked out afterwards (`measure`), so the
client's own work does not stand between two tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import urllib.parse
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, NamedTuple

from pdjax.errors import PdjaxError

Clock = Callable[[], float]

MAX_LINE_BYTES = 1 << 20
MAX_HEADERS = 256
READ_BYTES = 1 << 16
SHOWN_ERROR_BYTES = 300


class RequestFailed(PdjaxError):
    """One request went wrong; the message says how, in few words that do not differ from request to request."""


class Endpoint(NamedTuple):
    """Where a server listens. `prefix` is put before every path, without a slash at its end."""

    host: str
    port: int
    prefix: str
    is_tls: bool


class Event(NamedTuple):
    """One `data:` line of an event stream and when its last byte was read, in seconds of the client's clock."""

    time_s: float
    data: bytes


class Stream(NamedTuple):
    """One answered request. `start_s` is the time before the connection was opened."""

    start_s: float
    events: list[Event]


class Sample(NamedTuple):
    """What one request measured, in seconds of the client's clock.

    `ttft_s`: start to first token. `itl_s`: the gaps between events that carry tokens, the first of which is the hand-off.
    `e2e_s`: start to the end of the stream. `output_tokens` is the server's count, or the number of events where it tells none.
    `cached_tokens` is None where the server does not tell.
    """

    ttft_s: float
    itl_s: tuple[float, ...]
    e2e_s: float
    output_tokens: int
    cached_tokens: int | None

    @property
    def handoff_s(self) -> float | None:
        """First to second token; None where there was only one."""
        return self.itl_s[0] if self.itl_s else None

    @property
    def steady_itl_s(self) -> tuple[float, ...]:
        """The gaps behind the hand-off."""
        return self.itl_s[1:]


def parse_url(url: str) -> Endpoint:
    """Raises ValueError where `url` is not http(s)://HOST[:PORT][/PREFIX]. A prefix of /v1 is understood as the server's root."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"a server's URL looks like http://127.0.0.1:8000, got {url!r}")
    is_tls = parts.scheme == "https"
    port = parts.port or (443 if is_tls else 80)
    return Endpoint(parts.hostname, port, parts.path.rstrip("/").removesuffix("/v1"), is_tls)


async def get(endpoint: Endpoint, path: str, timeout_s: float) -> tuple[int, bytes]:
    """Status and body. Raises RequestFailed where there is no whole answer."""
    with _failures_named(timeout_s):
        async with asyncio.timeout(timeout_s), _exchange(endpoint, "GET", path, b"") as (status, body):
            return status, await _read_all(body)


async def model_name(endpoint: Endpoint, timeout_s: float) -> str:
    """The first model that the server lists. Raises RequestFailed."""
    status, data = await get(endpoint, "/v1/models", timeout_s)
    if status != 200:
        raise RequestFailed(f"HTTP {status}: {_shown(data)}")
    try:
        return str(json.loads(data)["data"][0]["id"])
    except (ValueError, LookupError, TypeError) as error:
        raise RequestFailed(f"/v1/models names no model: {_shown(data)}") from error


async def stream_completion(endpoint: Endpoint, request: bytes, clock: Clock, timeout_s: float) -> Stream:
    """POST the JSON `request` to /v1/completions and time its events. Raises RequestFailed.

    The clock is read once before the connection is opened and once for each piece that arrives, and at no other time.
    """
    events: list[Event] = []
    rest = b""
    with _failures_named(timeout_s):
        async with asyncio.timeout(timeout_s):
            start_s = clock()
            async with _exchange(endpoint, "POST", "/v1/completions", request) as (status, body):
                if status != 200:
                    raise RequestFailed(f"HTTP {status}: {_shown(await _read_all(body))}")
                while piece := await body.next_piece():
                    now_s = clock()
                    *lines, rest = (rest + piece).split(b"\n")
                    events += [Event(now_s, line[5:].strip()) for line in lines if line.startswith(b"data:")]
    return Stream(start_s, events)


def measure(stream: Stream, expected_tokens: int) -> Sample:
    """Work out what a stream says. Raises RequestFailed where it is not a complete answer of `expected_tokens` tokens."""
    start_s, events = stream
    token_times_s: list[float] = []
    usage: dict[str, Any] = {}
    for event in events:
        if event.data == b"[DONE]":
            break
        message = _parse_event(event.data)
        usage = message.get("usage") or usage
        token_times_s += [event.time_s for choice in message.get("choices") or [] if _carries_token(choice)]
    else:
        raise RequestFailed("stream ended without [DONE]")
    if not token_times_s:
        raise RequestFailed("stream without a token")
    output_tokens = usage.get("completion_tokens", len(token_times_s))
    if usage and output_tokens != expected_tokens:
        raise RequestFailed(f"answer of {output_tokens} tokens, expected {expected_tokens}")
    gaps_s = tuple(after - before for before, after in itertools.pairwise(token_times_s))
    cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    return Sample(token_times_s[0] - start_s, gaps_s, event.time_s - start_s, output_tokens, cached_tokens)


def _parse_event(data: bytes) -> dict[str, Any]:
    try:
        message = json.loads(data)
    except ValueError as error:
        raise RequestFailed(f"event that is no JSON: {_shown(data)}") from error
    if not isinstance(message, dict):
        raise RequestFailed(f"event that is no object: {_shown(data)}")
    if "error" in message:
        raise RequestFailed(f"error event: {_shown(json.dumps(message['error']).encode())}")
    return message


def _carries_token(choice: dict[str, Any]) -> bool:
    """An event with neither text nor an end is a token whose characters are not complete yet; an end without text is no token."""
    return bool(choice.get("text")) or choice.get("finish_reason") is None


class _ChunkedBody:
    """A body in chunked transfer encoding; each chunk is a piece."""

    def __init__(self, reader: asyncio.StreamReader):
        self._reader = reader

    async def next_piece(self) -> bytes:
        """The next piece; empty at the end. Raises ValueError and EOFError on a body that is broken or cut off."""
        size = int((await _read_line(self._reader)).split(b";")[0], 16)
        piece = await self._reader.readexactly(size)
        await _read_line(self._reader)
        return piece


class _PlainBody:
    """A body of known size, or (`num_bytes` None) one that ends with the connection."""

    def __init__(self, reader: asyncio.StreamReader, num_bytes: int | None):
        self._reader = reader
        self._left = num_bytes

    async def next_piece(self) -> bytes:
        if self._left is None:
            return await self._reader.read(READ_BYTES)
        if self._left == 0:
            return b""
        piece = await self._reader.read(min(self._left, READ_BYTES))
        if not piece:
            raise EOFError(f"{self._left} bytes are missing")
        self._left -= len(piece)
        return piece


_Body = _ChunkedBody | _PlainBody


@contextlib.asynccontextmanager
async def _exchange(endpoint: Endpoint, method: str, path: str, request: bytes) -> AsyncIterator[tuple[int, _Body]]:
    """Send one request over a connection of its own; gives status and body. The connection is closed on leaving."""
    reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port, ssl=endpoint.is_tls or None, limit=MAX_LINE_BYTES)
    try:
        host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
        head = (
            f"{method} {endpoint.prefix}{path} HTTP/1.1\r\nHost: {host}:{endpoint.port}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(request)}\r\n\r\n"
        )
        writer.write(head.encode("ascii") + request)
        await writer.drain()
        status, headers = await _read_head(reader)
        yield status, _body_of(reader, headers)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """Status and headers (names in lower case). Raises ValueError and EOFError."""
    words = (await _read_line(reader)).split(None, 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/1."):
        raise ValueError("no HTTP/1.x status line")
    headers: dict[str, str] = {}
    while line := await _read_line(reader):
        if len(headers) >= MAX_HEADERS:
            raise ValueError(f"more than {MAX_HEADERS} headers")
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
    return int(words[1]), headers


def _body_of(reader: asyncio.StreamReader, headers: dict[str, str]) -> _Body:
    if headers.get("transfer-encoding", "").lower() == "chunked":
        return _ChunkedBody(reader)
    length = headers.get("content-length")
    return _PlainBody(reader, None if length is None else int(length))


async def _read_line(reader: asyncio.StreamReader) -> bytes:
    """A line without its end."""
    return (await reader.readuntil(b"\n")).rstrip(b"\r\n")


async def _read_all(body: _Body) -> bytes:
    pieces = []
    while piece := await body.next_piece():
        pieces.append(piece)
    return b"".join(pieces)


@contextlib.contextmanager
def _failures_named(timeout_s: float) -> Iterator[None]:
    """Turn everything that can happen to a connection into RequestFailed."""
    try:
        yield
    except TimeoutError as error:
        raise RequestFailed(f"no complete answer within {timeout_s:g} s") from error
    except OSError as error:
        raise RequestFailed(f"connection failed: {error.strerror or error}") from error
    except (EOFError, asyncio.LimitOverrunError) as error:
        raise RequestFailed("connection closed or garbled in mid-answer") from error
    except ValueError as error:
        raise RequestFailed(f"not an HTTP answer: {error}") from error


def _shown(data: bytes) -> str:
    return data[:SHOWN_ERROR_BYTES].decode("utf-8", "replace")
