"""What HTTP surface and router can do on one core, with workers that answer at once; and their memory over many requests.

The router process has a core of its own; the stand-in workers (`growth_worker`) and the clients, which are this process, share the
others. Where these do not keep the router busy, requests per second of the router's CPU time say what it could do.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import NamedTuple

from pdjax.benchmarks.client import Clock, RequestFailed, measure, model_name, stream_completion
from pdjax.benchmarks.fleet import Fleet, Part, available_cores, running_fleet, serve_part
from pdjax.benchmarks.growth_report import Chart, Curve, Goal, PartReport
from pdjax.benchmarks.growth_worker import ROLES
from pdjax.benchmarks.serve import completion_request
from pdjax.config.load import load_config

PROMPT_TOKENS, NUM_PROMPTS = 64, 500
"""Prompts repeat: the router remembers which worker has computed what, up to a bound that 10,000 different ones would not reach."""
REQUESTS_GOAL, TOKENS_GOAL = 300.0, 5000.0
SHORT_OUT, LONG_OUT = 2, 256
"""Two tokens are the least of which both workers give one."""
CONCURRENCIES = (1, 4, 16, 64)
MEMORY_CONCURRENCY, MEMORY_OUT = 16, 4
STRETCH_S = 3.0
"""How long each concurrency is kept up."""
NUM_REQUESTS = 10_000
SAMPLE_EVERY = 500
FLAT_MB = 4.0
"""What the second half of the requests may add: fragments of the heap, and no more."""
REQUEST_TIMEOUT_S = 60.0

Tell = Callable[[str], None]


class Stretch(NamedTuple):
    """Load of one kind for a while. `router_cpu_s`: CPU time of the router process meanwhile."""

    concurrency: int
    requests: int
    tokens: int
    errors: int
    duration_s: float
    router_cpu_s: float

    @property
    def requests_per_s(self) -> float:
        return self.requests / self.duration_s

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.duration_s

    @property
    def router_load(self) -> float:
        """The share of one core that the router used."""
        return self.router_cpu_s / self.duration_s


class Drive:
    """Sends requests to one router from many clients. For one event loop."""

    def __init__(self, fleet: Fleet, model: str, clock: Clock = time.perf_counter):
        self._fleet = fleet
        self._model = model
        self._clock = clock
        self._number = 0

    async def send(self, out: int) -> bool:
        """One request; whether it was answered in full."""
        self._number = (self._number + 1) % NUM_PROMPTS
        prompt = [100 + (self._number * PROMPT_TOKENS + place) * 7919 % 47900 for place in range(PROMPT_TOKENS)]
        request = completion_request(self._model, prompt, out)
        try:
            measure(await stream_completion(self._fleet.endpoint, request, self._clock, REQUEST_TIMEOUT_S), out)
        except RequestFailed:
            return False
        return True

    async def stretch(self, concurrency: int, out: int, goes_on: Callable[[int], bool]) -> Stretch:
        """`concurrency` clients send one request after the other while `goes_on(requests begun so far)`."""
        counts = {True: 0, False: 0}
        begun = 0

        async def client() -> None:
            nonlocal begun
            while goes_on(begun):
                begun += 1
                counts[await self.send(out)] += 1

        pid = self._fleet.pids["router"]
        start_s, start_cpu_s = self._clock(), cpu_s(pid)
        await asyncio.gather(*(client() for _ in range(concurrency)))
        duration_s, spent_s = self._clock() - start_s, cpu_s(pid) - start_cpu_s
        return Stretch(concurrency, counts[True], counts[True] * out, counts[False], duration_s, spent_s)

    async def stretch_of(self, seconds: float, concurrency: int, out: int) -> Stretch:
        end_s = self._clock() + seconds
        return await self.stretch(concurrency, out, lambda _: self._clock() < end_s)


def cpu_s(pid: int) -> float:
    """User and system time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def loopback_system(overrides: tuple[str, ...] = ()) -> AbstractAsyncContextManager[Fleet]:
    """A router on the first core, the stand-in workers on the others. Binds the calling thread, which is to be the client, to these too."""
    cores = available_cores()
    others = frozenset(cores[1:]) or None
    config = load_config(None, ("log.level=warning", "worker.heartbeat_interval_s=0.2", *overrides))
    router = serve_part("router", "router", config, frozenset(cores[:1]) if others else None)
    workers = Part("workers", ("pdjax.benchmarks.growth_worker",), config, others)
    return running_fleet(router, [workers], num_joining=len(ROLES))


