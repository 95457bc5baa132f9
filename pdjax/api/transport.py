"""Bytes in and out: request bodies under a size limit, event streams, and an end to all work when the client has gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from pdjax.api.errors import BodyTooLarge, error_reply
from pdjax.api.writers import server_sent_event
from pdjax.errors import BadRequest, DeadlineExceeded, PdjaxError

T = TypeVar("T")
GRACE_S = 1.0
"""How long after a request's deadline its own end of the work is waited for, before it is cut off here."""


class ClientGone(PdjaxError):
    """The client has closed its connection; there is nobody left to answer."""


async def read_json(scope: Scope, receive: Receive, max_bytes: int, timeout_s: float) -> Any:
    """The request's body as JSON. Raises BodyTooLarge before more than `max_bytes` are held, BadRequest for anything but JSON,
    DeadlineExceeded where the body takes longer than `timeout_s` to arrive.
    """
    try:
        body = await asyncio.wait_for(_read_body(scope, receive, max_bytes), timeout_s)
    except TimeoutError:
        raise DeadlineExceeded(f"the request body has not arrived after {timeout_s:.1f} s") from None
    try:
        return msgspec.json.decode(body)
    except RecursionError:
        raise BadRequest("the request body is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"the request body is not valid JSON: {error}") from None


async def _read_body(scope: Scope, receive: Receive, max_bytes: int) -> bytearray:
    announced = dict(scope["headers"]).get(b"content-length", b"0")
    if len(announced) > 18 or int(announced) > max_bytes:
        raise BodyTooLarge(max_bytes)
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone("the client left while it was sending its request")
        part = message.get("body", b"")
        if len(body) + len(part) > max_bytes:
            raise BodyTooLarge(max_bytes)
        body += part
        if not message.get("more_body", False):
            return body


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T], time_left_s: float) -> T:
    """The result of `work`, which is cancelled, and has ended, when this raises.

    Raises ClientGone as soon as the client closes its connection, DeadlineExceeded after `time_left_s` and a grace period. The request's
    body must have been read.
    """
    worker = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((worker, watcher), timeout=time_left_s + GRACE_S, return_when=asyncio.FIRST_COMPLETED)
        if worker.done():
            return worker.result()
        if watcher.done():
            raise ClientGone("the client closed its connection")
        raise DeadlineExceeded(f"no end after {time_left_s:.1f} s")
    finally:
        worker.cancel()
        watcher.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    message: Message = {}
    while message.get("type") != "http.disconnect":
        message = await receive()


class EventStream(Response):
    """A stream of server-sent events whose status waits for the first of them.

    An error before that propagates and becomes a status; a later one becomes an event, after which the stream ends. `events` is closed
    however this ends; it gives encoded events.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], time_left_s: float):
        super().__init__(None, headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._time_left_s = time_left_s
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            try:
                await while_connected(receive, self._send_all(send), self._time_left_s)
            except ClientGone:
                if not self._started:
                    raise
            except DeadlineExceeded as error:
                if not self._started:
                    raise
                # A client that has stopped reading takes no error event either: then its connection is cut.
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._send_end(send, error), GRACE_S)

    async def _send_all(self, send: Send) -> None:
        event = await anext(self._events)
        self._started = True
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            await send({"type": "http.response.body", "body": event, "more_body": True})
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        except Exception as error:
            await self._send_end(send, error)
        else:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_end(self, send: Send, error: Exception) -> None:
        """The end of a stream that has failed: neither a finish_reason nor [DONE]."""
        await send({"type": "http.response.body", "body": server_sent_event(error_reply(error).body), "more_body": False})
