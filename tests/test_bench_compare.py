"""The comparison of designs, against scripted servers: nothing here starts a worker or depends on how fast it is."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from pdjax import bench
from pdjax.benchmarks import compare, compare_report, trace
from pdjax.benchmarks.client import Endpoint, RequestFailed, Sample, parse_url
from pdjax.benchmarks.compare import Surroundings, Watch
from pdjax.benchmarks.compare_plan import ComparePlan, CompareSettings, Design, System, parse_design
from pdjax.benchmarks.compare_report import LoadRun
from pdjax.benchmarks.fleet import count_ready, share_cores
from pdjax.benchmarks.load import Outcome
from pdjax.benchmarks.trace import BLOCK_TOKENS, SAMPLE, Scale, TraceRequest
from tests.scripted_server import ScriptedServer, answer

# Designs


def test_a_design_says_how_many_workers_of_which_kind() -> None:
    assert parse_design("unified:2") == Design("unified:2", 0, 2)
    assert parse_design("1p1d") == Design("1p1d", 1, 1)
    assert parse_design("2p13d") == Design("2p13d", 2, 13)
    tuned = parse_design("unified:2+scheduler.max_step_tokens=128+engine.num_pages=99")
    assert tuned.overrides == ("scheduler.max_step_tokens=128", "engine.num_pages=99") and tuned.num_decode == 2


@pytest.mark.parametrize("text", ["", "unified", "unified:0", "0p1d", "1p", "1d1p", "p1d", "unified:2,", "1p1d "])
def test_what_is_no_design_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a design looks like unified:2, 1p1d or"):
        parse_design(text)


def plan_of(cores: tuple[int, ...] = (0, 1), **settings: Any) -> ComparePlan:
    return ComparePlan(CompareSettings(**settings), cores)


def roles_of(system: System) -> list[tuple[str, object]]:
    return [(part.command[-1], part.cores) for part in system.workers]


def test_each_worker_has_the_same_share_of_the_machine_in_every_design() -> None:
    plan = plan_of(designs=("unified:2", "1p1d", "unified:1", "2p1d"))
    unified, apart, single, many = (plan.system(design) for design in plan.designs)
    one, other = frozenset({0}), frozenset({1})
    assert roles_of(unified) == [("decode", one), ("decode", other)]
    assert roles_of(apart) == [("prefill", one), ("decode", other)]
    assert roles_of(single) == [("decode", frozenset({0, 1}))]
    assert roles_of(many) == [("prefill", None), ("prefill", None), ("decode", None)]
    assert [plan.cores_a_worker(design) for design in plan.designs] == [1, 1, 2, 0]
    assert unified.router.cores is None and unified.router.command[-1] == "router"


@given(st.integers(1, 9), st.lists(st.integers(0, 99), min_size=1, max_size=12, unique=True))
def test_shares_are_equal_and_no_core_is_given_out_twice(num_workers: int, cores: list[int]) -> None:
    shares = [share for share in share_cores(num_workers, cores) if share is not None]
    if len(cores) < num_workers:
        assert not shares
        return
    assert len(shares) == num_workers and {len(share) for share in shares} == {len(cores) // num_workers}
    given_out = [core for share in shares for core in share]
    assert len(given_out) == len(set(given_out)) and set(given_out) <= set(cores)


def test_overrides_are_those_of_all_and_then_those_of_the_design() -> None:
    plan = plan_of(designs=("unified:2+engine.page_size=32", "1p1d"), overrides=("engine.page_size=8", "engine.num_pages=2000"))
    tuned, plain = (plan.system(design).workers[0].config.engine for design in plan.designs)
    assert (tuned.page_size, tuned.num_pages, plain.page_size, plain.num_pages) == (32, 2000, 8, 2000)


def test_a_worker_counts_once_the_router_calls_it_ready() -> None:
    page = """# HELP pdjax_router_workers Workers by role and health
