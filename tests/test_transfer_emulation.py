"""The emulated link and announcement, on clocks that the test turns, and what a room's meter makes of its times."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdjax.config.load import ConfigError, load_config
from pdjax.protocol import KVPoll
from pdjax.transfer.base import Emulation, TransferLimits
from pdjax.transfer.emulation import BURST_S, EmulatedLink, LateAnnouncer, Pipe, RealLink, make_announcer, make_link
from pdjax.transfer.tcp_bytes import ByteCarriers
from pdjax.transfer.tcp_link import DataListener
from pdjax.transfer.grpc_send import Carriers
from pdjax.transfer.rooms import Counters, RoomMeter, RoomTransfer
from pdjax.worker.build import transfer_limits
from tests.test_transfer_contract import LAYOUT, META, WAIT_S, Clock, GrpcRig, InProcessRig, Rig, rows_of

# -- the pipe --


def test_bytes_leave_one_after_another_at_the_rate_of_the_link() -> None:
    clock = Clock()
    pipe = Pipe(1000.0, clock)
    assert pipe.wait_s(500) == pytest.approx(0.5)
    assert pipe.wait_s(250) == pytest.approx(0.75), "behind what was handed over before"
    clock.now_s += 0.75
    assert pipe.wait_s(1000) == pytest.approx(1.0)


def test_an_idle_link_saves_up_no_more_than_a_burst() -> None:
    clock = Clock()
    pipe = Pipe(1000.0, clock)
    clock.now_s += 3600.0
    assert pipe.wait_s(1000) == pytest.approx(1.0 - BURST_S)


def test_a_sleep_that_ends_a_little_late_costs_no_throughput() -> None:
    clock = Clock()
    pipe = Pipe(1e6, clock)
    for _ in range(100):
        clock.now_s += pipe.wait_s(10_000) + BURST_S / 2
    assert clock.now_s - 1000.0 == pytest.approx(1.0, abs=2 * BURST_S)


@given(st.lists(st.tuples(st.integers(1, 10_000), st.floats(0.0, 0.02)), min_size=1, max_size=50))
def test_the_link_is_never_faster_than_its_rate(steps: list[tuple[int, float]]) -> None:
    clock = Clock()
    started_s = clock.now_s
    pipe = Pipe(100_000.0, clock)
    total_bytes = 0
    for num_bytes, pause_s in steps:
        clock.now_s += pause_s
        left_at_s = clock.now_s + pipe.wait_s(num_bytes)
        total_bytes += num_bytes
        assert left_at_s - started_s >= total_bytes / 100_000.0 - BURST_S - 1e-9


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_a_rate_that_moves_nothing_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="bytes_per_s must be positive"):
        Pipe(rate, Clock())


def test_an_emulated_link_sleeps_for_what_the_pipe_says() -> None:
    naps: list[float] = []

    async def sleep(seconds: float) -> None:
        naps.append(seconds)

    link = EmulatedLink(Pipe(1000.0, Clock()), sleep, naps.append)
    asyncio.run(link.carry(500))
    link.carry_blocking(500)
    assert naps == pytest.approx([0.5, 1.0])


def test_closing_the_link_ends_the_waits_of_its_threads() -> None:
    link = EmulatedLink(Pipe(1e-3, Clock()))
    thread = threading.Thread(target=link.carry_blocking, args=(1000,))
    thread.start()
    link.close()
    thread.join(WAIT_S)
    assert not thread.is_alive()


def test_without_emulation_the_link_is_the_real_one_and_announcements_are_prompt() -> None:
    assert isinstance(make_link(Emulation()), RealLink)
    calls: list[int] = []
    make_announcer(Emulation()).announce(lambda: calls.append(1))
    assert calls == [1]


# -- in the transports --


class SlowGrpcRig(GrpcRig):
    def carriers(self) -> Carriers:
        return ByteCarriers(LAYOUT, DataListener("127.0.0.1"), self.limits.emulation)


RIGS: dict[str, type[Rig]] = {"tcp": SlowGrpcRig, "device_put": InProcessRig}


@pytest.fixture(params=list(RIGS))
def make_rig(request: pytest.FixtureRequest) -> Iterator[Callable[[Emulation], Rig]]:
    made: list[Rig] = []

    def make(emulation: Emulation) -> Rig:
        made.append(RIGS[request.param](TransferLimits(emulation=emulation)))
        return made[-1]

    yield make
    for rig in made:
        rig.close()


def test_a_chunk_that_the_link_holds_does_not_arrive_and_is_dropped_with_its_room(make_rig: Callable[[Emulation], Rig]) -> None:
    rig = make_rig(Emulation(bytes_per_s=1.0))  # most of an hour for this chunk
    sender, receiver = rig.pair()
    rig.send(sender, 0, rows_of(2, 0))
    looks = iter(range(20))
    rig.until(lambda: next(looks, None) is None)
    assert receiver.take() == [] and receiver.poll() is KVPoll.TRANSFERRING
    receiver.abort()
    rig.until(lambda: sender.poll() is KVPoll.FAILED)


def test_a_fast_enough_link_delivers_what_was_sent(make_rig: Callable[[Emulation], Rig]) -> None:
    rig = make_rig(Emulation(bytes_per_s=1e9, announce_delay_s=0.05))
    sender, receiver = rig.pair()
    rows = rows_of(2, 0)
    rig.send(sender, 0, rows)
    sender.finish(META)
    (chunk,) = rig.drain(receiver)
    np.testing.assert_array_equal(np.asarray(chunk.kv)[:2], rows)
    assert receiver.poll() is KVPoll.SUCCESS


def test_a_late_announcement_leaves_the_sender_waiting_and_an_aborted_one_never_comes(make_rig: Callable[[Emulation], Rig]) -> None:
    rig = make_rig(Emulation(announce_delay_s=0.2))
    sender = rig.source.create_sender(1)
    receiver = rig.open(1)
    assert sender.poll() is KVPoll.BOOTSTRAPPING and receiver.poll() is KVPoll.BOOTSTRAPPING
    aborted = rig.open(2)
    aborted.abort()
    rig.until(lambda: sender.poll() is KVPoll.WAITING_FOR_INPUT)
    rig.until(lambda: rig.sink.open_rooms() == 1)
    assert rig.source.open_rooms() == 1, "the aborted room was never announced"


def test_closing_forgets_announcements_that_were_to_come() -> None:
    announcer = LateAnnouncer(3600.0)
    announcer.announce(lambda: pytest.fail("announced after closing"))
    announcer.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "kv-late-announcement"]


# -- the configuration --


def test_the_configuration_reaches_the_limits() -> None:
    settings = ["transfer.emulate_gbytes_per_s=0.25", "transfer.emulate_announce_delay_s=1.5", "server.request_timeout_s=77"]
    limits = transfer_limits(load_config(None, settings))
    assert limits.emulation == Emulation(bytes_per_s=0.25e9, announce_delay_s=1.5)
    assert limits.announce_timeout_s == 77.0
    assert transfer_limits(load_config(None, [])).emulation == Emulation()


def test_a_delay_that_no_answer_could_outrun_is_refused() -> None:
    with pytest.raises(ConfigError, match="emulate_announce_delay_s 30.0 must be below transfer.bootstrap_timeout_s 30.0"):
        load_config(None, ["transfer.emulate_announce_delay_s=30"])


# -- meters --


def test_a_meter_counts_overlapping_chunks_once_and_the_gaps_not_at_all() -> None:
    clock = Clock()
    meter = RoomMeter(clock)
    meter.accepted()
    clock.now_s += 10.0  # prefill computes
    meter.began()
    clock.now_s += 1.0
    meter.began()
    clock.now_s += 1.0
    meter.moved(100)
    clock.now_s += 1.0
    meter.moved(50)
    clock.now_s += 4.0  # prefill computes
    meter.began()
    clock.now_s += 0.5
    meter.dropped()
    assert meter.transfer() == RoomTransfer(transfer_s=17.5, busy_s=3.5, num_bytes=150)


def test_a_chunk_that_ends_twice_is_a_broken_invariant() -> None:
    meter = RoomMeter(Clock())
    meter.began()
    meter.dropped()
    with pytest.raises(AssertionError, match="ended that never began"):
        meter.moved(1)


def test_counters_add_up_the_rooms_that_ended_well() -> None:
    counters = Counters()
    for number in range(10):
        counters.succeeded(RoomTransfer(1.0, 0.5, number))
    counts = counters.snapshot()
    assert (counts.rooms_succeeded, counts.transfer_s_total, counts.busy_s_total) == (10, 10.0, 5.0)
