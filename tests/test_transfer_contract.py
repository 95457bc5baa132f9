"""What every transport promises, run over all four. gRPC goes through a real server on a free port."""

from __future__ import annotations

import abc
import asyncio
import functools
import random
import threading
from collections.abc import Callable, Iterator

import grpc.aio
import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from pdjax import rpc
from pdjax.protocol import PROTOCOL_VERSION, KVPoll, Layout, Peer
from pdjax.transfer.base import KVReceiver, KVSender, KVSink, KVSource, ReceivedChunk, TransferLimits
from pdjax.transfer.checksum import ChecksumPrograms
from pdjax.transfer.device_put import DevicePutMover
from pdjax.transfer.frames import PageForm
from pdjax.transfer.grpc_receive import Lander
from pdjax.transfer.grpc_send import Carriers
from pdjax.transfer.grpc_stream import GrpcSink, GrpcSource
from pdjax.transfer.in_process import InProcessSink, InProcessSource, Mover, Registry
from pdjax.transfer.jax_receive import PullLander
from pdjax.transfer.jax_send import Endpoint, OfferCarriers
from pdjax.transfer.tcp_bytes import ByteCarriers, ByteLander, Landing
from pdjax.transfer.tcp_link import DataListener
from pdjax.transfer.loopback import LoopbackMover
from pdjax.transfer.rooms import Counts

LAYOUT = Layout(model_fingerprint="tiny", page_size=4, kv_dtype="float32", num_layers=3, num_kv_heads=2, head_dim=8)
PAGE_SHAPE = (3, 4, 4, 8)
BUCKETS = (1, 4, 16)
WAIT_S = 30.0  # far above what anything here takes: only a hang gets there
META = b"metadata row"


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class DeviceArray(np.ndarray):
    """Stands for an array that the device still computes: whoever waits for it waits for the gate, then gets the values or the error.

    On CPU a computation that waits for Python runs where it is dispatched, so a real array cannot be stalled from here.
    """

    gate: threading.Event
    error: Exception | None
    is_awaited: threading.Event

    def block_until_ready(self) -> DeviceArray:
        self.is_awaited.set()
        assert self.gate.wait(WAIT_S), "the gate was never opened"
        if self.error is not None:
            raise self.error
        return self


def pending(rows: np.ndarray, gate: threading.Event, error: Exception | None = None) -> DeviceArray:
    array = rows.view(DeviceArray)
    array.gate, array.error, array.is_awaited = gate, error, threading.Event()
    return array


