"""Programs to compile, with a stub in place of the compilers: what is kept, what is tried again, what a process that dies leaves undone."""

from __future__ import annotations

import argparse
import json
import sys
import threading
from pathlib import Path

import pytest

from pdjax.benchmarks import kernels_command, kernels_jobs, kernels_tpu, kernels_tune
from pdjax.benchmarks.kernels_gpu import GROUP
from pdjax.benchmarks.kernels_jobs import Job, Record, Results, run_jobs
from pdjax.benchmarks.kernels_target import CHIPS

STUB = """
import json, os, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
print("a compiler may say what it likes")
if sys.argv[3] == "broken":
    sys.exit("no such compiler")
print("@{}", flush=True)
for index, case in enumerate(json.loads(Path(sys.argv[2]).read_text())):
    with (folder / "log").open("a") as log:
        log.write(case["does"] + "\\n")
    if case["does"] == "dies":
        print("out of registers", file=sys.stderr, flush=True)
        os._exit(7)
    if case["does"] == "hangs":
        time.sleep(60)
    record = {"reason": "RuntimeError: no"} if case["does"] == "fails" else {"found": case["does"].upper()}
    print("@" + json.dumps({"index": index, "record": record}), flush=True)
"""


class Bench:
    """Jobs by what they do, over one folder of results."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said: list[str] = []

    def run(self, *does: str, group: str = "v6e", sources: tuple[str, ...] = ("benchmarks/kernels_jobs.py",)) -> list[Record]:
        jobs = [Job(group, "v6e", f"job {what}", {"does": what}, sources) for what in does]
        return run_jobs(jobs, Results(self.folder / "results"), self.command, self.said.append)

    def command(self, group: str, todo: Path, work: Path) -> list[str]:
        assert work.is_dir()
        return [sys.executable, "-c", STUB, str(self.folder), str(todo), group]

    def worked_on(self) -> list[str]:
        """What processes have begun since the last call."""
        log = self.folder / "log"
        lines = log.read_text().splitlines() if log.exists() else []
        log.write_text("")
        return lines


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_a_second_run_compiles_only_what_is_new(bench: Bench) -> None:
    first = bench.run("a", "b")
    assert first == [{"target": "v6e", "does": "a", "found": "A"}, {"target": "v6e", "does": "b", "found": "B"}]
    assert bench.worked_on() == ["a", "b"]
    assert bench.run("b", "c", "a") == [first[1], {"target": "v6e", "does": "c", "found": "C"}, first[0]]
    assert bench.worked_on() == ["c"]
    assert "2 of 3 programs are known from before" in bench.said


def test_what_a_result_depends_on_is_in_its_key(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.run("a")
    bench.worked_on()
    bench.run("a", sources=("benchmarks/kernels_report.py",))
    assert bench.worked_on() == ["a"]
    monkeypatch.setattr(kernels_jobs, "_versions", lambda: {"jax": "another"})
    bench.run("a")
    assert bench.worked_on() == ["a"]


def test_a_failure_is_a_row_that_says_why_and_is_tried_again(bench: Bench) -> None:
    assert bench.run("fails", "a") == [
        {"target": "v6e", "does": "fails", "reason": "RuntimeError: no"},
        {"target": "v6e", "does": "a", "found": "A"},
    ]
    assert any("FAILED: RuntimeError: no; about" in line and "left" in line for line in bench.said)
    bench.worked_on()
    bench.run("fails", "a")
    assert bench.worked_on() == ["fails"]


def test_a_process_that_dies_takes_one_job_with_it(bench: Bench) -> None:
    records = bench.run("a", "dies", "b", "dies too")
    assert [record.get("found") for record in records] == ["A", None, "B", "DIES TOO"]
    assert records[1]["reason"] == "its process ended with status 7: out of registers"
    assert bench.worked_on() == ["a", "dies", "b", "dies too"]


def test_a_process_that_does_not_start_fails_its_jobs_once(bench: Bench) -> None:
    records = bench.run("a", "b", group="broken")
    assert [record["reason"] for record in records] == ["its process ended with status 1: no such compiler"] * 2


def test_a_compiler_that_hangs_is_ended(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels_jobs, "LIMIT_S", 2.0)
    records = bench.run("hangs")
    assert records[0]["reason"].startswith("its process ended with status -9")


def test_an_interrupt_ends_the_processes_and_keeps_what_is_done(bench: Bench) -> None:
    def interrupted(line: str) -> None:
        raise KeyboardInterrupt(line)

    jobs = [Job("v6e", "v6e", what, {"does": what}, ("benchmarks/kernels_jobs.py",)) for what in ("a", "hangs")]
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        run_jobs(jobs, Results(bench.folder / "results"), bench.command, interrupted)
    assert threading.active_count() == before
    bench.worked_on()
    bench.run("a")
    assert bench.worked_on() == []


def test_neighbours_halve_and_double_one_size_at_a_time() -> None:
    assert list(kernels_tune.neighbours((128, 512, 9), (128, 128, 0))) == [(128, 512, 9), (256, 512, 9), (128, 256, 9), (128, 1024, 9)]


def test_every_entry_of_the_tables_is_compiled_for_every_chip() -> None:
    for chip in CHIPS.values():
        compiled = [job.case for job in kernels_tpu.jobs(chip, False)]
        for kernel in ("ragged_paged_attention", "paged_decode_attention"):
            for head_dim in (64, 128, 256):
                for dtype in ("float32", "bfloat16", "int8", "float8_e4m3fn"):
                    assert kernels_tpu.table_case(chip, kernel, head_dim, dtype)._asdict() in compiled


FIGURES = {
    "bundles_per_1000_scores": 2.5,
    "mxu": 0.7,
    "valu": 0.6,
    "fill": 0,
    "spill": 0,
    "bundles_per_page": 9,
    "dma_cycles_per_page": 8,
    "temp_bytes": 0,
}
REPORT = {"registers": 100, "spill_stores": 0, "spill_loads": 0, "shared_memory": 9, "blocks_at_a_time": 2, "is_serialized": False}


def test_tuning_writes_the_figures_of_entries_and_neighbours_beside_the_tables(tmp_path: Path) -> None:
    for name in ("tpu", "gpu"):
        (tmp_path / name).mkdir()
    jobs = [job for job in kernels_tune.jobs(("v6e", GROUP)) if "head_dim 64 bfloat16" in job.name]
    records = [job.described() | (FIGURES if job.group == "v6e" else {"report": REPORT}) for job in jobs]
    records[1] = jobs[1].described() | {"reason": "ValueError: too large"}
    found = kernels_tune.entries(jobs, records)
    assert kernels_tune.write(found, tmp_path) == [tmp_path / name / "tuning_figures.json" for name in ("tpu", "gpu")]
    tpu, gpu = (json.loads((tmp_path / name / "tuning_figures.json").read_text())["entries"] for name in ("tpu", "gpu"))
    assert [entry["is_chosen"] for entry in tpu if entry["kernel"] == "ragged_paged_attention"].count(True) == 1
    assert (
        tpu[0]["is_chosen"]
        and tpu[0]["bundles_per_1000_scores"] == 2.5
        and [entry["reason"] for entry in tpu if "reason" in entry] == ["ValueError: too large"]
    )
    assert {(entry["target"], entry["kernel"]) for entry in gpu if entry["is_chosen"]} == {
        (target, kernel) for target in ("sm_80", "sm_90", "sm_100") for kernel in ("triton_prefill", "triton_decode")
    }
    # Another run, of one key, leaves the others as they are.
    again = [job for job in jobs if job.target == "sm_80" and job.case["kernel"] == "triton_decode"]
    fresh = kernels_tune.entries(again, [job.described() | {"report": REPORT | {"registers": 7}} for job in again])
    kernels_tune.write(fresh, tmp_path)
    merged = json.loads((tmp_path / "gpu" / "tuning_figures.json").read_text())["entries"]
    assert len(merged) == len(gpu) and sum(entry["registers"] == 7 for entry in merged) == len(again)
    assert len(kernels_tune.grid(found).rows) == len(jobs)


def test_the_command_ends_with_1_where_a_program_failed_and_prints_the_rest(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = kernels_command.Settings(("v6e",), True, False, (), bench.folder / "results", bench.folder / "out.json", None)
    monkeypatch.setattr(kernels_command, "command", lambda group, todo, work: bench.command("broken", todo, work))
    assert kernels_command.run(argparse.Namespace(), settings) == 1
    said = capsys.readouterr()
    assert "3 of 3 programs failed" in said.err and "no such compiler" in said.out
    report = json.loads((bench.folder / "out.json").read_text())
    assert [record["reason"] for record in report["tpu"]] == ["its process ended with status 1: no such compiler"] * 3
