"""What the schedulers record of each request, over the engine whose clock counts ticks."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdjax.protocol import Failed, Finished, Stage
from pdjax.scheduler.faults import FaultHooks
from pdjax.scheduler.timeline import MAX_SPANS, MAX_STAGES, NO_RECORDER, ClockRecorder, Timeline, Totals
from tests.scheduler_harness import Cluster, expected_answer
from tests.test_schedulers import prompt_of

FOLLOWERS = {
    "prefill": {
        "bootstrap_queue": {"waiting"},
        "waiting": {"forward", "bootstrap_queue"},
        "forward": {"parked", "delivering", "waiting", "bootstrap_queue"},
        "parked": {"delivering", "waiting", "bootstrap_queue"},
        "delivering": set(),
    },
    "decode": {
        "prealloc": {"transfer", "forward"},
        "transfer": {"decode_queue"},
        "decode_queue": {"first_step", "retracted"},
        "first_step": {"decode", "retracted"},
        "forward": {"decode", "retracted"},
        "decode": {"retracted"},
        "retracted": {"forward"},
    },
}


def proper(stages: list[Stage]) -> list[Stage]:
    return [stage for stage in stages if not stage.track]


def names(stages: list[Stage]) -> list[str]:
    return [stage.name for stage in proper(stages)]


def took(stages: list[Stage], name: str) -> list[float]:
    return [stage.end_s - stage.start_s for stage in stages if stage.name == name]


def pages(stages: list[Stage], track: str) -> int:
    return sum(stage.count for stage in stages if stage.track == track)


def check(stages: list[Stage], side: str, begin_s: float, end_s: float) -> None:
    """What holds for every request, however it ended."""
    path = proper(stages)
    assert path[0].name == ("bootstrap_queue" if side == "prefill" else "prealloc") and path[0].start_s == begin_s
    assert path[-1].end_s <= end_s
    for before, after in itertools.pairwise(path):
        assert before.end_s == after.start_s, f"a gap or an overlap between {before} and {after}"
        assert after.name in FOLLOWERS[side][before.name], f"{after.name} after {before.name}"
    for stage in stages:
        assert path[0].start_s <= stage.start_s <= stage.end_s <= path[-1].end_s, stage
    for before, after in itertools.pairwise(stage for stage in stages if stage.name == "chunk"):
        assert before.end_s <= after.start_s, "the chunks of one sequence follow each other"
    assert len(stages) <= MAX_STAGES + MAX_SPANS + 10


# One timeline


def test_stages_follow_each_other_and_what_is_open_ends_with_the_request():
    timeline = Timeline("bootstrap_queue", 1.0)
    timeline.open("bootstrap", 1.0)
    timeline.mark("waiting", 2.0)
    timeline.close("bootstrap", 3.0)
    timeline.open("transfer", 4.0)
    timeline.open("transfer", 4.5)
    timeline.note("early_send", "sends", 7, 5.0)
    assert timeline.end(6.0) == [
        Stage("bootstrap_queue", 1.0, 2.0),
        Stage("waiting", 2.0, 6.0),
        Stage("bootstrap", 1.0, 3.0, "bootstrap"),
        Stage("early_send", 5.0, 5.0, "sends", 7),
        Stage("transfer", 4.0, 6.0, "transfer"),
    ]


def test_a_chunk_that_waited_behind_its_forerunner_starts_when_that_ended():
    timeline = Timeline("forward", 0.0)
    timeline.chunk(0.0, 16, 10.0)
    timeline.chunk(1.0, 16, 19.0)
    timeline.chunk(25.0, 4, 30.0)
    assert [(stage.start_s, stage.end_s) for stage in timeline.end(30.0)[1:]] == [(0.0, 10.0), (10.0, 19.0), (25.0, 30.0)]


@given(st.lists(st.tuples(st.sampled_from(["mark", "open", "close", "note", "chunk"]), st.floats(-1e3, 1e3)), max_size=40))
def test_a_clock_that_jumps_makes_no_duration_negative(events):
    timeline = Timeline("a", 0.0)
    for kind, now_s in events:
        match kind:
            case "mark":
                timeline.mark("a", now_s)
            case "open":
                timeline.open("transfer", now_s)
            case "close":
                timeline.close("transfer", now_s)
            case "note":
                timeline.note("send", "sends", 1, now_s)
            case "chunk":
                timeline.chunk(-now_s, 1, now_s)
    stages = timeline.end(-5.0)
    assert all(stage.end_s >= stage.start_s for stage in stages)
    assert all(before.end_s == after.start_s for before, after in itertools.pairwise(proper(stages)))


def test_a_timeline_is_bounded_and_loses_no_page_token_or_second():
    timeline = Timeline("forward", 0.0)
    timeline.open("transfer", 0.0)
    for i in range(1000):
        timeline.chunk(float(i), 4, i + 1.0)
        timeline.note("send", "sends", 2, i + 1.0)
        timeline.mark("retracted" if i % 2 else "forward", i + 1.0)
    stages = timeline.end(1000.0)
    assert len(stages) <= MAX_STAGES + MAX_SPANS + 2
    assert pages(stages, "chunks") == 4000 and pages(stages, "sends") == 2000
    assert sum(stage.end_s - stage.start_s for stage in proper(stages)) == 1000.0
    assert took(stages, "transfer") == [1000.0]


def test_totals_leave_pages_sent_under_the_computation_out_of_the_speed():
    totals = Totals()
    totals.add(
        [
            Stage("forward", 0.0, 10.0),
            Stage("delivering", 10.0, 12.0),
            Stage("early_send", 0.0, 0.0, "sends", 100),
            Stage("send", 5.0, 5.0, "sends", 30),
            Stage("last_send", 6.0, 6.0, "sends", 6),
        ]
    )
    assert totals.speed_pages_per_s == 3.0
    assert totals.counts["early_send"] == 100
    assert totals.seconds == {"forward": 10.0, "delivering": 2.0}
    assert totals.ends == {"forward": 1, "delivering": 1}


def test_what_is_not_known_is_left_alone():
    recorder = ClockRecorder(lambda: 1.0)
    recorder.mark("nobody", "waiting")
    recorder.note("nobody", "send", "sends", 1)
    recorder.chunk("nobody", 0.0, 1)
    assert recorder.finished("nobody") == [] and len(recorder) == 0
    assert not recorder.totals.ends


# Both schedulers


def answered(cluster: Cluster, name: str = "a") -> tuple[list[Stage], list[Stage]]:
    return cluster.ends[name, "prefill"].stages, cluster.ends[name, "decode"].stages


def run_until_token(cluster: Cluster, name: str = "a") -> float:
    while 0 not in cluster.tokens[name]:
        cluster.tick()
        assert cluster.now < 500
    return cluster.now


def test_nothing_is_recorded_unless_somebody_asks():
    cluster = Cluster()
    cluster.submit(cluster.request("a", prompt_of(20), 4))
    cluster.run()
    assert cluster.prefill.recorder is NO_RECORDER
    assert answered(cluster) == ([], [])


def test_the_stages_before_delivery_are_the_time_to_the_first_token():
    cluster = Cluster(record=True)
    cluster.submit(cluster.request("a", prompt_of(45), 5), decode_delay=7)
    first_token_s = run_until_token(cluster)
    cluster.run()
    prefill, decode = answered(cluster)
    assert names(prefill) == ["bootstrap_queue", "waiting", "forward", "delivering"]
    assert names(decode) == ["prealloc", "transfer", "decode_queue", "first_step", "decode"]
    assert sum(stage.end_s - stage.start_s for stage in proper(prefill)[:-1]) == first_token_s
    assert took(prefill, "bootstrap") == took(prefill, "bootstrap_queue") and took(prefill, "bootstrap")[0] >= 7
    assert pages(prefill, "chunks") == 45
    assert pages(prefill, "sends") == pages(decode, "receives") == 12
    [transfer] = [stage for stage in prefill if stage.name == "transfer"]
    first_chunk, *_ = (stage for stage in prefill if stage.name == "chunk")
    assert transfer.start_s == min(stage.start_s for stage in prefill if stage.track == "sends") == first_chunk.start_s
    assert transfer.end_s == proper(prefill)[-1].end_s


def test_late_bootstrap_shows_as_time_parked_and_never_as_a_negative_time():
    """Row 13 of what goes wrong in systems of this kind."""
    cluster = Cluster(record=True, retries=1)
    cluster.submit(cluster.request("a", prompt_of(45), 5), decode_delay=30)
    first_token_s = run_until_token(cluster)
    cluster.run()
    prefill, _ = answered(cluster)
    assert names(prefill) == ["bootstrap_queue", "waiting", "forward", "parked", "delivering"]
    assert took(prefill, "parked")[0] > 20
    [bootstrap], [parked] = ([stage for stage in prefill if stage.name == name] for name in ("bootstrap", "parked"))
    assert bootstrap.end_s == parked.end_s >= 30
    assert all(stage.end_s >= stage.start_s for stage in prefill)
    assert sum(stage.end_s - stage.start_s for stage in proper(prefill)[:-1]) == first_token_s
    assert {stage.name for stage in prefill if stage.track == "sends"} == {"held_send"}, "nothing left before bootstrap"


def test_the_waiting_time_of_a_retry_starts_anew():
    cluster = Cluster(record=True, retries=2, drop_on_miss=True)
    cluster.submit(cluster.request("a", prompt_of(20), 5), decode_delay=60)
    cluster.run()
    prefill, _ = answered(cluster)
    assert names(prefill) == [*["bootstrap_queue", "waiting", "forward"] * 3, "delivering"]
    assert pages(prefill, "retries") == 2
    assert max(took(prefill, "waiting")) <= 2
    assert took(prefill, "bootstrap_queue")[1] <= 4 and took(prefill, "bootstrap_queue")[2] > 40


def test_a_cached_prefix_is_seen_to_leave_before_its_step_is_computed():
    cluster = Cluster(record=True, window=8)
    prompt = prompt_of(48)
    cluster.submit(cluster.request("warm", prompt[:32], 1))
    cluster.run()
    cluster.submit(cluster.request("a", prompt, 4))
    cluster.run()
    prefill, decode = answered(cluster)
    early = [stage for stage in prefill if stage.name == "early_send"]
    [chunk] = [stage for stage in prefill if stage.name == "chunk"]
    assert sum(stage.count for stage in early) == 8 and chunk.count == 16
    assert all(stage.end_s <= chunk.start_s for stage in early)
    assert [stage.start_s < chunk.end_s for stage in decode if stage.track == "receives"][:2] == [True, True]


def test_a_local_prompt_and_its_retraction_are_told():
    cluster = Cluster(record=True, decode_pages=12, reserve=1)
    prompts = {name: prompt_of(12, i) for i, name in enumerate("abc")}
    for name, prompt in prompts.items():
        cluster.submit(cluster.request(name, prompt, 16, local=True))
    cluster.run()
    told = {name: cluster.ends[name, "decode"].stages for name in prompts}
    assert cluster.decode.num_retractions > 0
    assert sum(names(stages).count("retracted") for stages in told.values()) == cluster.decode.num_retractions
    for name, stages in told.items():
        check(stages, "decode", 0.0, cluster.now)
        assert names(stages)[:3] == ["prealloc", "forward", "decode"]
        assert cluster.answer(name) == expected_answer(prompts[name], 16)


@pytest.mark.parametrize("ticks", range(0, 14))
def test_a_request_that_is_aborted_tells_how_far_it_came(ticks):
    cluster = Cluster(record=True, retries=1, max_delay=2)
    cluster.submit(cluster.request("a", prompt_of(45), 5), decode_delay=4)
    for _ in range(ticks):
        cluster.tick()
    cluster.prefill.abort("a")
    cluster.decode.abort("a")
    cluster.late.clear()
    cluster.run()
    for side in ("prefill", "decode"):
        if end := cluster.ends.get(("a", side)):
            check(end.stages, side, 0.0 if side == "prefill" else 4.0, cluster.now)
    assert not len(cluster.prefill.recorder) and not len(cluster.decode.recorder)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6))
def test_whatever_happens_stages_are_complete_in_order_and_never_negative(seed):
    rng = random.Random(seed)
    forced = frozenset(f"r{i}" for i in range(12) if rng.random() < 0.2)
    cluster = Cluster(
        record=True,
        prefill_pages=rng.choice([24, 64]),
        decode_pages=rng.choice([20, 64]),
        slots=rng.choice([2, 8]),
        metadata=rng.choice([1, 2, 8]),
        step_tokens=rng.choice([4, 16]),
        max_delay=rng.choice([0, 5]),
        seed=seed,
        reserve=rng.choice([1, 6]),
        retries=rng.choice([0, 1, 3]),
        drop_on_miss=rng.random() < 0.5,
        faults=FaultHooks(lambda request_id: request_id in forced, lambda: rng.random() < 0.003),
    )
    begins: dict[tuple[str, str], float] = {}
    for i in range(10):
        name, delay = f"r{i}", rng.choice([0, 0, 3, 20])
        is_local = rng.random() < 0.2
        request = cluster.request(name, prompt_of(rng.randint(1, 40), rng.randint(0, 3)), rng.randint(1, 12), local=is_local)
        begins[name, "prefill"], begins[name, "decode"] = cluster.now, cluster.now + delay
        cluster.submit(request, decode_delay=delay)
        for _ in range(rng.randint(0, 4)):
            cluster.tick()
        if rng.random() < 0.15:
            cluster.prefill.abort(name)
            cluster.decode.abort(name)
    for _ in range(400):
        cluster.tick()
        # Whoever lost its other side is let go, as a router would.
        for name, side in list(cluster.ends):
            if isinstance(cluster.ends[name, side], Failed):
                cluster.prefill.abort(name)
                cluster.decode.abort(name)
    for (name, side), end in cluster.ends.items():
        check(end.stages, side, begins[name, side], cluster.now)
        if side == "decode" and isinstance(end, Finished):
            assert names(end.stages)[-1] == "decode"
    for name in {name for name, _ in cluster.ends}:
        prefill, decode = cluster.ends.get((name, "prefill")), cluster.ends.get((name, "decode"))
        if isinstance(prefill, Finished) and prefill.reason == "handed_off":
            assert names(prefill.stages)[-1] == "delivering"
            assert decode is None or pages(prefill.stages, "sends") == pages(decode.stages, "receives")
    assert len(cluster.prefill.recorder) == len(cluster.decode.recorder) == 0
