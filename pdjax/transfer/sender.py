"""Prefill's end of a room, the same for every transport: states, deadlines and the bound on chunks in flight.

A transport only says where chunks go (`Outlet`) and reports what became of them. `SenderTable` brings senders and announcements
together, whichever comes first.
"""

from __future__ import annotations

import abc
import collections
import threading
from typing import TYPE_CHECKING, NamedTuple

from pdjax.errors import TransferError
from pdjax.protocol import Announce, KVPoll, Layout
from pdjax.transfer.base import KVSender, TransferLimits, Wake
from pdjax.transfer.rooms import Clock, Counters, FailureKind, RoomMeter, RoomState

if TYPE_CHECKING:  # the rules of a room need no device: the simulation runs them without jax
    import jax


class OutboundChunk(NamedTuple):
    """Pages `first_page .. first_page + num_pages`. Whoever holds it last calls `RoomSender.chunk_left` once."""

    first_page: int
    num_pages: int
    kv: jax.Array  # [n >= num_pages, layers, page_size, 2 * kv_heads, head_dim]


class Outlet(abc.ABC):
    """Where one room's chunks go. Called by the engine loop or the transport's threads; never blocks, never raises."""

    @abc.abstractmethod
    def accepted(self, sender: RoomSender) -> None:
        """The announcement has found its sender. First call of all but `failed`."""

    @abc.abstractmethod
    def chunk(self, chunk: OutboundChunk) -> bool:
        """Take one chunk; False where the room has ended and the chunk was not taken."""

    @abc.abstractmethod
    def last(self, metadata: bytes) -> None:
        """Nothing follows but this metadata row."""

    @abc.abstractmethod
    def failed(self, message: str) -> None:
        """The room has failed: let the receiver know and let go of the chunks. May come twice."""