async def _with_drive(work: Callable[[Drive, Fleet], Awaitable[PartReport]]) -> PartReport:
    cores = available_cores()
    async with loopback_system() as fleet:
        os.sched_setaffinity(0, cores[1:] or cores)
        try:
            return await work(Drive(fleet, await model_name(fleet.endpoint, REQUEST_TIMEOUT_S)), fleet)
        finally:
            os.sched_setaffinity(0, cores)


def run_router(tell: Tell) -> PartReport:
    """Requests per second with the shortest answers, streamed tokens per second with long ones, over the number of clients."""

    async def work(drive: Drive, fleet: Fleet) -> PartReport:
        measured: dict[int, list[Stretch]] = {}
        for out in (SHORT_OUT, LONG_OUT):
            await drive.stretch_of(STRETCH_S / 4, CONCURRENCIES[-1], out)  # warm-up
            for concurrency in CONCURRENCIES:
                tell(f"router: answers of {out} tokens, {concurrency} clients")
                measured.setdefault(out, []).append(await drive.stretch_of(STRETCH_S, concurrency, out))
        return build_router(measured[SHORT_OUT], measured[LONG_OUT])

    return asyncio.run(_with_drive(work))


def build_router(short: list[Stretch], long: list[Stretch]) -> PartReport:
    """Achieved rates, and rates over the router's CPU time, which are those of a router that is busy all the time."""
    charts = (
        Chart(
            f"answers of {SHORT_OUT} tokens",
            "clients",
            "requests/s",
            (
                Curve("achieved", [(each.concurrency, each.requests_per_s) for each in short]),
                Curve("per second of router CPU", [(each.concurrency, _per_cpu_s(each.requests, each)) for each in short]),
            ),
        ),
        Chart(
            f"answers of {LONG_OUT} tokens",
            "clients",
            "streamed tokens/s",
            (
                Curve("achieved", [(each.concurrency, each.tokens_per_s) for each in long]),
                Curve("per second of router CPU", [(each.concurrency, _per_cpu_s(each.tokens, each)) for each in long]),
            ),
        ),
    )
    best_short = max(short, key=lambda each: each.requests_per_s)
    best_long = max(long, key=lambda each: each.tokens_per_s)
    goals = (
        Goal("requests/s, router on one core", best_short.requests_per_s, REQUESTS_GOAL, is_upper_limit=False),
        Goal("streamed tokens/s, router on one core", best_long.tokens_per_s, TOKENS_GOAL, is_upper_limit=False),
        Goal("requests that failed", sum(each.errors for each in (*short, *long)), 0),
    )
    notes = [
        f"At the best rate of {what} the router used {best.router_load:.0%} of its core."
        for what, best in (("requests", best_short), ("tokens", best_long))
    ]
    raw = {"short": [each._asdict() for each in short], "long": [each._asdict() for each in long]}
    return PartReport("router", charts, goals, tuple(notes), raw)


def _per_cpu_s(count: int, stretch: Stretch) -> float:
    return count / stretch.router_cpu_s if stretch.router_cpu_s else 0.0


def run_memory(tell: Tell, num_requests: int = NUM_REQUESTS) -> PartReport:
    """Resident memory of the router process while it serves `num_requests`."""

    async def work(drive: Drive, fleet: Fleet) -> PartReport:
        pid = fleet.pids["router"]
        samples = [(0.0, resident_bytes(pid) / 1e6)]
        errors = 0
        for done in range(0, num_requests, SAMPLE_EVERY):
            if done % (2 * SAMPLE_EVERY) == 0:
                tell(f"memory: {done:,} of {num_requests:,} requests")
            count = min(SAMPLE_EVERY, num_requests - done)
            stretch = await drive.stretch(MEMORY_CONCURRENCY, MEMORY_OUT, lambda begun, count=count: begun < count)
            errors += stretch.errors
            samples.append((float(done + count), resident_bytes(pid) / 1e6))
        return build_memory(samples, errors)

    return asyncio.run(_with_drive(work))


def build_memory(samples: list[tuple[float, float]], errors: int) -> PartReport:
    """`samples`: requests so far, resident megabytes."""
    half = samples[len(samples) // 2 :]
    goals = (
        Goal("MB that the second half of the requests added", half[-1][1] - half[0][1], FLAT_MB),
        Goal("requests that failed", errors, 0),
    )
    chart = Chart("resident memory of the router", "requests", "MB", (Curve("resident", samples),))
    return PartReport("memory", (chart,), goals)