pdjax_router_workers{health="ready",role="prefill"} 1.0
pdjax_router_workers{health="loading",role="prefill"} 4.0
pdjax_router_workers{health="ready",role="decode"} 2.0
pdjax_router_in_flight 7.0
"""
    assert count_ready(page) == 3
    assert count_ready("") == 0


# The trace


def write_trace(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def row(timestamp: int, input_length: int = 600, output_length: int = 10, hash_ids: tuple[int, ...] = (0, 1)) -> dict[str, Any]:
    return {"timestamp": timestamp, "input_length": input_length, "output_length": output_length, "hash_ids": list(hash_ids)}


def test_the_sample_is_a_small_piece_of_a_trace_and_says_whose() -> None:
    requests = trace.read_trace(SAMPLE)
    assert len(requests) == 200 and SAMPLE.stat().st_size < 100_000
    assert requests[0] == TraceRequest(0.0, 6758, 500, tuple(range(14)))
    assert all(request.blocks[0] == 0 for request in requests[:10])
    note = (SAMPLE.parent / "README.md").read_text()
    assert "Apache License" in note and "Mooncake" in note and SAMPLE.name in note


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([row(0), row(5, hash_ids=(0,))], "line 2: 600 input tokens have 2 blocks of 512, got 1 hash_ids"),
        ([row(0, input_length=0, hash_ids=())], "line 1: lengths must be at least 1, got 0 and 10"),
        ([{"timestamp": 0}], "line 1: 'input_length' is missing"),
        ([row(5), row(0)], "timestamps must not fall from line to line"),
        ([], "holds no requests"),
    ],
)
def test_a_broken_trace_is_refused_with_the_line(rows: list[dict[str, Any]], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as error:
        trace.read_trace(write_trace(tmp_path / "trace.jsonl", *rows))
    assert message in str(error.value)


def test_what_is_no_json_is_refused_with_the_line(tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text(json.dumps(row(0)) + "\nhello\n")
    with pytest.raises(ValueError, match="line 2: Expecting value"):
        trace.read_trace(tmp_path / "trace.jsonl")


def requests_at(*times_s: float) -> list[TraceRequest]:
    return [TraceRequest(time_s, 10, 1, (0,)) for time_s in times_s]


def test_what_came_in_one_step_of_the_clock_is_spread_until_the_next() -> None:
    spread = trace.spread_arrivals(requests_at(0.0, 0.0, 0.0, 3.0, 6.0, 6.0))
    assert [request.arrival_s for request in spread] == [0.0, 1.0, 2.0, 3.0, 6.0, 7.5]
    assert [request.arrival_s for request in trace.spread_arrivals(requests_at(4.0, 4.0))] == [4.0, 4.0]


def test_the_span_counts_the_distance_to_the_next_arrival_too() -> None:
    assert trace.span_s([2.0, 4.0, 6.0]) == 6.0
    assert trace.span_s([2.0]) == 0.0


def test_lengths_and_times_are_scaled() -> None:
    replayed = trace.replay_of([TraceRequest(2.0, 1000, 100, (7, 8))], Scale(0.1, 0.25, 3.0), "seed", 48000)
    assert (replayed[0].arrival_s, len(replayed[0].prompt), replayed[0].output_tokens) == (6.0, 100, 25)
    least = trace.replay_of([TraceRequest(2.0, 10, 1, (7,))], Scale(0.01, 0.01, 1.0), "seed", 48000)[0]
    assert (len(least.prompt), least.output_tokens) == (1, 1)


@given(
    scale=st.floats(0.005, 1.0),
    shared=st.lists(st.integers(0, 99), max_size=4),
    tails=st.tuples(st.integers(1, 3 * BLOCK_TOKENS), st.integers(1, 3 * BLOCK_TOKENS)),
)
def test_equal_blocks_are_equal_tokens_and_other_blocks_are_others(scale: float, shared: list[int], tails: tuple[int, int]) -> None:
    requests = []
    for number, tail in enumerate(tails):
        own = [100 + 10 * number + place for place in range(-(-tail // BLOCK_TOKENS))]
        requests.append(TraceRequest(0.0, len(shared) * BLOCK_TOKENS + tail, 1, (*shared, *own)))
    one, other = (each.prompt for each in trace.replay_of(requests, Scale(scale, 1.0, 1.0), "seed", 48000))
    assert [len(one), len(other)] == [max(1, round(request.input_tokens * scale)) for request in requests]
    border = round(len(shared) * BLOCK_TOKENS * scale)
    assert one[:border] == other[:border]
    rest = list(zip(one[border:], other[border:], strict=False))
    assert len(rest) < 8 or any(mine != theirs for mine, theirs in rest)


def test_loads_have_the_same_requests_at_other_times_and_with_other_tokens() -> None:
    plan = plan_of(max_requests=20)
    slow, fast = plan.replay(0.5), plan.replay(2.0)
    assert [len(request.prompt) for request in slow] == [len(request.prompt) for request in fast]
    assert [request.arrival_s for request in slow] == pytest.approx([4 * request.arrival_s for request in fast])
    assert slow[0].prompt != fast[0].prompt and slow[0].prompt == plan.replay(0.5)[0].prompt
    assert plan.offered_per_s(2.0) == pytest.approx(4 * plan.offered_per_s(0.5))


def test_the_offered_rate_is_that_of_the_scaled_trace(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace.jsonl", *(row(1000 * second) for second in range(5)))
    assert plan_of(trace=path, scale_time=4.0).offered_per_s(1.0) == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale_lengths": 0.0}, "scale_lengths must be above 0, got 0.0"),
        ({"scale_outputs": -1.0}, "scale_outputs must be above 0, got -1.0"),
        ({"itl_target_s": float("nan")}, "itl_target_s must be above 0, got nan"),
        ({"loads": ()}, "at least one load is needed, got none"),
        ({"loads": (1.0, 0.0)}, "a load must be above 0, got 0.0"),
        ({"loads": (1.0, 1.0)}, "loads must differ from each other, got 1.0, 1.0"),
        ({"designs": ("1p1d", "1p1d")}, "designs must differ from each other, got 1p1d, 1p1d"),
        ({"max_requests": 1}, "max_requests must be at least 2, got 1"),
    ],
)
def test_settings_that_make_no_sense_are_refused_with_value_and_limit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        CompareSettings(**changes)
    assert message in str(error.value)


def test_prompts_that_no_worker_takes_are_refused_before_anything_starts() -> None:
    with pytest.raises(ValueError, match="1p1d takes at most 8192: lower --scale-lengths"):
        plan_of(designs=("1p1d",), scale_lengths=1.0)


def test_requests_that_all_come_at_once_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="2 requests at one time have no rate"):
        plan_of(trace=write_trace(tmp_path / "trace.jsonl", row(7), row(7)))


# Numbers


def outcome(ttft_s: float, *itl_s: float) -> Outcome:
    return Outcome(Sample(ttft_s, itl_s, ttft_s + sum(itl_s), 1 + len(itl_s), 16), None)


def test_a_request_is_good_within_both_targets() -> None:
    """Mean gaps of 0.1, 0.2 and 0.3 s; one answer of a single token; one failure."""
    outcomes = [outcome(1.0, 0.1, 0.1), outcome(2.0, 0.1, 0.3), outcome(1.0, 0.3), outcome(1.0), outcome(2.1), Outcome(None, "HTTP 500")]
    assert compare_report.attained_share(outcomes, ttft_target_s=2.0, itl_target_s=0.2) == 0.5
    numbers = compare_report.load_report(CompareSettings(ttft_target_s=2.0, itl_target_s=0.2), LoadRun(1.0, 4.0, outcomes))
    assert (numbers["goodput_per_s"], numbers["completed"], numbers["errors"]) == (2.0, 5, 1)
    assert numbers["error_messages"] == {"HTTP 500": 1}
    assert (numbers["ttft_s"]["median"], numbers["itl_s"]["count"], numbers["mean_itl_s"]["count"]) == (1.0, 5, 3)
    assert numbers["samples"][5] is None


def designs_of(**goodputs: list[float]) -> dict[str, dict[str, Any]]:
    """Loads of 1, 2, 3, ... requests/s; the median TTFT is the goodput of the other designs' turned round."""
    return {
        label: {
            "is_disaggregated": label.startswith("apart"),
            "cores_a_worker": 1,
            "loads": [
                {"load": float(place), "offered_per_s": float(place), "goodput_per_s": goodput, "ttft_s": None, "itl_s": None}
                for place, goodput in enumerate(values, 1)
            ],
        }
        for label, values in goodputs.items()
    }


