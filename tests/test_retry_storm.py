"""Row 15: ten times the load that decode can admit, in virtual time. Prompts that are computed ahead must cost nobody his turn.

The whole simulated system, with steps that take time in proportion to the tokens in them. Everything is drawn from seeds, so throughput is
a number that never varies.
"""

from __future__ import annotations

import random
from functools import cache
from typing import NamedTuple

import pytest

from pdjax.protocol import Sampling
from pdjax.scheduler.graces import Backoff
from pdjax.simulation.engine import Cost
from pdjax.simulation.process import Timeline
from pdjax.simulation.scenario import NEVER, Delays, Job, LinkFaults, Policy, Scenario, SchedulerFaults, WorkCost, WorkerSize
from pdjax.simulation.trace import NoTrace
from pdjax.simulation.world import World
from tests.scheduler_harness import Cluster, expected_answer
from tests.test_schedulers import prompt_of

FACTOR = 10
NUM_JOBS = 60
PAGE = 4
PROMPT_TOKENS, ANSWER_TOKENS = 32, 6
"""On average; each varies by a half to either side."""
JOIN_TICKS = 10
LEAST_SHARE = 0.98
NO_BACKOFF = Backoff(0.0, 0.0)


class Storm(NamedTuple):
    """`pages`: of the prefill worker; a prompt and its answer take nine on average. `decode_slots`: sequences that decode admits."""

    name: str
    pages: int
    decode_slots: int
    prefill: Cost
    decode: Cost

    @property
    def service_ticks(self) -> float:
        """Between two ends of answers, where decode has nothing to wait for."""
        return ANSWER_TOKENS * (self.decode.step + self.decode_slots * self.decode.token) / self.decode_slots


STORMS = (
    Storm("prefill has time, the cache holds few prompts", 60, 2, Cost(2, 1), Cost(60, 20)),
    Storm("prefill has time, the cache holds many prompts", 300, 2, Cost(2, 1), Cost(60, 20)),
    Storm("prefill is hardly faster than decode", 60, 4, Cost(2, 1), Cost(12, 4)),
    Storm("decode admits one", 60, 1, Cost(4, 2), Cost(24, 4)),
)


class Outcome(NamedTuple):
    """`per_tick`: finished requests. `num_ahead`: pages held and forwards lost for requests that were ahead of their bootstrap, the latter
    `num_lost` of them."""

    per_tick: float
    last_arrival: int
    num_ahead: int
    num_lost: int