class RoomSender(KVSender):
    """A `KVSender` in front of an `Outlet`.

    The engine loop calls the methods of `KVSender`; those below them belong to the transport and may come from any thread.
    One clock runs until the announcement, another can end an accepted room: `link_owes(limit_s)` starts it when the transport has given
    something to the link or the receiver, `link_paid` stops it. While prefill still computes a chunk, nobody owes anything and no clock
    runs. `meter` is for the transport to tell of the same.
    """

    def __init__(self, room: int, limits: TransferLimits, clock: Clock, table: SenderTable) -> None:
        self.room = room
        self._limits = limits
        self._clock = clock
        self._table = table
        self._state = RoomState(table.counters)
        self._lock = threading.Lock()
        self._outlet: Outlet | None = None
        self._prefix_tokens = 0
        self._next_page = 0
        self._in_flight = 0
        self._is_finished = False
        self._owed_s = limits.announce_timeout_s
        self._deadline_s: float | None = clock() + self._owed_s
        self.meter = RoomMeter(clock)

    def poll(self) -> KVPoll:
        with self._lock:
            is_late = self._deadline_s is not None and self._clock() >= self._deadline_s
            is_announced = self._outlet is not None
        if is_late and is_announced:
            self.end(FailureKind.STALLED, f"room {self.room}: nothing of the chunk on its way was accepted for {self._owed_s} s")
        elif is_late:
            self.end(FailureKind.BOOTSTRAP, f"decode did not announce room {self.room} within {self._owed_s} s")
        return self._state.value

    @property
    def decode_prefix_tokens(self) -> int:
        assert self._outlet is not None, f"room {self.room} has not been announced"
        return self._prefix_tokens

    def can_send(self) -> bool:
        is_open = self._state.value in (KVPoll.WAITING_FOR_INPUT, KVPoll.TRANSFERRING)
        return is_open and not self._is_finished and self._in_flight < self._limits.max_chunks_in_flight

    def send(self, first_page: int, num_pages: int, kv: jax.Array) -> None:
        assert 0 < num_pages <= kv.shape[0], f"room {self.room}: {num_pages} pages of an array of {kv.shape[0]}"
        with self._lock:
            if self._state.value is KVPoll.FAILED:  # failed since `can_send`: dropped at the door
                return
            assert not self._is_finished, f"room {self.room}: chunk after finish()"
            assert self._in_flight < self._limits.max_chunks_in_flight, f"room {self.room}: {self._in_flight} chunks in flight"
            outlet = self._outlet
            assert outlet is not None, f"room {self.room} has not been announced"
            assert first_page == self._next_page, f"room {self.room}: page {first_page} sent, page {self._next_page} was next"
            self._in_flight += 1
            self._next_page = first_page + num_pages
        self._state.raise_to(KVPoll.TRANSFERRING)
        if not outlet.chunk(OutboundChunk(first_page, num_pages, kv)):
            self.chunk_left()

    def finish(self, metadata: bytes) -> None:
        if self._state.value is KVPoll.FAILED:
            return
        assert self._outlet is not None, f"room {self.room} has not been announced"
        assert not self._is_finished, f"room {self.room}: finish() called twice"
        self._is_finished = True
        self._state.raise_to(KVPoll.TRANSFERRING)
        self._outlet.last(metadata)

    def fail(self, message: str) -> None:
        self.end(FailureKind.ABORTED, message)

    def failure(self) -> str | None:
        return self._state.message

    # -- called by the transport, from any thread --

    def bootstrap(self, prefix_tokens: int, outlet: Outlet) -> None:
        """The announcement has come, once. Where the sender has failed before, the outlet hears of it."""
        with self._lock:
            self._prefix_tokens, self._outlet, self._deadline_s = prefix_tokens, outlet, None
            self._next_page = prefix_tokens // self._table.page_size
        self.meter.accepted()
        outlet.accepted(self)
        if not self._state.raise_to(KVPoll.WAITING_FOR_INPUT):
            outlet.failed(self._state.message or "the room has ended")
        self._table.changed(self)

    @property
    def counters(self) -> Counters:
        return self._table.counters

    def is_failed(self) -> bool:
        return self._state.value is KVPoll.FAILED

    def chunk_left(self) -> None:
        """One chunk has been let go: moved, or dropped after a failure."""
        with self._lock:
            self._in_flight -= 1
            assert self._in_flight >= 0, f"room {self.room}: more chunks left than were sent"
        self._table.settle(self)
        self._table.wake()

    def delivered(self) -> None:
        """Chunks and metadata have left."""
        if self._state.raise_to(KVPoll.SUCCESS):
            self._table.counters.succeeded(self.meter.transfer())
        self._table.settle(self)
        self._table.changed(self)

    def end(self, kind: FailureKind, message: str) -> None:
        """FAILED at once, and the outlet hears of it. No effect on a room that has ended."""
        if not self._state.fail(kind, message):
            return
        with self._lock:
            outlet = self._outlet
        if outlet is not None:
            outlet.failed(message)
        self._table.settle(self)
        self._table.changed(self)

    def link_owes(self, limit_s: float) -> None:
        with self._lock:
            self._owed_s = limit_s
            self._deadline_s = self._clock() + limit_s

    def link_paid(self) -> None:
        self._deadline_s = None

    def holds_nothing(self) -> bool:
        return self._state.is_final and self._in_flight == 0