def test_the_winner_of_a_load_has_the_most_goodput_and_equals_tie() -> None:
    found = compare_report.winners(designs_of(unified=[1.0, 1.0, 0.0], apart=[0.99, 1.5, 0.0]))
    assert [each["labels"] for each in found] == [["unified", "apart"], ["apart"], []]


def test_designs_cross_where_straight_lines_between_loads_do() -> None:
    """1 ahead at 1/s and 3 behind at 2/s: a quarter of the way. Equal at 3/s, ahead again at 4/s: that stretch is crossed too."""
    found = compare_report.crossovers(designs_of(unified=[2.0, 0.0, 2.0, 4.0], apart=[1.0, 3.0, 2.0, 2.0]))
    assert found == [
        {"offered_per_s": 1.25, "below": "unified", "above": "apart"},
        {"offered_per_s": pytest.approx(2.0 + 2.0 * 3 / 5), "below": "apart", "above": "unified"},
    ]
    assert compare_report.crossovers(designs_of(unified=[1.0, 2.0], apart=[1.0, 1.0])) == []


def test_disaggregation_loses_where_the_best_unified_design_is_better() -> None:
    designs = designs_of(unified=[1.0, 1.0], other=[0.5, 2.0], apart=[1.0, 1.5])
    for label, medians in (("unified", (1.0, 4.0)), ("other", (2.0, 3.0)), ("apart", (1.01, 3.5))):
        for load, median in zip(designs[label]["loads"], medians, strict=True):
            load["ttft_s"] = {"median": median}
    found = compare_report.losses(designs)
    assert [(each["offered_per_s"], each["metric"], each["value"], each["best_unified"]) for each in found] == [
        (2.0, "goodput", 1.5, 2.0),
        (2.0, "median TTFT", 3.5, 3.0),
    ]