def draw_jobs(storm: Storm) -> tuple[Job, ...]:
    """Poisson arrivals at ten times the rate at which decode could finish them; no two prompts share a page."""
    rng = random.Random(15)
    at, jobs = float(JOIN_TICKS), []
    for number in range(NUM_JOBS):
        prompt = [rng.randrange(900) for _ in range(rng.randint(PROMPT_TOKENS // 2, PROMPT_TOKENS * 3 // 2))]
        sampling = Sampling(max_tokens=rng.randint(ANSWER_TOKENS // 2, ANSWER_TOKENS * 3 // 2))
        jobs.append(Job(f"r{number}", int(at), prompt, sampling, NEVER, None))
        at += rng.expovariate(FACTOR / storm.service_ticks)
    return tuple(jobs)


def scenario(storm: Storm, retries: int, on_miss: str, backoff: Backoff) -> Scenario:
    policy = Policy(
        page_size=PAGE,
        step_tokens=16,
        step_seqs=4,
        chunk_pages=8,
        window=4,
        max_queue=NUM_JOBS,
        reserve_tokens=8,
        retries=retries,
        grace=5,
        max_held_pages=32,
        drop_on_miss=on_miss == "retry",
        early_send=True,
        prefix_cache=True,
        max_attempts=1,
        is_recorded=False,
        backoff=backoff,
    )
    longest_step = storm.decode.step + storm.decode_slots * storm.decode.token
    return Scenario(
        seed=15,
        policy=policy,
        prefills=(WorkerSize(storm.pages, 8, 16),),
        decodes=(WorkerSize(300, storm.decode_slots, 2 * storm.decode_slots),),
        delays=Delays(turn=0, step=longest_step, message=1, chunk=2, announce=2),
        link_faults=LinkFaults(),
        scheduler_faults=SchedulerFaults(),
        jobs=draw_jobs(storm),
        incidents=(),
        cost=WorkCost(storm.prefill, storm.decode),
    )


@cache
def run(storm: Storm, retries: int, on_miss: str, backoff: Backoff = NO_BACKOFF) -> Outcome:
    """All properties of the simulation hold as well: every answer is right, and whole at the first attempt."""
    world = World(scenario(storm, retries, on_miss, backoff), Timeline(), NoTrace())
    tally = world.run()
    assert tally.outcomes == {"ok": NUM_JOBS}
    last_arrival, last_end = (max(ticks) for ticks in zip(*((call.job.at, call.ended_at) for call in world.calls), strict=True))
    num_ahead = tally.reached["held pages"] + tally.reached["optimistic retries"]
    return Outcome(NUM_JOBS / (last_end - JOIN_TICKS), last_arrival, num_ahead, tally.reached["optimistic retries"])


@pytest.mark.parametrize("storm", STORMS, ids=lambda storm: storm.name)
def test_the_storm_is_one(storm: Storm) -> None:
    """All have arrived when hardly any could have been finished, and decode is what they wait for."""
    calm = run(storm, 0, "park")
    assert calm.num_ahead == 0
    assert calm.last_arrival < 2 * NUM_JOBS * storm.service_ticks / FACTOR
    assert 0.4 < calm.per_tick * storm.service_ticks <= 1.1


@pytest.mark.parametrize("retries", [1, 3])
@pytest.mark.parametrize("on_miss", ["park", "retry"])
@pytest.mark.parametrize("storm", STORMS, ids=lambda storm: storm.name)
def test_going_ahead_costs_no_throughput_at_ten_times_what_decode_admits(storm: Storm, on_miss: str, retries: int) -> None:
    ahead = run(storm, retries, on_miss)
    assert ahead.num_ahead > NUM_JOBS / 4, "hardly anybody goes ahead"
    assert ahead.per_tick >= LEAST_SHARE * run(storm, 0, "park").per_tick


@pytest.mark.parametrize("storm", [STORMS[0], STORMS[1], STORMS[3]], ids=lambda storm: storm.name)
def test_backoff_saves_forwards_that_would_be_lost_and_costs_no_throughput(storm: Storm) -> None:
    """Retries that follow each other at once are used up long before decode has a slot."""
    backoff = Backoff(10 * storm.service_ticks, 100 * storm.service_ticks)
    spaced, at_once = (run(storm, 3, "retry", each) for each in (backoff, NO_BACKOFF))
    assert at_once.num_lost > NUM_JOBS, "hardly anybody is retried twice"
    assert spaced.num_lost < 0.8 * at_once.num_lost
    assert spaced.per_tick >= LEAST_SHARE * run(storm, 0, "park").per_tick


def test_a_bootstrapped_prompt_does_not_wait_for_one_that_is_half_computed_ahead() -> None:
    """The two steps in flight are all that stands before it: of those that are ahead nobody can use the result yet."""
    cluster = Cluster(retries=1, step_tokens=16, prefill_pages=128)
    cluster.submit(cluster.request("ahead", prompt_of(160, 1), 3), decode_delay=200)  # ten steps
    for _ in range(2):
        cluster.tick()
    cluster.submit(cluster.request("now", prompt_of(12, 2), 3))
    for _ in range(4):
        cluster.tick()
    assert cluster.tokens["now"], f"no token of {cluster.prefill.queue_lengths()}"
    assert cluster.num_forwards["ahead"] == 0
    cluster.run()
    assert cluster.answer("ahead") == expected_answer(prompt_of(160, 1), 3)
