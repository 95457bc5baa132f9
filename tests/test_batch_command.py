"""`python -m pdjax.batch` against a running router, and rows beside the HTTP answers that they have to equal."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from pdjax.api.chat_template import ChatTemplate
from pdjax.api.service import Service
from pdjax.batch import main
from pdjax.benchmarks.client import parse_url
from pdjax.config.schema import ServerConfig
from pdjax.errors import NoWorker, OverCapacity
from pdjax.jobs.answers import ServiceAnswers
from pdjax.jobs.backend import Reply, Unreachable
from pdjax.jobs.remote import RouterBackend
from pdjax.jobs.rows import CHAT, COMPLETIONS
from pdjax.observe.http_metrics import HttpMetrics
from tests.fake_backend import MODEL, TEMPLATE, WAIT_S, FakeBackend, Served, byte_tokenizer, serve
from tests.live import COMPILE_CACHE

ROOT = Path(__file__).parent.parent
SERVER = ServerConfig(default_max_tokens=20, max_body_bytes=2000)


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serve(SERVER) as served:
        yield served


@pytest.fixture
def served(server: Served) -> Iterator[Served]:
    server.backend.reset()
    yield server
    server.backend.wait_until_open(0)


@pytest.fixture(autouse=True)
def no_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry point takes all logging over; these tests run it in a process that goes on."""
    monkeypatch.setattr("pdjax.batch.configure_logging", lambda level, board: None)


def results(path: Path) -> dict[str, dict[str, Any]]:
    """By custom_id, each once."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found = {line["custom_id"]: line for line in lines}
    assert len(found) == len(lines)
    return found


def write_job(folder: Path, served: Served, lines: list[Any], **fields: Any) -> Path:
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    url = f"http://127.0.0.1:{served.port}"
    job = {"input": "in.jsonl", "output": str(folder / "out.jsonl"), "url": url, "patience_s": 0.0, **fields}
    file = folder / "job.yaml"
    file.write_text(json.dumps(job))  # JSON is YAML
    return file


MESSAGES = [{"role": "user", "content": "Hi"}]
BODIES: list[tuple[str, Any]] = [
    (COMPLETIONS, {"model": MODEL, "prompt": "Hi"}),
    (COMPLETIONS, {"model": MODEL, "prompt": ["Hi", "Ho"], "n": 2, "max_tokens": 3}),
    (COMPLETIONS, {"model": MODEL, "prompt": [72, 105], "echo": True, "logprobs": 2, "max_tokens": 2}),
    (COMPLETIONS, {"model": MODEL, "prompt": "Hi", "stop": "d"}),
    (CHAT, {"model": MODEL, "messages": MESSAGES}),
    (CHAT, {"model": MODEL, "messages": MESSAGES, "logprobs": True, "top_logprobs": 1, "max_completion_tokens": 2}),
    (COMPLETIONS, {"model": "other", "prompt": "Hi"}),
    (COMPLETIONS, {"model": MODEL, "prompt": "Hi", "temperature": 3}),
    (COMPLETIONS, {"model": MODEL, "prompt": "Hi", "colour": "red"}),
    (COMPLETIONS, {"model": MODEL, "prompt": "x" * 60}),
    (COMPLETIONS, {"model": MODEL, "prompt": "x" * 3000}),
    (COMPLETIONS, {"prompt": "Hi"}),
    (COMPLETIONS, [1]),
    (CHAT, {"model": MODEL, "messages": []}),
]


def comparable(status: int, body: bytes) -> tuple[int, Any]:
    """Without what is different each time."""
    answer = json.loads(body)
    for name in ("id", "created"):
        answer.pop(name, None)
    return status, answer


@pytest.mark.parametrize(("url", "body"), BODIES)
def test_a_row_in_this_process_and_a_posted_row_get_what_an_http_client_gets(url: str, body: Any, served: Served) -> None:
    data = json.dumps(body).encode()
    by_http = served.http.post(url, content=data, headers={"content-type": "application/json"})
    expected = comparable(by_http.status_code, by_http.content)
    posted = asyncio.run(RouterBackend(parse_url(f"http://127.0.0.1:{served.port}"), WAIT_S).answer(url, data, lambda: None))
    assert comparable(posted.status, posted.body) == expected
    backend = FakeBackend()
    prefilled: list[bool] = []
    here = asyncio.run(answers_of(backend).answer(url, data, lambda: prefilled.append(True)))
    assert comparable(here.status, here.body) == expected
    assert bool(prefilled) == (expected[0] == 200)
    assert backend.num_open == 0


def answers_of(backend: FakeBackend, timeout_s: float = WAIT_S) -> ServiceAnswers:
    service = Service(backend, byte_tokenizer(), ChatTemplate(TEMPLATE), SERVER, HttpMetrics(CollectorRegistry()))
    return ServiceAnswers(service, SERVER.max_body_bytes, timeout_s)


BODY = json.dumps({"model": MODEL, "prompt": "Hi"}).encode()


def test_a_row_without_end_is_cut_off_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdjax.jobs.answers.GRACE_S", 0.0)
    backend = FakeBackend()
    backend.hold_at = 2
    reply = asyncio.run(answers_of(backend, timeout_s=0.05).answer(COMPLETIONS, BODY, lambda: None))
    assert (reply.status, json.loads(reply.body)["error"]["code"]) == (504, "deadline_exceeded")
    assert backend.num_open == 0


@pytest.mark.parametrize(("error", "status", "retry_after_s"), [(OverCapacity("full", 3.5), 429, 3.5), (NoWorker("none"), 503, 2.0)])
def test_a_reply_of_a_full_or_absent_system_says_when_to_come_back(error: Exception, status: int, retry_after_s: float) -> None:
    backend = FakeBackend()
    backend.fail_at, backend.error = 0, error
    reply = asyncio.run(answers_of(backend).answer(COMPLETIONS, BODY, lambda: None))
    assert (reply.status, reply.retry_after_s) == (status, retry_after_s)


def test_a_router_says_too_when_to_come_back(served: Served) -> None:
    served.backend.ready = False
    reply = asyncio.run(RouterBackend(parse_url(f"http://127.0.0.1:{served.port}"), WAIT_S).answer(COMPLETIONS, BODY, lambda: None))
    assert (reply.status, reply.retry_after_s) == (503, 2.0)


async def _answered_by(data: bytes) -> Reply:
    """The reply where a server sends `data` and closes the connection."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(len(BODY))
        writer.write(data)
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(talk, "127.0.0.1", 0) as listener:
        port = listener.sockets[0].getsockname()[1]
        return await RouterBackend(parse_url(f"http://127.0.0.1:{port}"), WAIT_S).answer(COMPLETIONS, BODY, lambda: None)


