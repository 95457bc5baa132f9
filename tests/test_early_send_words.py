"""Row 3: pages that leave before the step, while the step before it still runs, and pool after pool is taken over by the next one.

Both real roles over real engines of the tiny model, coupled in one process. The forward of prefill is slowed down by hand: no step ends
before the test lets it, so every gather is dispatched while a step is under way. Prompts are computed in chunks far below their length,
and each chunk has a word of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from pdjax.engine.batch import PrefillSeq
from pdjax.engine.compilation import ProgramKey
from pdjax.engine.engine import Engine, StepHandle
from pdjax.engine.pages import padded_pages
from pdjax.kernels.base import Attend, AttentionSpec, DecodeBatch, PrefillBatch
from pdjax.kernels.xla import XlaAttention
from pdjax.protocol import Event, Failed, Layout, Peer, Sampling, SequenceRequest, Tokens
from pdjax.scheduler.bootstrap import BootstrapQueue
from pdjax.scheduler.decode import DecodeLimits, DecodeScheduler
from pdjax.scheduler.memory import KVMemory
from pdjax.scheduler.metadata import MetadataSlots
from pdjax.scheduler.pages import PagePool
from pdjax.scheduler.prefill import PrefillLimits, PrefillScheduler
from pdjax.scheduler.radix import RadixCache
from pdjax.scheduler.slots import SlotPool
from pdjax.transfer.base import TransferLimits
from pdjax.transfer.device_put import DevicePutMover
from pdjax.transfer.in_process import InProcessSink, InProcessSource, Registry
from pdjax.worker.decode import DecodeRole
from pdjax.worker.prefill import PrefillRole, no_early_sends
from pdjax.worker.role import Role
from tests.engine_kit import CONFIG, SHAPE, SMALL_BLOCKS, generate, make_engine, poison_pool, random_weights

PAGE = CONFIG.page_size
STEP_TOKENS = 8
CHUNK_PAGES = 2
CACHED = 6 * PAGE
NUM_SEQS = 3
ANSWER = 6
WAIT_S = 60.0
TOLERANCE = 1e-5
"""Keys and values are of order 1. Chunks of other lengths add up in another order."""

LAYOUT = Layout(
    model_fingerprint="tiny",
    page_size=PAGE,
    kv_dtype="float32",
    num_layers=SHAPE.num_layers,
    num_kv_heads=SHAPE.num_kv_heads,
    head_dim=SHAPE.head_dim,
)
PREFILL, DECODE = Peer("prefill", "p"), Peer("decode", "d")
BURNT_PRODUCTS = 500
GREEDY = Sampling(max_tokens=ANSWER, temperature=0.0)


class SlowAttention:
    """Attention of prefill steps takes its time on the device, some 20 ms a layer. Its result is that of the real one."""

    name = "slow"

    def __init__(self) -> None:
        self._attention = XlaAttention(SMALL_BLOCKS)

    def prefill(self, batch: PrefillBatch) -> Attend:
        attend = self._attention.prefill(batch)

        def slowed(
            queries: jax.Array, kv: jax.Array, pool: jax.Array, layer: jax.Array | int, spec: AttentionSpec
        ) -> tuple[jax.Array, jax.Array]:
            attended, pool = attend(queries, kv, pool, layer, spec)
            start = jnp.full((64, 64), attended[0, 0, 0])
            spent = jax.lax.fori_loop(0, BURNT_PRODUCTS, lambda _, x: jnp.tanh(x @ x), start)
            return attended + 0.0 * spent[0, 0], pool

        return slowed

    def decode(self, batch: DecodeBatch) -> Attend:
        return self._attention.decode(batch)


class Launched(NamedTuple):
    """One step. `num_pending`: gathers dispatched since the step before that had not run yet when this one took the pool over.
    `all_gathered`: for each sequence, whether every page before its chunk had been gathered."""

    starts: list[int]
    num_pending: int
    all_gathered: list[bool]


class WatchedEngine:
    """What `PrefillRole` asks of an engine, and a log of what it dispatched."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._gathered: list[jax.Array] = []
        self._pages: set[int] = set()
        self.launches: list[Launched] = []
        self.read = engine.read
        self.set_history = engine.set_history

    def watch(self) -> None:
        """Forget what has been."""
        self._gathered.clear()
        self._pages.clear()
        self.launches.clear()

    def gather(self, pages: list[int]) -> jax.Array:
        kv = self._engine.gather(pages)
        self._gathered.append(kv)
        self._pages.update(pages)
        return kv

    def launch_prefill(self, seqs: Sequence[PrefillSeq]) -> StepHandle:
        num_pending = sum(not kv.is_ready() for kv in self._gathered)
        all_gathered = [self._pages.issuperset(seq.pages[: seq.start // PAGE]) for seq in seqs]
        self.launches.append(Launched([seq.start for seq in seqs], num_pending, all_gathered))
        self._gathered.clear()
        return self._engine.launch_prefill(seqs)


class Policy(NamedTuple):
    """`announced_after`: prefill steps that are launched before decode hears of the requests, if there are so many."""

    early_send: bool = True
    retries: int = 0
    on_miss: str = "park"
    announced_after: int = 0


class Pair:
    """Both roles, turned by hand. `answers` by request."""

    def __init__(self, prefill: Engine, decode: Engine, policy: Policy):
        self.answers: dict[str, list[int]] = {}
        self.open: set[str] = set()
        self._changed = threading.Event()
        registry, limits, wake = Registry(), TransferLimits(max_chunks_in_flight=16), self._changed.set
        self.watched = WatchedEngine(prefill)
        source = InProcessSource(registry, LAYOUT, PREFILL, wake, limits)
        sink = InProcessSink(registry, LAYOUT, DECODE, DevicePutMover(SingleDeviceSharding(jax.devices()[0])), wake, limits)
        metadata = MetadataSlots(8)
        self.prefill_scheduler = PrefillScheduler(
            _memory(),
            SlotPool(8, "request"),
            metadata,
            BootstrapQueue(source, metadata, PAGE, policy.retries),
            PrefillLimits(STEP_TOKENS, CONFIG.max_prefill_seqs, CHUNK_PAGES, 100, 1000, policy.on_miss == "retry", 64),
        )
        self.decode_scheduler = DecodeScheduler(
            _memory(), SlotPool(8, "request"), MetadataSlots(8), sink, DecodeLimits(STEP_TOKENS, 3, 100, 1000, ANSWER)
        )
        early_sends = self.prefill_scheduler.maybe_send_cached_prefix_chunk if policy.early_send else no_early_sends
        self.prefill = PrefillRole(self.watched, self.prefill_scheduler, source, wake, early_sends, 1)
        self.decode = DecodeRole(decode, self.decode_scheduler, sink, wake)

    def request(self, name: str, prompt: list[int], sampling: Sampling) -> SequenceRequest:
        room = 1000 + len(self.answers)
        self.answers[name] = []
        self.open.add(name)
        return SequenceRequest(request_id=name, room=room, prompt=prompt, sampling=sampling, deadline_s=time.time() + 300, prefill=PREFILL)

    def turn(self) -> None:
        for role in (self.prefill, self.decode):
            role.turn(time.time())
            for name, event in role.take_outcomes():
                self._hear(role, name, event)

    def run(self, is_done: Callable[[], bool]) -> None:
        end_s = time.monotonic() + WAIT_S
        while not is_done():
            assert time.monotonic() < end_s, f"still open: {self.open}"
            self._changed.clear()
            self.turn()
            self._changed.wait(0.01)

    def is_ahead_of_all(self) -> bool:
        """Whether prefill has computed what it may before bootstrap ends."""
        lengths = self.prefill_scheduler.queue_lengths()
        return bool(self.watched.launches) and lengths["parked"] + lengths["bootstrap"] == NUM_SEQS

    def close(self) -> None:
        self.prefill.close()
        self.decode.close()

    def _hear(self, role: Role, name: str, event: Event) -> None:
        if isinstance(event, Tokens):
            self.answers[name] += [token.token for token in event.tokens]
        elif isinstance(event, Failed):
            assert name not in self.open, f"{name}: {event}"
        elif role is self.decode or event.reason != "handed_off":
            self.open.remove(name)
            self.decode.abort(name)  # where it ended with its first token


def _memory() -> KVMemory:
    pool = PagePool(CONFIG.num_pages)
    return KVMemory(pool, RadixCache(pool, PAGE), PAGE)


class Story(NamedTuple):
    """A prompt with a word of its own in each page, and what a unified run makes of it: the answer, and the KV of full pages."""

    name: str
    prompt: list[int]
    answer: list[int]
    pages: np.ndarray  # float32[full pages of prompt and answer, layers, page_size, 2 * kv_heads, head_dim]


@pytest.fixture(scope="module")
def engines() -> tuple[Engine, Engine]:
    weights, device = random_weights(), jax.devices()[0]
    return Engine(SHAPE, weights, CONFIG, jnp.float32, device, SlowAttention()), make_engine()


@pytest.fixture(scope="module")
def stories() -> list[Story]:
    """Suffixes end inside a page, so that the step with the end of one prompt has room for the start of the next."""
    engine, stories = make_engine(), []
    for number, suffix in enumerate((19, 27, 18)):
        rng = np.random.default_rng(number)
        prompt = rng.integers(0, SHAPE.vocab_size, CACHED + suffix).tolist()
        for page, first in enumerate(range(0, len(prompt), PAGE)):
            prompt[first + page % min(PAGE, len(prompt) - first)] = (19 * number + page) % SHAPE.vocab_size
        pages = list(range(1 + 20 * number, 21 + 20 * number))
        answer = generate(engine, number, prompt, pages, ANSWER, GREEDY)
        full = (len(prompt) + ANSWER - 1) // PAGE
        stories.append(Story(f"story {number}", prompt, answer, read_pages(engine, pages[:full])))
    return stories


def read_pages(engine: Engine, pages: list[int]) -> np.ndarray:
    largest = CONFIG.transfer_buckets[-1]
    parts = [pages[first : first + largest] for first in range(0, len(pages), largest)]
    return np.concatenate([np.array(engine.gather(part))[: len(part)] for part in parts])


@contextmanager
def coupled(engines: tuple[Engine, Engine], policy: Policy) -> Iterator[Pair]:
    """Pools that hold nothing but NaN. Ends with nothing held."""
    for engine in engines:
        poison_pool(engine)
    pair = Pair(*engines, policy)
    try:
        yield pair
        pair.run(lambda: not pair.prefill_scheduler.num_running + pair.decode_scheduler.num_running)
        for scheduler in (pair.prefill_scheduler, pair.decode_scheduler):
            scheduler.check()
            assert scheduler.slots.num_held == scheduler.metadata.num_held == scheduler.memory.num_private == 0
    finally:
        pair.close()


def tell(pair: Pair, stories: list[Story], policy: Policy) -> None:
    """Bring the starts of all prompts into prefill's cache alone, then serve the prompts."""
    for story in stories:
        request = pair.request(f"start of {story.name}", story.prompt[: CACHED + 1], Sampling(max_tokens=1, temperature=0.0))
        pair.prefill.submit(request)
        pair.decode.submit(request)
    pair.run(lambda: not pair.open)
    assert pair.prefill_scheduler.memory.cache.num_pages == NUM_SEQS * CACHED // PAGE
    assert pair.decode_scheduler.memory.cache.num_pages == 0
    pair.watched.watch()
    requests = [pair.request(story.name, story.prompt, GREEDY) for story in stories]
    for request in requests:
        pair.prefill.submit(request)
    pair.run(lambda: len(pair.watched.launches) >= policy.announced_after or pair.is_ahead_of_all())
    for request in requests:
        pair.decode.submit(request)
    pair.run(lambda: not pair.open)


def check(pair: Pair, decode: Engine, stories: list[Story]) -> None:
    """Answers, and every full page that decode now holds of each prompt and its answer."""
    for story in stories:
        assert pair.answers[story.name] == story.answer
        computed = story.prompt + story.answer[:-1]
        pages = pair.decode_scheduler.memory.cache.match(computed[: len(story.pages) * PAGE]).pages
        assert len(pages) == len(story.pages)
        for number, (page, expected) in enumerate(zip(read_pages(decode, pages), story.pages, strict=True)):
            np.testing.assert_allclose(page, expected, atol=TOLERANCE, rtol=0, err_msg=f"{story.name}, page {number}")


POLICIES = {
    "bootstrapped": Policy(),
    "bootstrapped, nothing sent early": Policy(early_send=False),
    "ahead, announced while it is computed": Policy(retries=1, announced_after=3),
    "ahead and parked": Policy(retries=1, announced_after=1000),
    "ahead and retried": Policy(retries=1, on_miss="retry", announced_after=1000),
}


@pytest.mark.parametrize("name", POLICIES)
def test_every_page_on_decode_is_that_of_a_unified_run(name: str, engines: tuple[Engine, Engine], stories: list[Story]) -> None:
    policy = POLICIES[name]
    with coupled(engines, policy) as pair:
        tell(pair, stories, policy)
        check(pair, engines[1], stories)
        launches, counts = pair.watched.launches, pair.prefill_scheduler.counts
        assert max(len(launch.starts) for launch in launches) > 1, "no step is shared"
        assert len(launches) > 2 * NUM_SEQS, "chunks are not far below the prompts"
        assert sum(launch.num_pending for launch in launches), "no gather is under way when the next step takes the pool over"
        assert (counts.early_sent_pages > 0) == (name in ("bootstrapped", "ahead and retried"))
        assert counts.retries == (NUM_SEQS if name == "ahead and retried" else 0)


@pytest.mark.parametrize("name", POLICIES)
def test_whatever_is_computed_is_gathered_before_the_next_step_of_its_sequence(
    name: str, engines: tuple[Engine, Engine], stories: list[Story]
) -> None:
    """To be sent, or to be held while bootstrap is pending. Without early send the cached prefix has to wait for that step."""
    policy = POLICIES[name]
    with coupled(engines, policy) as pair:
        tell(pair, stories, policy)
        assert policy.early_send == all(is_gathered for launch in pair.watched.launches for is_gathered in launch.all_gathered)


def test_a_pool_that_a_step_has_taken_over_cannot_be_gathered_from(engines: tuple[Engine, Engine]) -> None:
    """A gather dispatched behind the step would need this pool: the mistake is an error, not wrong pages."""
    _, engine = engines
    engine.gather([1])
    gather = engine.compiled_programs()[ProgramKey("gather", 1)]
    pool = engine._state.pool
    gather(pool, padded_pages([1], 1))
    generate(engine, 0, [1, 2, 3], [1], 1, GREEDY)
    with pytest.raises(ValueError, match="deleted"):
        gather(pool, padded_pages([1], 1))
