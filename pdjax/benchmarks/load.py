"""Three ways to put load on systems that are compared: in turns, at random times, and without a pause.

In turns, one request is in flight at a time and each prompt goes to every system, in an order that alternates: whatever else the machine does
hits all of them alike.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from pdjax.benchmarks.client import Clock, Endpoint, RequestFailed, Sample, measure, stream_completion
from pdjax.benchmarks.serve import FIRST_TOKEN_ID, completion_request

Prompt = list[int]
OnRequest = Callable[[], None]


class Target(NamedTuple):
    """One system under test, by the name of what is switched on or off in it."""

    name: str
    endpoint: Endpoint
    model: str


class PromptShape(NamedTuple):
    """Prompts of `num_tokens`, of which the first `num_shared` are the same in all, drawn from ids below `vocab`."""

    num_tokens: int
    num_shared: int
    vocab: int


class Outcome(NamedTuple):
    """One request: its measurement, or why there is none."""

    sample: Sample | None
    error: str | None


class Block(NamedTuple):
    """A stretch of load on one system; outcomes in the order of the prompts. `duration_s`: first request sent to last one ended."""

    outcomes: list[Outcome]
    duration_s: float


def shared_prefix(shape: PromptShape, seed: int) -> Prompt:
    return _draw(random.Random(f"shared {seed}"), shape.num_shared, shape.vocab)


def make_prompts(shape: PromptShape, seed: int, stream: str) -> Iterator[Prompt]:
    """Endless prompts. The shared tokens depend on `seed` alone, the others on `stream` too."""
    prefix, rest = shared_prefix(shape, seed), random.Random(f"rest {seed} {stream}")
    while True:
        yield prefix + _draw(rest, shape.num_tokens - shape.num_shared, shape.vocab)


def poisson_times(rate_per_s: float, count: int, seed: int) -> list[float]:
    """Arrival times in seconds, rising, the first at 0: gaps are exponential with mean 1 / `rate_per_s`."""
    rng = random.Random(f"arrivals {seed}")
    times_s = [0.0]
    while len(times_s) < count:
        times_s.append(times_s[-1] + rng.expovariate(rate_per_s))
    return times_s[:count]


class Sender:
    """Sends requests of one kind. `num_cached`: prompt tokens that must be found cached, None where that does not matter."""

    def __init__(self, out: int, num_cached: int | None, timeout_s: float, clock: Clock, on_request: OnRequest):
        self._out = out
        self._num_cached = num_cached
        self._timeout_s = timeout_s
        self._on_request = on_request
        self.clock = clock

    async def send(self, target: Target, prompt: Prompt) -> Outcome:
        """One request, whatever becomes of it."""
        request = completion_request(target.model, prompt, self._out)
        try:
            stream = await stream_completion(target.endpoint, request, self.clock, self._timeout_s)
            outcome = self._checked(measure(stream, self._out))
        except RequestFailed as failure:
            outcome = Outcome(None, str(failure))
        self._on_request()
        return outcome

    def _checked(self, sample: Sample) -> Outcome:
        if self._num_cached is not None and sample.cached_tokens != self._num_cached:
            return Outcome(None, f"{sample.cached_tokens} prompt tokens were cached, expected {self._num_cached}")
        return Outcome(sample, None)


async def warm_up(sender: Sender, target: Target, prefix: Prompt, prompts: Sequence[Prompt], timeout_s: float) -> None:
    """Compute the shared prefix, so that prefill has it cached, then send `prompts`. Raises RequestFailed with the first failure.

    A request for one token ends on prefill: decode gets no KV of the prefix.
    """
    if prefix:
        stream = await stream_completion(target.endpoint, completion_request(target.model, [*prefix, prefix[0]], 1), sender.clock, timeout_s)
        measure(stream, 1)
    for prompt in prompts:
        outcome = await sender.send(target, prompt)
        if outcome.error is not None:
            raise RequestFailed(f"{target.name}: warm-up: {outcome.error}")


async def in_turns(sender: Sender, targets: Sequence[Target], prompts: Sequence[Prompt]) -> dict[str, list[Outcome]]:
    """Each prompt to every target, one request at a time; from prompt to prompt the order is turned round. Outcomes by target, by prompt."""
    outcomes: dict[str, list[Outcome]] = {target.name: [] for target in targets}
    for turn, prompt in enumerate(prompts):
        for target in targets if turn % 2 == 0 else reversed(targets):
            outcomes[target.name].append(await sender.send(target, prompt))
    return outcomes


async def at_times(sender: Sender, target: Target, prompts: Sequence[Prompt], times_s: Sequence[float]) -> Block:
    """An open loop: prompt i is sent `times_s[i]` after the start, whether or not others have been answered."""
    loop = asyncio.get_running_loop()
    loop_start_s, start_s = loop.time(), sender.clock()

    async def send_at(time_s: float, prompt: Prompt) -> Outcome:
        await asyncio.sleep(max(0.0, loop_start_s + time_s - loop.time()))
        return await sender.send(target, prompt)

    outcomes = await asyncio.gather(*(send_at(time_s, prompt) for time_s, prompt in zip(times_s, prompts, strict=True)))
    return Block(outcomes, sender.clock() - start_s)


async def without_pause(sender: Sender, target: Target, prompts: Sequence[Prompt], concurrency: int) -> Block:
    """A closed loop: `concurrency` clients, each sending its next prompt when the last one has been answered."""
    pending = iter(enumerate(prompts))
    outcomes: dict[int, Outcome] = {}

    async def client() -> None:
        for place, prompt in pending:
            outcomes[place] = await sender.send(target, prompt)

    start_s = sender.clock()
    await asyncio.gather(*(client() for _ in range(concurrency)))
    return Block([outcomes[place] for place in range(len(prompts))], sender.clock() - start_s)


def _draw(rng: random.Random, count: int, vocab: int) -> Prompt:
    return [rng.randrange(FIRST_TOKEN_ID, vocab) for _ in range(count)]
