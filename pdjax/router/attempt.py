"""One attempt at one sequence: both calls at once, their events in one bounded place, and a watch over silent workers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from types import TracebackType
from typing import cast

from pdjax.protocol import Event, Failed, Tokens
from pdjax.router.fleet import Dispatch, Member
from pdjax.router.merge import Side
from pdjax.router.policy import Pair
from pdjax.router.roster import Roster
from pdjax.router.sequence import PairRequests

log = logging.getLogger(__name__)

MAX_WAITING_EVENTS = 16
"""Events between the streams and the reader. A slow reader holds the workers' streams back instead of filling memory."""

CLOSE_TIMEOUT_S = 1.0
"""How long the end of an attempt waits for its streams to close. They are cancelled before the wait, so only a stuck one takes it."""


class _Half:
    """One worker's part. `last_event_s`: when it was last heard, on the fleet's clock."""

    def __init__(self, member: Member, stream: AsyncGenerator[Event, None], dispatch: Dispatch, now_s: float):
        self.member = member
        self.stream = stream
        self.dispatch = dispatch
        self.last_event_s = now_s
        self.is_open = True


class Attempt:
    """An async context manager; leaving it cancels both calls at once and waits, for a bounded time, until they have closed."""

    def __init__(self, roster: Roster, pair: Pair, requests: PairRequests):
        self._roster = roster
        self.pair = pair
        self.requests = requests
        self._inbox: asyncio.Queue[tuple[Side, Event]] = asyncio.Queue(MAX_WAITING_EVENTS)
        self._halves: dict[Side, _Half] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Attempt:
        """Start both calls in the same turn of the event loop."""
        pair, requests = self.pair, self.requests
        decode_stream = self._roster.client(pair.decode).decode(requests.decode)
        if pair.prefill is not None and requests.prefill is not None:
            prefill_stream = self._roster.client(pair.prefill).prefill(requests.prefill)
            self._start(Side.PREFILL, pair.prefill, pair.prefill_tokens, prefill_stream)
        self._start(Side.DECODE, pair.decode, len(requests.decode.prompt), decode_stream)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for task in self._tasks:
            task.cancel()
        try:
            done, _ = await asyncio.wait(self._tasks, timeout=CLOSE_TIMEOUT_S)
            if len(done) == len(self._tasks):
                # A pump that was cancelled before its first step has not closed its stream.
                await asyncio.gather(*(half.stream.aclose() for half in self._halves.values()), return_exceptions=True)
        finally:
            for half in self._halves.values():
                self._roster.fleet.release(half.dispatch)
            self._roster.reap()

    async def next_event(self, until_s: float) -> tuple[Side, Event]:
        """The next event of either worker; a worker that is gone gives a retriable `Failed`.

        `until_s`: a time on the fleet's clock. Raises TimeoutError when it comes first.
        """
        while True:
            now_s = self._roster.fleet.clock()
            if self._inbox.empty() and (gone := self._gone_side(now_s)) is not None:
                half = self._halves[gone]
                half.is_open = False
                return gone, Failed(kind="internal", message=f"nothing heard from worker {half.member.info.peer.address}", retriable=True)
            if now_s >= until_s:
                raise TimeoutError
            wake_s = min([until_s] + [self._gone_at(half) for half in self._halves.values() if half.is_open])
            try:
                async with asyncio.timeout(max(wake_s - now_s, 0)):
                    side, event = await self._inbox.get()
            except TimeoutError:
                continue
            half = self._halves[side]
            if half.is_open:
                half.is_open = isinstance(event, Tokens)
                half.last_event_s = self._roster.fleet.clock()
                return side, event

    def _gone_at(self, half: _Half) -> float:
        return self._roster.fleet.gone_at(half.member, half.last_event_s)

    def _gone_side(self, now_s: float) -> Side | None:
        return next((side for side, half in self._halves.items() if half.is_open and now_s >= self._gone_at(half)), None)

    def _start(self, side: Side, member: Member, tokens: int, stream: AsyncIterator[Event]) -> None:
        fleet = self._roster.fleet
        closable = cast(AsyncGenerator[Event, None], stream)
        half = _Half(member, closable, fleet.dispatch(member, tokens), fleet.clock())
        self._halves[side] = half
        self._tasks.append(self._roster.spawn(self._pump(side, half)))

    async def _pump(self, side: Side, half: _Half) -> None:
        """Carry one stream's events over. The worker counts as done with the sequence once its last event is here."""
        last: Event = Failed(kind="internal", message="the stream ended without a result", retriable=True)
        try:
            async with aclosing(half.stream) as stream:
                async for event in stream:
                    if not isinstance(event, Tokens):
                        last = event
                        break
                    await self._inbox.put((side, event))
        except Exception as error:  # A client's own fault must not leave the sequence waiting until its deadline.
            log.exception("call to worker %s", half.member.info.peer.address)
            last = Failed(kind="internal", message=f"{type(error).__name__}: {error}", retriable=True)
        finally:
            self._roster.fleet.release(half.dispatch)
        await self._inbox.put((side, last))
