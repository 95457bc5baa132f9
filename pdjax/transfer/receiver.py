"""Decode's end of a room, the same for every transport: states, deadlines and the queue of chunks that the engine has not taken."""

from __future__ import annotations

import abc
import collections
import threading

from pdjax.protocol import Announce, KVPoll, Layout, Peer
from pdjax.transfer.base import KVReceiver, ReceivedChunk, TransferLimits, Wake
from pdjax.transfer.rooms import Clock, Counters, FailureKind, RoomMeter, RoomState


def announcement(room: int, source: Peer, decode_prefix_tokens: int, layout: Layout, receiver: Peer) -> Announce:
    """Raises ValueError where `decode_prefix_tokens` is negative or no multiple of the page size."""
    if decode_prefix_tokens < 0 or decode_prefix_tokens % layout.page_size:
        raise ValueError(f"decode_prefix_tokens {decode_prefix_tokens} is no multiple of the page size {layout.page_size}")
    return Announce(
        room=room,
        decode_prefix_tokens=decode_prefix_tokens,
        layout=layout,
        sender_instance_id=source.instance_id,
        receiver=receiver,
    )


class Intake(abc.ABC):
    """The transport's end of one receiver. Called by whoever ends the room or takes its chunks; never blocks, never raises."""

    @abc.abstractmethod
    def freed(self, num_chunks: int) -> None:
        """That many chunks have been taken or dropped: their places are free."""

    @abc.abstractmethod
    def ended(self, message: str) -> None:
        """The room has failed on this side: stop the link and let the sender know."""


class RoomReceiver(KVReceiver):
    """A `KVReceiver` behind an `Intake`.

    The engine loop calls the methods of `KVReceiver`; those below them belong to the transport and may come from any thread. The stall
    clock runs while the transport waits for the sender (`awaits_sender` .. `heard_sender`), not while it holds the link back because
    chunks wait here.
    """

    def __init__(self, room: int, limits: TransferLimits, clock: Clock, wake: Wake, counters: Counters) -> None:
        self.room = room
        self._limits = limits
        self._clock = clock
        self._wake = wake
        self.counters = counters
        self._state = RoomState(counters)
        self._lock = threading.Lock()
        self._intake: Intake | None = None
        self._chunks: collections.deque[ReceivedChunk] = collections.deque()
        self._metadata: bytes | None = None
        self._deadline_s: float | None = clock() + limits.bootstrap_timeout_s
        self.meter = RoomMeter(clock)

    def poll(self) -> KVPoll:
        with self._lock:
            is_late = self._deadline_s is not None and self._clock() >= self._deadline_s
            is_accepted = self._state.value is not KVPoll.BOOTSTRAPPING
        if is_late and is_accepted:
            self.end(FailureKind.STALLED, f"room {self.room}: no sign of life from the sender for {self._limits.stall_timeout_s} s")
        elif is_late:
            self.end(FailureKind.BOOTSTRAP, f"prefill did not accept room {self.room} within {self._limits.bootstrap_timeout_s} s")
        return self._state.value

    def take(self) -> list[ReceivedChunk]:
        with self._lock:
            chunks = list(self._chunks)
            self._chunks.clear()
            intake = self._intake
        if chunks and intake is not None:
            intake.freed(len(chunks))
        return chunks

    def metadata(self) -> bytes:
        assert self._metadata is not None and self._state.value is KVPoll.SUCCESS, f"room {self.room} is {self._state.value.name}"
        return self._metadata

    def abort(self) -> None:
        message = f"room {self.room} was aborted by the receiver"
        if not self.end(FailureKind.ABORTED, message):
            self._drop_chunks()

    def failure(self) -> str | None:
        return self._state.message

    def is_refused(self) -> bool:
        return self._state.kind is FailureKind.REFUSED

    # -- called by the transport, from any thread --

    def attach(self, intake: Intake) -> None:
        """Once, before anything else of this half."""
        with self._lock:
            self._intake = intake

    def accepted(self) -> None:
        self.meter.accepted()
        with self._lock:
            self._deadline_s = None
            self._state.raise_to(KVPoll.TRANSFERRING)
        self._wake()

    def awaits_sender(self) -> None:
        """Start the stall clock. Without effect before `accepted`: there the bootstrap deadline runs."""
        with self._lock:
            if self._state.value is not KVPoll.BOOTSTRAPPING:
                self._deadline_s = self._clock() + self._limits.stall_timeout_s

    def heard_sender(self) -> None:
        with self._lock:
            if self._state.value is not KVPoll.BOOTSTRAPPING:
                self._deadline_s = None

    def deliver(self, chunk: ReceivedChunk) -> None:
        """A verified chunk. After the room's end it is dropped here, at the door."""
        with self._lock:
            is_late = self._state.is_final
            if not is_late:
                assert len(self._chunks) < self._limits.max_chunks_in_flight, f"room {self.room}: {len(self._chunks)} chunks wait"
                self._chunks.append(chunk)
            intake = self._intake
        if is_late and intake is not None:
            intake.freed(1)
        self._wake()

    def complete(self, metadata: bytes) -> None:
        """Everything announced has been delivered."""
        with self._lock:
            self._metadata = metadata
            self._deadline_s = None
            is_first = self._state.raise_to(KVPoll.SUCCESS)
        if is_first:
            self.counters.succeeded(self.meter.transfer())
        self._wake()

    def end(self, kind: FailureKind, message: str) -> bool:
        """FAILED at once, waiting chunks dropped, the intake told. False and no effect on a room that has ended."""
        with self._lock:
            if not self._state.fail(kind, message):
                return False
            intake = self._intake
        self._drop_chunks()
        if intake is not None:
            intake.ended(message)
        self._wake()
        return True

    def is_failed(self) -> bool:
        return self._state.value is KVPoll.FAILED

    def holds_nothing(self) -> bool:
        return self._state.is_final and not self._chunks

    def _drop_chunks(self) -> None:
        self.take()
