"""Answers rows by the same service that stands behind the HTTP endpoints."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import msgspec

from pdjax.api.errors import NO_WORKER_RETRY_AFTER_S, BodyTooLarge, error_reply, new_request_id
from pdjax.api.generation import Delta
from pdjax.api.schemas import parse_chat, parse_completion
from pdjax.api.service import Arrival, Job, Service
from pdjax.api.transport import GRACE_S
from pdjax.errors import BadRequest, DeadlineExceeded, NoWorker, OverCapacity
from pdjax.jobs.backend import Reply
from pdjax.jobs.rows import CHAT

_Events = AsyncGenerator[tuple[int, Delta], None]


class ServiceAnswers:
    """One request at a time, any number at once, in the event loop of the service. `timeout_s`: deadline of a request from its arrival."""

    def __init__(self, service: Service, max_body_bytes: int, timeout_s: float):
        self._service = service
        self._max_body_bytes = max_body_bytes
        self._timeout_s = timeout_s

    async def answer(self, url: str, body: bytes, on_prefilled: Callable[[], None]) -> Reply:
        """What the endpoint `url` would answer to `body`, whatever happens: errors are replies."""
        try:
            return await self._answer(url, body, on_prefilled)
        except Exception as error:
            request_id = new_request_id()
            reply = error_reply(error, request_id)
            return Reply(reply.status, request_id, msgspec.json.encode(reply.body), _retry_after_s(error))

    async def _answer(self, url: str, body: bytes, on_prefilled: Callable[[], None]) -> Reply:
        arrival = Arrival(time.perf_counter(), time.time() + self._timeout_s)
        if len(body) > self._max_body_bytes:
            raise BodyTooLarge(self._max_body_bytes)
        job = await self._job(url, _decode(body), arrival)
        watched = job._replace(events=_watched(job.events, on_prefilled))
        try:
            async with asyncio.timeout(arrival.time_left_s + GRACE_S):
                return Reply(200, job.head.id, await watched.whole())
        except TimeoutError:
            raise DeadlineExceeded(f"no end after {self._timeout_s:.1f} s") from None

    async def _job(self, url: str, body: Any, arrival: Arrival) -> Job:
        if url == CHAT:
            return await self._service.chat(parse_chat(body), arrival)
        return await self._service.complete(parse_completion(body), arrival)


async def _watched(events: _Events, on_prefilled: Callable[[], None]) -> _Events:
    """The first output token shows that the whole prompt has been computed, and with that is in the prefix cache."""
    async with aclosing(events):
        async for event in events:
            if event[1].token is not None:
                on_prefilled()
            yield event


def _decode(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the request body is not valid JSON: {error}") from None


def _retry_after_s(error: Exception) -> float | None:
    if isinstance(error, OverCapacity):
        return error.retry_after_s
    return NO_WORKER_RETRY_AFTER_S if isinstance(error, NoWorker) else None
