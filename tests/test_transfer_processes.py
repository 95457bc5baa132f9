"""The transports between processes that are killed or stopped."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import grpc.aio
import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from pdjax import rpc
from pdjax.protocol import KVPoll, Layout, Peer
from pdjax.transfer.base import KVReceiver, KVSender, TransferLimits
from pdjax.transfer.checksum import ChecksumPrograms
from pdjax.transfer.frames import PageForm
from pdjax.transfer.grpc_stream import GrpcSink, GrpcSource
from pdjax.transfer.jax_receive import PullLander
from pdjax.transfer.jax_send import Endpoint, OfferCarriers
from pdjax.transfer.tcp_bytes import ByteCarriers, ByteLander, Landing
from pdjax.transfer.tcp_link import DataListener

pytestmark = pytest.mark.live

LAYOUT = Layout(model_fingerprint="tiny", page_size=16, kv_dtype="float32", num_layers=8, num_kv_heads=2, head_dim=64)
ROWS_SHAPE = (4, 8, 16, 4, 64)  # 512 KiB
BIG_PAGES = 512  # 64 MiB: long enough on its way to be stopped there
KINDS = ["tcp", "jax_transfer"]
LIMITS = TransferLimits(bootstrap_timeout_s=30.0, stall_timeout_s=1.0)
PINGS = [*rpc.SERVER_OPTIONS, ("grpc.keepalive_time_ms", 500), ("grpc.keepalive_timeout_ms", 500), ("grpc.http2.ping_timeout_ms", 500)]
"""The worker's server, impatient: of two options with one name gRPC takes the later."""
WAIT_S = 30.0


class Side:
    """An event loop in a thread, and a wake-up to wait on."""

    def __init__(self) -> None:
        self.changed = threading.Event()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="side-loop")
        self._thread.start()
        self._server: grpc.aio.Server | None = None

    def serve(self, source: GrpcSource) -> int:
        return asyncio.run_coroutine_threadsafe(self._serve(source), self.loop).result(WAIT_S)

    async def _serve(self, source: GrpcSource) -> int:
        self._server = grpc.aio.server(options=PINGS)
        self._server.add_generic_rpc_handlers([source.handler()])
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return port

    def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(int(WAIT_S / 0.02)):
            if condition():
                return
            self.changed.wait(0.02)
            self.changed.clear()
        raise AssertionError("timed out")

    def close(self) -> None:
        if self._server is not None:
            asyncio.run_coroutine_threadsafe(self._server.stop(None), self.loop).result(WAIT_S)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(WAIT_S)
        self.loop.close()


def programs() -> ChecksumPrograms:
    return ChecksumPrograms(PageForm.of(LAYOUT), (4,), SingleDeviceSharding(jax.devices()[0]))


def endpoint() -> Endpoint:
    return Endpoint("127.0.0.1", jax.devices()[0])


def sink_of(side: Side, kind: str) -> GrpcSink:
    lander = {
        "tcp": lambda: ByteLander(LAYOUT, Landing(jax.device_put, (4, BIG_PAGES))),
        "jax_transfer": lambda: PullLander(programs(), BIG_PAGES, endpoint(), LIMITS.stall_timeout_s),
    }[kind]()
    return GrpcSink(LAYOUT, Peer("decode:1", "d-1"), lander, side.loop, side.changed.set, LIMITS)


def is_waiting(sink: GrpcSink) -> bool:
    """Whether a pull is on its way, of a room that has ended perhaps."""
    lander = sink._lander
    return isinstance(lander, PullLander) and any(link.waited_s() for link in lander._links.values())


def source_of(side: Side, kind: str) -> GrpcSource:
    carriers = {
        "tcp": lambda: ByteCarriers(LAYOUT, DataListener("127.0.0.1")),
        "jax_transfer": lambda: OfferCarriers(programs(), endpoint(), max_offered_bytes=256 << 20),
    }[kind]()
    return GrpcSource(LAYOUT, "p-1", carriers, side.changed.set, LIMITS)


def prefill_process(pipe: Connection, kind: str) -> None:
    """Serves room 1: one chunk, then nothing more. Rooms 2 and 3 get a chunk and an end. Runs until it is killed."""
    side = Side()
    source = source_of(side, kind)
    pipe.send(side.serve(source))
    senders = {room: source.create_sender(room) for room in (1, 2, 3)}
    for room, sender in senders.items():
        side.until(sender.can_send)
        sender.send(0, 4, jax.numpy.ones(ROWS_SHAPE, "float32"))
        if room != 1:
            sender.finish(b"m")
    threading.Event().wait()


