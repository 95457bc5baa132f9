"""A simulated link between the real ends of a room: `pdjax.transfer.sender` here, `pdjax.transfer.receiver` there.

One wire a room carries announcement, chunks, metadata row and bad news, each in order and each late; and it may lose, repeat, damage or
hold back what it carries. The engine loops see nothing but senders and receivers.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import NamedTuple

from pdjax.errors import TransferError
from pdjax.protocol import Announce, KVPoll, Layout, Peer
from pdjax.scheduler.metadata import MetadataRow
from pdjax.simulation.process import Action, Chance, Process, Timeline
from pdjax.simulation.scenario import LinkFaults
from pdjax.simulation.trace import Trace
from pdjax.transfer.base import ReceivedChunk, TransferLimits, Wake
from pdjax.transfer.receiver import Intake, RoomReceiver, announcement
from pdjax.transfer.rooms import Counters, FailureKind
from pdjax.transfer.sender import OutboundChunk, Outlet, RoomSender, SenderTable


class LinkDelays(NamedTuple):
    """Longest delays in ticks; each message draws its own. `late`: how much longer a message takes that is held back."""

    announce: int
    chunk: int
    message: int
    late: int


class Network:
    """Who listens where, and what goes wrong on the way."""

    def __init__(self, timeline: Timeline, chance: Chance, delays: LinkDelays, faults: LinkFaults, limits: TransferLimits, trace: Trace):
        self.timeline = timeline
        self.chance = chance
        self.delays = delays
        self.faults = faults
        self.limits = limits
        self.trace = trace
        self.num_faults: Counter[str] = Counter()
        self._ports: dict[str, SourcePort] = {}

    def listen(self, address: str, port: SourcePort) -> None:
        """Whoever listened at `address` before does so no more."""
        self._ports[address] = port

    def is_faulty(self, kind: str, probability: float) -> bool:
        """Draws whether a fault happens; one that does is counted."""
        if not self.chance.hits(probability):
            return False
        self.num_faults[kind] += 1
        self.trace.note("link", "fault: %s", kind)
        return True

    def announce(self, wire: Wire, announce: Announce, address: str) -> None:
        if self.is_faulty("announcement lost", self.faults.lost_announcement):
            return
        delay = self.chance.upto(self.delays.announce)
        if self.is_faulty("announcement held back", self.faults.late_announcement):
            delay += self.delays.late
        self.timeline.at(delay, self._arrive, wire, announce, address)
        if self.is_faulty("announcement repeated", self.faults.repeated_announcement):
            self.timeline.at(delay + self.chance.upto(self.delays.late), self._repeat, wire, announce, address)

    def _arrive(self, wire: Wire, announce: Announce, address: str) -> None:
        port = self._ports[address]
        if port.process.is_dead and not port.is_silent:
            wire.refuse(FailureKind.PEER_GONE, f"nobody listens at {address}")
        else:
            port.process.run(port.take, wire, announce)

    def _repeat(self, wire: Wire, announce: Announce, address: str) -> None:
        port = self._ports[address]
        if wire.source is not None:
            port.process.run(port.take_repeated, announce)


class SourcePort:
    """A prefill worker's end of the network: `pdjax.transfer.base.KVSource` for its scheduler."""

    def __init__(self, network: Network, process: Process, layout: Layout, peer: Peer, wake: Wake):
        self.network = network
        self.process = process
        self.is_silent = False
        self._table = SenderTable(layout, peer.instance_id, network.limits, network.timeline.clock, wake)
        self._senders: dict[int, RoomSender] = {}
        self._wires: dict[Wire, None] = {}
        network.listen(peer.address, self)

    def create_sender(self, room: int) -> RoomSender:
        sender = self._senders[room] = self._table.create(room)
        return sender

    def take_changed(self) -> list[int]:
        return self._table.take_changed()

    def state(self, room: int) -> KVPoll | None:
        """Of the room's sender; None where there never was one."""
        return self._senders[room].poll() if room in self._senders else None

    def open_rooms(self) -> int:
        return self._table.open_rooms()

    def take(self, wire: Wire, announce: Announce) -> None:
        if wire.is_cut:
            return
        wire.source = self
        self._wires[wire] = None
        try:
            self._table.announce(announce, wire)
        except TransferError as error:
            wire.refuse(FailureKind.REJECTED if error.retriable else FailureKind.REFUSED, str(error))
        if wire.receiver.is_failed():  # while the announcement was under way
            wire.ended("the announcement was withdrawn")
        self.process.post(int(self.network.limits.bootstrap_timeout_s), self._forget_unclaimed, wire)

    def take_repeated(self, announce: Announce) -> None:
        """The same announcement once more. It must be turned away, and change nothing for the room."""
        try:
            self._table.announce(announce, _Nowhere())
        except TransferError:
            return
        raise AssertionError(f"room {announce.room} was let in twice")

    def _forget_unclaimed(self, wire: Wire) -> None:
        """An announcement waits for its sender for a bounded time only."""
        if not wire.is_accepted:
            self.withdraw(wire, "no sender came")

    def withdraw(self, wire: Wire, message: str) -> None:
        self._table.withdraw(wire.room, wire, FailureKind.PEER_GONE, message)

    def stop(self) -> None:
        """The process gives no sign of life any more."""
        for wire in self._wires:
            wire.fall_silent()

    def resume(self) -> None:
        for wire in self._wires:
            wire.speak_again()

    def die(self, is_silent: bool) -> None:
        """The process is gone; `is_silent`: nobody is told, nor turned away."""
        self.is_silent = is_silent
        for wire in self._wires:
            if is_silent:
                wire.fall_silent()
            else:
                wire.refuse(FailureKind.PEER_GONE, "the connection broke")


