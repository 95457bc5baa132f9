"""Host time of one scheduler pass over the number of requests that wait.

Real schedulers, with the page, slot and metadata owners of a worker at its default sizes, senders that are the transports' own
(`pdjax.transfer.sender`), and an engine that has always computed already. What differs is what the requests wait for; a pass is what
one turn of a worker's loop asks of its scheduler.
"""

from __future__ import annotations

import abc
import itertools
import random
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from pdjax.benchmarks.growth_report import Chart, Curve, Goal, PartReport, growth_ratio
from pdjax.benchmarks.report import quantile
from pdjax.protocol import Announce, KVPoll, Layout, Peer, Sampling, SequenceRequest, TokenOut
from pdjax.scheduler.bootstrap import BootstrapQueue
from pdjax.scheduler.chunks import PrefillPart
from pdjax.scheduler.decode import DecodeLimits, DecodeScheduler
from pdjax.scheduler.decode_states import Chunk
from pdjax.scheduler.memory import KVMemory
from pdjax.scheduler.metadata import MetadataSlots
from pdjax.scheduler.outbound import SendOrder
from pdjax.scheduler.pages import PagePool
from pdjax.scheduler.prefill import PrefillLimits, PrefillScheduler
from pdjax.scheduler.radix import RadixCache
from pdjax.scheduler.slots import SlotPool
from pdjax.scheduler.timeline import ClockRecorder
from pdjax.transfer.base import TransferLimits
from pdjax.transfer.sender import OutboundChunk, Outlet, RoomSender, SenderTable

PAGE_SIZE = 16
NUM_SLOTS = 16
NUM_METADATA = 2 * NUM_SLOTS
STEP_TOKENS, STEP_SEQS, CHUNK_PAGES = 512, 8, 32
RESERVE_TOKENS = 32
PROMPT_TOKENS = 64
NUM_PAGES = 768
SMALL_POOL_SEQS = 8
"""Sequences that fit into the pool where pages are what is waited for."""
RETRIES = 1
"""`scheduler.optimistic_prefill_retries` as it is by default."""

SIZES = (10, 100, 1000, 10_000)
FLAT_FROM, FLAT_TO, FLAT_RATIO = 100, 10_000, 4.0
"""A pass that grows with the logarithm of the number doubles from 100 to 10,000; beyond four times it grows faster."""
SMALL_REPEATS, LARGE_REPEATS = 15, 7
SETTLE_TURNS = 3
TURN_S = 0.01

LAYOUT = Layout(model_fingerprint="growth", page_size=PAGE_SIZE, kv_dtype="float32", num_layers=1, num_kv_heads=1, head_dim=1)
PEER = Peer("127.0.0.1:1", "growth")


class GatheredPages(NamedTuple):
    """What a gather gives out, without content."""

    shape: tuple[int]


class StuckOutlet(Outlet):
    """The end of a link that takes nothing."""

    def accepted(self, sender: RoomSender) -> None:
        pass

    def chunk(self, chunk: OutboundChunk) -> bool:
        raise AssertionError("no chunk may be in flight")

    def last(self, metadata: bytes) -> None:
        pass

    def failed(self, message: str) -> None:
        pass


class SilentReceiver:
    """A transfer of which nothing arrives."""

    def poll(self) -> KVPoll:
        return KVPoll.TRANSFERRING

    def take(self) -> Sequence[Chunk]:
        return ()

    def metadata(self) -> bytes:
        raise AssertionError("nothing arrives here")

    def abort(self) -> None:
        pass

    def failure(self) -> str | None:
        return None

    def is_refused(self) -> bool:
        return False


class SilentSink:
    def open(self, room: int, source: Peer, decode_prefix_tokens: int) -> SilentReceiver:
        return SilentReceiver()


