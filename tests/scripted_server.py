"""An HTTP server that answers completions as scripted, and a clock that shows scripted times, for tests of HTTP clients."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

from pdjax.benchmarks.client import Endpoint, parse_url

Reply = Callable[[dict[str, Any]], list[bytes]]
"""From the JSON of a completion request to the writes that answer it."""

OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
MODELS = b'HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{"data": [{"id": "scripted"}, {"id": "other"}]}'


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def sse(message: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(message).encode() + b"\n\n"


def token(text: str = "x", finish_reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}]}


def usage(completion_tokens: int, cached_tokens: int | None = None) -> dict[str, Any]:
    details = None if cached_tokens is None else {"cached_tokens": cached_tokens}
    return {"choices": [], "usage": {"completion_tokens": completion_tokens, "prompt_tokens_details": details}}


def answer(num_tokens: int, cached_tokens: int | None = None) -> list[bytes]:
    """A complete answer: one chunk a token, one for usage, one for the end."""
    events = [sse(token()) for _ in range(num_tokens)] + [sse(usage(num_tokens, cached_tokens)), b"data: [DONE]\n\n"]
    return [OK, *map(chunk, events), chunk(b"")]


class ScriptedServer:
    """Answers /v1/models with one model and completions with what `reply` says; keeps all requests. Lives in a thread of its own."""

    def __init__(self, reply: Reply, num_meeting: int = 1):
        """`num_meeting`: answers are held back until so many requests are there at the same time."""
        self.requests: list[dict[str, Any]] = []
        self.url = ""
        self._reply = reply
        self._num_meeting = num_meeting
        self._is_up = threading.Event()

    async def serve(self) -> None:
        self._loop, self._stop, self._barrier = asyncio.get_running_loop(), asyncio.Event(), asyncio.Barrier(self._num_meeting)
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._is_up.set()
        async with server:
            await self._stop.wait()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next(int(line.split(":")[1]) for line in head.splitlines() if line.lower().startswith("content-length"))
        body = await reader.readexactly(length)
        if head.startswith("GET /v1/models "):
            writer.write(MODELS)
        else:
            assert head.startswith("POST /v1/completions ")
            request = json.loads(body)
            self.requests.append(request)
            if len(self.requests) > 1:  # the first one is the warm-up, which comes alone
                await asyncio.wait_for(self._barrier.wait(), 30)
            for piece in self._reply(request):
                writer.write(piece)
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        writer.close()

    @contextlib.contextmanager
    def running(self) -> Iterator[ScriptedServer]:
        thread = threading.Thread(target=lambda: asyncio.run(self.serve()))
        thread.start()
        try:
            assert self._is_up.wait(30)
            yield self
        finally:
            self._loop.call_soon_threadsafe(self._stop.set)
            thread.join()


@contextlib.contextmanager
def serving(*pieces: bytes) -> Iterator[Endpoint]:
    with ScriptedServer(lambda request: list(pieces)).running() as server:
        yield parse_url(server.url)


def readings(*times_s: float) -> Callable[[], float]:
    """A clock that shows these times, one a reading, and fails when it is read more often."""
    return iter(times_s).__next__
