"""`/v1/files` and `/v1/batches`, used through OpenAI's own client."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from pdjax.api.app import create_app
from pdjax.batches.endpoints import batch_extension
from pdjax.batches.upload import FormReader
from pdjax.config.schema import BatchesConfig, Config, RouterConfig
from pdjax.errors import OverCapacity
from tests import live
from tests.batches_kit import CHAT, COMPLETIONS, SERVER, begin, hold_long_rows, jsonl, line, results, running, upload, wait_for
from tests.fake_backend import EOS, FakeBackend, Served, byte_tokenizer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with running(tmp_path_factory.mktemp("batches"), FakeBackend(), max_file_bytes=20_000, max_rows=50) as served:
        yield served


@pytest.fixture
def served(server: Served) -> Iterator[Served]:
    server.backend.reset()
    yield server
    server.backend.wait_until_open(0)


def test_a_batch_goes_from_a_file_to_files_of_answers_and_errors(served: Served) -> None:
    client = served.client()
    served.backend.cached_tokens = 1
    sent = jsonl(line("a", url=CHAT), line("b", url=CHAT, max_tokens=2), line("c", url=CHAT, temperature=9))
    file = client.files.create(file=("questions.jsonl", sent), purpose="batch")
    assert (file.filename, file.bytes, file.purpose, file.status) == ("questions.jsonl", len(sent), "batch", "processed")
    assert client.files.content(file.id).content == sent
    assert client.files.retrieve(file.id) == file
    began = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"for": "test"})
    assert (began.status, began.expires_at) == ("validating", began.created_at + 86400)
    batch = wait_for(client, began.id, "completed")
    assert batch.request_counts is not None and batch.request_counts.to_dict() == {"total": 3, "completed": 2, "failed": 1}
    assert (batch.metadata, batch.input_file_id, batch.endpoint) == ({"for": "test"}, file.id, CHAT)
    assert None not in (batch.in_progress_at, batch.finalizing_at, batch.completed_at)
    answered, failed = results(client, batch.output_file_id), results(client, batch.error_file_id)
    texts = {name: each["response"]["body"]["choices"][0]["message"]["content"] for name, each in answered.items()}
    assert texts == {"a": "abcdef", "b": "ab"}
    assert answered["a"]["response"]["status_code"] == 200 and answered["a"]["error"] is None
    assert failed.keys() == {"c"} and failed["c"]["response"]["body"]["error"]["param"] == "temperature"
    usages = [answered[name]["response"]["body"]["usage"] for name in ("a", "b")]
    assert batch.usage is not None
    assert batch.usage.input_tokens == sum(usage["prompt_tokens"] for usage in usages)
    assert (batch.usage.output_tokens, batch.usage.input_tokens_details.cached_tokens) == (7 + 2, 2)
    output = client.files.retrieve(batch.output_file_id)
    assert (output.purpose, output.filename) == ("batch_output", f"{batch.id}_output.jsonl")
    assert client.batches.list(limit=1).data == [batch]


def test_where_no_row_fails_there_is_no_file_of_errors_and_the_other_way_round(served: Served) -> None:
    client = served.client()
    good, bad = begin(client, line("a")), begin(client, line("a", temperature=9))
    good, bad = wait_for(client, good.id, "completed"), wait_for(client, bad.id, "completed")
    assert good.error_file_id is None and results(client, good.output_file_id).keys() == {"a"}
    assert bad.output_file_id is None and results(client, bad.error_file_id).keys() == {"a"}


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([line("a"), line("b"), line("a")], [(3, "duplicate_custom_id")]),
        ([line("a"), line("b", url=CHAT)], [(2, "mismatched_url")]),
        ([line("a") | {"method": "GET"}, line("b") | {"url": "/v1/embeddings"}], [(1, "invalid_method"), (2, "invalid_url")]),
        (["Hi", {"prompt": "Hi"}, line("a")], [(1, "invalid_row"), (2, "invalid_row")]),
        ([line("a", stream=True)], [(1, "unsupported_value")]),
        ([line(str(i)) for i in range(51)], [(None, "too_many_requests")]),
    ],
)
def test_a_file_with_a_bad_line_fails_the_batch_and_asks_for_nothing(rows: list[Any], expected: Any, served: Served) -> None:
    client = served.client()
    batch = wait_for(client, begin(client, *rows).id, "failed")
    assert batch.errors is not None and batch.errors.data is not None and batch.failed_at is not None
    assert [(error.line, error.code) for error in batch.errors.data] == expected
    assert all(error.message for error in batch.errors.data)
    assert (batch.output_file_id, batch.error_file_id) == (None, None)
    assert served.backend.calls == []


def test_a_file_of_blank_lines_is_an_empty_batch(served: Served) -> None:
    client = served.client()
    file = client.files.create(file=("blank.jsonl", b"\n\n"), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h")
    errors = wait_for(client, batch.id, "failed").errors
    assert errors is not None and errors.data is not None and [error.code for error in errors.data] == ["empty_file"]


def test_a_cancelled_batch_keeps_what_was_answered_and_stops_the_rest(served: Served) -> None:
    client = served.client()
    hold_long_rows(served.backend)
    began = begin(client, *[line(f"short-{i}", max_tokens=3) for i in range(2)], *[line(f"long-{i}", "Ho") for i in range(12)])
    wait_for(client, began.id, "in_progress", ready=lambda batch: batch.request_counts.completed == 2)  # type: ignore[union-attr]
    served.backend.wait_until_open(8)
    assert client.batches.cancel(began.id).status == "cancelling"
    batch = wait_for(client, began.id, "cancelled")
    served.backend.wait_until_open(0)
    assert batch.request_counts is not None and batch.request_counts.to_dict() == {"total": 14, "completed": 2, "failed": 0}
    assert results(client, batch.output_file_id).keys() == {"short-0", "short-1"}
    assert None not in (batch.cancelling_at, batch.cancelled_at) and batch.error_file_id is None
    assert client.batches.cancel(began.id) == batch
    done = wait_for(client, begin(client, line("a", max_tokens=3)).id, "completed")
    with pytest.raises(openai.BadRequestError, match="is completed and cannot be cancelled any more"):
        client.batches.cancel(done.id)


def test_a_cancelled_batch_that_waits_for_its_turn_ends_at_once(tmp_path: Path) -> None:
    backend = FakeBackend()
    backend.hold_at = 0
    with running(tmp_path, backend, max_in_progress=1) as served:
        client = served.client()
        first, second = begin(client, line("a")), begin(client, line("b"))
        backend.wait_until_open(1)
        wait_for(client, second.id, "in_progress")
        client.batches.cancel(second.id)
        batch = wait_for(client, second.id, "cancelled")
        assert (batch.output_file_id, batch.request_counts.total) == (None, 1)  # type: ignore[union-attr]
        assert client.batches.retrieve(first.id).status == "in_progress"


def test_rows_of_all_batches_together_are_bounded(tmp_path: Path) -> None:
    backend = FakeBackend()
    most: list[int] = []
    backend.script = lambda prompt: most.append(backend.num_open) or [*b"abc", EOS]  # type: ignore[func-returns-value]
    with running(tmp_path, backend, max_in_flight=3, max_in_progress=2) as served:
        client = served.client()
        batches = [begin(client, *[line(f"{i}") for i in range(20)]) for _ in range(3)]
        for batch in batches:
            assert len(results(client, wait_for(client, batch.id, "completed").output_file_id)) == 20
    assert max(most) == 2  # before the call itself counts
    assert len(backend.calls) == 60


def test_a_full_system_is_waited_for_and_fails_no_row(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdjax.jobs.backend.FIRST_PAUSE_S", 0.01)
    client = served.client()
    served.backend.fail_at, served.backend.error = 0, OverCapacity("full", 0.01)
    batch = begin(client, line("a"), line("b"))
    while len(served.backend.calls) < 6:
        time.sleep(0.01)
    assert client.batches.retrieve(batch.id).status == "in_progress"
    served.backend.reset()
    assert results(client, wait_for(client, batch.id, "completed").output_file_id).keys() == {"a", "b"}


def test_what_is_not_answered_when_the_window_closes_is_told_as_expired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdjax.batches.keeper.COMPLETION_WINDOW_S", 1)
    backend = FakeBackend()
    hold_long_rows(backend)
    with running(tmp_path, backend, max_in_flight=2) as served:
        client = served.client()
        batch = begin(client, line("short", max_tokens=3), *[line(f"long-{i}") for i in range(3)])
        batch = wait_for(client, batch.id, "expired")
        assert batch.expired_at is not None and batch.completed_at is None
        assert batch.request_counts is not None and batch.request_counts.to_dict() == {"total": 4, "completed": 1, "failed": 3}
        assert results(client, batch.output_file_id).keys() == {"short"}
        failed = results(client, batch.error_file_id)
        assert {name: each["error"]["code"] for name, each in failed.items()} == dict.fromkeys(
            ("long-0", "long-1", "long-2"), "batch_expired"
        )


def test_lists_are_newest_first_and_come_in_pages(tmp_path: Path) -> None:
    with running(tmp_path, FakeBackend()) as served:
        client = served.client()
        assert client.batches.list().data == [] and client.files.list().data == []
        batches = [begin(client, line("a")).id for _ in range(5)]
        for batch in batches:
            wait_for(client, batch, "completed")
        page = client.batches.list(limit=2)
        assert ([each.id for each in page.data], page.has_more) == ([batches[4], batches[3]], True)
        assert [each.id for each in client.batches.list(limit=2)] == batches[::-1]
        last = client.batches.list(limit=2, after=batches[1])
        assert ([each.id for each in last.data], last.has_more) == ([batches[0]], False)
        inputs = [client.batches.retrieve(batch).input_file_id for batch in batches]
        assert [file.id for file in client.files.list(purpose="batch", limit=2)] == inputs[::-1]
        assert [file.id for file in client.files.list(purpose="batch", order="asc", after=inputs[2])] == inputs[3:]
        assert len(client.files.list().data) == 10


def test_a_removed_file_is_gone_but_not_while_a_batch_needs_it(tmp_path: Path) -> None:
    backend = FakeBackend()
    backend.hold_at = 0
    with running(tmp_path, backend) as served:
        client = served.client()
        batch = begin(client, line("a"))
        backend.wait_until_open(1)
        with pytest.raises(openai.BadRequestError, match="is the input of batch_") as refused:
            client.files.delete(batch.input_file_id)
        assert refused.value.code == "file_in_use"
        client.batches.cancel(batch.id)
        wait_for(client, batch.id, "cancelled")
        assert client.files.delete(batch.input_file_id).deleted
        for use in (client.files.retrieve, client.files.content, client.files.delete):
            with pytest.raises(openai.NotFoundError, match="there is no file"):
                use(batch.input_file_id)
        assert list((tmp_path / "files").iterdir()) == []


def test_more_batches_than_allowed_are_over_capacity_and_more_bytes_are_refused(tmp_path: Path) -> None:
    backend = FakeBackend()
    backend.hold_at = 0
    with running(tmp_path, backend, max_open=1, max_stored_bytes=1024) as served:
        client = served.client()
        batch = begin(client, line("a"))
        with pytest.raises(openai.RateLimitError, match="1 batches have not ended, the limit is 1"):
            client.batches.create(input_file_id=batch.input_file_id, endpoint=COMPLETIONS, completion_window="24h")
        with pytest.raises(openai.BadRequestError, match=r"at most 1024 bytes of files \(batches\.max_stored_bytes\); delete some"):
            upload(client, line("x" * 1000))
        backend.wait_until_open(1)


def refused(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"} and response.headers["x-request-id"].startswith("req-")
    return error


FILE = {"file": ("in.jsonl", b"{}")}


@pytest.mark.parametrize(
    ("data", "files", "status", "param", "message"),
    [
        ({"purpose": "assistants"}, FILE, 400, "purpose", "purpose must be 'batch', got 'assistants'"),
        ({}, FILE, 400, "purpose", "purpose is required"),
        ({"purpose": "batch", "expires_after[seconds]": "3600"}, FILE, 400, "expires_after[seconds]", "is not supported"),
        ({"purpose": "batch", "file": "text"}, {"other": ("o", b"1")}, 400, "other", "one file, named 'file'"),
        ({"purpose": "batch", "file": "text"}, {"file": ("in.jsonl", b"")}, 400, "file", "file is empty"),
        ({"purpose": "batch"}, {"file": ("in.jsonl", b"")}, 400, "file", "file is empty"),
        ({"purpose": "batch"}, {"file": ("in.jsonl", b"x" * 20_001)}, 413, None, "request body exceeds 20000 bytes"),
        ({"purpose": "batch"}, {"file": ("in.jsonl", b"x" * 200_000)}, 413, None, "request body exceeds 20000 bytes"),
        ({"purpose": "batch"}, [("file", ("a", b"1")), ("file", ("b", b"2"))], 400, "file", "one file"),
        ({"purpose": "batch"}, None, 400, None, "must be multipart/form-data"),
        ({"purpose": "x" * 70_000}, FILE, 413, None, "request body exceeds 20000 bytes"),
    ],
)
def test_an_upload_that_cannot_be_taken_is_refused(data: Any, files: Any, status: int, param: Any, message: str, served: Served) -> None:
    before = len(served.http.get("/v1/files").json()["data"])
    error = refused(served.http.post("/v1/files", data=data, files=files), status)
    assert error["param"] == param and message in error["message"]
    assert len(served.http.get("/v1/files").json()["data"]) == before


@pytest.mark.parametrize("piece_bytes", [1, 2, 7, 64, 10_000])
def test_a_form_reads_the_same_in_pieces_of_any_size(piece_bytes: int) -> None:
    content = b"a line\r\n--b\r\n-- b\r\n\r\n" * 9
    whole = (
        b'--b-\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--b-\r\nContent-Type: text/plain\r\nContent-Disposition: form-data; name="file"; filename="in put.jsonl"\r\n\r\n'
        + content
        + b"\r\n--b---\r\n"
    )
    form = FormReader("multipart/form-data; boundary=b-")
    file = b"".join(form.feed(whole[start : start + piece_bytes]) for start in range(0, len(whole), piece_bytes))
    assert (file, form.fields, form.filename, form.is_whole) == (content, {"purpose": "batch"}, "in put.jsonl", True)


def test_a_large_file_comes_back_as_it_was(tmp_path: Path) -> None:
    content = random.Random(0).randbytes(3 << 20)
    with running(tmp_path, FakeBackend()) as served:
        file = served.client().files.create(file=("random", content), purpose="batch")
        assert served.client().files.content(file.id).content == content
        assert list((tmp_path / "uploads").iterdir()) == []


def test_batches_cannot_have_more_rows_in_flight_than_the_router() -> None:
    with pytest.raises(ValueError, match=r"batches\.max_in_flight 9 exceeds router\.max_in_flight 8"):
        Config(batches=BatchesConfig(directory="batches", max_in_flight=9), router=RouterConfig(max_in_flight=8))


@pytest.mark.parametrize("body", [b"", b"nonsense", b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\ncut o'])
def test_a_broken_form_is_a_400(body: bytes, served: Served) -> None:
    refused(served.http.post("/v1/files", content=body, headers={"content-type": "multipart/form-data; boundary=b"}), 400)
    refused(served.http.post("/v1/files", content=body, headers={"content-type": "multipart/form-data"}), 400)
    refused(served.http.post("/v1/files", content=body), 400)


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"input_file_id": None}, 400, "input_file_id"),
        ({"input_file_id": "file-none"}, 404, "input_file_id"),
        ({"input_file_id": "../state.db"}, 404, "input_file_id"),
        ({"endpoint": "/v1/embeddings"}, 400, "endpoint"),
        ({"completion_window": "1h"}, 400, "completion_window"),
        ({"metadata": {"a": 1}}, 400, "metadata.a"),
        ({"metadata": {str(i): "" for i in range(17)}}, 400, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 3600}}, 400, "output_expires_after"),
        ({"colour": "red"}, 400, "colour"),
    ],
)
def test_a_batch_that_cannot_be_is_refused_with_the_field_at_fault(change: dict[str, Any], status: int, param: str, served: Served) -> None:
    good = {"input_file_id": upload(served.client(), line("a")), "endpoint": COMPLETIONS, "completion_window": "24h"}
    assert refused(served.http.post("/v1/batches", json=good | change), status)["param"] == param


def test_results_are_no_input(served: Served) -> None:
    client = served.client()
    batch = wait_for(client, begin(client, line("a")).id, "completed")
    with pytest.raises(openai.BadRequestError, match="is of purpose 'batch_output', not 'batch'"):
        client.batches.create(input_file_id=str(batch.output_file_id), endpoint=COMPLETIONS, completion_window="24h")


@pytest.mark.parametrize(
    ("path", "status", "param"),
    [
        ("/v1/batches?limit=0", 400, "limit"),
        ("/v1/batches?limit=101", 400, "limit"),
        ("/v1/batches?limit=x", 400, "limit"),
        ("/v1/batches?after=none", 400, "after"),
        ("/v1/batches?colour=red", 400, "colour"),
        ("/v1/batches/none", 404, "batch_id"),
        ("/v1/files?order=up", 400, "order"),
        ("/v1/files?after=none", 400, "after"),
        ("/v1/files/none", 404, "file_id"),
        ("/v1/files/..%2Fstate.db/content", 404, None),
    ],
)
def test_what_is_not_there_is_not_found_and_what_makes_no_sense_refused(path: str, status: int, param: Any, served: Served) -> None:
    assert refused(served.http.get(path), status)["param"] == param


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/v1/files"), ("GET", "/v1/files/f/content"), ("POST", "/v1/batches"), ("GET", "/v1/batches/b")]
)
def test_without_a_folder_the_endpoints_say_how_to_turn_them_on(method: str, path: str) -> None:
    backend, extension = FakeBackend(), batch_extension(Config())
    app = create_app(backend, byte_tokenizer(), None, SERVER, extensions=[extension])

    async def ask() -> httpx.Response:
        await extension.start()
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as http:
            response = await http.request(method, path)
        await extension.stop()
        return response

    error = refused(asyncio.run(ask()), 404)
    assert "the setting batches.directory turns them on" in error["message"] and error["code"] == "batches_disabled"


@pytest.mark.live
def test_a_batch_on_a_real_system_gets_the_answers_that_other_clients_get(pair: live.Client) -> None:
    client = openai.OpenAI(base_url=f"{pair.url}/v1", api_key="none", max_retries=0, http_client=pair.http)
    system = {"role": "system", "content": "You answer in one short sentence. " * 8}
    questions = ["What is the capital of France?", "Who wrote Hamlet?", "What is the largest planet?", "What is the capital of France?"]
    chats = [[system, {"role": "user", "content": question}] for question in questions]
    bodies = [{"model": live.MODEL, "messages": chat, "max_tokens": 8, "temperature": 0} for chat in chats]
    rows = [{"custom_id": f"{i}", "method": "POST", "url": CHAT, "body": body} for i, body in enumerate(bodies)]
    batch = wait_for(client, begin(client, *rows, endpoint=CHAT).id, "completed", wait_s=live.WAIT_S)
    answered = results(client, batch.output_file_id)
    for i, chat in enumerate(chats):
        [expected] = pair.choices(messages=chat, max_tokens=8)
        assert answered[f"{i}"]["response"]["body"]["choices"][0]["message"]["content"] == expected.text
    assert batch.usage is not None and batch.usage.input_tokens_details.cached_tokens >= 3 * 64
