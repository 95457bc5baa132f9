"""What a seed stands for: the cluster, the load, the delays and everything that will go wrong. Drawn before the run begins."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal, NamedTuple

from pdjax.protocol import Sampling
from pdjax.simulation.arithmetic import expected_answer

JOIN_TICKS = 5
"""Requests come later than this: by then the first workers have joined."""

NEVER = 1_000_000
"""A deadline in ticks that no run reaches."""


class WorkerSize(NamedTuple):
    """`pages` counts the null page."""

    pages: int
    slots: int
    metadata: int


class Delays(NamedTuple):
    """Longest delays in ticks: of a turn after its cause, of a step on the device, of a message, a chunk, an announcement."""

    turn: int
    step: int
    message: int
    chunk: int
    announce: int


class LinkFaults(NamedTuple):
    """Probabilities, each for one message of its kind."""

    lost_announcement: float = 0.0
    late_announcement: float = 0.0
    repeated_announcement: float = 0.0
    lost_chunk: float = 0.0
    late_chunk: float = 0.0
    damaged_chunk: float = 0.0
    repeated_chunk: float = 0.0
    wrong_row: float = 0.0


class SchedulerFaults(NamedTuple):
    """Probabilities for the schedulers' own test hooks: per look at a sender, and per request."""

    fail_poll: float = 0.0
    force_retry: float = 0.0


class Incident(NamedTuple):
    """Something that befalls the worker in place `place` (of all prefill places, then all decode places) at tick `at`.

    `until`: when a stopped one goes on, or when a successor of a dead one joins; None: never. `is_silent`: connections do not break.
    """

    at: int
    place: int
    kind: Literal["stop", "kill"]
    until: int | None
    is_silent: bool


class Job(NamedTuple):
    """One request of a client. `cancel_at`: when the client goes away; None: it stays."""

    name: str
    at: int
    prompt: list[int]
    sampling: Sampling
    deadline: int
    cancel_at: int | None


class Policy(NamedTuple):
    """What configuration would say, the same for every worker."""

    page_size: int
    step_tokens: int
    step_seqs: int
    chunk_pages: int
    window: int
    max_queue: int
    reserve_tokens: int
    retries: int
    drop_on_miss: bool
    early_send: bool
    prefix_cache: bool
    max_attempts: int