class Rig(abc.ABC):
    """A source and a sink of one transport, with everything that they need. One a test."""

    def __init__(self, limits: TransferLimits) -> None:
        self.limits = limits
        self.clock = Clock()
        self.source_peer = Peer("prefill:1", "p-1")
        self.sink_peer = Peer("decode:1", "d-1")
        self._changed = threading.Event()
        self.source, self.sink = self.make()

    @abc.abstractmethod
    def make(self) -> tuple[KVSource, KVSink]: ...

    @abc.abstractmethod
    def sink_with(self, layout: Layout) -> KVSink: ...

    @abc.abstractmethod
    def counts(self) -> tuple[Counts, Counts]: ...

    def close(self) -> None:
        self.sink.close()
        self.source.close()

    def wake(self) -> None:
        self._changed.set()

    def expected(self, rows: np.ndarray) -> np.ndarray:
        return rows

    def open(self, room: int, prefix_tokens: int = 0) -> KVReceiver:
        return self.sink.open(room, self.source_peer, prefix_tokens)

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for `condition`, looking whenever the transport says that something has changed."""
        for _ in range(int(WAIT_S / 0.02)):
            if condition():
                return
            self._changed.wait(0.02)
            self._changed.clear()
        raise AssertionError("timed out")

    def pair(self, room: int = 1, prefix_tokens: int = 0) -> tuple[KVSender, KVReceiver]:
        """Both ends of an accepted room."""
        sender, receiver = self.source.create_sender(room), self.open(room, prefix_tokens)
        self.until(lambda: sender.poll() is KVPoll.WAITING_FOR_INPUT and receiver.poll() is KVPoll.TRANSFERRING)
        return sender, receiver

    def send(self, sender: KVSender, first_page: int, rows: np.ndarray, num_pages: int | None = None) -> None:
        self.until(sender.can_send)
        sender.send(first_page, len(rows) if num_pages is None else num_pages, jax.device_put(rows))

    def drain(self, receiver: KVReceiver) -> list[ReceivedChunk]:
        """Take until the room ends; everything that came."""
        chunks: list[ReceivedChunk] = []

        def ended() -> bool:
            is_final = receiver.poll() in (KVPoll.FAILED, KVPoll.SUCCESS)
            chunks.extend(receiver.take())
            return is_final

        self.until(ended)
        return chunks

    def assert_nothing_open(self) -> None:
        self.until(lambda: self.source.open_rooms() == 0 and self.sink.open_rooms() == 0)


class InProcessRig(Rig):
    def make(self) -> tuple[KVSource, KVSink]:
        self.registry = Registry()
        source = InProcessSource(self.registry, LAYOUT, self.source_peer, self.wake, self.limits, self.clock)
        return source, self.sink_with(LAYOUT)

    def sink_with(self, layout: Layout) -> KVSink:
        return InProcessSink(self.registry, layout, self.sink_peer, self.mover(), self.wake, self.limits, self.clock)

    def mover(self) -> Mover:
        return DevicePutMover(SingleDeviceSharding(jax.devices()[-1]))

    def counts(self) -> tuple[Counts, Counts]:
        assert isinstance(self.source, InProcessSource) and isinstance(self.sink, InProcessSink)
        return self.source.counters.snapshot(), self.sink.counters.snapshot()


class LoopbackRig(InProcessRig):
    def mover(self) -> Mover:
        return LoopbackMover(SingleDeviceSharding(jax.devices()[-1]))

    def expected(self, rows: np.ndarray) -> np.ndarray:
        return np.zeros_like(rows)


class GrpcRig(Rig):
    def make(self) -> tuple[KVSource, KVSink]:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="grpc-loop")
        self._thread.start()
        source = GrpcSource(LAYOUT, "p-1", self.carriers(), self.wake, self.limits, self.clock)
        self._server, port = asyncio.run_coroutine_threadsafe(self._serve(source), self.loop).result(WAIT_S)
        self.source_peer = Peer(f"127.0.0.1:{port}", "p-1")
        return source, self.sink_with(LAYOUT)

    async def _serve(self, source: GrpcSource) -> tuple[grpc.aio.Server, int]:
        server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
        server.add_generic_rpc_handlers([source.handler()])
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return server, port

    def sink_with(self, layout: Layout) -> KVSink:
        return GrpcSink(layout, self.sink_peer, self.lander(layout), self.loop, self.wake, self.limits, self.clock)

    def carriers(self) -> Carriers:
        self.listener = DataListener("127.0.0.1")
        return ByteCarriers(LAYOUT, self.listener)

    def lander(self, layout: Layout) -> Lander:
        return ByteLander(layout, Landing(jax.device_put, BUCKETS))

    def counts(self) -> tuple[Counts, Counts]:
        assert isinstance(self.source, GrpcSource) and isinstance(self.sink, GrpcSink)
        return self.source.counters.snapshot(), self.sink.counters.snapshot()

    def stop_server(self) -> None:
        asyncio.run_coroutine_threadsafe(self._server.stop(None), self.loop).result(WAIT_S)

    def close(self) -> None:
        super().close()
        self.stop_server()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(WAIT_S)
        self.loop.close()


class JaxRig(GrpcRig):
    def carriers(self) -> Carriers:
        return OfferCarriers(programs_for(LAYOUT), ENDPOINT, max_offered_bytes=1 << 20)

    def lander(self, layout: Layout) -> Lander:
        return PullLander(programs_for(layout), BUCKETS[-1], ENDPOINT, self.limits.stall_timeout_s)


ENDPOINT = Endpoint("127.0.0.1", jax.devices()[0])


@functools.cache
def programs_for(layout: Layout) -> ChecksumPrograms:
    return ChecksumPrograms(PageForm.of(layout), (), SingleDeviceSharding(jax.devices()[0]))


RIGS: dict[str, type[Rig]] = {"tcp": GrpcRig, "jax_transfer": JaxRig, "device_put": InProcessRig, "loopback": LoopbackRig}
MOVING = ["tcp", "jax_transfer", "device_put"]


@pytest.fixture(params=list(RIGS))
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    threads = set(threading.enumerate())
    limits = TransferLimits(bootstrap_timeout_s=30.0, stall_timeout_s=10.0, max_unclaimed_announcements=8, announce_timeout_s=600.0)
    made = RIGS[request.param](limits)
    yield made
    made.close()
    left = {thread.name for thread in set(threading.enumerate()) - threads if not thread.daemon}
    assert not left, f"threads left behind: {left}"


def rows_of(num_pages: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((num_pages, *PAGE_SHAPE), np.float32)


# -- what is moved --


def test_chunks_arrive_in_order_with_the_bytes_that_were_sent(rig: Rig) -> None:
    sender, receiver = rig.pair()
    sent = [rows_of(num_pages, seed) for seed, num_pages in enumerate((1, 4, 3))]
    received: list[ReceivedChunk] = []
    first_page = 0
    for rows in sent:
        rig.until(lambda: (received.extend(receiver.take()) or sender.can_send()))
        rig.send(sender, first_page, rows)
        first_page += len(rows)
    sender.finish(META)
    received += rig.drain(receiver)
    assert [(chunk.first_page, chunk.num_pages) for chunk in received] == [(0, 1), (1, 4), (5, 3)]
    for rows, chunk in zip(sent, received, strict=True):
        np.testing.assert_array_equal(np.asarray(chunk.kv)[: chunk.num_pages], rig.expected(rows))
    assert receiver.metadata() == META
    rig.until(lambda: sender.poll() is KVPoll.SUCCESS)
    rig.assert_nothing_open()


def test_only_counting_rows_are_counted_and_only_they_must_match(rig: Rig) -> None:
    sender, receiver = rig.pair()
    rows = rows_of(4, 0)
    rows[3] = np.nan
    rig.send(sender, 0, rows, num_pages=3)
    sender.finish(META)
    (chunk,) = rig.drain(receiver)
    assert chunk.num_pages == 3
    np.testing.assert_array_equal(np.asarray(chunk.kv)[:3], rig.expected(rows[:3]))
    page_bytes = 3 * 4 * 4 * 8 * 4
    rig.until(lambda: rig.counts()[0].bytes_sent == 3 * page_bytes and rig.counts()[1].bytes_received == 3 * page_bytes)


def test_decode_prefix_is_what_the_receiver_announced_and_sending_starts_behind_it(rig: Rig) -> None:
    sender, receiver = rig.pair(prefix_tokens=8)
    assert sender.decode_prefix_tokens == 8
    rig.send(sender, 2, rows_of(2, 0))
    sender.finish(META)
    (chunk,) = rig.drain(receiver)
    assert (chunk.first_page, chunk.num_pages) == (2, 2)


def test_a_room_without_chunks_succeeds(rig: Rig) -> None:
    sender, receiver = rig.pair(prefix_tokens=400)
    sender.finish(META)
    assert rig.drain(receiver) == []
    assert receiver.poll() is KVPoll.SUCCESS and receiver.metadata() == META
    rig.until(lambda: sender.poll() is KVPoll.SUCCESS)
    rig.assert_nothing_open()


def test_a_chunk_of_another_page_than_the_next_is_a_broken_invariant(rig: Rig) -> None:
    sender, _ = rig.pair(prefix_tokens=8)
    with pytest.raises(AssertionError, match="page 3 sent, page 2 was next"):
        sender.send(3, 1, jax.device_put(rows_of(1, 0)))


# -- meeting --


def test_an_announcement_that_comes_first_waits_for_its_sender(rig: Rig) -> None:
    receiver = rig.open(5, prefix_tokens=4)
    rig.until(lambda: rig.source.open_rooms() == 1)
    assert receiver.poll() is KVPoll.BOOTSTRAPPING
    sender = rig.source.create_sender(5)
    rig.until(lambda: receiver.poll() is KVPoll.TRANSFERRING)
    assert sender.poll() is KVPoll.WAITING_FOR_INPUT
    assert sender.decode_prefix_tokens == 4


def test_a_sender_that_comes_first_waits_for_its_announcement(rig: Rig) -> None:
    sender = rig.source.create_sender(5)
    assert sender.poll() is KVPoll.BOOTSTRAPPING and not sender.can_send()
    receiver = rig.open(5)
    rig.until(lambda: sender.poll() is KVPoll.WAITING_FOR_INPUT)
    assert sender.can_send()
    rig.until(lambda: receiver.poll() is KVPoll.TRANSFERRING)


def test_sending_before_the_announcement_is_a_broken_invariant(rig: Rig) -> None:
    sender = rig.source.create_sender(5)
    with pytest.raises(AssertionError, match="room 5 has not been announced"):
        sender.send(0, 1, jax.device_put(rows_of(1, 0)))


def test_a_room_is_taken_once_on_each_side(rig: Rig) -> None:
    rig.pair(room=9)
    with pytest.raises(ValueError, match="room 9 is taken"):
        rig.source.create_sender(9)
    with pytest.raises(ValueError, match="room 9 is taken"):
        rig.open(9)


@pytest.mark.parametrize("prefix_tokens", [-4, 6])
def test_a_prefix_that_is_no_multiple_of_the_page_size_is_turned_down_before_any_work(rig: Rig, prefix_tokens: int) -> None:
    with pytest.raises(ValueError, match=f"{prefix_tokens} is no multiple of the page size 4"):
        rig.open(1, prefix_tokens)
    assert rig.sink.open_rooms() == 0


@pytest.mark.parametrize(
    ("field", "value", "here"),
    [
        ("page_size", 16, 4),
        ("kv_dtype", "bfloat16", "float32"),
        ("kv_scales", "xxh3:0", ""),
        ("num_kv_heads", 1, 2),
        ("model_fingerprint", "other", "tiny"),
        ("num_layers", 30, 3),
        ("head_dim", 64, 8),
        ("protocol_version", 99, PROTOCOL_VERSION),
    ],
)
def test_a_refused_announcement_names_both_values(rig: Rig, field: str, value: int | str, here: int | str) -> None:
    facts = {name: getattr(LAYOUT, name) for name in LAYOUT.__struct_fields__}
    sink = rig.sink_with(Layout(**{**facts, field: value}))
    try:
        sender = rig.source.create_sender(1)
        receiver = sink.open(1, rig.source_peer, 0)
        rig.until(lambda: receiver.poll() is KVPoll.FAILED)
        assert receiver.is_refused()
        assert f"{field} {here!r} here, {value!r} there" in str(receiver.failure())
        assert sender.poll() is KVPoll.BOOTSTRAPPING, "a stranger's announcement must not end the room"
    finally:
        sink.close()


def test_a_replaced_worker_is_noticed_and_named_and_may_be_tried_again(rig: Rig) -> None:
    receiver = rig.sink.open(1, Peer(rig.source_peer.address, "p-0"), 0)
    rig.until(lambda: receiver.poll() is KVPoll.FAILED)
    assert "worker was replaced: 'p-0' was meant, 'p-1' is here" in str(receiver.failure())
    assert not receiver.is_refused()
    rig.assert_nothing_open()


def test_a_second_announcement_is_refused_and_leaves_the_first_alone(rig: Rig) -> None:
    sender, receiver = rig.pair(room=3)
    second_sink = rig.sink_with(LAYOUT)
    try:
        second = second_sink.open(3, rig.source_peer, 0)
        rig.until(lambda: second.poll() is KVPoll.FAILED)
        assert "announced twice" in str(second.failure()) and not second.is_refused()
        rig.send(sender, 0, rows_of(1, 0))
        sender.finish(META)
        assert len(rig.drain(receiver)) == 1 and receiver.poll() is KVPoll.SUCCESS
    finally:
        second_sink.close()


def test_no_more_announcements_wait_than_the_bound(rig: Rig) -> None:
    waiting = [rig.open(room) for room in range(8)]
    rig.until(lambda: rig.source.open_rooms() == 8)
    surplus = rig.open(8)
    rig.until(lambda: surplus.poll() is KVPoll.FAILED)
    assert "8 announcements wait" in str(surplus.failure()) and not surplus.is_refused()
    assert all(receiver.poll() is KVPoll.BOOTSTRAPPING for receiver in waiting)


# -- bounds --


def test_a_receiver_that_takes_nothing_holds_the_sender_back_until_it_takes(rig: Rig) -> None:
    sender, receiver = rig.pair()
    rows = rows_of(16, 0)
    sent_pages: list[int] = []
    looks_held = 0

    def is_held() -> bool:
        """Whether the sender takes no chunk, for 25 looks in a row: a chunk that is merely on its way does not last that long."""
        nonlocal looks_held
        looks_held = looks_held + 1 if not sender.can_send() else 0
        while sender.can_send():
            sender.send(16 * len(sent_pages), 16, jax.device_put(rows))
            sent_pages.append(16 * len(sent_pages))
            assert len(sent_pages) <= 400, "10 MB sent, and the receiver has taken nothing"
        return looks_held >= 25

    rig.until(is_held)
    limit = rig.limits.max_chunks_in_flight
    assert rig.counts()[1].chunks_received == limit
    if isinstance(rig, InProcessRig):  # in others, as many may wait for the receiver, or HTTP/2's own window holds some
        assert len(sent_pages) == limit
    assert sender.poll() is KVPoll.TRANSFERRING and receiver.poll() is KVPoll.TRANSFERRING
    assert [chunk.first_page for chunk in receiver.take()] == sent_pages[:limit]
    rest: list[ReceivedChunk] = []
    rig.until(lambda: rest.extend(receiver.take()) or sender.can_send())
    sender.finish(META)
    rest += rig.drain(receiver)
    assert [chunk.first_page for chunk in rest] == sent_pages[limit:]


def test_states_only_move_up(rig: Rig) -> None:
    sender, receiver = rig.source.create_sender(1), rig.open(1)
    seen: tuple[list[KVPoll], list[KVPoll]] = ([], [])

    def look() -> bool:
        seen[0].append(sender.poll())
        seen[1].append(receiver.poll())
        receiver.take()
        return seen[0][-1] is KVPoll.SUCCESS and seen[1][-1] is KVPoll.SUCCESS

    rig.until(lambda: look() or sender.can_send())
    for page in range(6):
        rig.until(lambda: look() or sender.can_send())
        sender.send(page, 1, jax.device_put(rows_of(1, page)))
    sender.finish(META)
    rig.until(look)
    for states in seen:
        assert states == sorted(states)
    sender.fail("too late")
    receiver.abort()
    assert sender.poll() is KVPoll.SUCCESS and receiver.poll() is KVPoll.SUCCESS
    assert sender.failure() is None and receiver.failure() is None


# -- failure and abort --


def test_a_failed_sender_reaches_the_receiver_with_its_reason(rig: Rig) -> None:
    sender, receiver = rig.pair()
    rig.send(sender, 0, rows_of(1, 0))
    sender.fail("out of pages")
    sender.fail("second reason")
    assert sender.poll() is KVPoll.FAILED and sender.failure() == "out of pages" and not sender.can_send()
    rig.until(lambda: receiver.poll() is KVPoll.FAILED)
    assert "out of pages" in str(receiver.failure()) and not receiver.is_refused()
    assert receiver.take() == []
    rig.assert_nothing_open()


def test_a_sender_that_failed_before_its_announcement_turns_it_away_at_once(rig: Rig) -> None:
    sender = rig.source.create_sender(1)
    sender.fail("aborted while queued")
    receiver = rig.open(1)
    rig.until(lambda: receiver.poll() is KVPoll.FAILED)
    assert "aborted while queued" in str(receiver.failure())
    rig.assert_nothing_open()


def test_a_receiver_that_let_go_before_its_sender_came_fails_the_sender_at_once(rig: Rig) -> None:
    receiver = rig.open(1)
    rig.until(lambda: rig.source.open_rooms() == 1)
    receiver.abort()
    rig.until(lambda: rig.source.open_rooms() == 0)
    sender = rig.source.create_sender(1)
    assert sender.poll() is KVPoll.FAILED and "went away" in str(sender.failure())
    rig.assert_nothing_open()


@pytest.mark.parametrize("num_chunks", [0, 1, 2])
def test_an_aborted_receiver_reaches_the_sender_at_every_state(rig: Rig, num_chunks: int) -> None:
    sender, receiver = rig.pair()
    for page in range(num_chunks):
        rig.send(sender, page, rows_of(1, page))
    receiver.abort()
    receiver.abort()
    assert receiver.poll() is KVPoll.FAILED and receiver.take() == []
    rig.until(lambda: sender.poll() is KVPoll.FAILED)
    assert "went away" in str(sender.failure())
    for page in range(num_chunks, num_chunks + 3):  # the loop may not have looked yet: dropped at the door
        sender.send(page, 1, jax.device_put(rows_of(1, 0)))
    sender.finish(META)
    assert sender.poll() is KVPoll.FAILED
    rig.assert_nothing_open()


def test_a_failure_of_a_room_that_nobody_knows_is_ignored(rig: Rig) -> None:
    sender, receiver = rig.pair(room=1)
    stranger = rig.open(2)
    stranger.abort()
    rig.until(lambda: rig.sink.open_rooms() == 1)
    sender.finish(META)
    rig.drain(receiver)
    assert receiver.poll() is KVPoll.SUCCESS


def test_an_unknown_worker_fails_the_room_at_once(rig: Rig) -> None:
    receiver = rig.sink.open(1, Peer("127.0.0.1:1", "nobody"), 0)
    rig.until(lambda: receiver.poll() is KVPoll.FAILED)
    assert "127.0.0.1:1" in str(receiver.failure()) and not receiver.is_refused()
    rig.assert_nothing_open()


# -- deadlines, on a clock that the test turns --


def test_a_sender_waits_for_its_announcement_far_longer_than_a_receiver_for_its_answer(rig: Rig) -> None:
    """A decode worker with a long queue announces late; the shorter time-out would fail and repeat work for nothing."""
    sender, other = rig.source.create_sender(1), rig.source.create_sender(2)
    rig.clock.now_s += 599.0
    assert sender.poll() is KVPoll.BOOTSTRAPPING
    other.fail("the request's deadline passed")
    assert other.poll() is KVPoll.FAILED
    rig.clock.now_s += 1.1
    assert sender.poll() is KVPoll.FAILED and "decode did not announce room 1 within 600.0 s" in str(sender.failure())
    assert rig.counts()[0].failures == {"aborted": 1, "bootstrap_timeout": 1}
    rig.assert_nothing_open()


def test_an_announced_room_is_bound_to_no_announcement_deadline(rig: Rig) -> None:
    sender, receiver = rig.pair()
    rig.clock.now_s += 10_000.0
    assert sender.poll() is KVPoll.WAITING_FOR_INPUT


def test_a_receiver_gives_up_waiting_for_its_answer(rig: Rig) -> None:
    receiver = rig.open(1)
    rig.clock.now_s += 30.1
    assert receiver.poll() is KVPoll.FAILED
    assert "did not accept room 1 within 30.0 s" in str(receiver.failure())
    rig.assert_nothing_open()


def test_an_accepted_room_outlives_the_bootstrap_deadline(rig: Rig) -> None:
    sender, receiver = rig.pair()
    for _ in range(4):
        rig.clock.now_s += 9.0
        if isinstance(rig, GrpcRig):  # signs of life come by real time: let one pass for each turn of the clock
            rig.until(lambda: _heard(rig, receiver))
        assert sender.poll() is KVPoll.WAITING_FOR_INPUT
        assert receiver.poll() is KVPoll.TRANSFERRING
    sender.finish(META)
    rig.drain(receiver)
    assert receiver.poll() is KVPoll.SUCCESS


def _heard(rig: Rig, receiver: KVReceiver) -> bool:
    """Whether the receiver's stall clock was started again at the present time."""
    return receiver._deadline_s is not None and receiver._deadline_s >= rig.clock.now_s + 9.9  # type: ignore[attr-defined]


