"""A router with batches that stops, dies or loses its disk forgets nothing, and asks for nothing twice.

The router that dies is this module as `__main__`: the application around a backend that notes every row it is asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from pdjax.batches.folder import Folder
from pdjax.batches.store import Store
from tests.batches_kit import begin, hold_long_rows, jsonl, line, results, running, upload, wait_for
from tests.fake_backend import EOS, WAIT_S, FakeBackend

ROOT = Path(__file__).parent.parent
NUM_ROWS, ROWS_BEFORE_DEATH = 60, 25


def test_a_router_that_stops_and_starts_goes_on_with_every_batch(tmp_path: Path) -> None:
    backend = FakeBackend()
    hold_long_rows(backend)
    rows = [*[line(f"short-{i}", "Hi", max_tokens=3) for i in range(3)], *[line(f"long-{i}", "Ho") for i in range(5)]]
    with running(tmp_path, backend, max_in_progress=1) as served:
        client = served.client()
        first, waiting, done = begin(client, *rows), begin(client, line("z")), upload(client, line("x"))
        wait_for(client, first.id, "in_progress", ready=lambda batch: batch.request_counts.completed == 3)  # type: ignore[union-attr]
        backend.wait_until_open(5)
    backend.reset()
    with running(tmp_path, backend, max_in_progress=1) as served:
        client = served.client()
        batch = wait_for(client, first.id, "completed")
        assert results(client, batch.output_file_id).keys() == {row["custom_id"] for row in rows}
        assert results(client, wait_for(client, waiting.id, "completed").output_file_id).keys() == {"z"}
        assert [bytes(call.prompt) for call in backend.calls[:5]] == [b"Ho"] * 5 and len(backend.calls) == 6
        assert client.files.content(done).content == jsonl(line("x"))
        assert [each.id for each in client.batches.list()] == [waiting.id, first.id]
        assert list((tmp_path / "batches").iterdir()) == []


def test_a_batch_that_was_being_cancelled_is_cancelled_after_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FakeBackend()
    hold_long_rows(backend)
    publish = Folder.publish

    def broken(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Folder, "publish", broken)
    with running(tmp_path, backend) as served:
        client = served.client()
        batch = begin(client, line("short", max_tokens=3), line("long"))
        wait_for(client, batch.id, "in_progress", ready=lambda batch: batch.request_counts.completed == 1)  # type: ignore[union-attr]
        client.batches.cancel(batch.id)
        backend.wait_until_open(0)
    monkeypatch.setattr(Folder, "publish", publish)
    with running(tmp_path, backend) as served:
        ended = wait_for(served.client(), batch.id, "cancelled")
        assert results(served.client(), ended.output_file_id).keys() == {"short"}
        assert len(backend.calls) == 2


def test_results_whose_publishing_breaks_off_are_published_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files are in place, but the database cannot be written: what a full disk does, and a death in between."""
    monkeypatch.setattr("pdjax.batches.keeper.PAUSE_AFTER_TROUBLE_S", 0.01)
    save, num_refused = Store.save_batch, 0

    async def refusing_twice(self: Store, batch: Any, new_files: Any = ()) -> None:
        nonlocal num_refused
        if new_files and num_refused < 2:
            num_refused += 1
            raise sqlite3.OperationalError("database or disk is full")
        await save(self, batch, new_files)

    monkeypatch.setattr(Store, "save_batch", refusing_twice)
    with running(tmp_path, FakeBackend()) as served:
        client = served.client()
        batch = wait_for(client, begin(client, line("a"), line("b", temperature=9)).id, "completed")
        assert num_refused == 2
        assert results(client, batch.output_file_id).keys() == {"a"} and results(client, batch.error_file_id).keys() == {"b"}
        assert len(client.files.list(purpose="batch_output").data) == 2


def test_a_bug_ends_the_batch_with_what_was_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdjax.batches.keeper.PAUSE_AFTER_TROUBLE_S", 0.01)

    def buggy(*_: Any) -> Any:
        raise KeyError("a bug")

    monkeypatch.setattr("pdjax.batches.run.Agenda", buggy)
    with running(tmp_path, FakeBackend()) as served:
        client = served.client()
        batch = wait_for(client, begin(client, line("a")).id, "failed")
        assert batch.errors is not None and batch.errors.data is not None and batch.errors.data[0].code == "internal_error"


def test_a_folder_has_one_router(tmp_path: Path) -> None:
    with running(tmp_path, FakeBackend()):
        with pytest.raises(ValueError, match=r"batches\.directory: another router uses"), running(tmp_path, FakeBackend()):
            pass
    with running(tmp_path, FakeBackend()):
        pass