class SenderTable:
    """The rooms of one source. Every method may be called from any thread.

    Bounds: at most `max_unclaimed_announcements` announcements wait for their sender; as many ended rooms are remembered, so that a late
    announcement of a failed room is turned away at once instead of waiting in vain.
    """

    def __init__(self, layout: Layout, instance_id: str, limits: TransferLimits, clock: Clock, wake: Wake) -> None:
        self.page_size = layout.page_size
        self.counters = Counters()
        self.wake = wake
        self._layout = layout
        self._instance_id = instance_id
        self._limits = limits
        self._clock = clock
        self._lock = threading.Lock()
        self._senders: dict[int, RoomSender] = {}
        self._announced: dict[int, Outlet] = {}  # those of the senders that have one
        self._unclaimed: dict[int, tuple[int, Outlet]] = {}
        self._ended: collections.OrderedDict[int, str] = collections.OrderedDict()
        # Bounded by the rooms: each changes three times at most.
        self._changed: collections.deque[int] = collections.deque()
        self._is_closed = False

    def create(self, room: int) -> RoomSender:
        """Raises ValueError where the room is taken. A room that its receiver has let go already starts FAILED."""
        sender = RoomSender(room, self._limits, self._clock, self)
        with self._lock:
            if self._is_closed:
                raise ValueError(f"room {room}: the transport is closed")
            if room in self._senders:
                raise ValueError(f"room {room} is taken: it has a sender already")
            ended = self._ended.get(room)
            self._senders[room] = sender
            announced = self._unclaimed.pop(room, None)
            if announced is not None:
                self._announced[room] = announced[1]
        if ended is not None:
            sender.end(FailureKind.PEER_GONE, ended)
        elif announced is not None:
            sender.bootstrap(*announced)
        return sender

    def announce(self, announce: Announce, outlet: Outlet) -> None:
        """Give `outlet` to the room's sender, now or when it is created.

        Raises TransferError where that cannot be: not retriable where these two workers can never work together.
        """
        try:
            self._check_peers(announce)
            self._match(announce.room, announce.decode_prefix_tokens, outlet)
        except TransferError as error:
            self.counters.failed(FailureKind.REJECTED if error.retriable else FailureKind.REFUSED)
            raise

    def _check_peers(self, announce: Announce) -> None:
        mismatch = self._layout.mismatch(announce.layout)
        if mismatch is not None:
            peers = f"prefill worker {self._instance_id!r} (here) and decode worker {announce.receiver.address} (there)"
            raise TransferError(f"{peers} do not fit: {mismatch}", retriable=False)
        if announce.sender_instance_id != self._instance_id:
            raise TransferError(f"worker was replaced: {announce.sender_instance_id!r} was meant, {self._instance_id!r} is here")
        prefix = announce.decode_prefix_tokens
        if prefix < 0 or prefix % self.page_size:
            raise TransferError(f"decode_prefix_tokens {prefix} is no multiple of the page size {self.page_size}", retriable=False)

    def _match(self, room: int, prefix_tokens: int, outlet: Outlet) -> None:
        with self._lock:
            if self._is_closed:
                raise TransferError(f"room {room}: the sender is shutting down")
            if room in self._ended:
                raise TransferError(f"room {room} has ended: {self._ended[room]}")
            if room in self._unclaimed or room in self._announced:
                raise TransferError(f"room {room} was announced twice")
            sender = self._senders.get(room)
            if sender is not None:
                self._announced[room] = outlet
            elif len(self._unclaimed) < self._limits.max_unclaimed_announcements:
                self._unclaimed[room] = (prefix_tokens, outlet)
            else:
                raise TransferError(f"{len(self._unclaimed)} announcements wait for their sender, no more are taken")
        if sender is not None:
            sender.bootstrap(prefix_tokens, outlet)

    def withdraw(self, room: int, outlet: Outlet, kind: FailureKind, message: str) -> None:
        """The receiver behind `outlet` is gone, or its announcement waited too long. An outlet that was never let in changes nothing."""
        with self._lock:
            sender = self._senders.get(room) if self._announced.get(room) is outlet else None
            waiting = self._unclaimed.get(room)
            if waiting is not None and waiting[1] is outlet:
                del self._unclaimed[room]
                self._remember(room, message)
        if sender is not None:
            sender.end(kind, message)

    def changed(self, sender: RoomSender) -> None:
        """The sender's state has moved."""
        self._changed.append(sender.room)
        self.wake()

    def take_changed(self) -> list[int]:
        """Rooms whose sender's state has moved since the last call. For one caller."""
        return [self._changed.popleft() for _ in range(len(self._changed))]

    def settle(self, sender: RoomSender) -> None:
        """Forget `sender` once it has ended and holds nothing."""
        with self._lock:
            if sender.holds_nothing() and self._senders.get(sender.room) is sender:
                del self._senders[sender.room]
                self._announced.pop(sender.room, None)
                self._remember(sender.room, sender.failure() or "everything was sent")

    def open_rooms(self) -> int:
        with self._lock:
            return len(self._senders) + len(self._unclaimed)

    def close(self, message: str) -> None:
        """Fail what is open. No room is created or announced afterwards."""
        with self._lock:
            self._is_closed = True
            senders = list(self._senders.values())
            unclaimed = list(self._unclaimed.values())
            self._unclaimed.clear()
        for sender in senders:
            sender.end(FailureKind.CLOSED, message)
        for _, outlet in unclaimed:
            outlet.failed(message)

    def _remember(self, room: int, message: str) -> None:
        self._ended[room] = message
        while len(self._ended) > self._limits.max_unclaimed_announcements:
            self._ended.popitem(last=False)