# -- stalls and reuse --


@pytest.mark.parametrize("rig", MOVING, indirect=True)
def test_an_abort_while_a_send_is_stalled_leaves_other_rooms_untouched(rig: Rig) -> None:
    gate = threading.Event()
    sender, receiver = rig.pair(room=1)
    try:
        stalled = pending(rows_of(2, 1), gate)
        sender.send(0, 2, stalled)
        rig.until(stalled.is_awaited.is_set)
        receiver.abort()
        rig.until(lambda: sender.poll() is KVPoll.FAILED)
        other_sender, other_receiver = rig.pair(room=2)
        rows = rows_of(2, 2)
        other_sender.send(0, 2, jax.device_put(rows))
        other_sender.finish(META)
    finally:
        gate.set()
    (chunk,) = rig.drain(other_receiver)
    np.testing.assert_array_equal(np.asarray(chunk.kv)[:2], rows)
    assert receiver.take() == [] and receiver.poll() is KVPoll.FAILED
    rig.assert_nothing_open()


@pytest.mark.parametrize("rig", MOVING, indirect=True)
def test_a_sender_that_fails_while_its_array_is_computed_reaches_the_receiver_before_the_array_is_there(rig: Rig) -> None:
    gate = threading.Event()
    sender, receiver = rig.pair()
    try:
        stalled = pending(rows_of(1, 0), gate)
        sender.send(0, 1, stalled)
        rig.until(stalled.is_awaited.is_set)
        sender.fail("the client went away")
        rig.until(lambda: receiver.poll() is KVPoll.FAILED)
        assert "the client went away" in str(receiver.failure())
        assert rig.source.open_rooms() == 1, "the array is still held"
    finally:
        gate.set()
    rig.assert_nothing_open()


