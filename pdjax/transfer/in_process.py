"""KV between a prefill and a decode worker of one process: announcements and states pass through memory, arrays through a `Mover`.

A source and a sink find each other in a `Registry` that both were given. At most `max_chunks_in_flight` chunks of a room lie between
`send` and `take`.
"""

from __future__ import annotations

import abc
import concurrent.futures
import functools
import logging
import threading
import time
from typing import NamedTuple

import jax

from pdjax.errors import TransferError
from pdjax.protocol import Announce, Layout, Peer
from pdjax.transfer.base import KVReceiver, KVSender, KVSink, KVSource, ReceivedChunk, TransferLimits, Wake
from pdjax.transfer.emulation import Link, make_announcer, make_link
from pdjax.transfer.receiver import Intake, RoomReceiver, announcement
from pdjax.transfer.rooms import Clock, Counters, FailureKind
from pdjax.transfer.sender import OutboundChunk, Outlet, RoomSender, SenderTable

log = logging.getLogger(__name__)


class Mover(abc.ABC):
    """How an array comes from the prefill device to the decode device."""

    @abc.abstractmethod
    def start(self, kv: jax.Array) -> jax.Array:
        """The array as decode will see it, on its way. Does not wait; may raise what the device raises."""

    @abc.abstractmethod
    def wait(self, moved: jax.Array) -> None:
        """Return once `moved` is there and good; raise what its computation or its copy raised. May block."""


