"""Runs seeds, in this process or in several, and says which of them hold."""

from __future__ import annotations

import gc
import multiprocessing
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from pdjax.simulation.drawing import draw
from pdjax.simulation.process import Timeline
from pdjax.simulation.trace import NoTrace, PrintedTrace, Trace
from pdjax.simulation.world import Tally, World

BATCH_SEEDS = 100
"""Seeds that a process takes at a time: less than a second."""


class Failure(NamedTuple):
    """A seed that does not hold: the property, and the place in the code that noticed."""

    seed: int
    message: str
    place: str


@dataclass
class Report:
    """What a number of seeds came to. `longest_wait`: of any request, as a share of the bound on it."""

    num_seeds: int = 0
    num_events: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    reached: Counter[str] = field(default_factory=Counter)
    longest_wait: float = 0.0
    failures: list[Failure] = field(default_factory=list)

    def add(self, tally: Tally) -> None:
        self.num_events += tally.num_events
        self.outcomes.update(tally.outcomes)
        self.faults.update(tally.faults)
        self.reached.update(tally.reached)
        self.longest_wait = max(self.longest_wait, tally.longest_wait)

    def merge(self, other: Report) -> None:
        self.num_seeds += other.num_seeds
        self.num_events += other.num_events
        self.outcomes.update(other.outcomes)
        self.faults.update(other.faults)
        self.reached.update(other.reached)
        self.longest_wait = max(self.longest_wait, other.longest_wait)
        self.failures += other.failures


def run_seed(seed: int, is_traced: bool = False) -> Tally | Failure:
    """One seed, whatever comes of it. A traced one prints its events."""
    timeline = Timeline()
    trace: Trace = PrintedTrace(timeline) if is_traced else NoTrace()
    try:
        return World(draw(seed), timeline, trace).run()
    except Exception as error:  # whatever the code under test raises is a finding
        last = traceback.extract_tb(error.__traceback__)[-1]
        message = str(error) if isinstance(error, AssertionError) else repr(error)
        place = f"{_short(last.filename)}:{last.lineno}, {last.name}"
        return Failure(seed, f"{message or 'assertion failed'} (at tick {timeline.now})", place)


def run_batch(seeds: range) -> Report:
    """Seeds one after another in this process."""
    report = Report(num_seeds=len(seeds))
    was_enabled = gc.isenabled()
    gc.disable()  # a world is one big cycle: collecting it once a batch is faster than looking for garbage all the time
    try:
        for seed in seeds:
            result = run_seed(seed)
            if isinstance(result, Failure):
                report.failures.append(result)
            else:
                report.add(result)
    finally:
        if was_enabled:
            gc.enable()
        gc.collect()
    return report


def run_seeds(seeds: range, num_jobs: int) -> Iterator[Report]:
    """A report for each batch, in the order in which they end. `num_jobs` processes share the work; with 1 it is done here."""
    batches = [seeds[start : start + BATCH_SEEDS] for start in range(0, len(seeds), BATCH_SEEDS)]
    if num_jobs == 1 or len(batches) == 1:
        yield from map(run_batch, batches)
        return
    # Spawned, not forked: the caller may have threads, and a fresh process depends on nothing but the seed.
    with ProcessPoolExecutor(min(num_jobs, len(batches)), multiprocessing.get_context("spawn")) as pool:
        try:
            for done in as_completed([pool.submit(run_batch, batch) for batch in batches]):
                yield done.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _short(filename: str) -> str:
    path = Path(filename)
    return str(Path(*path.parts[path.parts.index("pdjax") :])) if "pdjax" in path.parts else path.name
