"""One client request at the simulated router: attempt after attempt until the answer is whole, and the check of every token on the way.

The state machine of `pdjax.router.router.Router._answer`, turned by events instead of awaiting them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from pdjax.errors import BadRequest, DeadlineExceeded, NoWorker, OverCapacity, WorkerFailed
from pdjax.observe.timelines import SequenceRecord
from pdjax.protocol import Event, Failed, Finished, Tokens
from pdjax.router.merge import Ended, Side
from pdjax.router.policy import Pair
from pdjax.router.sequence import Sequence
from pdjax.simulation.arithmetic import expected_answer
from pdjax.simulation.router import SETTLE_TICKS, Attempt, Router
from pdjax.simulation.scenario import HEARTBEAT_TIMEOUT_TICKS, Job

Outcome = Literal["ok", "cancelled", "bad_request", "deadline", "no_worker", "over_capacity", "worker_failed"]

OUTCOMES: dict[type[Exception], Outcome] = {
    BadRequest: "bad_request",
    DeadlineExceeded: "deadline",
    NoWorker: "no_worker",
    OverCapacity: "over_capacity",
    WorkerFailed: "worker_failed",
}
WAIT_TICKS = 6
"""Pause before another attempt, and between two looks for a worker."""


class Call:
    """`outcome`: how it ended, None while it goes on; `ended_at`: when. Every token is compared with the answer computed by hand."""

    def __init__(self, router: Router, job: Job, max_attempts: int, on_end: Callable[[], None]):
        self.job = job
        record = SequenceRecord(job.name, router.around.timeline.clock, job.at)
        self.sequence = Sequence(record, job.prompt, job.sampling, job.deadline, max_attempts)
        self.expected = expected_answer(job.prompt, job.sampling)
        self.outcome: Outcome | None = None
        self.finished: Finished | None = None
        self.ended_at = 0
        self._router = router
        self._on_end = on_end
        self._attempt: Attempt | None = None
        self._give_up_at = 0
        self._num_events = 0

    @property
    def tokens(self) -> list[int]:
        return self.sequence.tokens

    def begin(self) -> None:
        """The request arrives."""
        timeline = self._router.around.timeline
        timeline.at(self.job.deadline - timeline.now, self._expire)
        if self.job.cancel_at is not None:
            timeline.at(self.job.cancel_at - timeline.now, self._cancel)
        self._next_attempt()

    def _next_attempt(self) -> None:
        if (whole := self.sequence.complete()) is not None:
            return self._end("ok", whole)
        self._give_up_at = self._now() + HEARTBEAT_TIMEOUT_TICKS
        self._choose()

    def _choose(self) -> None:
        """Take the best pair; a sequence that is under way waits for one."""
        if self.outcome is not None:
            return
        sequence, policy = self.sequence, self._router.policy
        choose = policy.choose_decode if sequence.is_last_attempt else policy.choose_pair
        try:
            self._start(choose(sequence.current_prompt(), sequence.tried))
        except OverCapacity:
            if not sequence.tokens:
                return self._end("over_capacity")
            sequence.tried.full.clear()
            self._later(self._choose)
        except NoWorker:
            if not sequence.last_failure or self._now() >= self._give_up_at:
                return self._end("worker_failed" if sequence.last_failure else "no_worker")
            self._later(self._choose)

    def _start(self, pair: Pair) -> None:
        attempt = self._attempt = self._router.start(self.sequence, pair)
        self._router.attempts[attempt] = lambda: self._watch(attempt)
        requests = attempt.requests
        if requests.prefill is not None:
            attempt.halves[Side.PREFILL].submit(requests.prefill, lambda event: self._hear(attempt, Side.PREFILL, event))
        attempt.halves[Side.DECODE].submit(requests.decode, lambda event: self._hear(attempt, Side.DECODE, event))
        self._watch(attempt)

    def _watch(self, attempt: Attempt) -> None:
        """Give up a worker that is gone; look again when the next one could be."""
        if attempt.is_closed:
            return
        fleet = self._router.fleet
        gone_at = {side: fleet.gone_at(half.member, half.last_event_s) for side, half in attempt.halves.items() if half.is_open}
        for side, at in gone_at.items():
            if at <= self._now():
                attempt.halves[side].is_open = False
                self._hear(attempt, side, Failed(kind="internal", message="nothing heard from the worker", retriable=True))
                return self._watch(attempt)
        if gone_at:
            timeline = self._router.around.timeline
            timeline.at(int(min(gone_at.values())) - timeline.now, self._watch, attempt)

    def _hear(self, attempt: Attempt, side: Side, event: Event) -> None:
        if attempt.is_closed:
            return
        self._num_events += 1
        self._note(attempt, side, event)
        for token in attempt.merge.feed(side, event):
            self._give(token.index, token.token)
        self._look_at(attempt)

    def _note(self, attempt: Attempt, side: Side, event: Event) -> None:
        """What an event says about its worker."""
        pair = attempt.pair
        if isinstance(event, Failed) and event.kind == "internal":
            self._router.fleet.suspect(pair.worker(side))
        elif isinstance(event, Tokens) and side is Side.PREFILL and pair.prefill is not None:
            self._router.policy.computed(pair.prefill, attempt.requests.decode.prompt)

    def _give(self, index: int, token: int) -> None:
        """To the client."""
        assert index == len(self.tokens), f"{self.job.name}: token {index} is given where {len(self.tokens)} is due"
        assert index < len(self.expected), f"{self.job.name}: token {index} is given, the answer has {len(self.expected)}"
        assert token == self.expected[index], f"{self.job.name}: token {index} is {token}, computed by hand {self.expected[index]}"
        self.sequence.gave(token)

    def _look_at(self, attempt: Attempt) -> None:
        merge = attempt.merge
        if merge.outcome is None:
            if merge.is_settling:
                self._router.around.timeline.at(SETTLE_TICKS, self._settle, attempt, self._num_events)
            return
        self._router.close(attempt)
        self.sequence.note_cached_tokens(merge.cached_tokens)
        if isinstance(merge.outcome, Ended):
            return self._end("ok", self.sequence.finished(merge.outcome.finished))
        broken = merge.outcome
        self._router.around.trace.note("router", "%s: attempt broken on %s: %s", self.job.name, broken.side.value, broken.failed)
        if self.sequence.complete() is not None:
            return self._next_attempt()
        try:
            self.sequence.note_failure(attempt.pair, broken)
        except (BadRequest, DeadlineExceeded, WorkerFailed) as error:
            return self._end(OUTCOMES[type(error)])
        if broken.failed.kind == "over_capacity":
            self._next_attempt()
        else:
            self._later(self._go_on)

    def _settle(self, attempt: Attempt, num_events: int) -> None:
        if not attempt.is_closed and num_events == self._num_events:
            attempt.merge.conclude()
            self._look_at(attempt)

    def _go_on(self) -> None:
        if self.outcome is None:
            self._next_attempt()

    def _expire(self) -> None:
        if self.outcome is None:
            self._drop("deadline")

    def _cancel(self) -> None:
        if self.outcome is None:
            self._drop("cancelled")

    def _drop(self, outcome: Outcome) -> None:
        if self._attempt is not None and not self._attempt.is_closed:
            self._router.close(self._attempt)
        self._end(outcome)

    def _end(self, outcome: Outcome, finished: Finished | None = None) -> None:
        assert self.outcome is None, f"{self.job.name} ended with {self.outcome} and again with {outcome}"
        self.outcome, self.finished, self.ended_at = outcome, finished, self._now()
        self._router.around.trace.note("client", "%s: %s after %d tokens", self.job.name, outcome, len(self.tokens))
        self._on_end()

    def _later(self, action: Callable[[], None]) -> None:
        around = self._router.around
        around.timeline.at(1 + around.chance.upto(WAIT_TICKS), action)

    def _now(self) -> int:
        return self._router.around.timeline.now
