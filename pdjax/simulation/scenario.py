"""What a seed stands for: the cluster, the load, the delays and everything that will go wrong. Time is counted in ticks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from pdjax.protocol import Sampling
from pdjax.scheduler.graces import Backoff
from pdjax.simulation.engine import Cost

NEVER = 1_000_000
"""A deadline that no run reaches."""

HEARTBEAT_TICKS = 10
HEARTBEAT_TIMEOUT_TICKS = 45
BOOTSTRAP_TIMEOUT_TICKS = 150
ANNOUNCE_TIMEOUT_TICKS = 400
STALL_TIMEOUT_TICKS = 60
HOLD_TIMEOUT_TICKS = 120
LEAVE_TICKS = 30
"""From a worker's word that it leaves to its end."""
LATE_TICKS = 80
"""How much longer a message takes that is held back."""


class WorkerSize(NamedTuple):
    """`pages` counts the null page."""

    pages: int
    slots: int
    metadata: int


class Delays(NamedTuple):
    """Longest delays: of a turn after its cause, of a step on the device, of a message, a chunk, an announcement."""

    turn: int
    step: int
    message: int
    chunk: int
    announce: int


class WorkCost(NamedTuple):
    """What the steps of each kind of worker take, where that goes by the work in them."""

    prefill: Cost
    decode: Cost


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

    `until`: when a stopped one goes on, or when a successor of a dead one joins; None: never. One that leaves is gone a while after it
    has said so. `is_silent`: connections of a killed one do not break.
    """

    at: int
    place: int
    kind: Literal["stop", "kill", "leave"]
    until: int | None
    is_silent: bool


class Job(NamedTuple):
    """One request of a client. `cancel_at`: when the client goes away; None: it stays. `is_too_large`: for any worker."""

    name: str
    at: int
    prompt: list[int]
    sampling: Sampling
    deadline: int
    cancel_at: int | None
    is_too_large: bool = False


class Policy(NamedTuple):
    """What configuration would say, the same for every worker. `grace`: ticks that a request waits before it goes ahead of its bootstrap.
    `max_held_pages`: kept gathered for requests whose bootstrap is pending. `is_recorded`: schedulers keep timelines. `backoff`: in ticks.
    """

    page_size: int
    step_tokens: int
    step_seqs: int
    chunk_pages: int
    window: int
    max_queue: int
    reserve_tokens: int
    retries: int
    grace: int
    max_held_pages: int
    drop_on_miss: bool
    early_send: bool
    prefix_cache: bool
    max_attempts: int
    is_recorded: bool
    backoff: Backoff = Backoff()


@dataclass(frozen=True)
class Scenario:
    """`pdjax.simulation.drawing` makes one out of a seed. `cost`: None where steps take up to `delays.step`, whatever is in them."""

    seed: int
    policy: Policy
    prefills: tuple[WorkerSize, ...]
    decodes: tuple[WorkerSize, ...]
    delays: Delays
    link_faults: LinkFaults
    scheduler_faults: SchedulerFaults
    jobs: tuple[Job, ...]
    incidents: tuple[Incident, ...]
    cost: WorkCost | None = None

    @property
    def can_fail(self) -> bool:
        """Whether anything goes wrong but clients that leave and deadlines that pass."""
        return bool(self.incidents) or any(self.link_faults) or any(self.scheduler_faults)

    @property
    def servable_jobs(self) -> list[Job]:
        return [job for job in self.jobs if not job.is_too_large]

    @property
    def patience(self) -> int:
        """Ticks within which every request ends, however unlucky the delays.

        While nothing goes wrong: as if the requests were computed one after another, each prompt as often as optimism and one retraction
        allow. Where something can go wrong: that much for each attempt, and the time-outs that find out about a failed one.
        """
        policy, delays = self.policy, self.delays
        turn = 1 + delays.turn + delays.step
        chunk_tokens = policy.step_tokens // policy.page_size * policy.page_size
        work = 10 * (delays.message + delays.announce + policy.grace + turn)
        for job in self.servable_jobs:
            num_tokens = len(job.prompt) + job.sampling.max_tokens
            num_steps = (policy.retries + 2) * (num_tokens // chunk_tokens + 1) + 2 * job.sampling.max_tokens
            num_chunks = len(job.prompt) // policy.page_size + 2
            work += num_steps * turn + num_chunks * (delays.chunk + turn) + 4 * (delays.message + turn)
        if not self.can_fail:
            return work
        time_outs = HEARTBEAT_TIMEOUT_TICKS + ANNOUNCE_TIMEOUT_TICKS + BOOTSTRAP_TIMEOUT_TICKS + HOLD_TIMEOUT_TICKS + LATE_TICKS
        return policy.max_attempts * (work + time_outs) + max((incident.until or 0 for incident in self.incidents), default=0)