class Registry:
    """The sources of one process, by address. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sources: dict[str, InProcessSource] = {}

    def add(self, address: str, source: InProcessSource) -> None:
        """Raises ValueError where the address is taken."""
        with self._lock:
            if address in self._sources:
                raise ValueError(f"address {address!r} has a source already")
            self._sources[address] = source

    def remove(self, address: str) -> None:
        with self._lock:
            self._sources.pop(address, None)

    def find(self, address: str) -> InProcessSource:
        """Raises TransferError where there is none."""
        with self._lock:
            source = self._sources.get(address)
        if source is None:
            raise TransferError(f"there is no prefill worker {address!r} in this process")
        return source


class InProcessSource(KVSource):
    """Prefill's end. `peer` is the address and instance that sinks announce to.

    Its one thread waits for arrays in the order they were sent: a device computes and copies in order too.
    """

    def __init__(
        self,
        registry: Registry,
        layout: Layout,
        peer: Peer,
        wake: Wake,
        limits: TransferLimits = TransferLimits(),
        clock: Clock = time.monotonic,
    ) -> None:
        self._registry = registry
        self._peer = peer
        self._stall_timeout_s = limits.stall_timeout_s
        self._table = SenderTable(layout, peer.instance_id, limits, clock, wake)
        self._link = make_link(limits.emulation)
        self._waiter = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="kv-move-wait")
        registry.add(peer.address, self)

    @property
    def counters(self) -> Counters:
        return self._table.counters

    def create_sender(self, room: int) -> KVSender:
        return self._table.create(room)

    def take_changed(self) -> list[int]:
        return self._table.take_changed()

    def open_rooms(self) -> int:
        return self._table.open_rooms()

    def close(self) -> None:
        """Receivers hear of it at once. Waits for the array that its thread waits for."""
        self._registry.remove(self._peer.address)
        self._table.close("the prefill worker is shutting down")
        self._link.close()
        self._waiter.shutdown(wait=True)

    def connect(self, announce: Announce, receiver: RoomReceiver, mover: Mover, counters: Counters) -> None:
        """Announce a room, on behalf of a sink. Raises TransferError where it is refused."""
        carrier = _Carrier(mover, self._link, self._stall_timeout_s)
        link = _RoomLink(self._table, self._waiter, receiver, carrier, counters)
        receiver.attach(link)
        self._table.announce(announce, link)
        if receiver.is_failed():  # ended meanwhile, before there was a link to tell
            link.ended("it has ended")


class _Carrier(NamedTuple):
    """How arrays move, and how long that may take."""

    mover: Mover
    link: Link
    stall_timeout_s: float


class _RoomLink(Outlet, Intake):
    """Joins the two ends of one room. A chunk's place is free again once it has been taken or dropped."""

    def __init__(
        self,
        table: SenderTable,
        waiter: concurrent.futures.ThreadPoolExecutor,
        receiver: RoomReceiver,
        carrier: _Carrier,
        sink_counters: Counters,
    ) -> None:
        self._table = table
        self._waiter = waiter
        self._receiver = receiver
        self._carrier = carrier
        self._sink_counters = sink_counters
        self._sender: RoomSender | None = None

    def accepted(self, sender: RoomSender) -> None:
        self._sender = sender
        self._receiver.accepted()

    def chunk(self, chunk: OutboundChunk) -> bool:
        sender = self._bound_sender()
        try:
            moved = self._carrier.mover.start(chunk.kv)
        except Exception as error:  # whatever the device reports ends this room only
            sender.end(FailureKind.DEVICE, f"room {sender.room}: copying pages from {chunk.first_page} on failed: {error}")
            return False
        self._waiter.submit(self._land, sender, chunk, moved).add_done_callback(self._check)
        return True

    def last(self, metadata: bytes) -> None:
        self._waiter.submit(self._complete, self._bound_sender(), metadata).add_done_callback(self._check)

    def failed(self, message: str) -> None:
        self._receiver.end(FailureKind.PEER_FAILED, message)

    def freed(self, num_chunks: int) -> None:
        sender = self._bound_sender()
        for _ in range(num_chunks):
            sender.chunk_left()

    def ended(self, message: str) -> None:
        self._table.withdraw(self._receiver.room, self, FailureKind.PEER_GONE, f"the receiver went away: {message}")

    def _bound_sender(self) -> RoomSender:
        assert self._sender is not None, f"room {self._receiver.room}: no chunk moves before `accepted`"
        return self._sender

    def _land(self, sender: RoomSender, chunk: OutboundChunk, moved: jax.Array) -> None:
        """In the waiting thread. Both clocks run for the copy only, not while prefill computes the array."""
        meters = (sender.meter, self._receiver.meter)
        num_bytes = chunk.num_pages * (chunk.kv.nbytes // chunk.kv.shape[0])
        try:
            chunk.kv.block_until_ready()
        except Exception as error:  # an errored array ends this room only
            self._lose(sender, chunk, f"computing pages from {chunk.first_page} on failed: {error}")
            return
        for meter in meters:
            meter.began()
        try:
            sender.link_owes(self._carrier.stall_timeout_s)
            self._carrier.mover.wait(moved)
            sender.link_paid()
            self._carrier.link.carry_blocking(num_bytes)
        except Exception as error:
            for meter in meters:
                meter.dropped()
            self._lose(sender, chunk, f"copying pages from {chunk.first_page} on failed: {error}")
            return
        for meter in meters:
            meter.moved(num_bytes)
        sender.counters.sent(num_bytes)
        self._sink_counters.received(num_bytes)
        self._receiver.deliver(ReceivedChunk(chunk.first_page, chunk.num_pages, moved))

    def _lose(self, sender: RoomSender, chunk: OutboundChunk, message: str) -> None:
        sender.end(FailureKind.DEVICE, f"room {sender.room}: {message}")
        sender.chunk_left()

    def _check(self, settled: concurrent.futures.Future[None]) -> None:
        error = settled.exception()
        if error is not None:
            log.error("room %d failed", self._receiver.room, exc_info=error)
            self._bound_sender().end(FailureKind.INTERNAL, f"room {self._receiver.room}: {error}")

    def _complete(self, sender: RoomSender, metadata: bytes) -> None:
        if not sender.is_failed():
            self._receiver.complete(metadata)
            sender.delivered()


class InProcessSink(KVSink):
    """Decode's end. Has no thread: announcements run in the caller of `open`, arrivals in the source's thread."""

    def __init__(
        self,
        registry: Registry,
        layout: Layout,
        peer: Peer,
        mover: Mover,
        wake: Wake,
        limits: TransferLimits = TransferLimits(),
        clock: Clock = time.monotonic,
    ) -> None:
        self._registry = registry
        self._layout = layout
        self._peer = peer
        self._mover = mover
        self._wake = wake
        self._limits = limits
        self._clock = clock
        self.counters = Counters()
        self._announcer = make_announcer(limits.emulation)
        self._receivers: dict[int, RoomReceiver] = {}
        self._is_closed = False

    def open(self, room: int, source: Peer, decode_prefix_tokens: int) -> KVReceiver:
        """Raises ValueError where the room is open here, the prefix is no multiple of the page size, or the sink is closed."""
        if self._is_closed:
            raise ValueError(f"room {room}: the transport is closed")
        announce = announcement(room, source, decode_prefix_tokens, self._layout, self._peer)
        self._forget_ended()
        if room in self._receivers:
            raise ValueError(f"room {room} is taken: it has a receiver already")
        receiver = RoomReceiver(room, self._limits, self._clock, self._wake, self.counters)
        self._receivers[room] = receiver
        self._announcer.announce(functools.partial(self._announce, announce, source, receiver))
        return receiver

    def open_rooms(self) -> int:
        # Asked for by heartbeats, in another thread than the engine loop, which alone changes the table.
        return sum(not receiver.holds_nothing() for receiver in list(self._receivers.values()))

    def close(self) -> None:
        """Senders hear of it at once."""
        self._is_closed = True
        self._announcer.close()
        for receiver in self._receivers.values():
            receiver.end(FailureKind.CLOSED, "the decode worker is shutting down")
            receiver.abort()
        self._forget_ended()

    def _announce(self, announce: Announce, source: Peer, receiver: RoomReceiver) -> None:
        if receiver.is_failed():
            return
        try:
            self._registry.find(source.address).connect(announce, receiver, self._mover, self.counters)
        except TransferError as error:
            receiver.end(FailureKind.REJECTED if error.retriable else FailureKind.REFUSED, str(error))

    def _forget_ended(self) -> None:
        self._receivers = {room: receiver for room, receiver in self._receivers.items() if not receiver.holds_nothing()}
