"""The transports of one process: what is theirs alone."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from pdjax.protocol import KVPoll, Layout, Peer
from pdjax.transfer.base import TransferLimits
from pdjax.transfer.in_process import InProcessSink, InProcessSource, Mover, Registry
from pdjax.transfer.loopback import LoopbackMover

LAYOUT = Layout(model_fingerprint="tiny", page_size=4, kv_dtype="float32", num_layers=1, num_kv_heads=1, head_dim=2)
PREFILL, DECODE = Peer("prefill", "p-1"), Peer("decode", "d-1")
LIMITS = TransferLimits(bootstrap_timeout_s=30.0, stall_timeout_s=10.0)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class StuckMover(Mover):
    """A link that has stopped: copies begin and never end, until it is freed."""

    def __init__(self) -> None:
        self.is_waiting = threading.Event()
        self.freed = threading.Event()

    def start(self, kv: jax.Array) -> jax.Array:
        return kv

    def wait(self, moved: jax.Array) -> None:
        self.is_waiting.set()
        assert self.freed.wait(30)


class Ends(NamedTuple):
    source: InProcessSource
    sink: InProcessSink
    clock: Clock
    mover: StuckMover


@pytest.fixture
def stuck() -> Iterator[Ends]:
    clock, registry, mover = Clock(), Registry(), StuckMover()
    source = InProcessSource(registry, LAYOUT, PREFILL, lambda: None, LIMITS, clock)
    sink = InProcessSink(registry, LAYOUT, DECODE, mover, lambda: None, LIMITS, clock)
    yield Ends(source, sink, clock, mover)
    mover.freed.set()
    sink.close()
    source.close()


def rows() -> jax.Array:
    return jax.device_put(np.ones((1, 1, 4, 2, 2), np.float32))


def test_a_copy_that_stands_still_fails_its_room_on_both_sides_after_the_stall_timeout(stuck: Ends) -> None:
    sender, receiver = stuck.source.create_sender(1), stuck.sink.open(1, PREFILL, 0)
    sender.send(0, 1, rows())
    assert stuck.mover.is_waiting.wait(30)
    stuck.clock.now_s = 9.9
    assert sender.poll() is KVPoll.TRANSFERRING
    stuck.clock.now_s = 10.1
    assert sender.poll() is KVPoll.FAILED and receiver.poll() is KVPoll.FAILED
    assert "accepted for 10.0 s" in str(sender.failure()) and "accepted for 10.0 s" in str(receiver.failure())
    assert stuck.source.counters.snapshot().failures == {"stalled": 1}
    assert stuck.sink.counters.snapshot().failures == {"peer_failed": 1}


def test_what_arrives_after_the_end_of_its_room_is_dropped_at_the_door(stuck: Ends) -> None:
    sender, receiver = stuck.source.create_sender(1), stuck.sink.open(1, PREFILL, 0)
    sender.send(0, 1, rows())
    assert stuck.mover.is_waiting.wait(30)
    receiver.abort()
    assert stuck.source.open_rooms() == 1, "the copy still holds the array"
    stuck.mover.freed.set()
    stuck.source.close()  # waits for the copy
    assert receiver.take() == [] and receiver.poll() is KVPoll.FAILED
    assert stuck.source.open_rooms() == 0 and stuck.sink.open_rooms() == 0


def test_a_receiver_that_takes_its_time_does_not_fail_the_sender() -> None:
    clock, registry = Clock(), Registry()
    source = InProcessSource(registry, LAYOUT, PREFILL, lambda: None, LIMITS, clock)
    arrived = threading.Event()
    mover = LoopbackMover(SingleDeviceSharding(jax.devices()[0]))
    sink = InProcessSink(registry, LAYOUT, DECODE, mover, arrived.set, LIMITS, clock)
    sender, receiver = source.create_sender(1), sink.open(1, PREFILL, 0)
    arrived.clear()
    sender.send(0, 1, rows())
    assert arrived.wait(30)
    clock.now_s = 1000.0
    assert sender.poll() is KVPoll.TRANSFERRING and receiver.poll() is KVPoll.TRANSFERRING
    assert len(receiver.take()) == 1
    sink.close()
    source.close()


def test_two_sources_cannot_share_an_address() -> None:
    registry = Registry()
    source = InProcessSource(registry, LAYOUT, PREFILL, lambda: None)
    with pytest.raises(ValueError, match="'prefill' has a source already"):
        InProcessSource(registry, LAYOUT, PREFILL, lambda: None)
    source.close()
    InProcessSource(registry, LAYOUT, PREFILL, lambda: None).close()


TWO_DEVICES = """
import jax, numpy as np, threading
from pdjax.protocol import KVPoll, Layout, Peer
from jax.sharding import SingleDeviceSharding
from pdjax.transfer.device_put import DevicePutMover
from pdjax.transfer.in_process import InProcessSink, InProcessSource, Registry
layout = Layout(model_fingerprint="m", page_size=4, kv_dtype="float32", num_layers=1, num_kv_heads=1, head_dim=2)
here, there = jax.devices()
registry, changed = Registry(), threading.Event()
source = InProcessSource(registry, layout, Peer("p", "1"), changed.set)
sink = InProcessSink(registry, layout, Peer("d", "1"), DevicePutMover(SingleDeviceSharding(there)), changed.set)
sender, receiver = source.create_sender(1), sink.open(1, Peer("p", "1"), 0)
rows = np.arange(16, dtype=np.float32).reshape(1, 1, 4, 2, 2)
sender.send(0, 1, jax.device_put(rows, here))
sender.finish(b"m")
while receiver.poll() is not KVPoll.SUCCESS:
    assert receiver.poll() is KVPoll.TRANSFERRING and changed.wait(30)
    changed.clear()
(chunk,) = receiver.take()
assert chunk.kv.devices() == {there}, chunk.kv.devices()
np.testing.assert_array_equal(np.asarray(chunk.kv), rows)
sink.close(); source.close()
print("moved")
"""


def test_device_put_brings_the_array_to_the_decode_device() -> None:
    """In a process of its own: the number of devices is fixed once a process has used JAX."""
    env = {**os.environ, "JAX_NUM_CPU_DEVICES": "2", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", TWO_DEVICES], env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "moved", done.stderr
