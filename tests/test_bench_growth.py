"""The growth benchmark: what it sets up holds what it says, and its numbers are the ones worked out by hand."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from pdjax import bench
from pdjax.benchmarks import (
    growth,
    growth_engine,
    growth_radix,
    growth_report,
    growth_router,
    growth_scheduler,
    growth_start,
    growth_worker,
)
from pdjax.benchmarks.ablation_report import Goal
from pdjax.benchmarks.client import Sample, model_name
from pdjax.benchmarks.fleet import SystemFailed
from pdjax.benchmarks.growth import GrowthSettings
from pdjax.benchmarks.growth_engine import Timed
from pdjax.benchmarks.growth_radix import PROMPT_PAGES, Forest, Operations
from pdjax.benchmarks.growth_report import Chart, Curve, PartReport
from pdjax.benchmarks.growth_router import Drive, Stretch
from pdjax.benchmarks.growth_scheduler import KINDS, NUM_SLOTS, SMALL_POOL_SEQS, DecodeLoad, Load, Passes, PrefillLoad
from pdjax.config.load import ConfigError, load_config
from pdjax.errors import PdjaxError
from pdjax.protocol import Event, Finished, Peer, Sampling, SequenceRequest
from pdjax.router.merge import Ended, Merge, Side

BY_LABEL = {kind.label: kind for kind in KINDS}

# Waiting


def filled(label: str, num_waiting: int) -> Load:
    load = BY_LABEL[label].make(num_waiting)
    load.fill(num_waiting)
    return load


@pytest.mark.parametrize("label", BY_LABEL)
@pytest.mark.parametrize("num_waiting", [3, 70])
def test_every_kind_holds_as_many_waiting_as_it_says_and_keeps_them(label: str, num_waiting: int) -> None:
    load = filled(label, num_waiting)
    for _ in range(5):
        load.turn()
    assert load.num_waiting == num_waiting
    load.scheduler.check()  # type: ignore[attr-defined]


def test_requests_that_nobody_announced_wait_in_the_bootstrap_queue_but_for_those_with_a_metadata_row() -> None:
    load = filled("prefill: not announced", 200)
    assert isinstance(load, PrefillLoad)
    assert load.scheduler.queue_lengths() == {"bootstrap": 184, "waiting": 16, "parked": 16, "outgoing": 16, "delivering": 0}


def test_announced_requests_without_a_metadata_row_wait_in_the_bootstrap_queue() -> None:
    load = filled("prefill: announced, no metadata row free", 200)
    assert isinstance(load, PrefillLoad)
    assert load.scheduler.queue_lengths() == {"bootstrap": 184, "waiting": 16, "parked": 0, "outgoing": 16, "delivering": 0}
    assert load.scheduler.bootstrap.num_starved() == 184
    assert load.scheduler.metadata.num_free == 0


def test_requests_in_line_wait_for_request_slots_alone() -> None:
    load = filled("prefill: in line behind full slots", 200)
    assert isinstance(load, PrefillLoad)
    assert load.scheduler.queue_lengths()["waiting"] == 200
    assert load.scheduler.slots.num_free == 0 and load.scheduler.metadata.num_free > 0
    decode = filled("decode: in line behind full slots", 200)
    assert isinstance(decode, DecodeLoad)
    assert decode.scheduler.queue_lengths() == {"prealloc": 200, "retracted": 0, "receiving": NUM_SLOTS, "computing": 0, "running": 0}


def test_requests_that_wait_for_pages_find_slots_free() -> None:
    load = filled("decode: in line, no pages free", 50)
    assert isinstance(load, DecodeLoad)
    assert load.scheduler.queue_lengths()["receiving"] == SMALL_POOL_SEQS
    assert load.scheduler.slots.num_free == NUM_SLOTS - SMALL_POOL_SEQS
    assert load.scheduler.memory.pool.num_free == 0


@pytest.mark.parametrize("label", BY_LABEL)
def test_the_one_that_is_aborted_waits_in_the_middle(label: str) -> None:
    load = filled(label, 60)
    ahead = list(load.live).index(load.in_the_middle()) - (len(load.live) - 60)
    assert ahead in (29, 30)
    load.abort(load.in_the_middle())
    load.turn()
    assert load.num_waiting == 59


@pytest.mark.parametrize("label", BY_LABEL)
def test_a_change_moves_one_request_and_is_made_good(label: str) -> None:
    load = filled(label, 60)
    before = dict(load.live)
    load.change()
    load.turn()
    load.restore(60)
    assert load.num_waiting == 60
    assert len(before.keys() - load.live.keys()) == 1, "one request is over"
    load.scheduler.check()  # type: ignore[attr-defined]


def test_one_that_is_announced_goes_ahead_of_all_that_are_not() -> None:
    load = filled("prefill: not announced", 60)
    assert isinstance(load, PrefillLoad)
    request_id = load.in_the_middle()
    assert request_id in load.scheduler.bootstrap
    load.change()
    load.settle()
    lengths = load.scheduler.queue_lengths()
    assert request_id not in load.scheduler.bootstrap
    assert (lengths["parked"], lengths["outgoing"]) == (15, 16), "it has taken the place of one that had gone ahead"


def test_a_pass_is_timed_by_the_median_of_its_repeats() -> None:
    """Three repeats of each of three events: 1, 2 and 4 s; 10, 20 and 40 s; 5, 5 and 5 s."""
    took_s = [1.0, 4.0, 2.0, 40.0, 10.0, 20.0, 5.0, 5.0, 5.0]
    readings = itertools.chain.from_iterable((0.0, each) for each in took_s)
    passes = growth_scheduler.measure(DecodeLoad(growth_scheduler.NUM_PAGES), 5, 3, readings.__next__)
    assert passes == Passes(2.0, 20.0, 5.0)


def test_the_goal_of_a_curve_is_the_last_pass_over_that_at_a_hundred() -> None:
    flat, steep = Passes(1e-6, 2e-6, 3e-6), Passes(4e-6, 9e-6, 3e-6)
    report = growth_scheduler.build({"kind": {10: flat, 100: flat, 10_000: steep}})
    assert [chart.curves[0].points[-1] for chart in report.charts] == [(10_000, 4.0), (10_000, 9.0), (10_000, 3.0)]
    assert [(goal.value, goal.is_met) for goal in report.goals] == [(4.0, True), (4.5, False), (1.0, True)]


# The tree


def test_a_forest_has_the_size_that_was_asked_for_and_only_published_pages() -> None:
    forest = Forest(2_000)
    measured = growth_radix.measure(forest, 1_000, 20)
    assert min(measured) > 0
    assert 1_000 - PROMPT_PAGES <= forest.memory.cache.num_pages < 1_000 + PROMPT_PAGES
    forest.memory.check([])
    assert forest.memory.num_private == 0
    assert len(forest.memory.cache.match(forest.known[0]).pages) == PROMPT_PAGES


def test_the_operations_of_a_round_are_timed_one_by_one() -> None:
    """Read at 0, 1, 3, 7, 15 and 31 s; releasing the lease is not counted."""
    assert growth_radix.measure(Forest(500), 100, 1, iter([0.0, 1.0, 3.0, 7.0, 15.0, 31.0]).__next__) == Operations(1.0, 2.0, 4.0, 16.0)


def test_a_tree_whose_operations_stay_as_they_are_meets_its_goals() -> None:
    report = growth_radix.build({1_000: Operations(1e-6, 1e-6, 1e-6, 1e-6), 1_000_000: Operations(4e-6, 5e-6, 1e-6, 1e-6)})
    assert [goal.is_met for goal in report.goals] == [True, False, True, True]
    assert report.goals[1].name == "lease: 1,000,000 nodes over 1,000" and report.goals[1].value == 5.0


# Workers that answer at once


def request(max_tokens: int, num_prior: int = 0, is_local: bool = False) -> SequenceRequest:
    prefill = None if is_local else Peer("127.0.0.1:1", "p")
    prompt = list(range(1, 5 + num_prior))
    sampling = Sampling(max_tokens=max_tokens)
    return SequenceRequest(request_id="r", room=1, prompt=prompt, num_prior=num_prior, sampling=sampling, deadline_s=1e12, prefill=prefill)


def merged(asked: SequenceRequest, sides: dict[Side, list[Event]]) -> tuple[list[int], object]:
    merge = Merge(asked.num_prior, asked.sampling.max_tokens, has_prefill=Side.PREFILL in sides)
    tokens = [token.index for side, events in sides.items() for event in events for token in merge.feed(side, event)]
    return tokens, merge.outcome


@pytest.mark.parametrize(("max_tokens", "num_prior"), [(2, 0), (5, 0), (5, 2)])
def test_both_stand_ins_together_give_a_whole_answer(max_tokens: int, num_prior: int) -> None:
    asked = request(max_tokens, num_prior)
    sides = {Side.PREFILL: growth_worker.prefill_events(asked), Side.DECODE: growth_worker.decode_events(asked)}
    tokens, outcome = merged(asked, sides)
    assert tokens == list(range(num_prior, max_tokens))
    assert isinstance(outcome, Ended) and outcome.finished.reason == "length"


def test_a_stand_in_alone_gives_a_whole_answer() -> None:
    asked = request(3, is_local=True)
    tokens, outcome = merged(asked, {Side.DECODE: growth_worker.decode_events(asked)})
    assert tokens == [0, 1, 2] and isinstance(outcome, Ended)


def test_prefill_ends_an_answer_of_one_token() -> None:
    assert growth_worker.prefill_events(request(1))[-1] == Finished(reason="length")


@pytest.mark.live
def test_requests_go_through_a_real_router_to_the_stand_ins_and_nothing_is_left() -> None:
    async def scenario() -> tuple[list[Stretch], list[int]]:
        async with growth_router.loopback_system() as fleet:
            drive = Drive(fleet, await model_name(fleet.endpoint, 30.0))
            stretches = [await drive.stretch(3, out, lambda begun: begun < 6) for out in (2, 40)]
            assert growth_router.resident_bytes(fleet.pids["router"]) > 10 << 20
            return stretches, list(fleet.pids.values())

    before = os.sched_getaffinity(0)
    stretches, pids = asyncio.run(scenario())
    assert [(each.requests, each.tokens, each.errors) for each in stretches] == [(6, 12, 0), (6, 240, 0)]
    assert len(pids) == 2 and not any(psutil.pid_exists(pid) for pid in pids)
    assert os.sched_getaffinity(0) == before


def test_cpu_time_and_memory_are_those_of_the_process() -> None:
    mine = psutil.Process()
    assert growth_router.cpu_s(mine.pid) == pytest.approx(sum(mine.cpu_times()[:2]), abs=0.5)
    assert growth_router.resident_bytes(mine.pid) == pytest.approx(mine.memory_info().rss, rel=0.2)


def test_router_rates_are_the_ones_worked_out_by_hand() -> None:
    short = [Stretch(1, 200, 400, 0, 2.0, 1.0), Stretch(4, 800, 1600, 1, 2.0, 1.6)]
    long = [Stretch(1, 10, 2560, 0, 2.0, 0.0)]
    report = growth_router.build_router(short, long)
    achieved, possible = report.charts[0].curves
    assert achieved.points == [(1, 100.0), (4, 400.0)] and possible.points == [(1, 200.0), (4, 500.0)]
    assert report.charts[1].curves[1].points == [(1, 0.0)]
    assert [(goal.value, goal.is_met) for goal in report.goals] == [(400.0, True), (1280.0, False), (1, False)]
    assert report.notes[0] == "At the best rate of requests the router used 80% of its core."


def test_memory_counts_what_the_second_half_added() -> None:
    report = growth_router.build_memory([(0.0, 100.0), (10.0, 150.0), (20.0, 151.0), (30.0, 151.5), (40.0, 156.0)], 0)
    assert [(goal.value, goal.is_met) for goal in report.goals] == [(5.0, False), (0, True)]


# The engine


def timed(*token_times_s: float) -> Timed:
    gaps = tuple(after - before for before, after in itertools.pairwise(token_times_s))
    return Timed(Sample(0.5, gaps, 1.0, len(token_times_s), None), list(token_times_s))


def test_only_the_time_counts_in_which_a_whole_batch_streams() -> None:
    """Both are behind their hand-offs from 3 s on, and both stream until 6 s."""
    assert growth_engine.gaps_of_all([timed(0.0, 1.0, 4.0, 5.0, 6.0, 9.0), timed(2.0, 3.0, 4.5, 6.0)]) == [1.0, 1.0, 1.5, 1.5]
    assert growth_engine.gaps_of_all([timed(0.0, 1.0, 2.0), timed(3.0, 4.0, 5.0)]) == []


def test_engine_curves_are_medians_by_length_and_by_batch() -> None:
    by_batch = {1: [timed(0.0, 1.0, 1.25, 1.5)], 2: [timed(0.0, 1.0, 2.0), timed(9.0, 10.0, 11.0)]}
    report = growth_engine.build({128: [timed(0.0, 1.0, 1.5), timed(0.0, 1.0, 1.7)]}, by_batch)
    ttft, itl, steps, rates = (chart.curves[0].points for chart in report.charts)
    assert ttft == [(128, 500.0)] and itl == [(128, pytest.approx(600.0))]
    assert steps == [(1, 250.0)] and rates == [(1, 4.0)]
    assert report.notes[-1] == "2 requests never streamed all at the same time."


def test_short_prompts_are_repeated_and_long_ones_are_not() -> None:
    assert [growth_engine.num_repeats(length) for length in (128, 1024, 2048, 8000)] == [3, 2, 1, 1]


def test_the_engine_has_room_for_the_largest_batch_and_the_longest_prompt() -> None:
    config = growth_engine.engine_config(())
    assert config.engine.max_running == max(growth_engine.BATCHES)
    longest = max(growth_engine.LENGTHS) + growth_engine.CONTEXT_OUT
    assert longest <= config.model.max_context_tokens and longest < config.engine.num_pages * config.engine.page_size


# The start

READY = "import time; print('ready at http://127.0.0.1:1', flush=True); time.sleep(60)"


def test_a_start_is_over_with_the_word_ready_and_the_process_is_stopped() -> None:
    assert 0 < growth_start.time_to_ready([sys.executable, "-c", READY]) < 60
    assert not [child for child in psutil.Process().children() if READY in " ".join(child.cmdline())]


def test_a_start_that_fails_tells_the_last_words() -> None:
    with pytest.raises(SystemFailed, match="not get ready within 30 s: no such model"):
        growth_start.time_to_ready([sys.executable, "-c", "import sys; sys.exit('loading\\nno such model')"], 30.0)


def test_a_system_for_the_start_is_on_free_ports_with_the_overrides_of_the_command_line() -> None:
    words = growth_start.start_command(("engine.page_size=32",))
    overrides = [word for word in words if "=" in word]
    config = load_config(None, overrides)
    assert (config.server.port, config.router.control_port, config.engine.page_size) == (0, 0, 32)


def test_the_first_start_is_the_cold_one() -> None:
    report = growth_start.build([39.0, 14.0, 16.0])
    assert [(goal.value, goal.is_met) for goal in report.goals] == [(39.0, True), (16.0, False)]


# Reports

CHART = Chart("time", "requests", "ms", (Curve("one", [(10, 1.0), (1_000, 2.5)]), Curve("other", [(10, 4.0)])), is_log=True)
REPORT = PartReport("scheduler", (CHART,), (Goal("ratio", 2.5, 2.0), Goal("rate", 7.0, 5.0, is_upper_limit=False)), ("A note.",))


def test_a_table_has_a_row_for_each_place_and_a_column_for_each_curve() -> None:
    grid = growth_report.chart_grid(CHART)
    assert grid == ("time (ms)", ["requests", "one", "other"], [["10", "1.0", "4.0"], ["1,000", "2.5", "-"]])


def test_growth_is_a_ratio_of_two_measured_places() -> None:
    assert growth_report.growth_ratio(CHART.curves[0].points, 10, 1_000) == 2.5
    assert growth_report.growth_ratio(CHART.curves[1].points, 10, 1_000) is None
    assert growth_report.growth_ratio([(10, 0.0), (1_000, 1.0)], 10, 1_000) is None


def test_tables_goals_notes_and_failures_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    growth_report.print_part(Console(width=120), REPORT)
    growth_report.print_part(Console(width=120), PartReport("start", (), error="no such model"))
    printed = capsys.readouterr().out
    for words in ("scheduler: time (ms)", "at most 2", "missed", "at least 5", "met", "A note.", "start failed: no such model"):
        assert words in printed


def test_markdown_shows_pictures_and_the_same_tables(tmp_path: Path) -> None:
    growth_report.write_markdown(tmp_path / "growth.md", [REPORT, PartReport("start", (), error="no such model")])
    written = (tmp_path / "growth.md").read_text()
    for words in ("![scheduler](scheduler.svg)", "| 1,000 | 2.5 | - |", "| ratio | 2.50 | at most 2 | missed |"):
        assert words in written
    assert "## start\n\nFailed: no such model" in written


def test_a_part_is_drawn_as_svg_and_png(tmp_path: Path) -> None:
    svg, png = growth_report.draw_part(tmp_path, REPORT)
    assert svg.read_bytes().startswith(b"<?xml") and png.read_bytes().startswith(b"\x89PNG")
    assert growth_report.draw_part(tmp_path, PartReport("start", (), error="no such model")) == []


# The command


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (("scheduler", "speed"), "a part must be one of scheduler, radix, router, memory, engine, start, got 'speed'"),
        (("radix", "radix"), "name each part once and at least one, got radix, radix"),
        ((), "name each part once and at least one, got none"),
    ],
)
def test_parts_that_make_no_sense_are_refused(parts: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError) as error:
        GrowthSettings(parts)
    assert str(error.value) == message


def test_a_wrong_override_is_refused_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match="did you mean engine.num_pages"):
        GrowthSettings(overrides=("engine.pages=1",))


@pytest.mark.parametrize("arguments", [["--parts", "speed"], ["--parts", ""], ["--out", "no/such/folder"], ["--json", "no/such/file"]])
def test_a_bad_command_line_is_one_clear_line(arguments: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", "pdjax.bench", "growth", *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.count("error:") == 1


def test_a_part_that_fails_does_not_take_the_others_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(tell: growth.Tell) -> PartReport:
        raise PdjaxError("no such tree")

    monkeypatch.setattr(growth_scheduler, "run", lambda tell: REPORT)
    monkeypatch.setattr(growth_radix, "run", fail)
    folder, file = tmp_path / "growth", tmp_path / "growth.json"
    assert bench.main(["growth", "--parts", "radix,scheduler", "--json", str(file), "--out", str(folder)]) == 1
    assert "radix failed: no such tree" in capsys.readouterr().out
    assert {path.name for path in folder.iterdir()} == {"scheduler.svg", "scheduler.png", "growth.md"}
    measured = json.loads(file.read_text())
    assert measured["parts"]["scheduler"]["charts"][0]["curves"] == {"one": [[10, 1.0], [1000, 2.5]], "other": [[10, 4.0]]}
    assert [goal["is_met"] for goal in measured["parts"]["scheduler"]["goals"]] == [False, True]
    assert measured["parts"]["radix"]["error"] == "no such tree"
