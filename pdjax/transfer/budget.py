"""A bound on bytes that several rooms share, first come first served. Everything here runs in one event loop."""

from __future__ import annotations

import asyncio
import collections


class Reservation:
    """`granted` is done once the bytes may be used. Whoever asked gives it back with `ByteBudget.release`, granted or not."""

    def __init__(self, num_bytes: int, granted: asyncio.Future[bool]) -> None:
        self.num_bytes = num_bytes
        self.granted = granted
        self.is_held = False


class ByteBudget:
    """At most `max_bytes` are held at a time. One request beyond all of it is granted when nothing else is held."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held_bytes = 0
        self._waiting: collections.deque[Reservation] = collections.deque()

    @property
    def held_bytes(self) -> int:
        return self._held_bytes

    def request(self, num_bytes: int) -> Reservation:
        reservation = Reservation(num_bytes, asyncio.get_running_loop().create_future())
        self._waiting.append(reservation)
        self._grant()
        return reservation

    def release(self, reservation: Reservation) -> None:
        """Give back what was granted, or leave the queue. Idempotent."""
        reservation.granted.cancel()
        if reservation.is_held:
            reservation.is_held = False
            self._held_bytes -= reservation.num_bytes
        self._grant()

    def _grant(self) -> None:
        while self._waiting:
            first = self._waiting[0]
            if not first.granted.cancelled():
                if self._held_bytes and self._held_bytes + first.num_bytes > self._max_bytes:
                    return
                first.is_held = True
                self._held_bytes += first.num_bytes
                first.granted.set_result(True)
            self._waiting.popleft()