def test_the_verdict_says_plainly_who_wins_and_where_disaggregation_loses() -> None:
    designs = designs_of(unified=[1.0, 0.0, 0.0], apart=[0.5, 2.0, 0.0])
    found = {
        "winners": compare_report.winners(designs),
        "crossovers": compare_report.crossovers(designs),
        "losses": compare_report.losses(designs),
    }
    assert compare_report.verdict(found) == [
        "At 1.00 requests/s: unified wins (goodput unified 1.00, apart 0.50).",
        "At 2.00 requests/s: apart wins (goodput unified 0.00, apart 2.00).",
        "At 3.00 requests/s: no design answers anything within the targets (goodput unified 0.00, apart 0.00).",
        "Crossover at 1.20 requests/s: unified below, apart above.",
        "apart loses at 1.00 requests/s: goodput 0.5 requests/s against 1.",
    ]


# A whole run


class Stage:
    """Starts a scripted server in place of each system. Every design answers with as many tokens as were asked for, or fails."""

    def __init__(self, failing: str = "") -> None:
        self.systems: list[System] = []
        self.servers: list[ScriptedServer] = []
        self._failing = failing

    @contextlib.asynccontextmanager
    async def start(self, system: System) -> AsyncIterator[Endpoint]:
        self.systems.append(system)
        is_failing = self._failing == system.workers[0].command[-1]
        server = ScriptedServer(lambda request: [] if is_failing and request["max_tokens"] > 8 else answer(request["max_tokens"], 0))
        self.servers.append(server)
        with server.running():
            yield parse_url(server.url)


def run(stage: Stage, tmp_path: Path, **settings: Any) -> dict[str, Any]:
    path = write_trace(
        tmp_path / "trace.jsonl", *(row(10 * place, hash_ids=(0, place + 1), output_length=20 + place) for place in range(4))
    )
    given = CompareSettings(trace=path, scale_lengths=0.1, scale_outputs=0.5, scale_time=0.1, loads=(2.0, 1.0), **settings)
    return asyncio.run(compare.run(given, Watch(lambda step: None, lambda: None), Surroundings(stage.start, itertools.count().__next__)))