def big_prefill_process(pipe: Connection, kind: str) -> None:
    """As soon as the big chunk of room 1 begins to leave, stops or kills itself, as it was told. Room 2 gets a chunk and an end."""
    side = Side()
    source = source_of(side, kind)
    pipe.send(side.serve(source))
    number = pipe.recv()
    sender, later = source.create_sender(1), source.create_sender(2)
    side.until(sender.can_send)
    sender.send(0, BIG_PAGES, jax.numpy.ones((BIG_PAGES, *ROWS_SHAPE[1:]), "float32"))
    while not (sender.poll() is KVPoll.TRANSFERRING and (kind == "tcp" or source.counters.snapshot().bytes_offered)):
        pass
    os.kill(os.getpid(), number)
    side.until(later.can_send)
    later.send(0, 4, jax.numpy.ones(ROWS_SHAPE, "float32"))
    later.finish(b"m")
    threading.Event().wait()


def small_prefill_process(pipe: Connection, kind: str) -> None:
    """Gives room 3 a chunk and an end. Runs until it is killed."""
    side = Side()
    source = source_of(side, kind)
    pipe.send(side.serve(source))
    sender = source.create_sender(3)
    side.until(sender.can_send)
    sender.send(0, 4, jax.numpy.ones(ROWS_SHAPE, "float32"))
    sender.finish(b"m")
    threading.Event().wait()


def decode_process(pipe: Connection, kind: str) -> None:
    """Fetches room 1, takes one chunk and then nothing more. Runs until it is killed."""
    side = Side()
    sink = sink_of(side, kind)
    receiver = sink.open(1, Peer(f"127.0.0.1:{pipe.recv()}", "p-1"), 0)
    side.until(lambda: bool(receiver.take()))
    pipe.send("taken")
    threading.Event().wait()


def big_decode_process(pipe: Connection, kind: str) -> None:
    """Fetches room 1 and stops itself when its big chunk is on the way."""
    side = Side()
    receiver = sink_of(side, kind).open(1, Peer(f"127.0.0.1:{pipe.recv()}", "p-1"), 0)
    side.until(lambda: receiver.poll() is KVPoll.TRANSFERRING)
    pipe.send("accepted")
    pipe.recv()
    os.kill(os.getpid(), signal.SIGSTOP)
    threading.Event().wait()


class Child:
    def __init__(self, target: Callable[[Connection, str], None], kind: str) -> None:
        self.pipe, theirs = multiprocessing.Pipe()
        self._process: BaseProcess = multiprocessing.get_context("spawn").Process(target=target, args=(theirs, kind))
        self._process.start()
        theirs.close()

    def signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def end(self) -> None:
        self._process.kill()
        self._process.join(WAIT_S)
        self._process.close()
        self.pipe.close()


@pytest.fixture
def side() -> Iterator[Side]:
    made = Side()
    yield made
    made.close()


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    assert isinstance(request.param, str)
    return request.param


@pytest.fixture
def fetching(side: Side, kind: str) -> Iterator[tuple[Child, Peer, GrpcSink, KVReceiver]]:
    """A prefill process that has sent the first chunk of room 1."""
    child, sink = Child(prefill_process, kind), sink_of(side, kind)
    try:
        assert child.pipe.poll(WAIT_S)
        peer = Peer(f"127.0.0.1:{child.pipe.recv()}", "p-1")
        receiver = sink.open(1, peer, 0)
        side.until(lambda: bool(receiver.take()))
        yield child, peer, sink, receiver
    finally:
        sink.close()
        child.end()


@pytest.fixture
def sending(side: Side, kind: str) -> Iterator[tuple[Child, GrpcSource, KVSender]]:
    """A decode process that has taken the first chunk of room 1 and holds the link back."""
    child, source = Child(decode_process, kind), source_of(side, kind)
    try:
        child.pipe.send(side.serve(source))
        sender = source.create_sender(1)
        rows = jax.device_put(np.ones(ROWS_SHAPE, np.float32))
        num_sent = 0

        def has_taken() -> bool:
            nonlocal num_sent
            if num_sent < 40 and sender.can_send():
                sender.send(4 * num_sent, 4, rows)
                num_sent += 1
            return child.pipe.poll(0)

        side.until(has_taken)
        yield child, source, sender
    finally:
        child.end()
        source.close()


def test_a_killed_prefill_process_fails_its_rooms_at_once(fetching: tuple[Child, Peer, GrpcSink, KVReceiver], side: Side) -> None:
    child, _, sink, receiver = fetching
    child.signal(signal.SIGKILL)
    side.until(lambda: receiver.poll() is KVPoll.FAILED)
    assert sink.counters.snapshot().failures == {"peer_gone": 1}, "noticed by the broken connection, not by a deadline"
    side.until(lambda: sink.open_rooms() == 0)


