"""Runs of a batch job over backends whose answers are known: what is in flight, what is written, what ends a job."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdjax.config.load import ConfigError
from pdjax.jobs.backend import FIRST_PAUSE_S, WORKER_FAILURES, JobStopped, Reply, RowBackend, Unreachable, answer_patiently
from pdjax.jobs.config import Paths
from pdjax.jobs.ledger import Identity, Ledger, look_back
from pdjax.jobs.order import BLOCK_CHARS, Agenda, by_prefix
from pdjax.jobs.outcomes import Counts, ResultLine, counts_of, result_of, result_of_bad
from pdjax.jobs.report import Summary, Tally, progress_line
from pdjax.jobs.rows import COMPLETIONS, BadRow, Row
from pdjax.jobs.runner import Runner
from pdjax.observe.progress import LineBoard

IDENTITY = Identity("print", {})
USAGE = {"prompt_tokens": 10, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
WAIT_S = 10.0
"""Far longer than anything here takes."""


def row(line: int, key: str = "") -> Row:
    return Row(line, f"row {line}", COMPLETIONS, b"{}", False, key)


def ok(line: int) -> Reply:
    return Reply(200, f"cmpl-{line}", json.dumps({"line": line, "usage": USAGE}).encode())


def job_paths(folder: Path) -> Paths:
    output, errors = folder / "out.jsonl", folder / "errors.jsonl"
    return Paths(folder / "in.jsonl", output, errors, output, errors)


def written(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(folder: Path, rows: list[Row], answer: Any, max_in_flight: int = 4) -> list[ResultLine]:
    """What was told of results."""
    told: list[ResultLine] = []
    with Ledger.open(job_paths(folder), IDENTITY) as ledger:
        left = [each for each in rows if each.line not in ledger.past.done]

        async def go() -> None:
            async with asyncio.timeout(WAIT_S):
                await Runner(Agenda(by_prefix(left)), answer, ledger, max_in_flight, told.extend).run()
            assert len(asyncio.all_tasks()) == 1

        asyncio.run(go())
    return told


def test_every_row_has_one_line_in_the_file_that_its_status_asks_for(tmp_path: Path) -> None:
    async def answer(row: Row, on_prefilled: Callable[[], None]) -> Reply:
        await asyncio.sleep(0)
        return ok(row.line) if row.line % 3 else Reply(400, "", b'{"error": {"message": "no"}}')

    told = run(tmp_path, [row(line) for line in range(1, 11)], answer)
    good, bad = written(tmp_path / "out.jsonl"), written(tmp_path / "errors.jsonl")
    assert sorted(line["custom_id"] for line in good) == sorted(f"row {line}" for line in (1, 2, 4, 5, 7, 8, 10))
    assert sorted(line["custom_id"] for line in bad) == ["row 3", "row 6", "row 9"]
    first = next(line for line in good if line["custom_id"] == "row 1")
    response = {"status_code": 200, "request_id": "cmpl-1", "body": {"line": 1, "usage": USAGE}}
    assert first == {"id": "batch_req_1", "custom_id": "row 1", "response": response, "error": None}
    assert bad[0]["response"] == {"status_code": 400, "request_id": "", "body": {"error": {"message": "no"}}}
    assert len(told) == 10


def test_no_more_rows_are_in_flight_than_allowed_and_no_fewer_while_there_are_some(tmp_path: Path) -> None:
    open_rows, most = 0, []

    async def answer(row: Row, on_prefilled: Callable[[], None]) -> Reply:
        nonlocal open_rows
        open_rows += 1
        for _ in range(5):
            await asyncio.sleep(0)
        most.append(open_rows)
        open_rows -= 1
        return ok(row.line)

    run(tmp_path, [row(line) for line in range(1, 21)], answer, max_in_flight=3)
    assert max(most) == 3


def test_followers_start_when_their_leaders_prompt_is_there_and_not_before(tmp_path: Path) -> None:
    happened: list[str] = []
    followers_started = asyncio.Event()

    async def answer(row: Row, on_prefilled: Callable[[], None]) -> Reply:
        happened.append(f"start {row.line}")
        if row.line == 1:
            for _ in range(20):
                await asyncio.sleep(0)
            happened.append("prefilled")
            on_prefilled()
            on_prefilled()
            await followers_started.wait()  # the leader's answer ends only behind the start of the others
        elif row.line in (2, 3):
            followers_started.set()
        return ok(row.line)

    shared = "s" * BLOCK_CHARS
    run(tmp_path, [row(1, shared + "a"), row(2, shared + "b"), row(3, shared + "c"), row(4, "z")], answer)
    assert happened[:2] == ["start 1", "start 4"]
    assert happened.index("prefilled") < happened.index("start 2") < happened.index("start 3")


def test_followers_of_a_leader_that_fails_are_answered_all_the_same(tmp_path: Path) -> None:
    async def answer(row: Row, on_prefilled: Callable[[], None]) -> Reply:
        return Reply(400, "", b"{}") if row.line == 1 else ok(row.line)

    shared = "s" * BLOCK_CHARS
    run(tmp_path, [row(1, shared + "a"), row(2, shared + "b")], answer)
    assert [line["custom_id"] for line in written(tmp_path / "out.jsonl")] == ["row 2"]


@pytest.mark.parametrize("error", [JobStopped("the router is gone"), RuntimeError("a bug")])
def test_what_ends_a_job_leaves_finished_rows_written_and_the_others_to_be_done(error: Exception, tmp_path: Path) -> None:
    async def breaking(row: Row, on_prefilled: Callable[[], None]) -> Reply:
        if row.line == 3:
            raise error
        if row.line > 3:
            await asyncio.Event().wait()
        return ok(row.line)

    async def answer(row: Row, on_prefilled: Callable[[], None]) -> Reply:
        return ok(row.line)

    rows = [row(line) for line in range(1, 6)]
    with pytest.raises(type(error), match=str(error)):
        run(tmp_path, rows, breaking)
    assert sorted(line["custom_id"] for line in written(tmp_path / "out.jsonl")) == ["row 1", "row 2"]
    told = run(tmp_path, rows, answer)
    assert sorted(result.line for result in told) == [3, 4, 5]


def test_a_cancelled_run_writes_what_is_there_and_stops_the_rest(tmp_path: Path) -> None:
    stopped: list[int] = []

    async def answer(row: Row, on_prefilled: Callable[[], None]) -> Reply:
        if row.line <= 2:
            return ok(row.line)
        try:
            await asyncio.Event().wait()
        finally:
            stopped.append(row.line)
        raise AssertionError("an event that nobody sets")

    async def go(ledger: Ledger) -> None:
        told: list[ResultLine] = []
        agenda = Agenda(by_prefix([row(line) for line in range(1, 6)]))
        running = asyncio.create_task(Runner(agenda, answer, ledger, 4, told.extend).run())
        async with asyncio.timeout(WAIT_S):
            while len(told) < 2:
                await asyncio.sleep(0.001)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert sorted(stopped) == [3, 4, 5]

    with Ledger.open(job_paths(tmp_path), IDENTITY) as ledger:
        asyncio.run(go(ledger))
    assert len(written(tmp_path / "out.jsonl")) == 2


def test_a_full_disk_ends_the_job_and_nothing_more_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(row: Row, on_prefilled: Callable[[], None]) -> Reply:
        return ok(row.line)

    def full(file_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with Ledger.open(job_paths(tmp_path), IDENTITY) as ledger:
        monkeypatch.setattr("os.fsync", full)
        told: list[ResultLine] = []
        with pytest.raises(OSError, match="No space left"):
            asyncio.run(Runner(Agenda(by_prefix([row(1), row(2)])), answer, ledger, 1, told.extend).run())
        assert told == []
    assert len(written(tmp_path / "out.jsonl")) == 1


def test_a_file_cut_at_any_byte_is_continued_from_its_last_whole_line(tmp_path: Path) -> None:
    paths = job_paths(tmp_path)
    results = [result_of(row(line), ok(line)) for line in (1, 2, 3)]
    with Ledger.open(paths, IDENTITY) as ledger:
        ledger.commit(results)
    whole = paths.output.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for cut in range(len(whole) + 1):
        paths.output.write_bytes(whole[:cut])
        num_whole = sum(end <= cut for end in ends)
        with Ledger.open(paths, IDENTITY) as ledger:
            assert ledger.past.done == set(range(1, num_whole + 1))
            assert ledger.past.counts == Counts(num_whole, 0, 10 * num_whole, 4 * num_whole, 3 * num_whole)
            ledger.commit(results[num_whole:])
        assert paths.output.read_bytes() == whole


def test_a_changed_input_is_one_clear_error(tmp_path: Path) -> None:
    paths = job_paths(tmp_path)
    with Ledger.open(paths, IDENTITY) as ledger:
        ledger.commit([result_of(row(1), ok(1))])
    with pytest.raises(ConfigError, match=r"the input .*in\.jsonl has changed since this job was begun; name another output, or remove"):
        Ledger.open(paths, Identity("other", {}))
    with pytest.raises(ConfigError, match=r"the defaults in `request` have changed"):
        Ledger.open(paths, Identity("print", {"seed": 1}))
    assert look_back(paths, IDENTITY).done == {1}


def test_an_output_without_results_belongs_to_nobody(tmp_path: Path) -> None:
    Ledger.open(job_paths(tmp_path), IDENTITY).close()
    Ledger.open(job_paths(tmp_path), Identity("other", {})).close()
    assert look_back(job_paths(tmp_path), Identity("other", {})).done == frozenset()


@pytest.mark.parametrize("content", [b"a poem\n", b'{"id": "batch_req_x", "custom_id": "a", "response": null, "error": null}\n'])
def test_a_foreign_file_is_not_overwritten(content: bytes, tmp_path: Path) -> None:
    paths = job_paths(tmp_path)
    paths.output.write_bytes(content)
    with pytest.raises(ConfigError, match=r"out\.jsonl: line 1 is no result of a batch job"):
        Ledger.open(paths, IDENTITY)
    assert paths.output.read_bytes() == content


def test_results_without_their_identity_are_refused(tmp_path: Path) -> None:
    paths = job_paths(tmp_path)
    with Ledger.open(paths, IDENTITY) as ledger:
        ledger.commit([result_of(row(1), ok(1))])
    paths.identity.unlink()
    with pytest.raises(ConfigError, match=r"holds results, but .*out\.jsonl\.job, which says of what, is gone"):
        Ledger.open(paths, IDENTITY)


def test_a_job_has_one_process_at_a_time(tmp_path: Path) -> None:
    with Ledger.open(job_paths(tmp_path), IDENTITY), pytest.raises(ConfigError, match="another process is writing"):
        Ledger.open(job_paths(tmp_path), IDENTITY)
    Ledger.open(job_paths(tmp_path), IDENTITY).close()


def test_an_answer_over_several_lines_becomes_one() -> None:
    result = result_of(row(1), Reply(200, "", b'{\n "a":\n 1}'))
    assert result.response is not None and bytes(result.response.body) == b'{"a":1}'


def test_an_answer_that_is_not_json_is_a_failure() -> None:
    result = result_of(row(1), Reply(200, "", b"<html>"))
    assert result.response is None and not result.is_ok
    assert result.error is not None and (result.error.code, result.error.message[-6:]) == ("http_200", "<html>")


def test_a_malformed_row_counts_as_failed() -> None:
    result = result_of_bad(BadRow(4, None, "invalid_row", "line 4: no"))
    assert (result.line, result.custom_id, counts_of(result)) == (4, None, Counts(num_failed=1))


class Scripted(RowBackend):
    """Gives one reply after the other; exceptions are raised."""

    def __init__(self, *replies: Reply | Exception):
        self._replies = iter(replies)

    async def start(self) -> str:
        return "model"

    async def answer(self, url: str, body: bytes, on_prefilled: Callable[[], None]) -> Reply:
        reply = next(self._replies)
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def close(self) -> None:
        return None


def patiently(monkeypatch: pytest.MonkeyPatch, patience_s: float, *replies: Reply | Exception) -> tuple[Reply | Exception, list[float]]:
    """The reply, or the JobStopped, and every pause, by a clock that only pauses move."""
    pauses: list[float] = []
    monkeypatch.setattr("pdjax.jobs.backend.time.monotonic", lambda: sum(pauses))

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    async def go() -> Reply | Exception:
        monkeypatch.setattr("pdjax.jobs.backend.asyncio.sleep", sleep)
        try:
            return await answer_patiently(Scripted(*replies), COMPLETIONS, b"{}", lambda: None, patience_s)
        except JobStopped as error:
            return error

    coroutine = go()
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value, pauses
    raise AssertionError("nothing here waits for an event loop")


FULL, AWAY, WORKER_DIED = Reply(429, "", b"full", 3.0), Reply(503, "", b"no worker"), Reply(502, "", b"died")


def test_a_full_or_absent_system_is_tried_again_when_it_says_or_in_growing_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    reply, pauses = patiently(monkeypatch, 60, FULL, AWAY, Unreachable("no route"), AWAY, ok(1))
    assert reply == ok(1)
    assert pauses == [3.0, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S, 8 * FIRST_PAUSE_S]


def test_a_system_that_stays_away_stops_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    error, pauses = patiently(monkeypatch, 2.0, *[Unreachable("no route")] * 20)
    assert isinstance(error, JobStopped) and str(error) == "the system takes no requests after 2 s of trying: no route"
    assert sum(pauses) == 2.0


def test_a_row_that_keeps_failing_its_workers_is_recorded_as_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    reply, pauses = patiently(monkeypatch, 60, *[WORKER_DIED] * 20)
    assert reply == WORKER_DIED and len(pauses) == WORKER_FAILURES - 1


@pytest.mark.parametrize("status", [200, 400, 404, 413, 500, 504])
def test_other_answers_are_final(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert patiently(monkeypatch, 60, Reply(status, "", b"{}")) == (Reply(status, "", b"{}"), [])


def test_progress_tells_rate_time_left_and_cached_share() -> None:
    # 20 rows in 10 s, 40 of 100 left: 20 s.
    summary = Summary(100, Counts(40, 0), Counts(18, 2, 1000, 250, 500), 10.0)
    assert progress_line(summary) == "2 rows/s, 150 tokens/s, 0:20 left, 25% cached, 2 failed"
    assert progress_line(Summary(100, Counts(), Counts(), 0.0)) == ""


def test_the_summary_counts_earlier_runs_but_times_this_one() -> None:
    told = Summary(100, Counts(40, 0, 100, 0, 100), Counts(18, 2, 1000, 250, 500), 10.0).as_json()
    assert told["rows"] == {"total": 100, "ok": 58, "failed": 2, "left": 40}
    assert told["whole_job"] == {"prompt_tokens": 1100, "cached_prompt_tokens": 250, "cached_share": 250 / 1100, "output_tokens": 600}
    assert told["this_run"]["tokens_per_s"] == 150
    assert told["this_run"]["s_per_1000_tokens"] == pytest.approx(20 / 3)


def test_a_tally_times_from_the_beginning_to_the_last_result(capsys: pytest.CaptureFixture[str]) -> None:
    now_s = iter((0.0, 5.0, 9.0))
    tally = Tally(LineBoard(sys.stderr), 2, Counts(1), lambda: next(now_s))
    tally.begin()
    tally.add([result_of(row(1), ok(1))])
    summary = tally.summary()
    assert (summary.seconds, summary.num_left, summary.now) == (4.0, 0, Counts(1, 0, 10, 4, 3))
    assert "batch: rows 2/2 0.25 rows/s, 3 tokens/s, 0:00 left, 40% cached" in capsys.readouterr().err
