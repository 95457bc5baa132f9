"""`jax_transfer` against what its library does: offers nobody takes, pulls nobody answers, arrays that failed, damage nobody reports."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import grpc.aio
import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import SingleDeviceSharding

from pdjax import rpc
from pdjax.protocol import Accepted, Announce, ChunkLast, ChunkOffer, ChunkPulled, KVFrame, KVPoll, Peer, PulledReply, SendFailed
from pdjax.transfer.base import KVReceiver, KVSender, TransferLimits
from pdjax.transfer.budget import ByteBudget
from pdjax.transfer.checksum import ChecksumPrograms, chunk_checksum
from pdjax.transfer.frames import PageForm
from pdjax.transfer.grpc_receive import Lander
from pdjax.transfer.grpc_send import Carriers
from pdjax.transfer.jax_links import OfferLink, PullLink, start_server
from pdjax.transfer.jax_receive import PullLander
from pdjax.transfer.jax_send import MAX_WITHDRAWN, Endpoint, Offer, OfferBook, OfferCarriers
from tests.test_transfer_contract import BUCKETS, ENDPOINT, LAYOUT, META, WAIT_S, GrpcRig, JaxRig, programs_for, rows_of
from tests.test_transfer_grpc import Host

PAGE = PageForm.of(LAYOUT)
CHUNK_BYTES = 2 * PAGE.num_bytes
DEVICE = jax.devices()[0]
OK = Accepted("p-1")


def spec(num_rows: int) -> jax.ShapeDtypeStruct:
    return programs_for(LAYOUT).spec(num_rows)


@pytest.fixture
def rig() -> Iterator[JaxRig]:
    made = JaxRig(TransferLimits(bootstrap_timeout_s=30.0, stall_timeout_s=10.0))
    yield made
    made.close()
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("kv-pull")]
    assert not left, f"threads left behind: {left}"


@pytest.fixture
def host(rig: JaxRig) -> Iterator[Host]:
    made = Host(rig)
    yield made
    made.stop()


# -- the checksum --


def checksum_by_hand(words: list[int]) -> list[int]:
    """The same in plain integers."""

    def mix(word: int) -> int:
        word = (word ^ word >> 16) * 0x85EBCA6B % 2**32
        word = (word ^ word >> 13) * 0xC2B2AE35 % 2**32
        return word ^ word >> 16

    mixed = [mix(word ^ position * 0x9E3779B9 % 2**32) for position, word in enumerate(words)]
    return [sum(mixed) % 2**32, sum(word * (2 * position + 1) for position, word in enumerate(mixed)) % 2**32]


WORDS = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40)


@settings(deadline=None, max_examples=60)
@given(WORDS)
def test_the_checksum_is_what_plain_integers_give(words: list[int]) -> None:
    padded = [*words, *[0] * (40 - len(words))]
    on_device = np.asarray(chunk_checksum(jnp.asarray(np.array(padded, np.uint32).view(np.float32))))
    assert on_device.tolist() == checksum_by_hand(padded)


def test_the_checksum_of_half_width_numbers_goes_by_their_bits() -> None:
    kv = jnp.asarray([[1.0, -2.0], [0.5, float("nan")]], jnp.bfloat16)
    words = np.asarray(kv).reshape(-1).view(np.uint16).tolist()
    assert words[:3] == [0x3F80, 0xC000, 0x3F00]
    assert np.asarray(chunk_checksum(kv)).tolist() == checksum_by_hand(words)


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 31), st.integers(0, 39), st.randoms(use_true_random=False))
def test_one_flipped_bit_changes_the_checksum(bit: int, position: int, random: Any) -> None:
    words = [random.getrandbits(32) for _ in range(40)]
    flipped = [word ^ (1 << bit if index == position else 0) for index, word in enumerate(words)]
    assert checksum_by_hand(words)[0] != checksum_by_hand(flipped)[0]


def test_moved_pages_and_zeros_in_place_of_pages_change_the_checksum() -> None:
    programs, rows = programs_for(LAYOUT), rows_of(4, 0)
    sums = {
        "as sent": programs.checksum(jax.device_put(rows)),
        "two pages swapped": programs.checksum(jax.device_put(rows[[1, 0, 2, 3]])),
        "last page missing": programs.checksum(jax.device_put(rows * (np.arange(4) < 3)[:, None, None, None, None].astype(np.float32))),
        "all zeros": programs.checksum(jax.device_put(np.zeros_like(rows))),
        "signs turned": programs.checksum(jax.device_put(-rows)),
        "only padding differs": programs.checksum(jax.device_put(np.concatenate([rows[:3], rows[:1]]))),
    }
    assert len(set(sums.values())) == len(sums)


def test_programs_for_the_engines_sizes_are_compiled_at_once_and_others_at_first_use() -> None:
    programs = ChecksumPrograms(PAGE, (1, 4), SingleDeviceSharding(DEVICE))
    assert set(programs._compiled) == {1, 4}
    assert programs.checksum(jax.device_put(rows_of(3, 0))) == programs_for(LAYOUT).checksum(jax.device_put(rows_of(3, 0)))
    assert set(programs._compiled) == {1, 3, 4}


# -- the library, as the fence takes it to be --


def finish(kv: jax.Array) -> np.ndarray:
    return np.asarray(kv)


@pytest.fixture
def links() -> Iterator[tuple[OfferLink, PullLink]]:
    offers = OfferLink("127.0.0.1", DEVICE)
    pulls = PullLink("127.0.0.1", DEVICE, offers.address)
    yield offers, pulls
    pulls.end()
    pulls.break_off()
    assert pulls.wait_over(WAIT_S)


def test_an_offer_is_given_out_once_with_the_bits_that_were_offered(links: tuple[OfferLink, PullLink]) -> None:
    offers, pulls = links
    rows = rows_of(2, 0)
    rows[1] = np.nan
    offers.offer(7, jax.device_put(rows).block_until_ready())
    got = pulls.pull(7, spec(2), finish).result(WAIT_S)
    assert got.tobytes() == rows.tobytes()
    again = pulls.pull(7, spec(2), finish)
    pulls.end()
    pulls.break_off()
    with pytest.raises(Exception, match="INTERNAL"):
        again.result(WAIT_S)


@pytest.mark.parametrize("is_early", [False, True])
def test_a_pull_of_what_was_withdrawn_fails_at_once(links: tuple[OfferLink, PullLink], is_early: bool) -> None:
    offers, pulls = links
    early = [pulls.pull(7, spec(2), finish)] if is_early else []
    offers.offer(8, jax.device_put(rows_of(2, 0)).block_until_ready())
    pulls.pull(8, spec(2), finish)  # whatever was asked for before has reached the server with this one
    offers.offer(7 + 2 * is_early, jax.device_put(rows_of(2, 0)).block_until_ready())
    offers.withdraw(7)
    with pytest.raises(Exception, match="out of range"):
        (early or [pulls.pull(7, spec(2), finish)])[0].result(WAIT_S)
    assert offers.num_withdrawn == 1


def test_withdrawing_gives_the_memory_back(links: tuple[OfferLink, PullLink]) -> None:
    def resident_mib() -> int:
        return psutil.Process().memory_info().rss >> 20

    offers, _ = links
    empty = resident_mib()
    for uuid in (1, 2):
        offers.offer(uuid, jax.device_put(np.ones(16 << 20, np.float32)).block_until_ready())
    held = resident_mib()
    assert held - empty >= 120, "two arrays of 64 MiB that nothing else refers to"
    for uuid in (1, 2):
        offers.withdraw(uuid)
    for _ in range(100):  # a thread of the library may be the last to let go
        if held - resident_mib() >= 120:
            return
        threading.Event().wait(0.05)
    raise AssertionError(f"{held - resident_mib()} of 128 MiB came back")


def test_breaking_off_frees_a_pull_that_nobody_answers_and_ends_the_thread(links: tuple[OfferLink, PullLink]) -> None:
    _, pulls = links
    unanswered = pulls.pull(99, spec(1), finish)
    assert not unanswered.done()
    pulls.end()
    pulls.break_off()
    with pytest.raises(Exception, match="INTERNAL"):
        unanswered.result(WAIT_S)
    assert pulls.wait_over(WAIT_S)
    with pytest.raises(AssertionError, match="has ended"):
        pulls.pull(100, spec(1), finish)


def test_a_link_ends_behind_its_last_pull(links: tuple[OfferLink, PullLink]) -> None:
    offers, pulls = links
    last = pulls.pull(7, spec(2), finish)
    pulls.end()
    offers.offer(7, jax.device_put(rows_of(2, 0)).block_until_ready())
    np.testing.assert_array_equal(last.result(WAIT_S), rows_of(2, 0))
    assert pulls.wait_over(WAIT_S) and pulls.waited_s() == 0.0


def test_a_pull_that_nobody_wants_any_more_is_still_waited_for(links: tuple[OfferLink, PullLink]) -> None:
    """Or nobody would notice that the link stands still, and its memory would be out of sight."""
    offers, pulls = links
    first, unwanted = pulls.pull(7, spec(2), finish), pulls.pull(8, spec(2), finish)
    assert unwanted.cancel()
    offers.offer(7, jax.device_put(rows_of(2, 0)).block_until_ready())
    first.result(WAIT_S)
    behind = pulls.pull(9, spec(2), finish)
    offers.offer(9, jax.device_put(rows_of(2, 0)).block_until_ready())
    with pytest.raises(TimeoutError):
        behind.result(0.2)
    assert pulls.waited_s() > 0.0
    offers.offer(8, jax.device_put(rows_of(2, 0)).block_until_ready())
    behind.result(WAIT_S)


def test_an_array_of_another_size_than_asked_for_fails(links: tuple[OfferLink, PullLink]) -> None:
    offers, pulls = links
    for uuid, num_rows in ((1, 1), (2, 4)):
        offers.offer(uuid, jax.device_put(rows_of(num_rows, 0)).block_until_ready())
        with pytest.raises(Exception, match=r"INTERNAL|INVALID_ARGUMENT"):
            pulls.pull(uuid, spec(2), finish).result(WAIT_S)


def test_a_server_that_cannot_be_had_is_an_error_that_names_it() -> None:
    with pytest.raises(ValueError, match="does not start at 203.0.113.1 on cpu"):
        start_server("203.0.113.1", DEVICE)
    with pytest.raises(ValueError, match="'nowhere' is no address"):
        PullLink("127.0.0.1", DEVICE, "nowhere")


# -- offers that do not end well --


class Script:
    """A prefill worker by hand: answers every announcement with frames made for its room; keeps the acknowledgements."""

    def __init__(self, host: Host, frames: Callable[[Announce], list[KVFrame]], then_hang: bool = False) -> None:
        self.pulled: list[ChunkPulled] = []
        self._frames = frames
        self._then_hang = then_hang
        fetch = grpc.unary_stream_rpc_method_handler(
            self._serve, request_deserializer=rpc.decoder(Announce), response_serializer=rpc.encode
        )
        note = grpc.unary_unary_rpc_method_handler(
            self._note, request_deserializer=rpc.decoder(ChunkPulled), response_serializer=rpc.encode
        )
        port = host.start(grpc.method_handlers_generic_handler(rpc.WORKER_SERVICE, {"FetchKV": fetch, "PulledKV": note}))
        self.peer = Peer(f"127.0.0.1:{port}", "p-1")

    async def _serve(self, announce: Announce, context: grpc.aio.ServicerContext) -> None:
        for frame in self._frames(announce):
            await context.write(frame)
        if self._then_hang:
            await asyncio.Event().wait()

    async def _note(self, pulled: ChunkPulled, context: grpc.aio.ServicerContext) -> PulledReply:
        self.pulled.append(pulled)
        return PulledReply()


class Offering:
    """An `OfferLink` with two pages under number 5, and the frame that says so, changed as a case wants it."""

    def __init__(self, **changes: Any) -> None:
        self.link = OfferLink("127.0.0.1", DEVICE)
        self.kv = jax.device_put(rows_of(2, 0)).block_until_ready()
        self.link.offer(5, self.kv)
        facts = {"first_page": 0, "num_pages": 2, "num_rows": 2, "address": self.link.address, "uuid": 5}
        self.frame = ChunkOffer(**{**facts, "checksum": programs_for(LAYOUT).checksum(self.kv), **changes})


def test_the_script_itself_is_right(rig: JaxRig, host: Host) -> None:
    """Without this, every case below could fail for a reason of its own making."""
    offering = Offering()
    script = Script(host, lambda _: [OK, offering.frame, ChunkLast(2, META)])
    receiver = rig.sink.open(1, script.peer, 0)
    (chunk,) = rig.drain(receiver)
    assert receiver.poll() is KVPoll.SUCCESS, receiver.failure()
    np.testing.assert_array_equal(np.asarray(chunk.kv), rows_of(2, 0))
    assert script.pulled == [ChunkPulled(room=1, uuid=5)]


@pytest.mark.parametrize(
    ("changes", "kind", "text"),
    [
        ({"checksum": 1}, "damaged", "pages 0 to 1 arrived damaged: checksum 0x"),
        ({"first_page": 1}, "protocol", "chunk starts at page 1, page 0 was next"),
        ({"num_pages": 3}, "protocol", "chunk of 3 pages in 2 rows, 1 to 16 are taken"),
        ({"num_pages": 0}, "protocol", "chunk of 0 pages in 2 rows"),
        ({"num_rows": 17}, "protocol", "chunk of 2 pages in 17 rows"),
        ({"address": "nowhere"}, "protocol", "'nowhere' is no address of a transfer server"),
        ({"num_rows": 4}, "device", "pulling pages from 0 on failed"),
    ],
)
def test_a_bad_offer_fails_its_room_with_a_clear_text_and_is_not_acknowledged(
    rig: JaxRig, host: Host, changes: dict[str, Any], kind: str, text: str
) -> None:
    offering = Offering(**changes)
    script = Script(host, lambda _: [OK, offering.frame], then_hang=True)
    receiver = rig.sink.open(1, script.peer, 0)
    rig.until(lambda: receiver.poll() is KVPoll.FAILED)
    assert text in str(receiver.failure())
    assert receiver.take() == [] and script.pulled == []
    assert rig.counts()[1].failures == {kind: 1}
    rig.assert_nothing_open()


def test_a_second_offer_in_the_place_of_the_first_is_taken_for_damage(rig: JaxRig, host: Host) -> None:
    offering = Offering()
    offering.link.offer(5, jax.device_put(rows_of(2, 1)).block_until_ready())
    script = Script(host, lambda _: [OK, offering.frame], then_hang=True)
    receiver = rig.sink.open(1, script.peer, 0)
    rig.until(lambda: receiver.poll() is KVPoll.FAILED)
    assert "arrived damaged" in str(receiver.failure()) and receiver.take() == []


def test_the_senders_own_words_explain_a_pull_that_failed(rig: JaxRig, host: Host) -> None:
    offering = Offering()
    offering.link.withdraw(5)
    script = Script(host, lambda _: [OK, offering.frame, SendFailed("the client went away")])
    receiver = rig.sink.open(1, script.peer, 0)
    rig.until(lambda: receiver.poll() is KVPoll.FAILED)
    assert "the client went away" in str(receiver.failure()) and rig.counts()[1].failures == {"peer_failed": 1}


def test_an_offer_that_nobody_answers_fails_the_room_after_the_stall_timeout(rig: JaxRig, host: Host) -> None:
    offering = Offering(uuid=6)
    script = Script(host, lambda _: [OK, offering.frame], then_hang=True)
    receiver = rig.sink.open(1, script.peer, 0)
    rig.until(lambda: bool(lander_of(rig)._links))
    rig.clock.now_s += 9.9
    assert receiver.poll() is KVPoll.TRANSFERRING
    rig.clock.now_s += 10.1
    assert receiver.poll() is KVPoll.FAILED and "no sign of life" in str(receiver.failure())
    rig.assert_nothing_open()


def lander_of(rig: JaxRig) -> PullLander:
    lander = rig.sink._lander  # type: ignore[attr-defined]
    assert isinstance(lander, PullLander)
    return lander


class ImpatientRig(JaxRig):
    def lander(self, layout: Any) -> Lander:
        return PullLander(programs_for(layout), BUCKETS[-1], ENDPOINT, stall_timeout_s=0.1)


def test_while_a_pull_is_overdue_rooms_of_its_worker_fail_at_once_and_afterwards_the_link_is_good_again() -> None:
    rig = ImpatientRig(TransferLimits())
    host = Host(rig)
    try:
        offering = Offering()
        late = ChunkOffer(0, 2, 2, offering.link.address, 6, offering.frame.checksum)
        frames = {1: [OK, late], 2: [OK, offering.frame], 3: [OK, offering.frame, ChunkLast(2, META)]}
        script = Script(host, lambda announce: frames[announce.room], then_hang=True)
        overdue = rig.sink.open(1, script.peer, 0)
        rig.until(lambda: any(link.waited_s() > 0.1 for link in lander_of(rig)._links.values()))
        behind = rig.sink.open(2, script.peer, 0)
        rig.until(lambda: behind.poll() is KVPoll.FAILED)
        assert "is still on its way" in str(behind.failure())
        overdue.abort()
        offering.link.offer(6, offering.kv)
        rig.until(lambda: not any(link.waited_s() for link in lander_of(rig)._links.values()))
        later = rig.sink.open(3, script.peer, 0)
        assert len(rig.drain(later)) == 1 and later.poll() is KVPoll.SUCCESS, later.failure()
        assert overdue.take() == []
    finally:
        host.stop()
        rig.close()


def test_a_worker_that_replaces_its_server_is_followed_to_the_new_one(rig: JaxRig, host: Host) -> None:
    offerings = {1: Offering(), 2: Offering()}
    script = Script(host, lambda announce: [OK, offerings[announce.room].frame, ChunkLast(2, META)])
    for room in offerings:
        receiver = rig.sink.open(room, script.peer, 0)
        assert len(rig.drain(receiver)) == 1 and receiver.poll() is KVPoll.SUCCESS, receiver.failure()
    assert [link.address for link in lander_of(rig)._links.values()] == [offerings[2].link.address]


def test_an_array_that_failed_on_the_device_is_never_offered(rig: JaxRig, links: tuple[OfferLink, PullLink]) -> None:
    offers, pulls = links
    offers.withdraw(7)
    failed = pulls.pull(7, spec(2), lambda kv: kv).result(WAIT_S)  # an array of the device's that will have failed
    sender, receiver = rig.pair()
    sender.send(0, 2, failed)
    rig.until(lambda: receiver.poll() is KVPoll.FAILED and sender.poll() is KVPoll.FAILED)
    assert "out of range" in str(receiver.failure()) and receiver.take() == []
    assert failed.is_ready(), "as is one that is good"
    assert rig.counts()[0].failures == {"device": 1} and rig.counts()[0].bytes_offered == 0
    rig.assert_nothing_open()


# -- bounds --


def offered(rig: JaxRig) -> int:
    return rig.counts()[0].bytes_offered


class TightRig(JaxRig):
    def carriers(self) -> Carriers:
        return OfferCarriers(programs_for(LAYOUT), ENDPOINT, max_offered_bytes=2 * CHUNK_BYTES)


def test_all_rooms_together_offer_no_more_than_the_bound_and_all_get_their_turn() -> None:
    rig = TightRig(TransferLimits(max_chunks_in_flight=2))
    try:
        pairs = [rig.pair(room) for room in range(4)]
        for sender, _ in pairs:
            for page in (0, 2):
                rig.send(sender, page, rows_of(2, page))
            sender.finish(META)
        highest = 0
        arrived = [0] * len(pairs)

        def look() -> bool:
            nonlocal highest
            highest = max(highest, offered(rig))
            for number, (_, receiver) in enumerate(pairs):
                arrived[number] += len(receiver.take())
            return all(receiver.poll() is KVPoll.SUCCESS for _, receiver in pairs)

        rig.until(look)
        assert arrived == [2, 2, 2, 2]
        assert 0 < highest <= 2 * CHUNK_BYTES
        rig.assert_nothing_open()
        assert offered(rig) == 0
    finally:
        rig.close()


def stuck_pair(rig: JaxRig, room: int = 1) -> tuple[KVSender, KVReceiver]:
    """A room with two offers that its receiver does not take, because its engine has not taken two others."""
    sender, receiver = rig.pair(room)
    for page in range(4):
        rig.send(sender, page, rows_of(1, page))
    rig.until(lambda: offered(rig) == 2 * PAGE.num_bytes and rig.counts()[1].chunks_received == 2)
    return sender, receiver


def test_a_sender_that_fails_withdraws_what_it_offered(rig: JaxRig) -> None:
    sender, receiver = stuck_pair(rig)
    sender.fail("the client went away")
    rig.until(lambda: offered(rig) == 0)
    rig.drain(receiver)
    assert "the client went away" in str(receiver.failure())
    rig.assert_nothing_open()
    counts = rig.counts()[0]
    assert counts.bytes_offered == 0 and counts.chunks_withdrawn == 2


def test_a_receiver_that_goes_away_has_its_offers_withdrawn(rig: JaxRig) -> None:
    sender, receiver = stuck_pair(rig)
    receiver.abort()
    rig.until(lambda: sender.poll() is KVPoll.FAILED)
    rig.assert_nothing_open()
    counts = rig.counts()[0]
    assert counts.bytes_offered == 0 and counts.chunks_withdrawn == 2


def test_an_offer_that_is_held_back_too_long_fails_its_room(rig: JaxRig) -> None:
    sender, receiver = stuck_pair(rig)
    rig.clock.now_s += 29.0
    assert sender.poll() is KVPoll.TRANSFERRING
    rig.clock.now_s += 1.1
    assert sender.poll() is KVPoll.FAILED and "accepted for 30.0 s" in str(sender.failure())
    rig.drain(receiver)
    assert receiver.poll() is KVPoll.FAILED
    rig.assert_nothing_open()
    assert offered(rig) == 0


def test_an_offer_that_is_held_back_too_long_fails_its_room_after_the_last_frame_too(rig: JaxRig) -> None:
    """The last frame goes out behind the offers; its leaving must not stop their clock."""
    sender, _ = stuck_pair(rig)
    sender.finish(META)
    looks = iter(range(15))
    rig.until(lambda: next(looks, None) is None)
    rig.clock.now_s += 30.1
    assert sender.poll() is KVPoll.FAILED and "accepted for 30.0 s" in str(sender.failure())
    rig.until(lambda: offered(rig) == 0)


def test_success_on_the_senders_side_waits_for_the_last_acknowledgement(rig: JaxRig) -> None:
    sender, receiver = stuck_pair(rig)
    sender.finish(META)
    looks = iter(range(15))
    rig.until(lambda: next(looks, None) is None)
    assert sender.poll() is KVPoll.TRANSFERRING, "two chunks are still here"
    assert len(rig.drain(receiver)) == 4 and receiver.poll() is KVPoll.SUCCESS
    rig.until(lambda: sender.poll() is KVPoll.SUCCESS)
    counts = rig.counts()[0]
    assert (counts.bytes_offered, counts.chunks_withdrawn, counts.chunks_sent) == (0, 0, 4)


def acknowledge(rig: GrpcRig, pulled: ChunkPulled) -> None:
    async def call() -> None:
        async with grpc.aio.insecure_channel(rig.source_peer.address, options=rpc.CHANNEL_OPTIONS) as channel:
            await channel.unary_unary(rpc.PULLED_KV, rpc.encode, rpc.decoder(PulledReply))(pulled)

    asyncio.run_coroutine_threadsafe(call(), rig.loop).result(WAIT_S)


def test_an_acknowledgement_of_another_room_or_of_nothing_frees_nothing(rig: JaxRig) -> None:
    sender, _ = stuck_pair(rig)
    carriers = rig.source._carriers  # type: ignore[attr-defined]
    uuids = list(carriers._book._offers)
    for room, uuid in ((2, uuids[0]), (1, uuids[0] + 1000), (-1, -1)):
        acknowledge(rig, ChunkPulled(room, uuid))
    assert offered(rig) == 2 * PAGE.num_bytes and sender.poll() is KVPoll.TRANSFERRING
    acknowledge(rig, ChunkPulled(1, uuids[0]))
    acknowledge(rig, ChunkPulled(1, uuids[0]))
    rig.until(lambda: offered(rig) == PAGE.num_bytes)


def test_a_link_with_many_withdrawn_offers_is_replaced() -> None:
    async def run() -> None:
        book, peer = OfferBook(ENDPOINT, 1 << 20), Peer("decode:1", "d-1")
        kv = jax.device_put(rows_of(1, 0)).block_until_ready()

        def offer() -> Offer:
            return book.offer(1, peer, kv, book.budget.request(kv.nbytes), lambda _: None)

        first = offer()
        for _ in range(MAX_WITHDRAWN):
            book.withdraw(offer())
        last = offer()
        assert last.link is not first.link and last.link.num_withdrawn == 0
        assert last.uuid == first.uuid + MAX_WITHDRAWN + 1, "numbers go on over links"
        assert book.budget.held_bytes == 2 * kv.nbytes
        book.withdraw(first)
        book.withdraw(last)
        assert book.budget.held_bytes == 0

    asyncio.run(run())


# -- kinds that do not fit --


class BytesFromOffersRig(JaxRig):
    def lander(self, layout: Any) -> Lander:
        return GrpcRig.lander(self, layout)


class OffersFromBytesRig(JaxRig):
    def carriers(self) -> Carriers:
        return GrpcRig.carriers(self)


@pytest.mark.parametrize(
    ("rig_type", "text"),
    [
        (BytesFromOffersRig, "transfer.kind 'jax_transfer' here, 'tcp' there"),
        (OffersFromBytesRig, "transfer.kind 'tcp' here, 'jax_transfer' there"),
    ],
)
def test_workers_with_different_kinds_of_transfer_refuse_each_other_naming_both(rig_type: type[JaxRig], text: str) -> None:
    rig = rig_type(TransferLimits())
    try:
        sender, receiver = rig.source.create_sender(1), rig.open(1)
        rig.until(lambda: receiver.poll() is KVPoll.FAILED)
        assert receiver.is_refused() and text in str(receiver.failure())
        assert sender.poll() is KVPoll.BOOTSTRAPPING, "a stranger's announcement must not end the room"
        assert rig.counts()[0].failures == {"refused": 1}
    finally:
        rig.close()


# -- the budget --


def test_a_budget_grants_in_the_order_of_asking_and_one_that_exceeds_it_alone() -> None:
    async def run() -> None:
        budget = ByteBudget(10)
        first, second, small, giant = (budget.request(size) for size in (6, 6, 1, 50))
        assert [reservation.is_held for reservation in (first, second, small, giant)] == [True, False, False, False], "no overtaking"
        budget.release(first)
        assert second.granted.done() and small.is_held and budget.held_bytes == 7
        budget.release(second)
        assert not giant.is_held, "something is held still"
        budget.release(small)
        assert giant.is_held and budget.held_bytes == 50
        budget.release(giant)
        budget.release(giant)
        assert budget.held_bytes == 0

    asyncio.run(run())


def test_one_that_leaves_the_queue_lets_those_behind_it_pass() -> None:
    async def run() -> None:
        budget = ByteBudget(10)
        held, leaving, behind = (budget.request(size) for size in (6, 9, 4))
        assert not behind.is_held
        budget.release(leaving)
        assert behind.is_held and budget.held_bytes == 10
        budget.release(held)
        budget.release(behind)
        assert budget.held_bytes == 0

    asyncio.run(run())


def test_an_endpoint_at_an_address_of_another_machine_is_refused_before_anything_else() -> None:
    with pytest.raises(ValueError, match="does not start at 203.0.113.1"):
        OfferCarriers(programs_for(LAYOUT), Endpoint("203.0.113.1", DEVICE), 1 << 20)
    with pytest.raises(ValueError, match="does not start at 203.0.113.1"):
        PullLander(programs_for(LAYOUT), BUCKETS[-1], Endpoint("203.0.113.1", DEVICE), 10.0)
