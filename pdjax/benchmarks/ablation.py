"""Each latency technique off and on, on live systems that run side by side.

Both systems of a condition are up at the same time and get load in turns, so that both see the same machine. Two conditions:

  control    nothing is emulated; what a technique costs where it has nothing to win shows here. The time to first token with the
             technique off, which is the forward of what is not cached and a few milliseconds around it, also is the scale for the other one.
  emulated   decode's announcement is late by about one forward (optimistic, both); the link moves the KV of the whole prompt in the time
             of one forward (early-send, both).

With `--load poisson` requests of both modes come at the same random times, a stretch of one mode at a time; the order alternates from
round to round. A retry storm is a closed loop with ten times the requests in flight that decode admits, with retry budgets of 0, 1 and 3, also
a stretch at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, NamedTuple

from pdjax.benchmarks.ablation_plan import (
    CALIBRATION_REQUESTS,
    CONTROL,
    EMULATED,
    OFF,
    ON,
    STORM_FACTOR,
    STORM_RETRIES,
    WARM_UP_REQUESTS,
    AblationSettings,
    Emulation,
    Mode,
    Plan,
    storm_mode,
)
from pdjax.benchmarks.ablation_report import Comparison, ModeRun, build_report
from pdjax.benchmarks.client import Clock, Endpoint, RequestFailed, model_name
from pdjax.benchmarks.load import (
    Prompt,
    PromptShape,
    Sender,
    Target,
    at_times,
    in_turns,
    make_prompts,
    poisson_times,
    shared_prefix,
    warm_up,
    without_pause,
)
from pdjax.benchmarks.report import quantile
from pdjax.benchmarks.system import Roles, running_system, worker_figures

REQUEST_TIMEOUT_S = 600.0
HEARTBEATS_S = 1.5
"""After which what workers report of themselves includes the last request."""
VOCAB = 48000
BLOCK_FACTOR = 2
"""Requests of a stretch of storm over those in flight: every client sends two."""

Start = Callable[[Roles], AbstractAsyncContextManager[Endpoint]]


async def settled_figures(endpoint: Endpoint) -> dict[str, float]:
    await asyncio.sleep(HEARTBEATS_S)
    return await worker_figures(endpoint)


class Surroundings(NamedTuple):
    """What a run uses of the world: how a system is started, how its workers' figures are read, and the clock."""

    start: Start = running_system
    figures: Callable[[Endpoint], Awaitable[dict[str, float]]] = settled_figures
    clock: Clock = time.perf_counter


class Watch(NamedTuple):
    """Who is told: `on_step` what happens now, `on_request` of each request that has ended."""

    on_step: Callable[[str], None]
    on_request: Callable[[], None]


async def run(settings: AblationSettings, watch: Watch, surroundings: Surroundings = Surroundings()) -> dict[str, Any]:
    """Measure and report. Raises SystemFailed where a system does not start and RequestFailed where a warm-up fails; later failures are
    counted and reported."""
    ablation = _Ablation(Plan(settings), watch, surroundings)
    for round_number in range(settings.rounds):
        await ablation.run_round(round_number)
    return build_report(settings, ablation.model, ablation.emulations, ablation.comparisons())


