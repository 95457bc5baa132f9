"""What answers the rows of a job: an engine in this process, or a running router. And when a row is tried again."""

from __future__ import annotations

import abc
import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from pdjax.errors import PdjaxError

FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 5.0
WORKER_FAILURES = 3
"""Attempts at a row whose worker fails (502). The router has tried several workers each time: then it is the row."""

OVER_CAPACITY, WORKER_FAILED, NO_WORKER = 429, 502, 503


class Unreachable(PdjaxError):
    """The system cannot be talked to, or broke off; nothing is known of the row."""


class JobStopped(PdjaxError):
    """The system takes no requests. What is not answered yet stays to be done by another run."""


class Reply(NamedTuple):
    """What an HTTP client would have got. `retry_after_s`: when to come back, where the system says."""

    status: int
    request_id: str
    body: bytes
    retry_after_s: float | None = None


class Answers(Protocol):
    """What answers requests, one or many at a time, in one event loop."""

    async def answer(self, url: str, body: bytes, on_prefilled: Callable[[], None]) -> Reply:
        """Answer one request; errors are replies. Raises Unreachable.

        `on_prefilled` is called, any number of times, once the prompt is in the prefix cache. Not calling it is allowed: the reply says
        the same later. Cancelling stops the work.
        """
        ...


class RowBackend(Answers, abc.ABC):
    """`Answers` that have to be started. All methods run in one event loop."""

    @abc.abstractmethod
    async def start(self) -> str:
        """Be ready for rows; gives the name of the served model. Raises PdjaxError where that fails."""

    @abc.abstractmethod
    async def answer(self, url: str, body: bytes, on_prefilled: Callable[[], None]) -> Reply:
        """See `Answers`."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Give everything back. Idempotent; nothing is being answered."""


async def answer_patiently(backend: Answers, url: str, body: bytes, on_prefilled: Callable[[], None], patience_s: float) -> Reply:
    """The reply, tried again while the system is full or away. Raises JobStopped where it still is after `patience_s`."""
    end_s = time.monotonic() + patience_s
    pause_s, num_failures = FIRST_PAUSE_S, 0
    while True:
        wanted_s: float | None = None
        try:
            reply = await backend.answer(url, body, on_prefilled)
        except Unreachable as error:
            trouble = str(error)
        else:
            num_failures += reply.status == WORKER_FAILED
            if reply.status not in (OVER_CAPACITY, NO_WORKER, WORKER_FAILED) or num_failures == WORKER_FAILURES:
                return reply
            trouble, wanted_s = f"status {reply.status}: {reply.body[:300].decode(errors='replace')}", reply.retry_after_s
        if time.monotonic() >= end_s:
            raise JobStopped(f"the system takes no requests after {patience_s:g} s of trying: {trouble}")
        left_s = max(0.0, end_s - time.monotonic())
        await asyncio.sleep(min(pause_s if wanted_s is None else wanted_s, left_s))
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