@pytest.mark.parametrize("rig", MOVING, indirect=True)
def test_an_errored_array_fails_its_room_and_no_other(rig: Rig) -> None:
    ready = threading.Event()
    ready.set()
    errored = pending(rows_of(1, 0), ready, RuntimeError("device on fire"))
    sender, receiver = rig.pair(room=1)
    other_sender, other_receiver = rig.pair(room=2)
    sender.send(0, 1, errored)
    rig.until(lambda: receiver.poll() is KVPoll.FAILED and sender.poll() is KVPoll.FAILED)
    assert "device on fire" in str(receiver.failure())
    assert receiver.take() == []
    rig.send(other_sender, 0, rows_of(1, 1))
    other_sender.finish(META)
    assert len(rig.drain(other_receiver)) == 1 and other_receiver.poll() is KVPoll.SUCCESS
    assert rig.counts()[0].failures == {"device": 1}
    rig.assert_nothing_open()


# -- figures --


@pytest.mark.parametrize("rig", MOVING, indirect=True)
def test_a_transfer_is_timed_from_acceptance_and_its_speed_leaves_out_prefills_compute(rig: Rig) -> None:
    sender, receiver = rig.pair()
    rig.clock.now_s += 5.0  # prefill computes, nothing is on its way
    rig.send(sender, 0, rows_of(2, 0))
    received: list[ReceivedChunk] = []
    rig.until(lambda: received.extend(receiver.take()) or len(received) == 1)
    rig.until(lambda: rig.counts()[0].chunks_sent == 1 and sender.can_send())
    rig.clock.now_s += 2.5  # and again
    sender.finish(META)
    rig.drain(receiver)
    rig.until(lambda: all(counts.rooms_succeeded == 1 for counts in rig.counts()))
    for counts in rig.counts():
        assert counts.transfer_s_total == 7.5 and counts.busy_s_total == 0.0


