"""A slower link and a later announcement than there are, for measurements on one machine. Objects are chosen when a transport is made.

The link is a pipe: what is handed to it leaves in the order it came, at the given rate, over all rooms of one prefill worker.
"""

from __future__ import annotations

import abc
import asyncio
import functools
import threading
import time
from collections.abc import Awaitable, Callable

from pdjax.transfer.base import Emulation
from pdjax.transfer.rooms import Clock

BURST_S = 0.005
"""How far the pipe may be behind: a sleep that ends late by less than this costs no throughput."""

Sleep = Callable[[float], Awaitable[None]]


class Pipe:
    """When what is handed over now will have left. Any thread may call."""

    def __init__(self, bytes_per_s: float, clock: Clock) -> None:
        """Raises ValueError where `bytes_per_s` is not positive."""
        if not bytes_per_s > 0:
            raise ValueError(f"bytes_per_s must be positive, got {bytes_per_s}")
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._lock = threading.Lock()
        self._free_at_s = clock()

    def wait_s(self, num_bytes: int) -> float:
        """Hand over `num_bytes`; the seconds until the last of them has left."""
        with self._lock:
            now_s = self._clock()
            self._free_at_s = max(self._free_at_s, now_s - BURST_S) + num_bytes / self._bytes_per_s
            return max(0.0, self._free_at_s - now_s)


class Link(abc.ABC):
    """What bytes pass on their way out of a prefill worker."""

    @abc.abstractmethod
    async def carry(self, num_bytes: int) -> None:
        """Return when `num_bytes` have left. In an event loop; safe to cancel."""

    @abc.abstractmethod
    def carry_blocking(self, num_bytes: int) -> None:
        """The same in a thread. Returns early once the link is closed."""

    @abc.abstractmethod
    def close(self) -> None:
        """Hold nothing back any longer. Any thread, idempotent."""


class RealLink(Link):
    """The link as it is."""

    async def carry(self, num_bytes: int) -> None:
        pass

    def carry_blocking(self, num_bytes: int) -> None:
        pass

    def close(self) -> None:
        pass


class EmulatedLink(Link):
    """`sleep` and `pause` take seconds; `pause` is for threads and may return early."""

    def __init__(self, pipe: Pipe, sleep: Sleep = asyncio.sleep, pause: Callable[[float], object] | None = None) -> None:
        self._pipe = pipe
        self._sleep = sleep
        self._closed = threading.Event()
        self._pause = pause or self._closed.wait

    async def carry(self, num_bytes: int) -> None:
        await self._sleep(self._pipe.wait_s(num_bytes))

    def carry_blocking(self, num_bytes: int) -> None:
        self._pause(self._pipe.wait_s(num_bytes))

    def close(self) -> None:
        self._closed.set()


def make_link(emulation: Emulation) -> Link:
    return RealLink() if emulation.bytes_per_s is None else EmulatedLink(Pipe(emulation.bytes_per_s, time.monotonic))


class Announcer(abc.ABC):
    """When a receiver of this process announces itself to a source of this process."""

    @abc.abstractmethod
    def announce(self, action: Callable[[], None]) -> None:
        """Run `action`, now or later in another thread; not at all where `close` comes first."""

    @abc.abstractmethod
    def close(self) -> None:
        """Forget what has not been announced, and wait for what is being announced. Idempotent."""


class PromptAnnouncer(Announcer):
    def announce(self, action: Callable[[], None]) -> None:
        action()

    def close(self) -> None:
        pass


class LateAnnouncer(Announcer):
    """One timer for each announcement on its way: as many as there are rooms without an answer."""

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._timers: list[threading.Timer] = []

    def announce(self, action: Callable[[], None]) -> None:
        timer = threading.Timer(self._delay_s, action)
        timer.name = "kv-late-announcement"
        timer.start()
        self._timers = [running for running in self._timers if running.is_alive()] + [timer]

    def close(self) -> None:
        for timer in self._timers:
            timer.cancel()
        for timer in self._timers:
            timer.join()
        self._timers = []


async def _at_once() -> None:
    pass


def make_delay(emulation: Emulation) -> Callable[[], Awaitable[None]]:
    """What a receiver of another process awaits before it announces itself."""
    return functools.partial(asyncio.sleep, emulation.announce_delay_s) if emulation.announce_delay_s else _at_once


def make_announcer(emulation: Emulation) -> Announcer:
    return LateAnnouncer(emulation.announce_delay_s) if emulation.announce_delay_s else PromptAnnouncer()
