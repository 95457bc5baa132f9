"""What both sides of every transport keep about a room: its state, why it failed, and counters that outlive it."""

from __future__ import annotations

import collections
import enum
import threading
from collections.abc import Callable
from typing import NamedTuple

from pdjax.protocol import KVPoll

Clock = Callable[[], float]
"""Seconds on a clock that never goes back; `time.monotonic` unless a test turns the hands."""


class FailureKind(enum.StrEnum):
    """Why a room failed: a label of the failure counter."""

    ABORTED = "aborted"  # this side's caller ended the room
    BOOTSTRAP = "bootstrap_timeout"  # announcement, sender or answer did not come in time
    STALLED = "stalled"  # the link or the other side owed something and did not deliver
    REFUSED = "refused"  # the peers can never work together (layout)
    REJECTED = "rejected"  # this room cannot be served: replaced worker, announced twice, too many announcements
    PEER_GONE = "peer_gone"  # the connection broke, or the receiver let go of the room
    PEER_FAILED = "peer_failed"  # the other side's caller ended the room
    DAMAGED = "damaged"  # a checksum did not match
    PROTOCOL = "protocol"  # wrong order, wrong size, missing pages, unexpected frame
    DEVICE = "device"  # computing or copying the array failed
    CLOSED = "closed"  # the transport was closed with the room open
    INTERNAL = "internal"  # a fault of the transport itself; the log has the traceback


class RoomFault(Exception):
    """Ends one room from inside a transport. Never leaves the transport: it becomes the room's failure."""

    def __init__(self, kind: FailureKind, message: str):
        super().__init__(message)
        self.kind = kind


class RoomTransfer(NamedTuple):
    """One room that ended in SUCCESS, as one side saw it.

    `transfer_s`: from acceptance to success, prefill's compute included. `busy_s`: of that, the time in which at least one computed
    chunk was on its way; `num_bytes / busy_s` is the speed, whether a chunk left early or late.
    """

    transfer_s: float
    busy_s: float
    num_bytes: int


class Counts(NamedTuple):
    """A snapshot of what a transport has done since it was made. Bytes are payload.

    `host_copy_s`: thread time of device to host and checksum (sender), of verification and host to device (receiver).
    `rooms_succeeded`, `transfer_s_total`, `busy_s_total`: the sums over all rooms that ended in SUCCESS.
    `bytes_offered`: registered with a device-to-device library and not yet fetched, at this moment. `chunks_withdrawn`: taken back from
    it because their room had ended.
    """

    rooms: int
    chunks_sent: int
    bytes_sent: int
    chunks_received: int
    bytes_received: int
    host_copy_s: float
    failures: dict[str, int]
    rooms_succeeded: int = 0
    transfer_s_total: float = 0.0
    busy_s_total: float = 0.0
    bytes_offered: int = 0
    chunks_withdrawn: int = 0