class Load(abc.ABC):
    """A scheduler with requests in it. `live`: the ids of all of them, in the order of arrival."""

    def __init__(self) -> None:
        self.live: dict[str, int] = {}
        self._numbers = itertools.count()
        self._rng = random.Random(0)
        self._now_s = 0.0

    @property
    @abc.abstractmethod
    def num_waiting(self) -> int: ...

    @abc.abstractmethod
    def submit(self) -> None:
        """One more request."""

    @abc.abstractmethod
    def abort(self, request_id: str) -> None:
        """The request's client has gone."""

    @abc.abstractmethod
    def change(self) -> None:
        """What happens to one request between two passes."""

    @abc.abstractmethod
    def turn(self) -> None:
        """One pass."""

    def restore(self, num_waiting: int) -> None:
        """After an event: have as many wait as before it."""
        self.fill(num_waiting)

    def fill(self, num_waiting: int) -> None:
        """Submit until so many wait."""
        while self.num_waiting < num_waiting:
            for _ in range(num_waiting - self.num_waiting):
                self.submit()
            self.settle()

    def settle(self) -> None:
        for _ in range(SETTLE_TURNS):
            self.turn()

    def in_the_middle(self) -> str:
        """The id of a request that has as many waiting before it as behind it."""
        place = len(self.live) - self.num_waiting // 2 - 1
        return next(itertools.islice(self.live, place, None))

    def _request(self) -> SequenceRequest:
        number = next(self._numbers)
        request_id = f"cmpl-{number}@{number:x}"
        self.live[request_id] = number
        prompt = [self._rng.randrange(100, 48000) for _ in range(PROMPT_TOKENS)]
        return SequenceRequest(
            request_id=request_id, room=number, prompt=prompt, sampling=Sampling(max_tokens=32), deadline_s=1e12, prefill=PEER
        )

    def _advance_clock(self) -> float:
        self._now_s += TURN_S
        return self._now_s


class PrefillLoad(Load):
    """`is_announced`: decode has announced every request. `num_metadata`: rows of the worker. No chunk may be in flight, so what has been
    computed goes on holding its slot and pages."""

    def __init__(self, is_announced: bool, num_metadata: int):
        super().__init__()
        self._is_announced = is_announced
        limits = TransferLimits(max_chunks_in_flight=0)
        self._rooms = SenderTable(LAYOUT, PEER.instance_id, limits, lambda: 0.0, lambda: None)
        metadata, recorder = MetadataSlots(num_metadata), ClockRecorder(time.time)
        self.scheduler = PrefillScheduler(
            _memory(NUM_PAGES),
            SlotPool(NUM_SLOTS, "request"),
            metadata,
            BootstrapQueue(self, metadata, PAGE_SIZE, RETRIES, recorder=recorder),
            PrefillLimits(STEP_TOKENS, STEP_SEQS, CHUNK_PAGES, 10**9, 8192, max_held_pages=256),
            recorder,
        )
        self._launched: list[PrefillPart] = []
        self._went_on: str | None = None

    def create_sender(self, room: int) -> RoomSender:
        """The scheduler's source of senders."""
        return self._rooms.create(room)

    def take_changed(self) -> list[int]:
        return self._rooms.take_changed()

    @property
    def num_waiting(self) -> int:
        return self.scheduler.num_waiting

    def submit(self) -> None:
        request = self._request()
        self.scheduler.submit(request)
        if self._is_announced:
            self.announce(request.request_id)

    def announce(self, request_id: str) -> None:
        announce = Announce(
            room=self.live[request_id], decode_prefix_tokens=0, layout=LAYOUT, sender_instance_id=PEER.instance_id, receiver=PEER
        )
        self._rooms.announce(announce, StuckOutlet())

    def abort(self, request_id: str) -> None:
        del self.live[request_id]
        self.scheduler.abort(request_id)

    def change(self) -> None:
        """Decode announces a request; where it has announced all, the oldest one ends and gives its place to the next."""
        if self._is_announced:
            self.abort(next(iter(self.live)))
        else:
            self._went_on = self.in_the_middle()
            self.announce(self._went_on)

    def restore(self, num_waiting: int) -> None:
        """The one that was announced is to be no other kind of waiting."""
        if self._went_on is not None:
            self.abort(self._went_on)
            self._went_on = None
        self.fill(num_waiting)

    def turn(self) -> None:
        """As `PrefillRole.turn`: results are there one turn after their step."""
        scheduler = self.scheduler
        launched, self._launched = self._launched, []
        for part in launched:
            scheduler.settle(part, TokenOut(part.seq.answer.index_at(part.end), 100) if part.is_last else None)
        scheduler.advance(self._advance_clock())
        self._send(scheduler.sends())
        while parts := scheduler.next_step():
            self._send(scheduler.maybe_send_cached_prefix_chunk(parts))
            self._launched += parts
            self._send(scheduler.sends())
        scheduler.finish_sends()
        scheduler.take_outcomes()

    def _send(self, orders: Iterable[SendOrder]) -> None:
        for order in orders:
            order.sender.send(order.first_page, len(order.pages), GatheredPages((len(order.pages),)))


