"""Draws the scenario of a seed. Everything is small, and often as small as it can be: that is where schedulers go wrong."""

from __future__ import annotations

import random

from pdjax.protocol import Sampling
from pdjax.simulation.arithmetic import expected_answer
from pdjax.simulation.scenario import NEVER, Delays, Incident, Job, LinkFaults, Policy, Scenario, SchedulerFaults, WorkerSize

JOIN_TICKS = 5
"""Requests come later than this: by then the first workers have joined."""

TOO_MANY_TOKENS = 5000
"""More than any drawn pool holds."""

TEMPERS = ("calm", "clients", "link", "hooks", "deaths", "all")
"""Nothing goes wrong; clients leave and deadlines pass; the link fails; polls fail and retries are forced; workers stop and die; all."""


def draw(seed: int) -> Scenario:
    """The scenario of `seed`, the same on every machine."""
    rng = random.Random(seed)
    temper = rng.choices(TEMPERS, (30, 15, 15, 10, 15, 15))[0]
    policy = _policy(rng)
    jobs = _jobs(rng, leave=temper in ("clients", "all"))
    prefills = tuple(_worker(rng, policy.page_size, jobs) for _ in range(rng.choice((1, 1, 1, 1, 1, 1, 2, 2, 3, 3, 0))))
    draw_decode = _worker if rng.random() < 0.7 else _crowded_worker
    decodes = tuple(draw_decode(rng, policy.page_size, jobs) for _ in range(rng.choice((1, 1, 1, 2, 3))))
    return Scenario(
        seed=seed,
        policy=policy,
        prefills=prefills,
        decodes=decodes,
        delays=_delays(rng),
        link_faults=_link_faults(rng) if temper in ("link", "all") else LinkFaults(),
        scheduler_faults=_scheduler_faults(rng) if temper in ("hooks", "all") else SchedulerFaults(),
        jobs=jobs,
        incidents=_incidents(rng, len(prefills) + len(decodes)) if temper in ("deaths", "all") else (),
    )


def _policy(rng: random.Random) -> Policy:
    page_size = rng.choice((1, 2, 3, 4, 4, 8))
    return Policy(
        page_size=page_size,
        # A step holds a page at least: chunks end at page borders.
        step_tokens=rng.choice((page_size, page_size + 1, 2 * page_size + 1, 16, 64)),
        step_seqs=rng.choice((1, 2, 4)),
        chunk_pages=rng.choice((1, 2, 3, 8)),
        window=rng.choice((1, 1, 2, 4)),
        max_queue=rng.choice((1, 3, 100, 100, 100, 100, 100, 100)),
        reserve_tokens=rng.choice((1, 2, 4, 8)),
        retries=rng.choice((0, 0, 1, 1, 2, 3)),
        grace=rng.choice((0, 0, 0, 2, 20)),
        max_held_pages=rng.choice((0, 3, 10, 1000)),
        drop_on_miss=rng.random() < 0.4,
        early_send=rng.random() < 0.6,
        prefix_cache=rng.random() < 0.85,
        max_attempts=rng.choice((2, 4, 4, 6)),
        is_recorded=rng.random() < 0.3,
    )


def _jobs(rng: random.Random, leave: bool) -> tuple[Job, ...]:
    stems = [[rng.randrange(900) for _ in range(rng.choice((4, 8, 20, 40)))] for _ in range(rng.choice((1, 2, 3)))]
    spread = rng.choice((0, 5, 40, 150))
    jobs = []
    for number in range(rng.choice((1, 2, 3, 5, 8, 12))):
        stem = rng.choice(stems)
        prompt = stem[: rng.choice((rng.randint(0, len(stem)), len(stem)))] + [rng.randrange(900) for _ in range(rng.randint(1, 6))]
        sampling = _sampling(rng, prompt)
        at = JOIN_TICKS + rng.randint(0, spread)
        deadline = at + rng.randint(1, 150) if leave and rng.random() < 0.15 else NEVER
        cancel_at = at + rng.randint(0, 100) if leave and rng.random() < 0.3 else None
        jobs.append(Job(f"r{number}", at, prompt, sampling, deadline, cancel_at))
    if rng.random() < 0.03:
        jobs.append(Job("giant", JOIN_TICKS, [1, 2, 3], Sampling(max_tokens=TOO_MANY_TOKENS), NEVER, None, is_too_large=True))
    return tuple(jobs)


def _sampling(rng: random.Random, prompt: list[int]) -> Sampling:
    max_tokens = rng.choice((1, 2, 3, 5, 8, 14, 24))
    sampling = Sampling(max_tokens=max_tokens, seed=rng.randrange(1000))
    if rng.random() < 0.7:
        return sampling
    stop = rng.choice(expected_answer(prompt, sampling))
    return Sampling(max_tokens=max_tokens, min_tokens=rng.choice((0, 0, 2)), stop_token_ids=(stop,), seed=sampling.seed)


def _worker(rng: random.Random, page_size: int, jobs: tuple[Job, ...]) -> WorkerSize:
    """Never too small for the largest request with its answer, and often just large enough."""
    needed = _pages_needed(page_size, jobs)
    pages = needed + rng.choice((0, 0, 1, 3, needed, 3 * needed))
    return WorkerSize(pages + 1, rng.choice((1, 1, 2, 3, 6)), rng.choice((1, 1, 2, 3, 12)))


def _crowded_worker(rng: random.Random, page_size: int, jobs: tuple[Job, ...]) -> WorkerSize:
    """Slots for many and pages for few: sequences drive each other out."""
    pages = _pages_needed(page_size, jobs) + rng.choice((0, 1, 2, 5))
    return WorkerSize(pages + 1, rng.choice((3, 6, 12)), rng.choice((3, 12)))


def _pages_needed(page_size: int, jobs: tuple[Job, ...]) -> int:
    longest = max(len(job.prompt) + job.sampling.max_tokens - 1 for job in jobs if not job.is_too_large)
    return -(-longest // page_size)


def _delays(rng: random.Random) -> Delays:
    return Delays(
        turn=rng.choice((0, 1, 3)),
        step=rng.choice((0, 1, 2, 5)),
        message=rng.choice((0, 1, 3)),
        chunk=rng.choice((0, 1, 4, 12)),
        announce=rng.choice((0, 1, 6, 30)),
    )


def _link_faults(rng: random.Random) -> LinkFaults:
    return LinkFaults(*(rng.choice((0, 0, 0.05, 0.2)) for _ in LinkFaults._fields))


def _scheduler_faults(rng: random.Random) -> SchedulerFaults:
    return SchedulerFaults(fail_poll=rng.choice((0, 0.002, 0.02)), force_retry=rng.choice((0, 0.1, 0.5)))


def _incidents(rng: random.Random, num_places: int) -> tuple[Incident, ...]:
    incidents = []
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randint(0, 120)
        until = at + rng.randint(1, 150) if rng.random() < 0.7 else None
        kind = rng.choice(("stop", "stop", "kill", "kill", "kill", "leave"))
        incidents.append(Incident(at, rng.randrange(num_places), kind, until, rng.random() < 0.3))
    return tuple(incidents)
