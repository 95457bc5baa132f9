"""Time of what a sequence asks of the prefix tree, over the number of pages that the tree holds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from pdjax.benchmarks.growth_report import Chart, Curve, Goal, PartReport, growth_ratio
from pdjax.benchmarks.report import quantile
from pdjax.scheduler.memory import KVMemory, Lease
from pdjax.scheduler.pages import PagePool
from pdjax.scheduler.radix import RadixCache

PAGE_SIZE = 16
PROMPT_PAGES, SHARED_PAGES = 32, 8
PROMPTS_A_GROUP = 16
"""So many prompts share their first SHARED_PAGES pages."""
NUM_KNOWN = 16
"""The last prompts, which are looked for in the tree: fewer pages than the smallest tree has, so that none is evicted."""

SIZES = (1_000, 10_000, 100_000, 1_000_000)
FLAT_RATIO = 4.0
"""Operations are hash look-ups; a tree of 500 MB misses the caches that one of 500 kB fits into, which is not growth."""


class Operations(NamedTuple):
    """Medians, in seconds, for one prompt of PROMPT_PAGES pages: finding it in the tree, leasing pages for a new one, publishing that one,
    and evicting as many pages."""

    match_s: float
    lease_s: float
    publish_s: float
    evict_s: float


class Forest:
    """A tree that is filled with random prompts and remembers some of them."""

    def __init__(self, max_pages: int, seed: int = 0):
        pool = PagePool(max_pages + 4 * PROMPT_PAGES)
        self.memory = KVMemory(pool, RadixCache(pool, PAGE_SIZE), PAGE_SIZE)
        self._prompts = _prompts(seed)
        self.known: list[list[int]] = []

    def grow(self, num_pages: int) -> None:
        """Publish prompts until the tree has `num_pages` or a few more. The last ones are remembered."""
        while self.memory.cache.num_pages < num_pages:
            prompt = next(self._prompts)
            self.finish(self.lease(prompt), prompt)
            self.known = [*self.known[1 - NUM_KNOWN :], prompt]

    def new_prompt(self) -> list[int]:
        return next(self._prompts)

    def lease(self, prompt: list[int]) -> Lease:
        lease = self.memory.lease(prompt, len(prompt) - 1, len(prompt))
        assert lease is not None, f"{len(prompt)} tokens do not fit beside {self.memory.cache.num_pages} published pages"
        return lease

    def finish(self, lease: Lease, prompt: list[int]) -> None:
        self.memory.publish(lease, prompt)
        self.memory.release(lease)


def _prompts(seed: int) -> Iterator[list[int]]:
    rng = np.random.default_rng(seed)
    while True:
        shared = rng.integers(100, 48000, SHARED_PAGES * PAGE_SIZE).tolist()
        for _ in range(PROMPTS_A_GROUP):
            yield shared + rng.integers(100, 48000, (PROMPT_PAGES - SHARED_PAGES) * PAGE_SIZE).tolist()


def measure(forest: Forest, num_pages: int, repeats: int, clock: Callable[[], float] = time.perf_counter) -> Operations:
    """Time each operation `repeats` times; before each round `forest` grows to `num_pages`."""
    rounds = []
    for number in range(repeats):
        forest.grow(num_pages)
        rounds.append(_measure_round(forest, forest.known[number % len(forest.known)], clock))
    return Operations(*(quantile(times_s, 0.5) for times_s in zip(*rounds, strict=True)))


def _measure_round(forest: Forest, known: list[int], clock: Callable[[], float]) -> Operations:
    memory, prompt = forest.memory, forest.new_prompt()
    start_s = clock()
    memory.cache.match(known)
    matched_s = clock()
    lease = forest.lease(prompt)
    leased_s = clock()
    memory.publish(lease, prompt)
    published_s = clock()
    memory.release(lease)
    released_s = clock()
    memory.cache.evict(PROMPT_PAGES)
    return Operations(matched_s - start_s, leased_s - matched_s, published_s - leased_s, clock() - released_s)


def run(tell: Callable[[str], None], sizes: tuple[int, ...] = SIZES, repeats: int = 200) -> PartReport:
    """One tree that grows from size to size."""
    forest = Forest(max(sizes))
    measured = {}
    for size in sorted(sizes):
        tell(f"radix: {size:,} nodes")
        measured[size] = measure(forest, size, repeats)
    return build(measured)


def build(measured: dict[int, Operations]) -> PartReport:
    labels = ("match", "lease", "publish", "evict")
    curves = tuple(
        Curve(label, [(size, 1e6 * operations[place]) for size, operations in measured.items()]) for place, label in enumerate(labels)
    )
    low, high = min(measured), max(measured)
    goals = [Goal(f"{curve.label}: {high:,} nodes over {low:,}", growth_ratio(curve.points, low, high), FLAT_RATIO) for curve in curves]
    title = f"prefix tree, prompts of {PROMPT_PAGES} pages"
    return PartReport("radix", (Chart(title, "nodes", "µs", curves, is_log=True),), tuple(goals))