def test_every_design_is_sent_the_same_requests_at_every_load(tmp_path: Path) -> None:
    stage = Stage()
    report = run(stage, tmp_path)
    unified, apart = stage.servers
    sent = [[request for request in server.requests if request["max_tokens"] != compare.WARM_UP_OUT] for server in (unified, apart)]
    assert len(sent[0]) == 8 and sorted(map(json.dumps, sent[0])) == sorted(map(json.dumps, sent[1]))
    assert {request["max_tokens"] for request in sent[0]} == {10, 11, 12}
    assert len({json.dumps(request["prompt"][:51]) for request in sent[0]}) == 2, "one shared block a load"
    assert [part.command[-1] for part in stage.systems[1].workers] == ["prefill", "decode"]
    loads = report["designs"]["1p1d"]["loads"]
    assert [load["load"] for load in loads] == [1.0, 2.0] and all(load["completed"] == 4 for load in loads)
    assert report["workload"]["requests"] == 4 and report["workload"]["prompt_tokens"]["mean"] == 60
    assert report["workload"]["shared_tokens"] == pytest.approx(3 * 51 / 240)


def test_warm_up_takes_two_requests_for_each_worker(tmp_path: Path) -> None:
    stage = Stage()
    run(stage, tmp_path)
    warm_up = [request["prompt"] for request in stage.servers[0].requests if request["max_tokens"] == compare.WARM_UP_OUT]
    assert len(warm_up) == 4 and {len(prompt) for prompt in warm_up} == {60}


def test_requests_that_fail_are_counted_and_not_good(tmp_path: Path) -> None:
    report = run(Stage(failing="prefill"), tmp_path)
    assert compare_report.num_errors(report) == 8
    failed = report["designs"]["1p1d"]["loads"][0]
    assert (failed["errors"], failed["attained"], failed["ttft_s"]) == (4, 0.0, None)
    assert sum(failed["error_messages"].values()) == 4
    compare_report.print_comparison(Console(file=sys.stderr, width=120), report)


def test_a_warm_up_that_fails_ends_the_comparison(tmp_path: Path) -> None:
    @contextlib.asynccontextmanager
    async def nowhere(system: System) -> AsyncIterator[Endpoint]:
        with ScriptedServer(lambda request: []).running() as server:
            yield parse_url(server.url)

    settings = CompareSettings(trace=write_trace(tmp_path / "trace.jsonl", row(0), row(9)))
    with pytest.raises(RequestFailed, match="unified:2: warm-up: "):
        asyncio.run(compare.run(settings, Watch(lambda step: None, lambda: None), Surroundings(nowhere)))


# The command


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--designs", "3x"], "a design looks like"),
        (["--loads", "a,b"], "loads look like 0.5,1,2, got 'a,b'"),
        (["--trace", "no/such/trace"], "no/such/trace: No such file or directory"),
        (["--plot", "out.pdf"], "--plot must end with .png or .svg, got out.pdf"),
        (["--set", "engine.pages=1"], "unknown field engine.pages"),
        (["--scale-lengths", "0"], "scale_lengths must be above 0, got 0.0"),
    ],
)
def test_a_bad_command_line_is_one_clear_line(arguments: list[str], words: str) -> None:
    done = subprocess.run([sys.executable, "-m", "pdjax.bench", "compare", *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.count("error:") == 1 and words in done.stderr


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_command_prints_a_verdict_and_writes_json_and_picture(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = run(Stage(), tmp_path)

    async def measured(settings: CompareSettings, watch: Watch) -> dict[str, Any]:
        watch.on_step("unified:2: starting")
        return report

    monkeypatch.setattr(compare, "run", measured)
    picture, file = tmp_path / f"out.{suffix}", tmp_path / "out.json"
    assert bench.main(["compare", "--json", str(file), "--plot", str(picture)]) == 0
    printed = capsys.readouterr()
    assert "At 1000.00 requests/s:" in printed.out and "latency in ms" in printed.out and "unified:2: starting" in printed.err
    assert json.loads(file.read_text())["designs"].keys() == {"unified:2", "1p1d"}
    assert picture.read_bytes().startswith(b"\x89PNG" if suffix == "png" else b"<?xml")