def test_a_room_that_fails_is_no_transfer(rig: Rig) -> None:
    sender, receiver = rig.pair()
    sender.fail("out of pages")
    rig.until(lambda: receiver.poll() is KVPoll.FAILED)
    assert [counts.rooms_succeeded for counts in rig.counts()] == [0, 0]


# -- closing --


def test_closing_the_source_fails_what_is_open_and_tells_the_receivers(rig: Rig) -> None:
    sender, receiver = rig.pair(room=1)
    waiting = rig.open(2)
    rig.until(lambda: rig.source.open_rooms() == 2)
    rig.source.close()
    assert sender.poll() is KVPoll.FAILED
    rig.until(lambda: receiver.poll() is KVPoll.FAILED and waiting.poll() is KVPoll.FAILED)
    assert "shutting down" in str(receiver.failure()) and "shutting down" in str(waiting.failure())
    with pytest.raises(ValueError, match="closed"):
        rig.source.create_sender(3)
    rig.assert_nothing_open()


def test_closing_the_sink_aborts_what_is_open_and_tells_the_senders(rig: Rig) -> None:
    sender, receiver = rig.pair(room=1)
    rig.send(sender, 0, rows_of(1, 0))
    rig.sink.close()
    assert receiver.poll() is KVPoll.FAILED and receiver.take() == []
    rig.until(lambda: sender.poll() is KVPoll.FAILED)
    with pytest.raises(ValueError, match="closed"):
        rig.open(3)
    rig.assert_nothing_open()