class _Ablation:
    """One run. Gathers the outcomes of all rounds, by condition and mode."""

    def __init__(self, plan: Plan, watch: Watch, surroundings: Surroundings):
        self._plan = plan
        self._settings = plan.settings
        self._watch = watch
        self._around = surroundings
        self._sender = Sender(
            self._settings.out, plan.num_cached if plan.num_cached else None, REQUEST_TIMEOUT_S, surroundings.clock, watch.on_request
        )
        self._shape = PromptShape(self._settings.prompt_tokens, plan.num_cached, VOCAB)
        self._runs: dict[tuple[str, str], ModeRun] = {}
        self.emulations: list[Emulation] = []
        self.model = ""

    async def run_round(self, number: int) -> None:
        if self._settings.experiment == "retry-storm":
            await self._storm(number)
            return
        count = self._settings.requests if self._settings.load == "turns" else CALIBRATION_REQUESTS
        await self._take_turns(number, CONTROL, Emulation(), count)
        emulation = self._plan.calibrated(self._forward_s(number, count))
        self.emulations.append(emulation)
        if self._settings.load == "turns":
            await self._take_turns(number, EMULATED, emulation, count)
        else:
            await self._poisson(number, emulation)

    def comparisons(self) -> dict[str, Comparison]:
        """By name; what is compared with the first mode of each."""
        if self._settings.experiment == "retry-storm":
            none = self._runs[CONTROL, storm_mode(0)]
            return {mode: Comparison(none, self._runs[CONTROL, mode]) for mode in map(storm_mode, STORM_RETRIES)}
        return {name: Comparison(self._runs[name, OFF], self._runs[name, ON]) for name in (EMULATED, CONTROL)}

    async def _take_turns(self, number: int, condition: str, emulation: Emulation, count: int) -> None:
        async with self._targets(number, condition, emulation) as targets:
            self._watch.on_step(f"{condition}: in turns")
            outcomes = await in_turns(self._sender, targets, self._prompts(f"{number} {condition}", count))
            for name, each in outcomes.items():
                self._run(condition, name).outcomes += each

    async def _poisson(self, number: int, emulation: Emulation) -> None:
        settings = self._settings
        times_s = poisson_times(settings.utilisation / self._forward_s(number, CALIBRATION_REQUESTS), settings.requests, settings.seed + number)
        async with self._targets(number, EMULATED, emulation) as targets:
            prompts = self._prompts(f"{number} {EMULATED}", settings.requests)
            for target in targets:
                self._watch.on_step(f"{target.name}: random arrivals")
                self._run(EMULATED, target.name).add(await at_times(self._sender, target, prompts, times_s))

    async def _storm(self, number: int) -> None:
        async with self._targets(number, CONTROL, Emulation()) as targets:
            concurrency = STORM_FACTOR * self._settings.decode_slots
            prompts = self._prompts(f"{number} storm", self._settings.requests)
            for turn, block in enumerate(_blocks(prompts, BLOCK_FACTOR * concurrency)):
                for target in targets if turn % 2 == 0 else reversed(targets):
                    self._watch.on_step(f"{target.name}: storm")
                    self._run(CONTROL, target.name).add(await without_pause(self._sender, target, block, concurrency))

    @contextlib.asynccontextmanager
    async def _targets(self, number: int, condition: str, emulation: Emulation) -> AsyncIterator[list[Target]]:
        """All modes, started and warmed up, in an order that is turned round from round to round. On leaving, what the workers report of
        themselves is added to the runs."""
        modes = self._plan.modes() if number % 2 == 0 else self._plan.modes()[::-1]
        async with contextlib.AsyncExitStack() as stack:
            targets = [await self._start(stack, condition, mode, emulation) for mode in modes]
            before = [await self._around.figures(target.endpoint) for target in targets]
            yield targets
            for target, figures in zip(targets, before, strict=True):
                await self._add_figures(condition, target, figures)

    async def _start(self, stack: contextlib.AsyncExitStack, condition: str, mode: Mode, emulation: Emulation) -> Target:
        self._watch.on_step(f"{condition}: starting {mode.name}")
        endpoint = await stack.enter_async_context(self._around.start(self._plan.roles(mode, emulation)))
        target = Target(mode.name, endpoint, await model_name(endpoint, REQUEST_TIMEOUT_S))
        self.model = target.model
        prefix = shared_prefix(self._shape, self._settings.seed)
        await warm_up(self._sender, target, prefix, self._prompts(f"warm-up {condition}", WARM_UP_REQUESTS), REQUEST_TIMEOUT_S)
        return target

    async def _add_figures(self, condition: str, target: Target, before: dict[str, float]) -> None:
        try:
            after = await self._around.figures(target.endpoint)
        except RequestFailed:  # a worker is gone: the requests that failed over it say so
            return
        run = self._run(condition, target.name)
        for name, value in after.items():
            run.figures[name] = run.figures.get(name, 0.0) + value - before.get(name, 0.0)

    def _forward_s(self, number: int, count: int) -> float:
        """Of the round: median time to first token of the control, with the technique off. Raises RequestFailed where none was answered."""
        outcomes = self._runs[CONTROL, OFF].outcomes[number * count :]
        times_s = [outcome.sample.ttft_s for outcome in outcomes if outcome.sample is not None]
        if not times_s:
            raise RequestFailed(f"no request of the control was answered: {outcomes[0].error}")
        return quantile(times_s, 0.5)

    def _prompts(self, stream: str, count: int) -> Sequence[Prompt]:
        prompts = make_prompts(self._shape, self._settings.seed, stream)
        return [next(prompts) for _ in range(count)]

    def _run(self, condition: str, mode: str) -> ModeRun:
        return self._runs.setdefault((condition, mode), ModeRun(mode))


def _blocks(prompts: Sequence[Prompt], size: int) -> list[Sequence[Prompt]]:
    return [prompts[start : start + size] for start in range(0, len(prompts), size)]
