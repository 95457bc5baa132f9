"""A batch job is killed again and again, and continued: every row is done exactly once.

Each run is a program of its own, this module as `__main__`, whose backend answers after random times and notes every row that it is asked
for. It is ended by SIGKILL: as soon as a chosen number of rows has been answered, or by a thread at a random moment, which falls into
anything, writes included.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from pdjax.jobs.backend import Reply
from pdjax.jobs.config import JobConfig, load_job
from pdjax.jobs.job import Work, read_work
from pdjax.jobs.ledger import Ledger, look_back
from pdjax.jobs.order import Agenda
from pdjax.jobs.rows import Row
from pdjax.jobs.runner import Runner

ROOT = Path(__file__).parent.parent
NUM_ROWS = 80
MAX_IN_FLIGHT = 4


def make_job(folder: Path) -> Path:
    """Half the rows share a beginning; every seventh will fail."""
    shared = "s" * 100
    lines = [json.dumps({"custom_id": f"row-{i}", "prompt": f"{shared if i % 2 else ''}{i}"}) for i in range(1, NUM_ROWS + 1)]
    (folder / "in.jsonl").write_text("\n".join(lines) + "\n")
    file = folder / "job.yaml"
    file.write_text(f"input: in.jsonl\noutput: {folder}/out.jsonl\nurl: http://127.0.0.1:1\nmax_in_flight: {MAX_IN_FLIGHT}\n")
    return file


def run_program(job: Path, audit: Path, *death: str) -> int:
    """The exit status; minus the signal's number where one has ended the program."""
    command = [sys.executable, "-W", "error", "-m", "tests.test_batch_resume", str(job), str(audit), *death]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode


def asked_for(audit: Path) -> list[int]:
    return [int(line) for line in audit.read_text().split()] if audit.exists() else []


@pytest.mark.parametrize("seed", range(3))
def test_a_job_that_is_killed_at_random_points_does_every_row_exactly_once(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    file = make_job(tmp_path)
    job = load_job(file)
    work = read_work(job)
    done: frozenset[int] = frozenset()
    some_rows, some_seconds = lambda: str(chance.randrange(10, 20)), lambda: str(chance.uniform(0.01, 0.05))
    deaths = [("rows", some_rows()), ("seconds", some_seconds()), ("rows", some_rows())]
    for number, death in enumerate(deaths):
        audit = tmp_path / f"run-{number}.txt"
        status = run_program(file, audit, *death)
        assert status == -signal.SIGKILL
        assert not done & set(asked_for(audit)), "rows that were done are asked for again"
        before, done = done, look_back(job.paths, work.identity).done
        assert before <= done, "rows that were done are lost"
        assert death[0] == "seconds" or len(done) > len(before), "this death came before anything was done"
    audit = tmp_path / "last.txt"
    assert run_program(file, audit) == 0
    assert sorted(asked_for(audit)) == sorted(set(range(1, NUM_ROWS + 1)) - done)
    check_results(job)


def check_results(job: JobConfig) -> None:
    """Each row once, in the right file, with the answer to its own prompt."""
    good, bad = (
        [json.loads(line) for line in path.read_text().splitlines()] for path in (job.paths.output_journal, job.paths.errors_journal)
    )
    assert sorted(result["id"] for result in good + bad) == sorted(f"batch_req_{i}" for i in range(1, NUM_ROWS + 1))
    assert {result["custom_id"] for result in bad} == {f"row-{i}" for i in range(7, NUM_ROWS + 1, 7)}
    for result in good + bad:
        assert result["response"]["body"]["to"].lstrip("s") == result["custom_id"].removeprefix("row-")


def answer_until_killed(job: Path, audit: Path, *death: str) -> None:
    work = read_work(load_job(job))
    chance = random.Random(f"{job} {audit}")
    die_after_rows = int(death[1]) if death[:1] == ("rows",) else None
    num_answered = 0

    async def answer(row: Row, on_prefilled: Callable[[], None]) -> Reply:
        nonlocal num_answered
        os.write(notes, f"{row.line}\n".encode())
        await asyncio.sleep(chance.uniform(0, 0.006))
        on_prefilled()
        await asyncio.sleep(chance.uniform(0, 0.006))
        num_answered += 1
        if num_answered == die_after_rows:
            os.kill(os.getpid(), signal.SIGKILL)
        body = {"to": json.loads(row.body_for("m"))["prompt"]}
        return Reply(400 if row.line % 7 == 0 else 200, "", json.dumps(body).encode())

    notes = os.open(audit, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with Ledger.open(work.job.paths, work.identity) as ledger:
        if death[:1] == ("seconds",):
            threading.Timer(float(death[1]), os.kill, (os.getpid(), signal.SIGKILL)).start()
        asyncio.run(run_all(work, ledger, answer))
        if death[:1] == ("seconds",):
            os.kill(os.getpid(), signal.SIGKILL)  # before the timer could
    os.close(notes)


async def run_all(work: Work, ledger: Ledger, answer: Callable[..., object]) -> None:
    await Runner(Agenda(work.order(ledger.past)), answer, ledger, work.job.batch.max_in_flight, lambda results: None).run()


if __name__ == "__main__":
    answer_until_killed(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
