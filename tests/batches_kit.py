"""A router with batches in a thread, and what OpenAI's client does to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import uvicorn
from openai.types import Batch
from prometheus_client import CollectorRegistry

from pdjax.api.app import create_app
from pdjax.api.chat_template import ChatTemplate
from pdjax.batches.endpoints import batch_extension
from pdjax.config.schema import BatchesConfig, Config, ServerConfig
from tests.fake_backend import EOS, MODEL, TEMPLATE, WAIT_S, FakeBackend, Served, byte_tokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SERVER = ServerConfig(default_max_tokens=20)


@contextlib.contextmanager
def running(folder: Path, backend: FakeBackend, port: int = 0, **settings: Any) -> Iterator[Served]:
    """A router with batches in `folder`, in a thread, until the block ends."""
    config = Config(server=SERVER, batches=BatchesConfig(directory=str(folder), **settings))
    extension, registry = batch_extension(config), CollectorRegistry()
    app = create_app(backend, byte_tokenizer(), ChatTemplate(TEMPLATE), SERVER, registry, extensions=[extension])
    runner = uvicorn.Server(uvicorn.Config(app, log_config=None, ws="none", lifespan="off", timeout_graceful_shutdown=2))
    failure: list[BaseException] = []

    async def run(listener: socket.socket) -> None:
        try:
            await extension.start()
            await runner.serve([listener])
        except BaseException as error:
            failure.append(error)
        finally:
            await extension.stop()

    with socket.create_server(("127.0.0.1", port)) as listener:
        thread = threading.Thread(target=lambda: asyncio.run(run(listener)))
        thread.start()
        try:
            end_s = time.monotonic() + WAIT_S
            while not runner.started and not failure and time.monotonic() < end_s:
                time.sleep(0.01)
            if failure:
                raise failure[0]
            address = f"http://127.0.0.1:{listener.getsockname()[1]}"
            with httpx.Client(base_url=address, timeout=WAIT_S, trust_env=False) as http:
                yield Served(http, listener.getsockname()[1], backend, registry)
        finally:
            runner.should_exit = True
            thread.join(WAIT_S)
    assert not thread.is_alive(), "the server has not stopped"
    assert backend.num_open == 0


def line(custom_id: str, prompt: str = "Hi", url: str = COMPLETIONS, **fields: Any) -> dict[str, Any]:
    what = {"messages": [{"role": "user", "content": prompt}]} if url == CHAT else {"prompt": prompt}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": MODEL, **what, **fields}}


def jsonl(*rows: Any) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def upload(client: openai.OpenAI, *rows: Any) -> str:
    return client.files.create(file=("in.jsonl", jsonl(*rows)), purpose="batch").id


def begin(client: openai.OpenAI, *rows: Any, endpoint: Any = COMPLETIONS) -> Batch:
    return client.batches.create(input_file_id=upload(client, *rows), endpoint=endpoint, completion_window="24h")


def wait_for(
    client: openai.OpenAI, batch_id: str, *statuses: str, ready: Callable[[Batch], bool] = lambda batch: True, wait_s: float = WAIT_S
) -> Batch:
    end_s = time.monotonic() + wait_s
    while (batch := client.batches.retrieve(batch_id)).status not in statuses or not ready(batch):
        assert time.monotonic() < end_s, batch
        time.sleep(0.01)
    return batch


def results(client: openai.OpenAI, file_id: str | None) -> dict[str, dict[str, Any]]:
    """By custom_id, each once."""
    assert file_id is not None
    lines = [json.loads(each) for each in client.files.content(file_id).text.splitlines()]
    found = {each["custom_id"]: each for each in lines}
    assert len(found) == len(lines)
    return found


def hold_long_rows(backend: FakeBackend) -> None:
    """Rows with max_tokens 3 are answered, others never end."""
    backend.script = lambda prompt: [*b"abcd", EOS]
    backend.hold_at = 3