class SinkPort:
    """A decode worker's end of the network: `pdjax.transfer.base.KVSink` for its scheduler."""

    def __init__(self, network: Network, process: Process, layout: Layout, peer: Peer, wake: Wake):
        self.network = network
        self.process = process
        self._layout = layout
        self._peer = peer
        self._wake = wake
        self._counters = Counters()
        self._wires: dict[int, Wire] = {}

    def open(self, room: int, source: Peer, decode_prefix_tokens: int) -> RoomReceiver:
        announce = announcement(room, source, decode_prefix_tokens, self._layout, self._peer)
        assert room not in self._wires, f"room {room} is announced twice"
        receiver = RoomReceiver(room, self.network.limits, self.network.timeline.clock, self._wake, self._counters)
        wire = self._wires[room] = Wire(self.network, self.process, receiver)
        receiver.attach(wire)
        self.network.announce(wire, announce, source.address)
        return receiver

    def state(self, room: int) -> KVPoll | None:
        """Of the room's receiver; None where there never was one."""
        return self._wires[room].receiver.poll() if room in self._wires else None

    def open_rooms(self) -> int:
        return sum(not wire.receiver.holds_nothing() for wire in self._wires.values())

    def die(self, is_silent: bool) -> None:
        for wire in self._wires.values():
            wire.lose_receiver(is_silent)


