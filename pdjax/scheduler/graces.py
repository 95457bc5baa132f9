"""When requests may be computed ahead of their bootstrap: after a moment, and each time a forward was lost after a longer one."""

from __future__ import annotations

import random
from collections import deque
from typing import NamedTuple

from pdjax.scheduler.deadlines import Deadlines
from pdjax.scheduler.ticket import Ticket


class Backoff(NamedTuple):
    """How long a request waits after a lost forward, in seconds of the caller's clock.

    A retry wins one step of a few tokens, and only where bootstrap ends under it; what it waits for, a free slot on decode, takes as long
    as somebody's answer. Retries that follow each other step by step are used up before that and slow down whoever shares the device.
    """

    first_s: float = 2.0
    max_s: float = 60.0

    def wait_s(self, num_lost: int, room: int) -> float:
        """Twice as long each time, up to `max_s`, less up to half of it, so that requests that were lost in one step do not come back in
        one. The same for the same arguments; `num_lost` counts from 1."""
        longest_s = min(self.max_s, self.first_s * 2.0 ** min(num_lost - 1, 60))
        return longest_s * random.Random(f"{room}/{num_lost}").uniform(0.5, 1.0)


class Graces:
    """Requests that may go ahead, each after `grace_s` at first and after `backoff` from then on."""

    def __init__(self, grace_s: float, backoff: Backoff):
        self._grace_s = grace_s
        self._backoff = backoff
        self._unseen: deque[Ticket] = deque()
        self._times = Deadlines()
        self._waiting: dict[str, Ticket] = {}
        self._over: dict[str, Ticket] = {}

    def add(self, ticket: Ticket) -> None:
        """Its time starts when `over` is called next. It keeps the one it has where it comes back without having lost a forward."""
        self._waiting[ticket.request_id] = ticket
        self._unseen.append(ticket)

    def discard(self, request_id: str) -> None:
        self._waiting.pop(request_id, None)
        self._over.pop(request_id, None)
        self._times.remove(request_id)

    def over(self, now_s: float) -> dict[str, Ticket]:
        """Those whose time has come by now, by request id, in the order in which it has."""
        while self._unseen:
            ticket = self._unseen.popleft()
            if ticket.request_id not in self._waiting:
                continue
            if ticket.ahead_s is None:
                ticket.ahead_s = now_s + self._wait_s(ticket)
            self._times.add(ticket.request_id, ticket.ahead_s)
        for request_id in self._times.pop_due(now_s):
            self._over[request_id] = self._waiting.pop(request_id)
        return self._over

    def next_s(self) -> float | None:
        """When the next time comes."""
        return self._times.next_s()

    def _wait_s(self, ticket: Ticket) -> float:
        return self._backoff.wait_s(ticket.num_retries, ticket.request.room) if ticket.num_retries else self._grace_s
