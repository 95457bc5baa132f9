"""The properties that hold at the end of every seed. Those that hold all the time are asserted where things happen."""

from __future__ import annotations

from pdjax.scheduler.decode import DecodeScheduler
from pdjax.scheduler.prefill import PrefillScheduler
from pdjax.simulation.call import Call
from pdjax.simulation.scenario import Scenario
from pdjax.simulation.worker import Worker


def check_nothing_held(worker: Worker) -> None:
    """On a worker that has nothing to do: slots, pages, rows, rooms, deadlines and streams are all back; the tree lets go of every page."""
    scheduler = worker.scheduler
    assert isinstance(scheduler, PrefillScheduler | DecodeScheduler), worker.name
    scheduler.check()
    memory = scheduler.memory
    held = {
        "request slots": scheduler.slots.num_held,
        "metadata slots": scheduler.metadata.num_held,
        "private pages": memory.num_private,
        "locked pages": memory.cache.num_pages - memory.cache.num_evictable_pages,
        "rooms": worker.open_rooms(),
        "streams": len(worker.streams),
        "deadlines": int(scheduler.next_deadline_s() is not None),
        "timelines": worker.num_timelines(),
    }
    assert not any(held.values()), f"{worker.name} still holds {held}"
    memory.cache.reset()
    assert memory.pool.num_free == memory.pool.total, f"{worker.name} has lost {memory.pool.total - memory.pool.num_free} pages"


def check_answer(call: Call, scenario: Scenario) -> None:
    """The end of a request, in time: a whole answer, or one that breaks off for a reason that the scenario explains."""
    job, num_tokens = call.job, len(call.tokens)
    where = f"{job.name} ended with {call.outcome} at {call.ended_at} after {num_tokens} of {len(call.expected)} tokens"
    if job.is_too_large:
        assert call.outcome in ("bad_request", "worker_failed", "over_capacity", "no_worker"), where
        return
    if call.outcome == "ok":
        check_whole(call, where)
    elif call.outcome == "deadline":
        assert call.ended_at >= job.deadline, f"{where}, its deadline is {job.deadline}"
    elif call.outcome == "cancelled":
        assert job.cancel_at is not None and call.ended_at >= job.cancel_at, where
    elif call.outcome == "over_capacity":
        assert not num_tokens and scenario.policy.max_queue < len(scenario.jobs), where
    else:
        assert scenario.can_fail and call.outcome in ("no_worker", "worker_failed"), where
    if not scenario.can_fail:
        assert call.sequence.num_failed == 0, f"{where}: {call.sequence.last_failure}, and nothing went wrong"
    waited = call.ended_at - job.at
    assert waited <= scenario.patience, f"{where}: it waited {waited} ticks, {scenario.patience} are enough"


def check_whole(call: Call, where: str) -> None:
    """Every token is there (each was compared when it came), and the end says why it is one."""
    finished = call.finished
    assert finished is not None and len(call.tokens) == len(call.expected), where
    sampling = call.job.sampling
    is_stop = call.expected[-1] in sampling.stop_token_ids and len(call.expected) >= sampling.min_tokens
    assert finished.reason == ("stop" if is_stop else "length"), f"{where}: the reason is {finished.reason}"
    assert finished.stop_token == (call.expected[-1] if is_stop else None), f"{where}: the stop token is {finished.stop_token}"
    assert 0 <= finished.cached_tokens <= len(call.job.prompt), f"{where}: {finished.cached_tokens} cached tokens"


def check_forwards(worker: Worker, retries: int) -> None:
    """Optimism costs at most `retries` forwards beyond the one that counts."""
    for attempt, count in worker.num_forwards.items():
        assert count <= retries + 1, f"{attempt} was computed {count} times on {worker.name}, at most {retries + 1} are allowed"