def test_a_stopped_prefill_process_fails_its_rooms_after_the_stall_timeout_and_may_go_on_later(
    fetching: tuple[Child, Peer, GrpcSink, KVReceiver], side: Side
) -> None:
    child, peer, sink, receiver = fetching
    child.signal(signal.SIGSTOP)
    side.until(lambda: receiver.poll() is KVPoll.FAILED)
    assert "no sign of life" in str(receiver.failure())
    child.signal(signal.SIGCONT)
    later = sink.open(2, peer, 0)
    side.until(lambda: later.poll() in (KVPoll.SUCCESS, KVPoll.FAILED))
    assert later.poll() is KVPoll.SUCCESS, later.failure()
    assert len(later.take()) == 1 and receiver.take() == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_prefill_process_that_ends_in_mid_transfer_fails_that_room_only(side: Side, kind: str, number: signal.Signals) -> None:
    victim, healthy = Child(big_prefill_process, kind), Child(small_prefill_process, kind)
    sink = sink_of(side, kind)
    try:
        peers = [Peer(f"127.0.0.1:{child.pipe.recv()}", "p-1") for child in (victim, healthy)]
        victim.pipe.send(number)
        broken = sink.open(1, peers[0], 0)
        side.until(lambda: broken.poll() is KVPoll.FAILED)
        assert broken.take() == []
        other = sink.open(3, peers[1], 0)
        side.until(lambda: other.poll() in (KVPoll.SUCCESS, KVPoll.FAILED))
        assert other.poll() is KVPoll.SUCCESS, f"a peer that stands still holds others up: {other.failure()}"
        if number is signal.SIGSTOP:
            victim.signal(signal.SIGCONT)
            side.until(lambda: not is_waiting(sink))
            later = sink.open(2, peers[0], 0)
            side.until(lambda: later.poll() in (KVPoll.SUCCESS, KVPoll.FAILED))
            assert later.poll() is KVPoll.SUCCESS, later.failure()
        assert broken.take() == [] and broken.poll() is KVPoll.FAILED
    finally:
        victim.end()
        healthy.end()
        sink.close()


def test_a_killed_decode_process_fails_its_senders_at_once(sending: tuple[Child, GrpcSource, KVSender], side: Side) -> None:
    child, source, sender = sending
    assert sender.poll() is KVPoll.TRANSFERRING
    child.signal(signal.SIGKILL)
    side.until(lambda: sender.poll() is KVPoll.FAILED)
    assert "went away" in str(sender.failure())
    side.until(lambda: source.open_rooms() == 0)
    assert source.counters.snapshot().bytes_offered == 0


def test_a_decode_process_that_stops_in_mid_transfer_fails_that_room_only(side: Side, kind: str) -> None:
    child, source, sink = Child(big_decode_process, kind), source_of(side, kind), sink_of(side, kind)
    try:
        port = side.serve(source)
        child.pipe.send(port)
        sender = source.create_sender(1)
        assert child.pipe.recv() == "accepted"
        side.until(sender.can_send)
        sender.send(0, BIG_PAGES, jax.device_put(np.ones((BIG_PAGES, *ROWS_SHAPE[1:]), np.float32)))
        child.pipe.send("stop")
        other, receiver = source.create_sender(2), sink.open(2, Peer(f"127.0.0.1:{port}", "p-1"), 0)
        side.until(other.can_send)
        other.send(0, 4, jax.device_put(np.ones(ROWS_SHAPE, np.float32)))
        other.finish(b"m")
        side.until(lambda: receiver.poll() in (KVPoll.SUCCESS, KVPoll.FAILED))
        assert receiver.poll() is KVPoll.SUCCESS, f"a peer that stands still holds others up: {receiver.failure()}"
        side.until(lambda: sender.poll() is KVPoll.FAILED or source.counters.snapshot().chunks_sent == 2)
    finally:
        child.end()
        sink.close()
        source.close()


def test_a_stopped_decode_process_is_told_apart_from_one_that_holds_back(
    sending: tuple[Child, GrpcSource, KVSender], side: Side
) -> None:
    child, source, sender = sending
    looks = 0

    def outlives_the_pings() -> bool:
        nonlocal looks
        looks += 1
        return looks > 100  # 2 s, twice what the pings allow

    side.until(outlives_the_pings)
    assert sender.poll() is KVPoll.TRANSFERRING, "it holds back, and its process answers"
    child.signal(signal.SIGSTOP)
    side.until(lambda: sender.poll() is KVPoll.FAILED)
    assert "went away" in str(sender.failure())
    side.until(lambda: source.open_rooms() == 0)
