"""The simulation: that seeds hold, that it finds faults which are put in, and that it is what it says: deterministic and free of jax."""

from __future__ import annotations

import io
import subprocess
import sys
from collections import Counter
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from pdjax import simulate
from pdjax.protocol import Sampling
from pdjax.simulation.arithmetic import MODULUS, MULTIPLIER, START, VOCAB, expected_answer, extend, next_token
from pdjax.simulation.drawing import draw
from pdjax.simulation.engine import Device, Engine
from pdjax.simulation.process import Chance, Process, Timeline
from pdjax.simulation.runner import Failure, Report, run_batch, run_seed, run_seeds
from pdjax.simulation.scenario import Scenario
from pdjax.simulation.trace import NoTrace
from pdjax.simulation.world import World
from tests.mutants import MUTANTS, Mutant

ROOT = Path(__file__).parent.parent
QUIET: dict[str, Any] = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 200}
NUM_SEEDS = 2000
NUM_MORE_SEEDS = 1500
"""Tried in order where a mutant's own seeds have come to hold: any change of a scheduler may shift what a seed means."""


@pytest.fixture(scope="module")
def report() -> Report:
    """The default seeds, by all processors."""
    total = Report()
    for part in run_seeds(range(NUM_SEEDS), num_jobs=2):
        total.merge(part)
    return total


def test_every_default_seed_holds(report: Report) -> None:
    assert report.num_seeds == NUM_SEEDS
    assert report.failures == []


def test_the_default_seeds_reach_every_kind_of_fault_and_every_end(report: Report) -> None:
    assert set(report.outcomes) == {"ok", "cancelled", "deadline", "over_capacity", "worker_failed", "no_worker", "bad_request"}
    assert report.outcomes["ok"] > sum(report.outcomes.values()) / 2
    faults = {"stop", "kill", "kill, silent", "leave", "failed poll", "forced retry", "wrong metadata row"}
    faults |= {f"chunk {what}" for what in ("lost", "held back", "damaged", "repeated")}
    faults |= {f"announcement {what}" for what in ("lost", "held back", "repeated")}
    assert {kind for kind, count in report.faults.items() if count >= 10} == faults
    assert min(report.reached.values()) > 100, report.reached


def test_a_seed_is_the_same_run_every_time() -> None:
    def traced(seed: int) -> str:
        output = io.StringIO()
        with redirect_stdout(output):
            assert not isinstance(run_seed(seed, is_traced=True), Failure)
        return output.getvalue()

    for seed in range(0, 60, 7):
        assert draw(seed) == draw(seed)
        assert traced(seed) == traced(seed) != ""


def test_scenarios_go_down_to_one_slot_and_pools_that_just_fit() -> None:
    scenarios = [draw(seed) for seed in range(500)]
    smallest = Counter[str]()
    for scenario in scenarios:
        for size in (*scenario.prefills, *scenario.decodes):
            smallest["one request slot"] += size.slots == 1
            smallest["one metadata slot"] += size.metadata == 1
            smallest["just fits"] += size.pages - 1 == _pages_needed(scenario)
    assert min(smallest[what] for what in ("one request slot", "one metadata slot", "just fits")) > 50, smallest
    assert {len(scenario.prefills) for scenario in scenarios} == {0, 1, 2, 3}
    assert {len(scenario.decodes) for scenario in scenarios} == {1, 2, 3}


