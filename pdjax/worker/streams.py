"""Carries events of sequences from the engine loop into asyncio: value, end, cancel; event-driven."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

from pdjax.protocol import Event, Failed, Finished


class EventStream:
    """The events of one sequence. Made and read in the asyncio loop; ends after a `Finished` or `Failed`.

    Needs no bound of its own: a sequence makes at most max_tokens + 1 events, and a few that describe its prompt.
    """

    def __init__(self) -> None:
        self._events: asyncio.Queue[Event] = asyncio.Queue()

    def put(self, event: Event) -> None:
        """In the asyncio loop only."""
        self._events.put_nowait(event)

    async def __aiter__(self) -> AsyncIterator[Event]:
        while True:
            event = await self._events.get()
            yield event
            if isinstance(event, Finished | Failed):
                return


class Delivery(NamedTuple):
    stream: EventStream
    event: Event


class Outbox:
    """The engine loop's way to the streams: everything of one turn crosses into the asyncio loop by one call."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop

    def post(self, deliveries: Sequence[Delivery]) -> None:
        """Thread-safe. Dropped where the asyncio loop has been closed: nobody is left to read."""
        if deliveries and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._put_all, deliveries)

    @staticmethod
    def _put_all(deliveries: Sequence[Delivery]) -> None:
        for stream, event in deliveries:
            stream.put(event)
