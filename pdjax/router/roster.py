"""The fleet as the event loop sees it: membership changes that can be awaited, and the connections to the members."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from pdjax.protocol import WorkerInfo, WorkerLoad
from pdjax.router.client import WorkerClient
from pdjax.router.fleet import Fleet, Member

Connect = Callable[[WorkerInfo], WorkerClient]

REAP_DELAY_S = 0.05
"""Past the moment at which a lost worker counts as gone; any small value does."""


class Roster:
    """Owns one client a member: made when the worker joins, closed when the fleet forgets it. For one event loop only.

    Closing the client of a replaced worker breaks its streams, so sequences on it are tried elsewhere at once.
    """

    def __init__(self, fleet: Fleet, connect: Connect):
        self.fleet = fleet
        self._connect = connect
        self._clients: dict[str, WorkerClient] = {}
        self._change = asyncio.Event()
        self._reaper: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def join(self, info: WorkerInfo) -> Member:
        """Take in a worker; raises ValueError as `Fleet.join`. It gets work after its first heartbeat that says ready."""
        known = {member.instance_id: member.info for member in self.fleet.members()}.get(info.peer.instance_id)
        member = self.fleet.join(info)
        if known is not None and known.peer != info.peer:
            self._drop_client(info.peer.instance_id)
        if info.peer.instance_id not in self._clients:
            self._clients[info.peer.instance_id] = self._connect(info)
        self._changed()
        return member

    def heartbeat(self, instance_id: str, load: WorkerLoad) -> bool:
        """False where the worker is not a member any more and should join anew."""
        is_member = self.fleet.heartbeat(instance_id, load)
        self._changed(reap=False)
        return is_member

    def leave(self, instance_id: str) -> None:
        """The worker shuts down in order."""
        self.fleet.leave(instance_id)
        self._changed()

    def lose(self, instance_id: str, link: int) -> None:
        """The membership stream numbered `link` (`Member.link`) broke."""
        self.fleet.lose(instance_id, link)
        self._changed()

    def client(self, member: Member) -> WorkerClient:
        """The connection to a member that `PairPolicy` has chosen just now."""
        return self._clients[member.instance_id]

    async def wait_changed(self, timeout_s: float) -> None:
        """Return at the next membership change or heartbeat, or after `timeout_s`."""
        change = self._change
        try:
            async with asyncio.timeout(timeout_s):
                await change.wait()
        except TimeoutError:
            pass

    def reap(self) -> None:
        """Let go of workers that are out for good. Called after every change and whenever a dispatch ends."""
        self.fleet.prune()
        present = {member.instance_id for member in self.fleet.members()}
        for instance_id in [instance_id for instance_id in self._clients if instance_id not in present]:
            self._drop_client(instance_id)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `coroutine` as a task that `close` waits for."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Close every connection and end every task that is still running."""
        if self._reaper is not None:
            self._reaper.cancel()
        for instance_id in list(self._clients):
            self._drop_client(instance_id)
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=self.fleet.heartbeat_timeout_s)
        for task in list(self._tasks):
            task.cancel()

    def _drop_client(self, instance_id: str) -> None:
        self.spawn(self._clients.pop(instance_id).close())

    def _changed(self, reap: bool = True) -> None:
        self._change.set()
        self._change = asyncio.Event()
        if reap:
            self.reap()
            if self._reaper is not None:
                self._reaper.cancel()
            delay_s = self.fleet.heartbeat_timeout_s + REAP_DELAY_S
            self._reaper = asyncio.get_running_loop().call_later(delay_s, self.reap)