# -- many --


def test_two_hundred_rooms_at_once_in_random_order_end_as_they_should(rig: Rig) -> None:
    rng = random.Random(11)
    rooms = [rng.getrandbits(63) for _ in range(200)]
    plans = {room: [rows_of(rng.randint(1, 4), rng.getrandbits(30)) for _ in range(rng.randint(0, 3))] for room in rooms}
    fates = {room: rng.choice(["deliver", "deliver", "deliver", "abort", "fail"]) for room in rooms}
    senders: dict[int, KVSender] = {}
    receivers: dict[int, KVReceiver] = {}
    for start in range(0, len(rooms), 8):  # as many rooms as announcements may wait for their sender
        steps = [(room, side) for room in rooms[start : start + 8] for side in ("sender", "receiver")]
        rng.shuffle(steps)
        for room, side in steps:
            if side == "sender":
                senders[room] = rig.source.create_sender(room)
            else:
                receivers[room] = rig.open(room)
    progress = dict.fromkeys(rooms, 0)
    received: dict[int, list[ReceivedChunk]] = {room: [] for room in rooms}
    open_rooms = set(rooms)

    def step() -> bool:
        for room in rng.sample(sorted(open_rooms), len(open_rooms)):
            sender, receiver, plan = senders[room], receivers[room], plans[room]
            state = receiver.poll()
            received[room] += receiver.take()
            if state in (KVPoll.SUCCESS, KVPoll.FAILED) and sender.poll() in (KVPoll.SUCCESS, KVPoll.FAILED):
                open_rooms.discard(room)
            elif not sender.can_send():
                continue
            elif progress[room] < len(plan):
                first_page = sum(len(rows) for rows in plan[: progress[room]])
                sender.send(first_page, len(plan[progress[room]]), jax.device_put(plan[progress[room]]))
                progress[room] += 1
            elif fates[room] == "deliver":
                sender.finish(room.to_bytes(8, "little"))
            elif fates[room] == "abort":
                receiver.abort()
            else:
                sender.fail("planned")
        return not open_rooms

    rig.until(step)
    for room in rooms:
        if fates[room] != "deliver":
            assert senders[room].poll() is KVPoll.FAILED and receivers[room].poll() is KVPoll.FAILED
            continue
        assert receivers[room].poll() is KVPoll.SUCCESS, receivers[room].failure()
        assert receivers[room].metadata() == room.to_bytes(8, "little")
        got = [np.asarray(chunk.kv)[: chunk.num_pages] for chunk in received[room]]
        assert len(got) == len(plans[room])
        for rows, arrived in zip(plans[room], got, strict=True):
            np.testing.assert_array_equal(arrived, rig.expected(rows))
    rig.assert_nothing_open()