def _pages_needed(scenario: Scenario) -> int:
    longest = max(len(job.prompt) + job.sampling.max_tokens - 1 for job in scenario.servable_jobs)
    return -(-longest // scenario.policy.page_size)


def test_the_model_can_be_computed_by_hand() -> None:
    assert (MULTIPLIER % VOCAB, MODULUS % VOCAB) == (31, 0)
    assert next_token([]) == START == 1
    assert next_token([5]) == 1 * 31 + 5 + 7
    assert next_token([5, 2]) == (43 * 31 + 2 + 7) % 997
    assert extend(extend(START, [5]), [2]) == extend(START, [5, 2])
    assert expected_answer([5], Sampling(max_tokens=2)) == [43, next_token([5, 43])]
    assert expected_answer([5], Sampling(max_tokens=9, stop_token_ids=(43,))) == [43]
    assert expected_answer([5], Sampling(max_tokens=3, min_tokens=2, stop_token_ids=(43,)))[:2] == [43, next_token([5, 43])]


def test_the_engine_finds_a_page_of_another_sequence_and_one_that_nobody_wrote() -> None:
    engine = Engine(num_pages=6, page_size=2)
    first, second = [1, 2, 3, 4], [9, 2, 3, 4]
    assert engine._write([1, 2], 0, first) == extend(START, first)
    assert engine._write([3, 4], 0, second) == extend(START, second)
    assert engine._read([1, 2], 4) == extend(START, first)
    with pytest.raises(AssertionError, match="page 4, which holds other tokens"):
        engine._read([1, 4], 4)
    with pytest.raises(AssertionError, match="page 5, which holds other tokens"):
        engine._read([1, 5], 3)
    engine._write([1, 5], 2, [7])
    with pytest.raises(AssertionError, match="page 5, which holds too few tokens"):
        engine._read([1, 5], 4)
    engine.install([5], engine.gather([2]))
    assert engine._read([1, 5], 4) == extend(START, first)


def test_a_stopped_process_catches_up_in_order_and_a_dead_one_never() -> None:
    timeline, seen = Timeline(), []
    stopped, dead = Process(timeline), Process(timeline)
    for tick in (1, 2):
        stopped.post(tick, seen.append, tick)
        dead.post(tick, seen.append, -tick)
    stopped.stop()
    dead.kill()
    while timeline.step():
        pass
    assert seen == []
    stopped.resume()
    dead.resume()
    assert seen == [1, 2]


def test_steps_run_one_after_another_and_keep_their_order() -> None:
    timeline = Timeline()
    durations, woken = iter([5, 1]), []
    device = Device(Process(timeline), lambda: next(durations), lambda: woken.append(timeline.now))
    device.launch(["a"], [1])
    device.launch(["b"], [2])
    assert device.num_in_flight == 2 and device.take() == []
    while timeline.step():
        pass
    assert woken == [5, 6]
    assert [step.parts for step in device.take()] == [["a"], ["b"]] and device.num_in_flight == 0


def test_chance_reaches_both_ends() -> None:
    chance = Chance(1)
    assert {chance.upto(2) for _ in range(100)} == {0, 1, 2}
    assert not any(chance.hits(0.0) for _ in range(100)) and all(chance.hits(1.0) for _ in range(100))


def test_a_request_that_never_ends_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = Timeline()
    world = World(draw(1), timeline, NoTrace())
    monkeypatch.setattr(world.calls[0], "_next_attempt", lambda: None)
    with pytest.raises(AssertionError, match="every request should have ended"):
        world.run()


def test_a_failing_seed_is_told_with_its_property_and_the_command_that_replays_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pdjax.simulation.call.expected_answer", lambda prompt, sampling: [VOCAB + 1] * sampling.max_tokens)
    assert simulate.main(["--seeds", "3:5", "--jobs", "1"]) == 1
    output = capsys.readouterr().out
    assert "seed 3 does not hold: r" in output and "computed by hand 998" in output
    assert "replay: python -m pdjax.simulate --trace 3\n" in output
    assert output.splitlines()[-1].startswith("2 seeds, 2 DO NOT HOLD: ")
    assert simulate.main(["--trace", "3"]) == 1
    assert "does not hold" in capsys.readouterr().out


def test_the_command_ends_with_a_summary_and_status_0() -> None:
    done = subprocess.run([sys.executable, "-m", "pdjax.simulate", "--seeds", "0:250", "--jobs", "2"], **QUIET)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("250 seeds, all hold: ")


def test_the_simulation_does_not_import_jax() -> None:
    code = "import sys; from pdjax.simulate import main; status = main(['--trace', '5']); sys.exit('jax' in sys.modules or status)"
    done = subprocess.run([sys.executable, "-c", code], **QUIET)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("arguments", [["--seeds", "5:5"], ["--seeds", "x"], ["--seeds", "-1:3"], ["--seeds", "0:2", "--jobs", "0"], []])
def test_a_bad_command_line_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        simulate.main(arguments)
    assert caught.value.code == 2
    assert "usage" in capsys.readouterr().err


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_faulty_scheduler_is_found(mutant: Mutant) -> None:
    seeds = [*mutant.seeds, *range(NUM_MORE_SEEDS)]
    command = [sys.executable, "-m", "tests.mutants", mutant.name, *map(str, seeds)]
    done = subprocess.run(command, **QUIET)
    assert (done.returncode, done.stderr) == (1, ""), f"{mutant.why}: not found in {len(seeds)} seeds\n{done.stderr}"
    assert done.stdout.startswith("seed ")


def test_the_seeds_that_find_faults_hold_without_them() -> None:
    seeds = sorted({seed for mutant in MUTANTS for seed in mutant.seeds} - set(range(NUM_SEEDS)))
    failures = [failure for seed in seeds for failure in run_batch(range(seed, seed + 1)).failures]
    assert failures == []
    assert all(mutant.seeds for mutant in MUTANTS) and len(MUTANTS) >= 12