@dataclass(frozen=True)
class Scenario:
    seed: int
    policy: Policy
    prefills: tuple[WorkerSize, ...]
    decodes: tuple[WorkerSize, ...]
    delays: Delays
    link_faults: LinkFaults
    scheduler_faults: SchedulerFaults
    jobs: tuple[Job, ...]
    incidents: tuple[Incident, ...]

    @property
    def can_fail(self) -> bool:
        """Whether anything goes wrong but clients that leave and deadlines that pass."""
        return bool(self.incidents) or any(self.link_faults) or any(self.scheduler_faults)

    @property
    def patience(self) -> int:
        """Ticks within which any request is answered while nothing goes wrong, however unlucky the delays.

        As if every request were computed alone, one after another, each prompt as often as optimism allows, and the answers again and again
        as retraction may have it.
        """
        policy, delays = self.policy, self.delays
        turn = 2 * (delays.turn + delays.step) + 1
        chunk_tokens = policy.step_tokens // policy.page_size * policy.page_size
        total = 20 * (delays.message + delays.announce + turn)
        for job in self.jobs:
            tokens = len(job.prompt) + job.sampling.max_tokens
            num_steps = (policy.retries + 2) * (tokens // chunk_tokens + 1) + job.sampling.max_tokens
            num_chunks = len(job.prompt) // policy.page_size + 2
            total += 2 * num_steps * turn + num_chunks * (delays.chunk + turn) + 4 * (delays.message + turn)
        return 2 * total


def draw(seed: int) -> Scenario:
    """The scenario of `seed`, the same on every machine."""
    rng = random.Random(seed)
    temper = rng.choices(("calm", "clients", "link", "hooks", "deaths", "all"), (30, 15, 15, 10, 15, 15))[0]
    policy = _policy(rng)
    jobs = _jobs(rng, leave=temper in ("clients", "all"), num_jobs=rng.choice((1, 2, 3, 4, 6, 9)))
    prefills = tuple(_worker(rng, policy.page_size, jobs) for _ in range(rng.choice((1, 1, 1, 2, 3))))
    decodes = tuple(_worker(rng, policy.page_size, jobs) for _ in range(rng.choice((1, 1, 1, 2, 3))))
    num_places = len(prefills) + len(decodes)
    return Scenario(
        seed=seed,
        policy=policy,
        prefills=prefills,
        decodes=decodes,
        delays=_delays(rng),
        link_faults=_link_faults(rng) if temper in ("link", "all") else LinkFaults(),
        scheduler_faults=_scheduler_faults(rng) if temper in ("hooks", "all") else SchedulerFaults(),
        jobs=jobs,
        incidents=_incidents(rng, num_places) if temper in ("deaths", "all") else (),
    )


def _policy(rng: random.Random) -> Policy:
    page_size = rng.choice((1, 2, 3, 4, 4, 8))
    return Policy(
        page_size=page_size,
        step_tokens=rng.choice((page_size, page_size + 1, 2 * page_size + 1, 16, 64)),
        step_seqs=rng.choice((1, 2, 4)),
        chunk_pages=rng.choice((1, 2, 3, 8)),
        window=rng.choice((1, 1, 2, 4)),
        max_queue=rng.choice((1, 3, 100, 100, 100)),
        reserve_tokens=rng.choice((1, 2, 4, 8)),
        retries=rng.choice((0, 0, 1, 1, 2, 3)),
        drop_on_miss=rng.random() < 0.4,
        early_send=rng.random() < 0.6,
        prefix_cache=rng.random() < 0.85,
        max_attempts=rng.choice((2, 4, 4, 6)),
    )


def _jobs(rng: random.Random, leave: bool, num_jobs: int) -> tuple[Job, ...]:
    stems = [[rng.randrange(900) for _ in range(rng.choice((4, 8, 20)))] for _ in range(2)]
    spread = rng.choice((0, 5, 40))
    jobs = []
    for number in range(num_jobs):
        stem = rng.choice(stems)
        prompt = stem[: rng.randint(0, len(stem))] + [rng.randrange(900) for _ in range(rng.randint(1, 6))]
        sampling = _sampling(rng, prompt)
        at = JOIN_TICKS + rng.randint(0, spread)
        deadline = at + rng.randint(1, 120) if leave and rng.random() < 0.15 else NEVER
        cancel_at = at + rng.randint(0, 80) if leave and rng.random() < 0.3 else None
        jobs.append(Job(f"r{number}", at, prompt, sampling, deadline, cancel_at))
    return tuple(jobs)


def _sampling(rng: random.Random, prompt: list[int]) -> Sampling:
    max_tokens = rng.choice((1, 2, 3, 5, 8, 12))
    sampling = Sampling(max_tokens=max_tokens, seed=rng.randrange(1000))
    if rng.random() < 0.7:
        return sampling
    stop = rng.choice(expected_answer(prompt, sampling))
    return Sampling(max_tokens=max_tokens, min_tokens=rng.choice((0, 0, 2)), stop_token_ids=(stop,), seed=sampling.seed)


def _worker(rng: random.Random, page_size: int, jobs: tuple[Job, ...]) -> WorkerSize:
    """Never too small for the largest request with its answer, and often just large enough."""
    longest = max(len(job.prompt) + job.sampling.max_tokens - 1 for job in jobs)
    needed = -(-longest // page_size)
    pages = needed + rng.choice((0, 0, 1, 3, needed, 3 * needed))
    return WorkerSize(pages + 1, rng.choice((1, 1, 2, 3, 6)), rng.choice((1, 1, 2, 3, 12)))


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
        at = rng.randint(0, 100)
        until = at + rng.randint(1, 150) if rng.random() < 0.7 else None
        kind = rng.choice(("stop", "kill", "kill"))
        incidents.append(Incident(at, rng.randrange(num_places), kind, until, rng.random() < 0.3))
    return tuple(incidents)
