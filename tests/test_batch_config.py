"""A batch job's configuration: what is refused before anything is loaded, and in which words."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from pdjax.batch import main
from pdjax.config.load import ConfigError
from pdjax.config.schema import Config
from pdjax.jobs.config import load_job
from pdjax.jobs.job import read_work

ROOT = Path(__file__).parent.parent


def job_file(folder: Path, text: str, prompts: str = '"Hi"\n') -> Path:
    (folder / "in.jsonl").write_text(prompts)
    file = folder / "job.yaml"
    file.write_text(text.replace("FOLDER", str(folder)))
    return file


def test_input_and_output_are_enough(tmp_path: Path) -> None:
    job = load_job(job_file(tmp_path, "input: in.jsonl\noutput: FOLDER/out.jsonl\n"))
    assert job.paths.input == tmp_path / "in.jsonl"
    assert job.paths.output == job.paths.output_journal == tmp_path / "out.jsonl"
    assert job.paths.errors == tmp_path / "out.errors.jsonl"
    assert job.engine is not None and job.engine.transfer.kind == "device_put"
    assert job.engine.model_copy(update={"transfer": Config().transfer}) == Config()


def test_an_engine_can_be_given_by_file_or_in_place(tmp_path: Path) -> None:
    base = "input: in.jsonl\noutput: FOLDER/out.jsonl\n"
    by_file = load_job(job_file(tmp_path, base + "config: configs/notebook.yaml\n")).engine
    in_place = load_job(job_file(tmp_path, base + "config:\n  engine:\n    num_pages: 99\n  transfer:\n    kind: loopback\n")).engine
    assert by_file is not None and by_file.engine.num_pages == 512
    assert in_place is not None and (in_place.engine.num_pages, in_place.transfer.kind) == (99, "loopback")


def test_a_router_needs_no_engine(tmp_path: Path) -> None:
    job = load_job(job_file(tmp_path, "input: in.jsonl\noutput: FOLDER/out.jsonl\nurl: http://127.0.0.1:1\n"))
    assert job.engine is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("output: FOLDER/out.jsonl", "input is required"),
        ("", "must hold fields, at least input and output"),
        ("inptu: a\ninput: in.jsonl\noutput: FOLDER/o", "unknown field inptu; did you mean input?"),
        ("input: none.jsonl\noutput: FOLDER/o", "there is no input none.jsonl, neither in the current folder nor beside the configuration"),
        ("input: in.jsonl\noutput: FOLDER/no/o", "there is no folder FOLDER/no to write into"),
        ("input: in.jsonl\noutput: FOLDER", "cannot write FOLDER: it is a folder"),
        ("input: in.jsonl\noutput: FOLDER/in.jsonl", "input, output and errors must be three files"),
        ("input: in.jsonl\noutput: FOLDER/o\nerrors: FOLDER/o", "input, output and errors must be three files"),
        ("input: in.jsonl\noutput: FOLDER/o\nmax_in_flight: 0", "max_in_flight: Input should be greater than or equal to 1, got 0"),
        ("input: in.jsonl\noutput: FOLDER/o\nmax_in_flight: 129", "max_in_flight 129 exceeds what the engine takes at a time, 128"),
        ("input: in.jsonl\noutput: FOLDER/o\nurl: localhost", "a server's URL looks like http://127.0.0.1:8000, got 'localhost'"),
        ("input: in.jsonl\noutput: FOLDER/o\nurl: http://h\nconfig: {}", "url and config exclude each other"),
        ("input: in.jsonl\noutput: FOLDER/o\nrequest: {top_p: 3}", "request: top_p: Input should be less than or equal to 1, got 3"),
        ("input: in.jsonl\noutput: FOLDER/o\nrequest: {colour: red}", "request: unknown field 'colour'"),
        ("input: in.jsonl\noutput: FOLDER/o\nrequest: {stream: true}", "request.stream: a batch has no streams"),
        ("input: in.jsonl\noutput: FOLDER/o\nrequest: {prompt: x}", "request: prompt and messages belong into the input"),
        ("input: in.jsonl\noutput: FOLDER/o\nconfig: {engine: {num_pages: 1}}", "config: engine.num_pages must be at least 4, got 1"),
        ("input: in.jsonl\noutput: FOLDER/o\nconfig: {transfer: {kind: tcp}}", "transfer.kind tcp moves KV between processes"),
        ("input: in.jsonl\noutput: FOLDER/o\nconfig: none.yaml", "there is no configuration file none.yaml"),
        ("input: [in", "line 1"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(job_file(tmp_path, text))]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ") and told.count("\n") == 1
    assert message.replace("FOLDER", str(tmp_path)) in told
    assert not (tmp_path / "out.jsonl").exists()


def test_an_empty_input_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(job_file(tmp_path, "input: in.jsonl\noutput: FOLDER/out.jsonl", prompts="\n\n"))]) == 2
    assert "in.jsonl has no rows" in capsys.readouterr().err


def test_a_folder_for_the_summary_has_to_exist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = job_file(tmp_path, "input: in.jsonl\noutput: FOLDER/out.jsonl")
    assert main([str(file), "--json", str(tmp_path / "no" / "summary.json")]) == 2
    assert "there is no such folder" in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("pyarrow") is not None, reason="shows what is said where pyarrow is missing")
def test_without_pyarrow_parquet_is_refused_with_the_name_of_the_extra(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Parquet needs pyarrow, which is not installed: pip install 'pdjax\[batch\]'"):
        load_job(job_file(tmp_path, "input: in.jsonl\noutput: FOLDER/out.parquet\n"))


@pytest.mark.parametrize(("name", "num_rows"), [("prompts", 5), ("openai", 7), ("router", 7)])
def test_the_examples_can_be_run(name: str, num_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where the results would go
    work = read_work(load_job(ROOT / "configs" / "batch" / f"{name}.yaml"))
    assert (work.source.num_rows, work.source.bad_rows) == (num_rows, [])


def test_a_dry_run_shows_the_plan_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shared = "x" * 200
    prompts = f'"{shared} one"\n"{shared} two"\n"other"\n7\n'
    file = job_file(tmp_path, "input: in.jsonl\noutput: FOLDER/out.jsonl\n", prompts)
    assert main([str(file), "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert "4 rows, 1 of them malformed" in told
    assert "3 x /v1/completions" in told
    assert re.search(r"of these wait for a shared beginning\W+1\W", told)
    assert "46% of the characters" in told  # 192 of 205 + 205 + 6
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "job.yaml"]