@pytest.mark.parametrize("data", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf", b"nonsense\r\n\r\n"])
def test_a_broken_answer_is_none(data: bytes) -> None:
    reply = asyncio.run(_answered_by(data))
    assert (reply.status, json.loads(reply.body)["error"]["code"]) == (502, "worker_failed")


def test_an_answer_in_chunks_is_put_together() -> None:
    data = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-Request-Id: r\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
    assert asyncio.run(_answered_by(data)) == Reply(200, "r", b"{}")


def test_a_router_that_is_not_there_is_unreachable() -> None:
    backend = RouterBackend(parse_url("http://127.0.0.1:1"), WAIT_S)
    with pytest.raises(Unreachable, match=r"no connection to 127\.0\.0\.1:1"):
        asyncio.run(backend.answer(COMPLETIONS, BODY, lambda: None))


def test_a_job_with_good_and_bad_rows_ends_with_status_1_and_a_line_for_each(served: Served, tmp_path: Path) -> None:
    served.backend.cached_tokens = 1
    good = {"custom_id": "good", "method": "POST", "url": CHAT, "body": {"model": MODEL, "messages": MESSAGES}}
    lines = ["Hi", good, {"prompt": "Ho", "temperature": 9}, good, 7]
    file = write_job(tmp_path, served, lines, request={"max_tokens": 3})
    assert main([str(file), "--json", str(tmp_path / "summary.json")]) == 1
    answered, failed = results(tmp_path / "out.jsonl"), results(tmp_path / "out.errors.jsonl")
    assert answered.keys() == {"line-1", "good"}
    assert answered["line-1"]["response"]["body"]["choices"][0]["text"] == "abc"
    assert answered["good"]["response"]["body"]["choices"][0]["message"]["content"] == "abcdef"
    assert answered["good"]["response"]["request_id"] == answered["good"]["response"]["body"]["id"]
    told = json.loads((tmp_path / "summary.json").read_text())
    assert told["rows"] == {"total": 5, "ok": 2, "failed": 3, "left": 0}
    usages = [answered[name]["response"]["body"]["usage"] for name in ("line-1", "good")]
    assert told["this_run"]["prompt_tokens"] == sum(usage["prompt_tokens"] for usage in usages)
    assert told["this_run"]["output_tokens"] == 3 + 7
    assert told["this_run"]["cached_prompt_tokens"] == 2
    by_id = [json.loads(line) for line in (tmp_path / "out.errors.jsonl").read_text().splitlines()]
    codes = {line["id"]: line["error"] and line["error"]["code"] for line in by_id}
    assert codes == {"batch_req_3": None, "batch_req_4": "duplicate_custom_id", "batch_req_5": "invalid_row"}
    assert failed["line-3"]["response"]["body"]["error"]["param"] == "temperature"


def test_a_second_run_of_a_finished_job_asks_for_nothing(served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_job(tmp_path, served, ["Hi", "Ho"])
    assert main([str(file)]) == 0
    before = (tmp_path / "out.jsonl").read_bytes()
    served.backend.reset()
    assert main([str(file)]) == 0
    assert served.backend.calls == [] and (tmp_path / "out.jsonl").read_bytes() == before
    with (tmp_path / "in.jsonl").open("a") as file_of_rows:
        file_of_rows.write('"Hu"\n')
    assert main([str(file)]) == 2
    assert "in.jsonl has changed since this job was begun" in capsys.readouterr().err


def test_a_job_without_its_router_stops_and_goes_on_later(served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_job(tmp_path, served, ["Hi", "Ho"])
    served.backend.fail_at, served.backend.error = 0, OverCapacity("no room")
    assert main([str(file)]) == 1
    told = capsys.readouterr().err
    assert "error: the system takes no requests after 0 s of trying: status 429" in told
    assert "2 rows are left; the same command goes on with them" in told
    served.backend.reset()
    assert main([str(file)]) == 0
    assert results(tmp_path / "out.jsonl").keys() == {"line-1", "line-2"}


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_a_job_in_order_and_the_same_command_goes_on(number: int, status: int, served: Served, tmp_path: Path) -> None:
    served.backend.script = lambda prompt: list(b"abcd")
    served.backend.hold_at = 3  # only the first row wants no more than three tokens
    lines = ["Hi"] + ["wait"] * 3
    file = write_job(tmp_path, served, [{"prompt": line, "max_tokens": 3 if line == "Hi" else 9} for line in lines])
    with (tmp_path / "told").open("w") as told:
        process = subprocess.Popen([sys.executable, "-m", "pdjax.batch", str(file)], cwd=ROOT, stdout=told, stderr=told)
        try:
            end_s = time.monotonic() + 3 * WAIT_S
            while not ((tmp_path / "out.jsonl").exists() and (tmp_path / "out.jsonl").read_bytes()):
                assert time.monotonic() < end_s and process.poll() is None, (tmp_path / "told").read_text()
                time.sleep(0.02)
            served.backend.wait_until_open(3)
            process.send_signal(number)
            assert process.wait(WAIT_S) == status
        finally:
            process.kill()
            process.wait()
    assert "3 rows are left; the same command goes on with them" in (tmp_path / "told").read_text()
    served.backend.wait_until_open(0)
    served.backend.reset()
    assert main([str(file)]) == 0
    assert results(tmp_path / "out.jsonl").keys() == {f"line-{line}" for line in range(1, 5)}
    assert len(served.backend.calls) == 3


def test_parquet_goes_in_and_comes_out(served: Served, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow, the extra `batch`")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [
        {"custom_id": "text", "prompt": "Hi", "messages": None},
        {"custom_id": "chat", "prompt": None, "messages": json.dumps(MESSAGES)},
        {"custom_id": "chat", "prompt": "Ho", "messages": None},
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "in.parquet")
    outputs = {"output": str(tmp_path / "out.parquet"), "errors": str(tmp_path / "failed.parquet")}
    file = write_job(tmp_path, served, [], input=str(tmp_path / "in.parquet"), **outputs)
    assert main([str(file)]) == 1
    answered = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert [(row["custom_id"], row["status_code"], row["text"]) for row in answered] == [("text", 200, "abcdef"), ("chat", 200, "abcdef")]
    assert json.loads(answered[1]["body"])["object"] == "chat.completion"
    [failed] = parquet.read_table(tmp_path / "failed.parquet").to_pylist()
    assert (failed["id"], failed["error_code"], failed["body"]) == ("batch_req_3", "duplicate_custom_id", None)


@pytest.mark.live
def test_an_engine_in_the_process_computes_a_shared_beginning_once(tmp_path: Path) -> None:
    system = "You answer in one short sentence. " * 16
    questions = ["What is the capital of France?", "Who wrote Hamlet?", "What is the largest planet?"]
    chats = [{"messages": [{"role": "system", "content": system}, {"role": "user", "content": question}]} for question in questions]
    capital = {"custom_id": "capital", "messages": [{"role": "user", "content": "What is the capital of France?"}]}
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*chats, capital]))
    engine = {
        "num_pages": 112,
        "max_running": 4,
        "max_prefill_seqs": 4,
        "prefill_buckets": [64, 256],
        "decode_buckets": [1, 4],
        "transfer_buckets": [4, 32],
        "compile_cache": str(COMPILE_CACHE),
    }
    job = {
        "input": "in.jsonl",
        "output": str(tmp_path / "out.jsonl"),
        "request": {"max_tokens": 12, "temperature": 0},
        "config": {"engine": engine, "scheduler": {"max_step_tokens": 256}},
    }
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    command = [sys.executable, "-m", "pdjax.batch", str(tmp_path / "job.yaml"), "--json", str(tmp_path / "summary.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, stdin=subprocess.DEVNULL, env={**os.environ})
    assert done.returncode == 0, done.stdout + done.stderr
    answered = results(tmp_path / "out.jsonl")
    assert answered["capital"]["response"]["body"]["choices"][0]["message"]["content"] == "The capital of France is Paris."
    usages = [answered[f"line-{line}"]["response"]["body"]["usage"] for line in (1, 2, 3)]
    cached = sorted(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    shared_pages = (min(usage["prompt_tokens"] for usage in usages) - 30) // 16  # the question and the turns are far less than 30 tokens
    assert cached[0] == 0 and cached[1] >= 16 * shared_pages >= 64
    told = json.loads((tmp_path / "summary.json").read_text())
    assert told["rows"] == {"total": 4, "ok": 4, "failed": 0, "left": 0}
    assert told["this_run"]["cached_prompt_tokens"] >= sum(cached)