def test_a_database_of_another_version_is_refused(tmp_path: Path) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "state.db")) as database:
        database.execute("PRAGMA user_version = 7")
    with pytest.raises(ValueError, match=r"state\.db is of version 7, this program knows 1"), running(tmp_path, FakeBackend()):
        pass
    (tmp_path / "state.db").write_bytes(b"this is no database at all" * 99)
    with pytest.raises(ValueError, match=r"state\.db cannot be used"), running(tmp_path, FakeBackend()):
        pass


def test_what_a_dead_router_has_left_half_done_is_swept_away(tmp_path: Path) -> None:
    with running(tmp_path, FakeBackend()) as served:
        kept = upload(served.client(), line("a"))
    (tmp_path / "uploads" / "file-half").write_bytes(b"half")
    (tmp_path / "files" / "file-unknown").write_bytes(b"whole, but its router died before it had noted it down")
    with running(tmp_path, FakeBackend()) as served:
        assert [file.id for file in served.client().files.list()] == [kept]
    assert list((tmp_path / "uploads").iterdir()) == []
    assert [path.name for path in (tmp_path / "files").iterdir()] == [kept]


def asked_for(audit: Path) -> list[str]:
    return audit.read_text().split() if audit.exists() else []


def recorded(folder: Path, batch_id: str) -> set[str]:
    """custom_ids in whole lines of the journals, once the router is dead."""
    text = "".join(path.read_text() for path in (folder / "batches" / batch_id).glob("*.jsonl"))
    return {json.loads(each)["custom_id"] for each in text.split("\n")[:-1]}


@contextlib.contextmanager
def process(folder: Path, audit: Path, num_rows: int) -> Iterator[tuple[subprocess.Popen[bytes], openai.OpenAI]]:
    """A router that is up. It kills itself as soon as it is asked for row `num_rows`, counted from 1."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-W", "error", "-m", "tests.test_batch_restart", str(folder), str(audit), str(port), str(num_rows)]
    router = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=WAIT_S, trust_env=False) as http:
            end_s = time.monotonic() + 3 * WAIT_S
            while not _is_up(http):
                assert router.poll() is None and time.monotonic() < end_s, "the router has not started"
                time.sleep(0.02)
            yield router, openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, http_client=http)
    finally:
        router.kill()
        router.wait()


def _is_up(http: httpx.Client) -> bool:
    try:
        return http.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def test_a_router_that_is_killed_in_mid_batch_does_every_row_exactly_once(tmp_path: Path) -> None:
    folder, audit = tmp_path / "state", tmp_path / "first.txt"
    with process(folder, audit, ROWS_BEFORE_DEATH) as (router, client):
        batch_id = begin(client, *[line(f"row-{i}", f"{i}", temperature=9 if i % 7 == 0 else 0) for i in range(NUM_ROWS)]).id
        assert router.wait(3 * WAIT_S) == -signal.SIGKILL
    assert len(asked_for(audit)) == ROWS_BEFORE_DEATH
    done = recorded(folder, batch_id)
    assert ROWS_BEFORE_DEATH / 2 < len(done) < NUM_ROWS
    audit = tmp_path / "last.txt"
    with process(folder, audit, 0) as (_, client):
        batch = wait_for(client, batch_id, "completed")
        answered, failed = results(client, batch.output_file_id), results(client, batch.error_file_id)
    bad = {f"row-{i}" for i in range(0, NUM_ROWS, 7)}
    assert failed.keys() == bad and answered.keys() == {f"row-{i}" for i in range(NUM_ROWS)} - bad
    assert sorted(asked_for(audit)) == sorted(name.removeprefix("row-") for name in answered.keys() - done)
    for name, each in answered.items():
        assert each["response"]["body"]["choices"][0]["text"] == f"to {name.removeprefix('row-')}"


def route_until_killed(folder: Path, audit: Path, port: int, num_rows: int) -> None:
    """Answers slowly, and notes the rows that it is asked for before it answers them."""
    num_asked = 0
    notes = os.open(audit, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    class Noting(FakeBackend):
        async def generate(self, request_id: str, prompt: list[int], *rest: Any) -> Any:
            nonlocal num_asked
            os.write(notes, bytes(prompt) + b"\n")
            num_asked += 1
            if num_asked == num_rows:
                os.kill(os.getpid(), signal.SIGKILL)
            await asyncio.sleep(0.05)
            async for part in super().generate(request_id, prompt, *rest):
                yield part

    backend = Noting()
    backend.script = lambda prompt: [*b"to ", *prompt, EOS]
    with running(folder, backend, port, max_in_flight=3):
        threading.Event().wait()


if __name__ == "__main__":
    route_until_killed(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