class Counters:
    """Counts of one source or sink. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: collections.Counter[str] = collections.Counter()
        self._failures: collections.Counter[str] = collections.Counter()
        self._host_copy_s = 0.0
        self._transfer_s = 0.0
        self._busy_s = 0.0

    def opened(self) -> None:
        with self._lock:
            self._totals["rooms"] += 1

    def sent(self, num_bytes: int) -> None:
        with self._lock:
            self._totals["chunks_sent"] += 1
            self._totals["bytes_sent"] += num_bytes

    def received(self, num_bytes: int) -> None:
        with self._lock:
            self._totals["chunks_received"] += 1
            self._totals["bytes_received"] += num_bytes

    def copied(self, seconds: float) -> None:
        with self._lock:
            self._host_copy_s += seconds

    def failed(self, kind: FailureKind) -> None:
        with self._lock:
            self._failures[kind.value] += 1

    def succeeded(self, transfer: RoomTransfer) -> None:
        with self._lock:
            self._totals["rooms_succeeded"] += 1
            self._transfer_s += transfer.transfer_s
            self._busy_s += transfer.busy_s

    def offered(self, num_bytes: int) -> None:
        with self._lock:
            self._totals["bytes_offered"] += num_bytes

    def fetched(self, num_bytes: int) -> None:
        with self._lock:
            self._totals["bytes_offered"] -= num_bytes

    def withdrawn(self, num_bytes: int) -> None:
        with self._lock:
            self._totals["bytes_offered"] -= num_bytes
            self._totals["chunks_withdrawn"] += 1

    def snapshot(self) -> Counts:
        with self._lock:
            return Counts(
                rooms=self._totals["rooms"],
                chunks_sent=self._totals["chunks_sent"],
                bytes_sent=self._totals["bytes_sent"],
                chunks_received=self._totals["chunks_received"],
                bytes_received=self._totals["bytes_received"],
                host_copy_s=self._host_copy_s,
                failures=dict(self._failures),
                rooms_succeeded=self._totals["rooms_succeeded"],
                transfer_s_total=self._transfer_s,
                busy_s_total=self._busy_s,
                bytes_offered=self._totals["bytes_offered"],
                chunks_withdrawn=self._totals["chunks_withdrawn"],
            )


class RoomMeter:
    """Times one side of one room. Any thread may call; `began` and `moved` or `dropped` come in pairs, one for each computed chunk."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._accepted_s: float | None = None
        self._num_moving = 0
        self._moving_since_s = 0.0
        self._busy_s = 0.0
        self._num_bytes = 0

    def accepted(self) -> None:
        self._accepted_s = self._clock()

    def began(self) -> None:
        """A chunk that has been computed is on its way from now on."""
        with self._lock:
            if not self._num_moving:
                self._moving_since_s = self._clock()
            self._num_moving += 1

    def moved(self, num_bytes: int) -> None:
        """A chunk is on the other side."""
        self._ended(num_bytes)

    def dropped(self) -> None:
        """A chunk will not get to the other side."""
        self._ended(0)

    def transfer(self) -> RoomTransfer:
        """What the room took until now."""
        now_s = self._clock()
        with self._lock:
            busy_s = self._busy_s + (now_s - self._moving_since_s if self._num_moving else 0.0)
            started_s = now_s if self._accepted_s is None else self._accepted_s
            return RoomTransfer(now_s - started_s, busy_s, self._num_bytes)

    def _ended(self, num_bytes: int) -> None:
        with self._lock:
            assert self._num_moving > 0, "a chunk ended that never began"
            self._num_moving -= 1
            self._num_bytes += num_bytes
            if not self._num_moving:
                self._busy_s += self._clock() - self._moving_since_s


class RoomState:
    """The state of one side of one room. Moves up only; FAILED is sticky; SUCCESS and FAILED are final. Any thread may call."""

    def __init__(self, counters: Counters) -> None:
        self._lock = threading.Lock()
        self._counters = counters
        self._value = KVPoll.BOOTSTRAPPING
        self._kind: FailureKind | None = None
        self._message: str | None = None
        counters.opened()

    @property
    def value(self) -> KVPoll:
        return self._value

    @property
    def is_final(self) -> bool:
        return self._value in (KVPoll.FAILED, KVPoll.SUCCESS)

    @property
    def kind(self) -> FailureKind | None:
        return self._kind

    @property
    def message(self) -> str | None:
        return self._message

    def raise_to(self, value: KVPoll) -> bool:
        """Whether the state moved; a lower, equal or late value (the room has failed) changes nothing."""
        with self._lock:
            if self.is_final or value <= self._value:
                return False
            self._value = value
            return True

    def fail(self, kind: FailureKind, message: str) -> bool:
        """Whether this call ended the room; later reasons are dropped, as is a failure after SUCCESS."""
        with self._lock:
            if self.is_final:
                return False
            self._value, self._kind, self._message = KVPoll.FAILED, kind, message
        self._counters.failed(kind)
        return True
