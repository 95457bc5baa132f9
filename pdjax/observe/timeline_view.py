"""One picture of a request out of what the router and the workers noted: stages of all sequences and attempts on one clock, and the
two paths that a client feels: to the first token and from there to the second."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from pdjax.observe.timelines import AttemptRecord, RequestRecord, SequenceRecord
from pdjax.protocol import Failed, Finished, Stage

BEHIND_FIRST_TOKEN = ("delivering", "decode")
"""Stages of a worker that begin with the first token of an attempt."""


class Step(msgspec.Struct, frozen=True):
    """One step of a path. `where`: router, prefill, decode, or wire for the way between the router and a worker."""

    where: str
    name: str
    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


class StageView(msgspec.Struct, frozen=True):
    """A `pdjax.protocol.Stage`, as an object."""

    name: str
    start_s: float
    end_s: float
    track: str
    count: int


class WorkerView(msgspec.Struct, frozen=True):
    """One worker's part in one attempt. `ended` None and no stages: the router never heard its last word.

    `clock_shift_s` was added to the worker's times: as little as puts them behind their cause and before their effect on the router.
    """

    side: str
    address: str
    ended: str | None
    message: str | None
    clock_shift_s: float
    stages: list[StageView]


class AttemptView(msgspec.Struct, frozen=True):
    room: str
    dispatched_s: float
    workers: list[WorkerView]


class SequenceView(msgspec.Struct, frozen=True):
    """`ttft_path` adds up to `ttft_s`, `handoff_path` to `handoff_s`; None and empty where there was no such token."""

    sequence_id: str
    outcome: str | None
    end_s: float | None
    ttft_s: float | None
    handoff_s: float | None
    ttft_path: list[Step]
    handoff_path: list[Step]
    attempts: list[AttemptView]


class RequestView(msgspec.Struct, frozen=True):
    """All times are seconds after `received_s`, which counts from the epoch by the router's clock."""

    request_id: str
    received_s: float
    sequences: list[SequenceView]


def view(request: RequestRecord) -> RequestView:
    """A picture of the request as it stands now."""
    received_s = request.arrival.received_s if request.arrival is not None else request.sequences[0].began_s
    tokenized_s = request.arrival.tokenized_s if request.arrival is not None else None
    return RequestView(request.request_id, received_s, [_sequence(each, received_s, tokenized_s) for each in request.sequences])


def _sequence(record: SequenceRecord, zero_s: float, tokenized_s: float | None) -> SequenceView:
    ends_s = [attempt.dispatched_s for attempt in record.attempts[1:]] + [record.ended_s]
    attempts = [_attempt(attempt, end_s, record, zero_s) for attempt, end_s in zip(record.attempts, ends_s, strict=False)]
    tokens_s = [time_s - zero_s for time_s in record.token_times_s]
    before = [Step("router", "tokenize", 0.0, tokenized_s - zero_s)] if tokenized_s is not None else []
    return SequenceView(
        sequence_id=record.sequence_id,
        outcome=record.outcome,
        end_s=None if record.ended_s is None else record.ended_s - zero_s,
        ttft_s=tokens_s[0] if tokens_s else None,
        handoff_s=tokens_s[1] - tokens_s[0] if len(tokens_s) > 1 else None,
        ttft_path=before + _ttft_path(attempts, before[-1].end_s if before else 0.0, tokens_s[0]) if tokens_s else [],
        handoff_path=_handoff_path(attempts, *tokens_s) if len(tokens_s) > 1 else [],
        attempts=attempts,
    )


def _attempt(record: AttemptRecord, end_s: float | None, sequence: SequenceRecord, zero_s: float) -> AttemptView:
    workers = []
    for side, address in record.workers.items():
        last = record.ended.get(side)
        stages = [] if last is None else last.stages
        shift_s = clock_shift_s(stages, record.dispatched_s, _effects(stages, sequence, end_s))
        workers.append(
            WorkerView(
                side=side,
                address=address,
                ended=_ended(last),
                message=last.message if isinstance(last, Failed) else None,
                clock_shift_s=shift_s,
                stages=[
                    StageView(each.name, each.start_s + shift_s - zero_s, each.end_s + shift_s - zero_s, each.track, each.count)
                    for each in stages
                ],
            )
        )
    return AttemptView(f"{record.room:x}", record.dispatched_s - zero_s, workers)


def _ended(last: Finished | Failed | None) -> str | None:
    if last is None:
        return None
    return f"failed: {last.kind}" if isinstance(last, Failed) else last.reason


def _effects(stages: list[Stage], sequence: SequenceRecord, end_s: float | None) -> list[tuple[float, float]]:
    """Pairs (worker's time, router's time) of which the first must not lie behind the second."""
    first_token_s = [each.start_s for each in stages if each.name == "delivering"]
    effects = list(zip(first_token_s, sequence.token_times_s[:1], strict=False))
    if end_s is not None and stages:
        effects.append((max(each.end_s for each in stages), end_s))
    return effects


def clock_shift_s(stages: list[Stage], cause_s: float, effects: Iterable[tuple[float, float]]) -> float:
    """What to add to a worker's times so that none lies before `cause_s` and no effect before its reason; 0 where that holds already."""
    if not stages:
        return 0.0
    early_s = cause_s - min(each.start_s for each in stages)
    if early_s > 0:
        return early_s
    late_s = max((worker_s - router_s for worker_s, router_s in effects), default=0.0)
    return -max(late_s, 0.0)


def _ttft_path(attempts: list[AttemptView], start_s: float, token_s: float) -> list[Step]:
    """From `start_s` to the first token. Attempts that gave none are one step each."""
    tried = [attempt for attempt in attempts if attempt.dispatched_s <= token_s]
    if not tried:
        return []
    steps = [Step("router", "route", start_s, tried[0].dispatched_s)]
    for attempt, follower in zip(tried, tried[1:], strict=False):
        steps.append(Step("router", "failed attempt", attempt.dispatched_s, follower.dispatched_s))
    worker = tried[-1].workers[0]
    stages = _proper(worker)
    behind = next((i for i, stage in enumerate(stages) if stage.name in BEHIND_FIRST_TOKEN), len(stages))
    return steps + _through(worker, stages[:behind], tried[-1].dispatched_s, token_s)


def _handoff_path(attempts: list[AttemptView], first_s: float, second_s: float) -> list[Step]:
    """From the first token to the second: what decode still had to do."""
    tried = [attempt for attempt in attempts if attempt.dispatched_s <= second_s]
    if not tried:
        return []
    worker = tried[-1].workers[-1]
    stages = [stage for stage in _proper(worker) if stage.end_s > first_s and stage.name != "decode"]
    clipped = [
        StageView(each.name, max(each.start_s, first_s), min(each.end_s, second_s), "", 0) for each in stages if each.start_s < second_s
    ]
    steps = _through(worker, clipped, first_s, second_s)
    return [step for step in steps if step.name != "to worker" or step.duration_s > 0]


def _proper(worker: WorkerView) -> list[StageView]:
    return [stage for stage in worker.stages if not stage.track]


def _through(worker: WorkerView, stages: list[StageView], start_s: float, end_s: float) -> list[Step]:
    """`stages` of one worker and the ways to it and back. Without stages the worker has not told what it did."""
    if not stages:
        return [Step(worker.side, "not told", start_s, end_s)]
    inner = [Step(worker.side, stage.name, stage.start_s, stage.end_s) for stage in stages]
    return [Step("wire", "to worker", start_s, inner[0].start_s), *inner, Step("wire", "to router", inner[-1].end_s, end_s)]
