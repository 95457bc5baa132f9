"""Experiments with policies in virtual time: one load, one cluster without faults, and what each request waited under a router policy.

The schedulers, pools and room rules are the real ones, as in every simulation; only the policy is exchanged. A run has no noise: the same
policy gives the same numbers on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from pdjax.protocol import Failed, Finished, Sampling
from pdjax.router.fleet import Fleet
from pdjax.router.policy import PairPolicy
from pdjax.simulation.engine import Cost
from pdjax.simulation.process import Timeline
from pdjax.simulation.scenario import NEVER, Delays, Job, LinkFaults, Policy, Scenario, SchedulerFaults, WorkCost, WorkerSize
from pdjax.simulation.trace import Trace
from pdjax.simulation.world import World

JOIN_TICKS = 10
"""Requests come later than this: by then the workers have joined."""


class Cluster(NamedTuple):
    """Workers that are all alike. `prefill_pages`, `decode_pages`: of each pool; `decode_slots`: sequences that one decode worker admits.

    A step of prefill takes `prefill_cost`, in ticks, and at most `step_tokens` tokens; one of decode takes `decode_cost`.
    """

    num_prefill: int
    num_decode: int
    page_size: int = 4
    prefill_pages: int = 200
    decode_pages: int = 400
    decode_slots: int = 16
    step_tokens: int = 32
    prefill_cost: Cost = Cost(2, 1)
    decode_cost: Cost = Cost(2, 0)
    optimistic_retries: int = 0


class Arrival(NamedTuple):
    """One request: when, in ticks, what, and how many tokens it wants."""

    at: int
    prompt: list[int]
    num_tokens: int


class Chunk(NamedTuple):
    """Prompt tokens of request `index` that a prefill worker computed in one step."""

    worker: str
    index: int
    start: int
    end: int
    num_tokens: int


class Waited(NamedTuple):
    """Of one request, in ticks after its arrival: its first token, its last one, and prompt tokens that nobody had to compute."""

    ttft: int
    whole: int
    cached_tokens: int


class Outcome(NamedTuple):
    """`requests` in the order of their arrivals; `chunks` in the order in which they were told."""

    requests: list[Waited]
    chunks: list[Chunk]


def play(cluster: Cluster, arrivals: Sequence[Arrival], make_policy: Callable[[Fleet], PairPolicy] = PairPolicy) -> Outcome:
    """Run the load to its end. Raises AssertionError where any property of the simulation does not hold, a failed request included."""
    timeline = Timeline()
    chunks = _Chunks()
    world = World(_scenario(cluster, arrivals), timeline, chunks)
    world.router.policy = make_policy(world.router.fleet)
    tally = world.run()
    assert tally.outcomes == {"ok": len(arrivals)}, f"requests ended with {dict(tally.outcomes)}"
    requests = []
    for call in world.calls:
        assert call.finished is not None
        first, at = int(call.sequence.record.token_times_s[0]), call.job.at
        requests.append(Waited(first - at, call.ended_at - at, call.finished.cached_tokens))
    return Outcome(requests, chunks.told)


class _Chunks(Trace):
    """Hears what workers tell with their last word on a request."""

    def __init__(self) -> None:
        self.told: list[Chunk] = []

    def note(self, who: str, message: str, *values: object) -> None:
        if len(values) != 2 or not isinstance(values[1], Finished | Failed):
            return
        index = int(str(values[0]).partition("@")[0])
        stages = [stage for stage in values[1].stages if stage.track == "chunks"]
        self.told += [Chunk(who, index, int(stage.start_s), int(stage.end_s), stage.count) for stage in stages]


def _scenario(cluster: Cluster, arrivals: Sequence[Arrival]) -> Scenario:
    longest = max(len(each.prompt) + each.num_tokens for each in arrivals)
    for name, pages in (("prefill_pages", cluster.prefill_pages), ("decode_pages", cluster.decode_pages)):
        if pages * cluster.page_size < longest:
            raise ValueError(f"{name} {pages} hold {pages * cluster.page_size} tokens, the longest request has {longest}")
    jobs = [
        Job(str(index), JOIN_TICKS + each.at, each.prompt, Sampling(max_tokens=each.num_tokens), NEVER, None)
        for index, each in enumerate(arrivals)
    ]
    num = len(arrivals)
    longest_step = max(cost.step + cost.token * cluster.step_tokens for cost in (cluster.prefill_cost, cluster.decode_cost))
    return Scenario(
        seed=0,
        policy=_policy(cluster, num),
        prefills=(WorkerSize(cluster.prefill_pages + 1, num, 2 * num),) * cluster.num_prefill,
        decodes=(WorkerSize(cluster.decode_pages + 1, cluster.decode_slots, 2 * cluster.decode_slots),) * cluster.num_decode,
        delays=Delays(turn=0, step=longest_step, message=0, chunk=1, announce=1),
        link_faults=LinkFaults(),
        scheduler_faults=SchedulerFaults(),
        jobs=tuple(jobs),
        incidents=(),
        cost=WorkCost(cluster.prefill_cost, cluster.decode_cost),
    )


def _policy(cluster: Cluster, num_requests: int) -> Policy:
    return Policy(
        page_size=cluster.page_size,
        step_tokens=cluster.step_tokens,
        step_seqs=4,
        chunk_pages=8,
        window=4,
        max_queue=num_requests,
        reserve_tokens=8,
        retries=cluster.optimistic_retries,
        grace=2,
        max_held_pages=64,
        drop_on_miss=False,
        early_send=True,
        prefix_cache=True,
        max_attempts=1,
        is_recorded=True,
    )