class DecodeLoad(Load):
    """`num_pages`: of the pool. The sequences that have been admitted wait for KV for ever."""

    def __init__(self, num_pages: int):
        super().__init__()
        self.scheduler = DecodeScheduler(
            _memory(num_pages),
            SlotPool(NUM_SLOTS, "request"),
            MetadataSlots(NUM_METADATA),
            SilentSink(),
            DecodeLimits(STEP_TOKENS, STEP_SEQS, 10**9, 8192, RESERVE_TOKENS),
            ClockRecorder(time.time),
        )

    @property
    def num_waiting(self) -> int:
        return self.scheduler.num_waiting

    def submit(self) -> None:
        self.scheduler.submit(self._request())

    def abort(self, request_id: str) -> None:
        del self.live[request_id]
        self.scheduler.abort(request_id)

    def change(self) -> None:
        """The oldest sequence ends and gives its place to the next."""
        self.abort(next(iter(self.live)))

    def turn(self) -> None:
        """As `DecodeRole.turn`."""
        scheduler = self.scheduler
        for _ in scheduler.installs():
            raise AssertionError("nothing arrives here")
        scheduler.advance(self._advance_clock())
        assert not scheduler.next_prefill() and not scheduler.next_decode(), "nothing has arrived, so nothing can run"
        scheduler.take_outcomes()


def _memory(num_pages: int) -> KVMemory:
    pool = PagePool(num_pages)
    return KVMemory(pool, RadixCache(pool, PAGE_SIZE), PAGE_SIZE)


def _small_pool() -> int:
    return 1 + SMALL_POOL_SEQS * -(-(PROMPT_TOKENS + RESERVE_TOKENS) // PAGE_SIZE)


class Waiting(NamedTuple):
    """A kind of waiting, and how a scheduler comes into it that is to hold `num_waiting` requests."""

    label: str
    make: Callable[[int], Load]


KINDS = (
    Waiting("prefill: not announced", lambda num: PrefillLoad(False, NUM_METADATA)),
    Waiting("prefill: announced, no metadata row free", lambda num: PrefillLoad(True, NUM_METADATA)),
    Waiting("prefill: in line behind full slots", lambda num: PrefillLoad(True, num + 4 * NUM_METADATA)),
    Waiting("decode: in line behind full slots", lambda num: DecodeLoad(NUM_PAGES)),
    Waiting("decode: in line, no pages free", lambda num: DecodeLoad(_small_pool())),
)


class Passes(NamedTuple):
    """Medians, in seconds, of a pass in which nothing changes, one in which one request changes, and one in which a request in the middle
    of those that wait is aborted."""

    idle_s: float
    change_s: float
    abort_s: float


def measure(load: Load, num_waiting: int, repeats: int, clock: Callable[[], float] = time.perf_counter) -> Passes:
    """Bring `load` to `num_waiting` and time passes; before each it is brought back to that number."""
    load.fill(num_waiting)
    load.settle()

    def timed(event: Callable[[], None]) -> float:
        start_s = clock()
        event()
        load.turn()
        took_s = clock() - start_s
        load.restore(num_waiting)
        load.turn()
        return took_s

    def median(event: Callable[[], None]) -> float:
        return quantile([timed(event) for _ in range(repeats)], 0.5)

    return Passes(median(lambda: None), median(load.change), median(lambda: load.abort(load.in_the_middle())))


def run(tell: Callable[[str], None], sizes: tuple[int, ...] = SIZES) -> PartReport:
    """Every kind of waiting at every size."""
    passes: dict[str, dict[int, Passes]] = {}
    for kind in KINDS:
        for size in sizes:
            tell(f"scheduler: {size:,} requests, {kind.label}")
            passes.setdefault(kind.label, {})[size] = measure(kind.make(size), size, SMALL_REPEATS if size < FLAT_TO else LARGE_REPEATS)
    return build(passes)


def build(passes: dict[str, dict[int, Passes]]) -> PartReport:
    """Three charts, by what changes, with one curve for each kind of waiting; every curve has a goal."""
    titles = {"idle_s": "nothing changes", "change_s": "one request goes on", "abort_s": "one in the middle is aborted"}
    charts, goals = [], []
    for place, title in enumerate(titles.values()):
        curves = tuple(Curve(label, [(size, 1e6 * each[place]) for size, each in sizes.items()]) for label, sizes in passes.items())
        charts.append(Chart(title, "requests waiting", "µs", curves, is_log=True))
        for curve in curves:
            value = growth_ratio(curve.points, FLAT_FROM, FLAT_TO)
            goals.append(Goal(f"{curve.label}; {title}: 10,000 over 100", value, FLAT_RATIO))
    return PartReport("scheduler", tuple(charts), tuple(goals))
