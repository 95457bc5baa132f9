"""The picture of a request and its trace, from notes that were written down by hand; and what a router notes of fake workers."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdjax.observe.timeline_trace import page_runs, trace
from pdjax.observe.timeline_view import RequestView, SequenceView, clock_shift_s, view
from pdjax.observe.timelines import RequestTimelines, SequenceRecord
from pdjax.protocol import Failed, Finished, SequenceRequest, Stage
from tests.test_router_fakes import Rig, Step, collect, cut, decode_steps, failed, prefill_steps, run

PREFILL = [
    Stage("bootstrap_queue", 103.0, 104.0),
    Stage("waiting", 104.0, 105.0),
    Stage("forward", 105.0, 115.0),
    Stage("delivering", 115.0, 118.0),
    Stage("chunk", 105.0, 115.0, "chunks", 20),
    Stage("early_send", 105.0, 105.0, "sends", 4),
    Stage("early_send", 106.0, 106.0, "sends", 4),
    Stage("last_send", 106.5, 106.5, "sends", 2),
]
DECODE = [
    Stage("prealloc", 102.5, 103.0),
    Stage("transfer", 103.0, 119.0),
    Stage("decode_queue", 119.0, 119.5),
    Stage("first_step", 119.5, 121.0),
    Stage("decode", 121.0, 130.0),
    Stage("receive", 108.0, 108.0, "receives", 4),
    Stage("receive", 109.0, 109.0, "receives", 4),
    Stage("receive", 118.5, 118.5, "receives", 2),
]


class Clock:
    def __init__(self, now_s: float):
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


def noted(prefill: list[Stage] = PREFILL, decode: list[Stage] = DECODE) -> RequestTimelines:
    """Received at 100, tokenized at 101, dispatched at 102, tokens at 116 and 122, end at 131."""
    clock = Clock(101.0)
    timelines = RequestTimelines(clock)
    timelines.arrived("cmpl-1", 1.0)
    record = timelines.begin("cmpl-1-0")
    clock.now_s = 102.0
    ended = {
        "prefill": Finished(reason="handed_off", stages=prefill),
        "decode": Finished(reason="length", stages=decode),
    }
    record.dispatched(7, {"prefill": "p:1", "decode": "d:1"}, ended)
    for now_s in (116.0, 122.0):
        clock.now_s = now_s
        record.gave_token()
    clock.now_s = 131.0
    record.end("ok")
    return timelines


def picture(timelines: RequestTimelines) -> RequestView:
    record = timelines.find("cmpl-1")
    assert record is not None
    return view(record)


def path(steps: list) -> list[tuple[str, str, float]]:
    return [(step.where, step.name, step.duration_s) for step in steps]


def test_both_paths_are_the_ones_worked_out_by_hand_and_add_up():
    seen = picture(noted())
    [sequence] = seen.sequences
    assert (seen.received_s, sequence.ttft_s, sequence.handoff_s, sequence.end_s) == (100.0, 16.0, 6.0, 31.0)
    assert path(sequence.ttft_path) == [
        ("router", "tokenize", 1.0),
        ("router", "route", 1.0),
        ("wire", "to worker", 1.0),
        ("prefill", "bootstrap_queue", 1.0),
        ("prefill", "waiting", 1.0),
        ("prefill", "forward", 10.0),
        ("wire", "to router", 1.0),
    ]
    assert path(sequence.handoff_path) == [
        ("decode", "transfer", 3.0),
        ("decode", "decode_queue", 0.5),
        ("decode", "first_step", 1.5),
        ("wire", "to router", 1.0),
    ]


def test_a_local_prompt_is_told_by_decode_alone():
    clock = Clock(100.0)
    timelines = RequestTimelines(clock)
    record = timelines.begin("cmpl-1-0")
    stages = [Stage("prealloc", 101.0, 102.0), Stage("forward", 102.0, 105.0), Stage("decode", 105.0, 109.0)]
    record.dispatched(7, {"decode": "d:1"}, {"decode": Finished(reason="stop", stages=stages)})
    clock.now_s = 106.0
    record.gave_token()
    [sequence] = picture(timelines).sequences
    assert path(sequence.ttft_path) == [
        ("router", "route", 0.0),
        ("wire", "to worker", 1.0),
        ("decode", "prealloc", 1.0),
        ("decode", "forward", 3.0),
        ("wire", "to router", 1.0),
    ]
    assert sequence.handoff_path == [] and sequence.outcome is None


def test_an_attempt_that_gave_nothing_is_one_step_of_the_path():
    clock = Clock(100.0)
    timelines = RequestTimelines(clock)
    record = timelines.begin("cmpl-1-0")
    broken = Failed(kind="bootstrap", message="gone", retriable=True, stages=[Stage("bootstrap_queue", 101.0, 104.0)])
    record.dispatched(7, {"prefill": "p:1", "decode": "d:1"}, {"prefill": broken})
    clock.now_s = 105.0
    record.dispatched(8, {"prefill": "p:2", "decode": "d:1"}, {})
    clock.now_s = 109.0
    record.gave_token()
    [sequence] = picture(timelines).sequences
    assert path(sequence.ttft_path) == [
        ("router", "route", 0.0),
        ("router", "failed attempt", 5.0),
        ("prefill", "not told", 4.0),
    ]
    assert [worker.ended for worker in sequence.attempts[0].workers] == ["failed: bootstrap", None]
    assert sequence.attempts[0].workers[0].message == "gone"


@pytest.mark.parametrize(("ahead_s", "shift_s"), [(0.0, 0.0), (50.0, -49.0), (-50.0, 49.0)])
def test_a_worker_whose_clock_is_off_is_moved_as_little_as_cause_and_effect_demand(ahead_s, shift_s):
    """By a clock that is right the first stage began at 103 and delivery at 115; dispatch was at 102, the router had the token at 116."""
    moved = [msgspec.structs.replace(each, start_s=each.start_s + ahead_s, end_s=each.end_s + ahead_s) for each in PREFILL]
    [sequence] = picture(noted(prefill=moved)).sequences
    [prefill, decode] = sequence.attempts[0].workers
    assert (prefill.clock_shift_s, decode.clock_shift_s) == (shift_s, 0.0)
    assert sum(step.duration_s for step in sequence.ttft_path) == sequence.ttft_s
    assert all(step.duration_s >= 0 for step in sequence.ttft_path)


@given(st.floats(-1e3, 1e3), st.floats(0, 100), st.floats(0, 100))
def test_no_shift_puts_a_stage_before_its_cause(offset_s, start_s, length_s):
    stages = [Stage("a", offset_s + start_s, offset_s + start_s + length_s)]
    shift_s = clock_shift_s(stages, 0.0, [(offset_s + start_s + length_s, 1e4)])
    assert stages[0].start_s + shift_s >= -1e-9
    assert clock_shift_s([], 5.0, []) == 0.0


def test_pages_are_followed_from_hand_over_to_installation():
    [sequence] = picture(noted()).sequences
    runs = page_runs(*sequence.attempts[0].workers)
    assert [(run.first, run.count, run.send.name, run.start_s, run.end_s) for run in runs] == [
        (0, 4, "early_send", 5.0, 8.0),
        (4, 4, "early_send", 6.0, 9.0),
        (8, 2, "last_send", 15.0, 18.5),  # handed over behind the last chunk: not there before that was computed
    ]


def test_early_pages_are_seen_to_arrive_under_the_computation():
    [sequence] = picture(noted()).sequences
    prefill, _ = sequence.attempts[0].workers
    [chunk] = [stage for stage in prefill.stages if stage.track == "chunks"]
    early = [run for run in page_runs(*sequence.attempts[0].workers) if run.send.name == "early_send"]
    assert all(chunk.start_s <= run.start_s and run.end_s <= chunk.end_s for run in early)


def test_a_trace_has_a_track_for_everything_and_nothing_overlaps_on_a_track():
    events = json.loads(json.dumps(trace(picture(noted()))))["traceEvents"]
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert list(processes.values()) == ["router", "prefill p:1", "KV transfer", "decode d:1"]
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append((event["ts"], event["dur"]))
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert tracks.keys() == named
    for slices in tracks.values():
        for (start, length), (after, _) in itertools.pairwise(slices):
            assert length >= 0 and start + length <= after + 1e-3, "slices of a track come in order and do not overlap"
    [chunk] = [event for event in events if event["name"] == "chunk"]
    assert (chunk["ts"], chunk["dur"], chunk["args"]) == (5e6, 10e6, {"tokens": 20})


def test_only_the_last_requests_are_remembered():
    clock = Clock(0.0)
    timelines = RequestTimelines(clock, capacity=3)
    for i in range(5):
        timelines.arrived(f"cmpl-{i}", 0.5)
        timelines.begin(f"cmpl-{i}-0")
    assert [timelines.find(f"cmpl-{i}") is not None for i in range(5)] == [False, False, True, True, True]
    assert len(timelines._arrivals) == 3


def test_a_request_is_all_its_sequences_and_no_others():
    timelines = RequestTimelines(Clock(0.0))
    for name in ("cmpl-1-0", "cmpl-1-1", "cmpl-10-0", "alone"):
        timelines.begin(name)
    found = timelines.find("cmpl-1")
    assert found is not None and [each.sequence_id for each in found.sequences] == ["cmpl-1-0", "cmpl-1-1"]
    assert timelines.find("cmpl") is None
    assert timelines.find("alone") is not None


# A router with fake workers


def told(steps: list[Step], *stages: Stage) -> list[Step]:
    return [msgspec.structs.replace(step, stages=list(stages)) if isinstance(step, Finished | Failed) else step for step in steps]


def the_one(rig: Rig) -> tuple[SequenceRecord, SequenceView]:
    record = rig.router.timelines.find("r")
    assert record is not None
    return record.sequences[0], view(record).sequences[0]


def test_a_router_notes_dispatch_two_tokens_and_what_both_workers_told() -> None:
    async def scenario() -> None:
        rig = Rig("p1 d1")

        def prefill(request: SequenceRequest) -> list[Step]:
            return told(prefill_steps(request), Stage("forward", 1.0, 2.0))

        def decode(request: SequenceRequest) -> list[Step]:
            return told(decode_steps(request), Stage("prealloc", 1.0, 2.0))

        rig.plan("p1", prefill)
        rig.plan("d1", decode)
        await collect(rig.generate([5, 6]))
        record, seen = the_one(rig)
        assert (record.outcome, len(record.token_times_s), len(record.attempts)) == ("ok", 2, 1)
        assert record.attempts[0].workers == {"prefill": "p1:1", "decode": "d1:1"}
        first = {side: last.stages[0].name for side, last in record.attempts[0].ended.items()}
        assert first == {"prefill": "forward", "decode": "prealloc"}
        assert record.began_s <= record.attempts[0].dispatched_s <= record.token_times_s[0] <= record.token_times_s[1] <= record.ended_s
        assert sum(step.duration_s for step in seen.ttft_path) == pytest.approx(seen.ttft_s)

    run(scenario)


def test_a_router_notes_every_attempt_and_how_it_failed() -> None:
    async def scenario() -> None:
        rig = Rig("p1 p2 d1")
        rig.plan("p1", cut(prefill_steps, 0, failed("bootstrap")))
        await collect(rig.generate([5, 6]))
        record, seen = the_one(rig)
        assert [attempt.workers["prefill"] for attempt in record.attempts] == ["p1:1", "p2:1"]
        assert record.attempts[0].room != record.attempts[1].room
        assert [attempt.workers[0].ended for attempt in seen.attempts] == ["failed: bootstrap", "handed_off"]
        assert [step.name for step in seen.ttft_path][:2] == ["route", "failed attempt"]

    run(scenario)


def test_a_client_that_leaves_is_an_outcome_too() -> None:
    async def scenario() -> None:
        rig = Rig("p1 d1")
        parts = rig.generate([5, 6])
        await anext(parts)
        await parts.aclose()
        record, seen = the_one(rig)
        assert record.outcome == "cancelled" and record.ended_s is not None
        assert len(record.token_times_s) == 1 and seen.handoff_s is None

    run(scenario)
