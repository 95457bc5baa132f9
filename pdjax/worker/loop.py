"""The loop of a worker: one thread that receives, turns the role's crank and delivers."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from pdjax.protocol import Failed, Finished, SequenceRequest, WorkerLoad
from pdjax.worker.role import Role
from pdjax.worker.streams import Delivery, EventStream, Outbox

logger = logging.getLogger(__name__)

STUCK_S = 10.0
"""A turn takes milliseconds; one that takes this long will not end."""

IDLE_TURN_S = 0.25
"""Longest pause between two turns: deadlines of transfers are looked at by polling, and invariants are checked."""


class _Submit(NamedTuple):
    request: SequenceRequest
    stream: EventStream


class _Abort(NamedTuple):
    request_id: str


class EngineLoop:
    """Runs a role in a thread of its own. `submit` and `abort` are for the asyncio loop, `wake` for any thread.

    Dies in order: whatever the role raises fails every open request, then `on_death` is called once, from the loop's thread. What comes
    later fails at once.
    """

    def __init__(
        self, role: Role, wakeup: threading.Event, loop: asyncio.AbstractEventLoop, name: str, on_death: Callable[[Exception], None]
    ):
        self.role = role
        self._wakeup = wakeup
        self._outbox = Outbox(loop)
        self._on_death = on_death
        # Bounded by the calls that the gRPC server lets run at once.
        self._mailbox: deque[_Submit | _Abort] = deque()
        self._streams: dict[str, EventStream] = {}
        self._is_stopping = False
        self._end: Failed | None = None
        self._last_turn_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, request: SequenceRequest) -> EventStream:
        """Request ids are unique among the sequences of this worker; the caller sees to it."""
        stream = EventStream()
        self._mailbox.append(_Submit(request, stream))
        self._wakeup.set()
        if self._end is not None:  # too late for the loop, or told by it as well
            stream.put(self._end)
        return stream

    def abort(self, request_id: str) -> None:
        self._mailbox.append(_Abort(request_id))
        self._wakeup.set()

    def load(self) -> WorkerLoad:
        """For heartbeats. A loop that has stopped turning is not ready, whatever the role says; any thread may call this."""
        load = self.role.load()
        is_turning = self._thread.is_alive() and time.monotonic() - self._last_turn_s < STUCK_S
        return load if is_turning else msgspec.structs.replace(load, ready=False)

    def stop(self) -> None:
        """Fail what is open, then end the thread and the role's own. Blocks until that is done."""
        self._is_stopping = True
        self._wakeup.set()
        self._thread.join()
        self.role.close()

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._wakeup.wait(self._patience_s())
                self._wakeup.clear()
                self._receive()
                self.role.turn(time.time())
                self._last_turn_s = time.monotonic()
                self._deliver()
            self._fail_all("the worker stops")
        except Exception as error:
            logger.exception("the engine loop died")
            self._fail_all(f"the worker failed: {error!r}")
            self._on_death(error)

    def _patience_s(self) -> float:
        deadline_s = self.role.next_deadline_s()
        return IDLE_TURN_S if deadline_s is None else min(IDLE_TURN_S, max(0.0, deadline_s - time.time()))

    def _receive(self) -> None:
        while self._mailbox:
            match self._mailbox.popleft():
                case _Submit(request, stream):
                    assert request.request_id not in self._streams, f"request id {request.request_id!r} is in use"
                    self._streams[request.request_id] = stream
                    self.role.submit(request)
                case _Abort(request_id):
                    self.role.abort(request_id)

    def _deliver(self) -> None:
        deliveries = []
        for request_id, event in self.role.take_outcomes():
            deliveries.append(Delivery(self._streams[request_id], event))
            if isinstance(event, Finished | Failed):
                del self._streams[request_id]
        self._outbox.post(deliveries)
        if not self._streams:
            self.role.check()

    def _fail_all(self, message: str) -> None:
        failed = self._end = Failed(kind="internal", message=message, retriable=True)
        waiting = [mail.stream for mail in self._mailbox if isinstance(mail, _Submit)]
        self._outbox.post([Delivery(stream, failed) for stream in (*self._streams.values(), *waiting)])
        self._streams.clear()
        self._mailbox.clear()