class Wire(Outlet, Intake):
    """One room's link. A chunk stays on it until the receiver has a place free, and is the sender's until then."""

    def __init__(self, network: Network, sink: Process, receiver: RoomReceiver):
        self.room = receiver.room
        self.receiver = receiver
        self.source: SourcePort | None = None
        self._network = network
        self._sink = sink
        self._sender: RoomSender | None = None
        self._places = network.limits.max_chunks_in_flight
        self._num_unlanded = 0
        self._last_arrival = 0
        self._arrived: deque[tuple[Action, tuple]] = deque()

    @property
    def is_accepted(self) -> bool:
        return self._sender is not None

    @property
    def is_cut(self) -> bool:
        """Whether the receiver's process is dead."""
        return self._sink.is_dead

    # -- prefill's side: Outlet --

    def accepted(self, sender: RoomSender) -> None:
        self._sender = sender
        self._push(0, self.receiver.accepted)

    def chunk(self, chunk: OutboundChunk) -> bool:
        faults, network = self._network.faults, self._network
        self._owe()
        self._num_unlanded += 1
        delay = network.chance.upto(network.delays.chunk)
        if network.is_faulty("chunk held back", faults.late_chunk):
            delay += network.delays.late
        if network.is_faulty("chunk lost", faults.lost_chunk):
            self._push(delay, self._unlanded)
        elif network.is_faulty("chunk damaged", faults.damaged_chunk):
            self._push(delay, self.receiver.end, FailureKind.DAMAGED, "a checksum does not match")
            self._push(0, self._unlanded)
        else:
            self._push(delay, self._land, chunk)
        if network.is_faulty("chunk repeated", faults.repeated_chunk):
            self._push(delay, self._deliver, chunk)
        return True

    def last(self, metadata: bytes) -> None:
        self._owe()
        if self._network.is_faulty("wrong metadata row", self._network.faults.wrong_row):
            metadata = _spoilt(metadata, self._network.chance)
        self._push(self._network.chance.upto(self._network.delays.chunk), self._complete, metadata)

    def failed(self, message: str) -> None:
        self._push(0, self.receiver.end, FailureKind.PEER_FAILED, message)
        if self.source is not None and self._num_unlanded:
            self.source.process.post(self._give_up_ticks(), self._let_go)

    # -- decode's side: Intake --

    def freed(self, num_chunks: int) -> None:
        self._places += num_chunks
        self._drain()

    def ended(self, message: str) -> None:
        self._drain()
        if self.source is not None:
            self.source.process.post(self._message_delay(), self.source.withdraw, self, f"the receiver went away: {message}")

    # -- the link itself --

    def refuse(self, kind: FailureKind, message: str) -> None:
        """The receiver hears that nothing (more) comes."""
        self._push(self._message_delay(), self.receiver.end, kind, message)

    def fall_silent(self) -> None:
        self._sink.run(self.receiver.awaits_sender)

    def speak_again(self) -> None:
        self._sink.run(self.receiver.heard_sender)

    def lose_receiver(self, is_silent: bool) -> None:
        """The receiver's process is dead. The sender hears of it soon, or so late that its stall clock finds out first."""
        if self.source is not None:
            delay = self._give_up_ticks() if is_silent else self._message_delay()
            self.source.process.post(delay, self._break)

    def _break(self) -> None:
        assert self.source is not None, f"room {self.room} has no sender"
        self.source.withdraw(self, "the connection broke")
        self._let_go()

    def _push(self, delay: int, action: Action, *args: object) -> None:
        """Have something arrive behind all that was sent before it."""
        now = self._network.timeline.now
        self._last_arrival = max(now + delay, self._last_arrival)
        self._network.timeline.at(self._last_arrival - now, self._sink.run, self._arrive, action, args)

    def _arrive(self, action: Action, args: tuple) -> None:
        self._arrived.append((action, args))
        self._drain()

    def _drain(self) -> None:
        """Take what has arrived; chunks wait for a place unless the room has ended."""
        while self._arrived and (self._places > 0 or self.receiver.is_failed() or self._arrived[0][0] not in (self._land, self._deliver)):
            action, args = self._arrived.popleft()
            action(*args)

    def _land(self, chunk: OutboundChunk) -> None:
        self._unlanded()
        self._deliver(chunk)

    def _deliver(self, chunk: OutboundChunk) -> None:
        self._places -= 1
        self.receiver.deliver(ReceivedChunk(chunk.first_page, chunk.num_pages, chunk.kv))

    def _complete(self, metadata: bytes) -> None:
        self.receiver.complete(metadata)
        self._to_sender(self._delivered)

    def _unlanded(self) -> None:
        self._to_sender(self._chunk_left)

    def _to_sender(self, action: Action) -> None:
        assert self.source is not None, f"room {self.room}: nothing comes before the sender is known"
        self.source.process.run(action)

    def _delivered(self) -> None:
        self._bound_sender().delivered()

    def _chunk_left(self) -> None:
        sender = self._bound_sender()
        if self._num_unlanded == 0:
            return  # let go of when the receiver died
        self._num_unlanded -= 1
        sender.link_paid()
        if self._num_unlanded:
            self._owe()
        sender.chunk_left()

    def _let_go(self) -> None:
        """Nothing arrives any more: the chunks that are under way have left the sender."""
        while self._num_unlanded:
            self._chunk_left()

    def _owe(self) -> None:
        self._bound_sender().link_owes(self._network.limits.hold_timeout_s)

    def _bound_sender(self) -> RoomSender:
        assert self._sender is not None, f"room {self.room}: sent before bootstrap"
        return self._sender

    def _give_up_ticks(self) -> int:
        """When a connection counts as broken of which nothing is heard."""
        return 2 * int(self._network.limits.hold_timeout_s)

    def _message_delay(self) -> int:
        return self._network.chance.upto(self._network.delays.message)


class _Nowhere(Outlet):
    """What a repeated announcement would send to, were it let in."""

    def accepted(self, sender: RoomSender) -> None:
        pass

    def chunk(self, chunk: OutboundChunk) -> bool:
        return False

    def last(self, metadata: bytes) -> None:
        pass

    def failed(self, message: str) -> None:
        pass


def _spoilt(metadata: bytes, chance: Chance) -> bytes:
    """A row that must never become a token of this room."""
    row = MetadataRow.from_bytes(metadata)
    wrong = (row.first_token + 1) % 900
    match chance.upto(3):
        case 0:
            return MetadataRow(row.room ^ 1, wrong, row.step).to_bytes()
        case 1:
            return MetadataRow(row.room, wrong, row.step + 1).to_bytes()
        case 2:
            return metadata[:-1]
        case _:
            return bytes(len(metadata))
