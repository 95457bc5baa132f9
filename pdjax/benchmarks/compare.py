"""The same trace against several designs on the same cores: start one, replay the trace at every load, stop it, start the next."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, NamedTuple

from pdjax.benchmarks.client import Clock, Endpoint, RequestFailed, measure, model_name, stream_completion
from pdjax.benchmarks.compare_plan import ComparePlan, CompareSettings, Design, System
from pdjax.benchmarks.compare_report import LoadRun, build_comparison
from pdjax.benchmarks.fleet import running_fleet
from pdjax.benchmarks.load import Outcome, Target
from pdjax.benchmarks.serve import completion_request
from pdjax.benchmarks.trace import Replayed

WARM_UP_OUT = 8

Start = Callable[[System], AbstractAsyncContextManager[Endpoint]]


@asynccontextmanager
async def _start(system: System) -> AsyncIterator[Endpoint]:
    async with running_fleet(system.router, system.workers) as fleet:
        yield fleet.endpoint


class Watch(NamedTuple):
    """Who is told: `on_step` what happens now, `on_request` of each request that has ended."""

    on_step: Callable[[str], None]
    on_request: Callable[[], None]


class Surroundings(NamedTuple):
    """What a run uses of the world: how a system is started, and the clock."""

    start: Start = _start
    clock: Clock = time.perf_counter


THE_MACHINE = Surroundings()


async def run(settings: CompareSettings, watch: Watch, surroundings: Surroundings = THE_MACHINE) -> dict[str, Any]:
    """Measure and report. Raises ValueError as `ComparePlan`, SystemFailed where a design does not start and RequestFailed where its
    warm-up fails; later failures are counted and reported."""
    plan = ComparePlan(settings)
    runs: dict[str, list[LoadRun]] = {}
    model = ""
    for design in plan.designs:
        watch.on_step(f"{design.label}: starting")
        async with surroundings.start(plan.system(design)) as endpoint:
            model = await model_name(endpoint, settings.timeout_s)
            client = _Client(Target(design.label, endpoint, model), settings.timeout_s, surroundings.clock, watch.on_request)
            runs[design.label] = [load_run async for load_run in _replay_all(plan, design, client, watch)]
    return build_comparison(plan, model, runs)


def total_requests(settings: CompareSettings) -> int:
    """How often a run reports a request, warm-ups left out."""
    return len(settings.designs) * len(settings.loads) * len(ComparePlan(settings).trace)


class _Client:
    """Sends to one system. `outcome` says of each request what became of it."""

    def __init__(self, target: Target, timeout_s: float, clock: Clock, on_request: Callable[[], None]):
        self._target = target
        self._timeout_s = timeout_s
        self._clock = clock
        self._on_request = on_request

    async def outcome(self, prompt: list[int], out: int) -> Outcome:
        request = completion_request(self._target.model, prompt, out)
        try:
            stream = await stream_completion(self._target.endpoint, request, self._clock, self._timeout_s)
            return Outcome(measure(stream, out), None)
        except RequestFailed as failure:
            return Outcome(None, str(failure))

    async def warm_up(self, prompts: Sequence[list[int]]) -> None:
        """All at once, so that every worker has part. Raises RequestFailed."""
        for outcome in await asyncio.gather(*(self.outcome(prompt, WARM_UP_OUT) for prompt in prompts)):
            if outcome.error is not None:
                raise RequestFailed(f"{self._target.name}: warm-up: {outcome.error}")

    async def replay(self, requests: Sequence[Replayed]) -> list[Outcome]:
        """An open loop: every request is sent at its time, whether or not others have been answered."""
        loop = asyncio.get_running_loop()
        start_s = loop.time() - requests[0].arrival_s

        async def send(request: Replayed) -> Outcome:
            await asyncio.sleep(max(0.0, start_s + request.arrival_s - loop.time()))
            outcome = await self.outcome(request.prompt, request.output_tokens)
            self._on_request()
            return outcome

        return list(await asyncio.gather(*map(send, requests)))


async def _replay_all(plan: ComparePlan, design: Design, client: _Client, watch: Watch) -> AsyncIterator[LoadRun]:
    await client.warm_up(plan.warm_up_prompts(design))
    for load in sorted(plan.settings.loads):
        offered_per_s = plan.offered_per_s(load)
        watch.on_step(f"{design.label}: {offered_per_s:.2f} requests/s")
        yield LoadRun(load, offered_per_s, await client.replay(plan.replay(load)))
