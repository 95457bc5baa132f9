"""Real systems for live tests: starts `python -m pdjax.serve`, talks to it, looks into it, and ends every process of it."""

from __future__ import annotations

import getpass
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from pdjax.api.tokenizer import Tokenizer
from pdjax.checkpoints import open_checkpoint

ROOT = Path(__file__).parent.parent
MODEL = "smollm2-135m-instruct"
START_S = 180.0
STOP_S = 30.0
WAIT_S = 60.0
LOG_TAIL_LINES = 60

COMPILE_CACHE = Path(tempfile.gettempdir()) / f"pdjax-live-tests-{getpass.getuser()}"
NUM_PAGES = 112
WINDOW = 4
SETTINGS: dict[str, Any] = {
    "engine.num_pages": NUM_PAGES,  # 1,776 tokens: the longest golden fits, four answers of some length do not
    "engine.max_running": WINDOW,
    "engine.max_prefill_seqs": 4,
    "engine.prefill_buckets": [64, 256],
    "engine.decode_buckets": [1, WINDOW],
    "engine.transfer_buckets": [4, 32],
    "engine.compile_cache": str(COMPILE_CACHE),
    "scheduler.max_step_tokens": 256,
    "worker.heartbeat_interval_s": 0.2,
    "server.request_timeout_s": 240,
    # Far below what a burst has to wait for decode: a wait in line is no failure of the peer.
    "transfer.bootstrap_timeout_s": 2,
}
"""One set of shapes for every live system, so that each is compiled once and then found in the compile cache. Tests change only what
leaves the shapes alone."""

running: list[Served] = []
"""Everything that has been started and not ended; a failing test shows the logs of these."""


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = WAIT_S) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, f"waited {timeout_s} s for {what}"
        time.sleep(0.05)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Served:
    """One `python -m pdjax.serve`, at the head of its own process group, its output in `folder`. `end` it, whatever happened to it."""

    def __init__(self, folder: Path, name: str, role: str, settings: Mapping[str, Any], env: Mapping[str, str] | None = None):
        """`env`: environment variables beside those of this process."""
        self.name = name
        self._out, self._err = folder / f"{name}.out", folder / f"{name}.err"
        words = [word for key, value in settings.items() for word in ("--set", f"{key}={json.dumps(value)}")]
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pdjax.serve", "--role", role, *words],
                cwd=ROOT,
                env={**os.environ, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                process_group=0,
            )
        self.pid = self.process.pid
        running.append(self)

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def await_ready(self) -> dict[str, str]:
        """What the process tells once it is ready: `url` and `control` of a router, `address` of a worker, `url` of a whole system."""
        wait_until(lambda: "ready" in self.out or self.process.poll() is not None, f"{self.name} to be ready", START_S)
        assert self.process.poll() is None, f"{self.name} ended with status {self.process.returncode} while starting:\n{self.err}"
        if found := re.match(r"ready at (\S+)\n", self.out):
            return {"url": found[1]}
        facts = self.out.partition(" ready: ")[2].splitlines()[0]
        return dict(fact.split(" ", 1) for fact in facts.split(", "))

    def children(self) -> dict[str, int]:
        """Process ids of a supervised system by name; of a replaced process the last one."""
        return {name: int(pid) for name, pid in re.findall(r"^(\S+) runs as process (\d+)$", self.err, re.MULTILINE)}

    def all_pids(self) -> list[int]:
        return [self.pid, *(int(pid) for pid in re.findall(r" runs as process (\d+)$", self.err, re.MULTILINE))]

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """As a machine that loses power: no farewell."""
        self.process.kill()
        self.process.wait(STOP_S)
        running.remove(self)

    def end(self) -> int:
        """Stop in order and return the exit status. Asserts that no process is left, and leaves none."""
        pids = self.all_pids()
        self.send(signal.SIGCONT)
        self.send(signal.SIGTERM)
        try:
            status = self.process.wait(STOP_S)
        finally:
            left = [pid for pid in pids if is_alive(pid)]
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            self.process.wait()
            if self in running:
                running.remove(self)
        assert not left, f"{self.name}: processes {left} of {pids} were left behind"
        return status

    def log_tail(self) -> str:
        return "\n".join((self.out + self.err).splitlines()[-LOG_TAIL_LINES:])


@contextmanager
def serving(folder: Path, name: str, role: str, *, env: Mapping[str, str] | None = None, **settings: Any) -> Iterator[Served]:
    """A process that has been told to start, and is ended in the end. `settings` have `__` for the dot."""
    changed = {key.replace("__", "."): value for key, value in settings.items()}
    served = Served(folder, name, role, {"server.port": 0, "router.control_port": 0, **SETTINGS, **changed}, env)
    try:
        yield served
    finally:
        served.end()


class Vocabulary:
    """Token ids out of the names that log probabilities come with: the vocabulary holds no bytes twice, so a name tells the id."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        raw = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
        self._by_bytes = {each: token for token, each in enumerate(raw)}
        assert len(self._by_bytes) == len(raw), "two tokens of the vocabulary stand for the same bytes"

    def ids(self, logprobs: Mapping[str, Any]) -> list[int]:
        """Of a choice of either endpoint."""
        if "content" in logprobs:
            return [self._by_bytes[bytes(entry["bytes"])] for entry in logprobs["content"]]
        return [self.id_of(name) for name in logprobs["tokens"]]

    def id_of(self, name: str) -> int:
        if name.startswith("bytes:\\x"):
            return self._by_bytes[bytes(int(digits, 16) for digits in name.split("\\x")[1:])]
        return self._by_bytes[name.encode()]

    def text(self, ids: list[int]) -> str:
        """What a client is shown of an answer: nothing of the token that stops it."""
        return self.tokenizer.decode(ids[:-1] if ids and ids[-1] == 2 else ids)


@cache
def vocabulary() -> Vocabulary:
    return Vocabulary(Tokenizer(open_checkpoint(f"embedded:{MODEL}").tokenizer_data()))


class Answer(NamedTuple):
    """One choice. `ids` None where no log probabilities were asked for; `usage` of the whole response."""

    text: str
    finish_reason: str | None
    ids: list[int] | None
    usage: dict[str, Any]
    logprobs: dict[str, Any] | None

    @property
    def cached_tokens(self) -> int:
        return self.usage["prompt_tokens_details"]["cached_tokens"]


class BrokenStream(Exception):
    """The stream was refused or ended with an error event (`error`), or it ended without any word (`error` None). `ids`: what came
    before."""

    def __init__(self, ids: list[int], error: dict[str, Any] | None):
        super().__init__(f"{error} after {len(ids)} tokens")
        self.ids = ids
        self.error = error


class Client:
    """A client of one router. Safe to use from several threads."""

    def __init__(self, url: str):
        self.url = url
        limits = httpx.Limits(max_connections=256)
        self.http = httpx.Client(base_url=url, timeout=300.0, trust_env=False, limits=limits)

    def close(self) -> None:
        self.http.close()

    def post(self, path: str, body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def choices(self, **fields: Any) -> list[Answer]:
        """Greedy unless told otherwise; a chat where `messages` are given. Asserts status 200."""
        path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
        response = self.post(path, {"model": MODEL, "temperature": 0, **fields})
        assert response.status_code == 200, f"{response.status_code}: {response.text}"
        body = response.json()
        return [_answer(choice, body["usage"]) for choice in body["choices"]]

    def complete(self, prompt: Any, **fields: Any) -> Answer:
        [answer] = self.choices(prompt=prompt, **fields)
        return answer

    def ids(self, prompt: list[int], max_tokens: int, **fields: Any) -> list[int]:
        """Token ids of the answer to a prompt of token ids."""
        ids = self.complete(prompt, max_tokens=max_tokens, logprobs=0, **fields).ids
        assert ids is not None
        return ids

    def stream(self, prompt: list[int], max_tokens: int, **fields: Any) -> Iterator[int]:
        """Token ids as they come. Raises BrokenStream where there is no stream, or one that ends without a finish reason and [DONE]."""
        body = {"model": MODEL, "temperature": 0, "prompt": prompt, "max_tokens": max_tokens, "logprobs": 0, "stream": True, **fields}
        ids: list[int] = []
        finish_reason = None
        with self.http.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                raise BrokenStream([], json.loads(response.read())["error"])
            for event in _events(response):
                if event is None and finish_reason is not None:
                    return
                if event is None or "error" in event:
                    break
                [choice] = event["choices"]
                finish_reason = choice["finish_reason"] or finish_reason
                for token in vocabulary().ids(choice["logprobs"]) if choice["logprobs"] else []:
                    ids.append(token)
                    yield token
            else:
                event = None
        raise BrokenStream(ids, event and event["error"])

    def figure(self, name: str) -> float:
        """What the workers report under a name, summed."""
        return self.sample(f"pdjax_worker_{name}")

    def is_ready(self) -> bool:
        try:
            return self.http.get("/ready", timeout=5.0).status_code == 200
        except httpx.TransportError:
            return False

    def samples(self, name: str) -> dict[tuple[str, ...], float]:
        """Samples of the metrics page by the values of their labels, in the order of the labels' names."""
        families = text_string_to_metric_families(self.http.get("/metrics").text)
        return {
            tuple(value for _, value in sorted(sample.labels.items())): sample.value
            for family in families
            for sample in family.samples
            if sample.name == name
        }

    def sample(self, name: str, **labels: str) -> float:
        """The sum of the samples with these labels."""
        families = text_string_to_metric_families(self.http.get("/metrics").text)
        found = [sample for family in families for sample in family.samples if sample.name == name]
        return sum(sample.value for sample in found if labels.items() <= sample.labels.items())

    def num_ready(self, role: str) -> int:
        return int(self.sample("pdjax_router_workers", role=role, health="ready"))


PAGE_BYTES = 30 * 16 * 2 * 3 * 64 * 4
"""KV of one page: 30 layers, 16 tokens, keys and values of 3 heads of 64 numbers in float32."""


def pages_sent(client: Client) -> int:
    """Pages that have left the prefill workers so far. For when nothing is on its way: see `check_idle`."""
    return round(client.figure("kv_bytes_sent_total") / PAGE_BYTES)


def check_pages_sent(client: Client, expected: int) -> None:
    """Assert that as many pages have left as `expected`, once the workers' reports say so."""
    wait_until(lambda: pages_sent(client) >= expected, f"{expected} pages, {pages_sent(client)} were sent before", 10.0)
    check_idle(client)
    assert pages_sent(client) == expected


HELD = ("slots_held", "metadata_slots_held", "pages_private", "rooms_open", "waiting", "running")


def check_idle(client: Client) -> None:
    """Assert that router and workers soon hold nothing, and that nothing has been compiled while they served."""
    time.sleep(2.5 * SETTINGS["worker.heartbeat_interval_s"])  # what the router knows is from after the last request
    end_s = time.monotonic() + 10.0
    while held := _held(client):
        assert time.monotonic() < end_s, f"still held after 10 s: {held}"
        time.sleep(0.1)
    assert set(client.samples("pdjax_worker_compilations_after_warm_up").values()) <= {0.0}


def _held(client: Client) -> list[str]:
    held = [f"{name} of {key}: {value}" for name in HELD for key, value in client.samples(f"pdjax_worker_{name}").items() if value]
    in_flight = [name for name in ("pdjax_router_in_flight", "pdjax_http_requests_in_flight") if client.sample(name) > 1]
    return held + in_flight


def _answer(choice: dict[str, Any], usage: dict[str, Any]) -> Answer:
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    logprobs = choice["logprobs"]
    ids = vocabulary().ids(logprobs) if logprobs is not None else None
    return Answer(text, choice["finish_reason"], ids, usage, logprobs)


def _events(response: httpx.Response) -> Iterator[dict[str, Any] | None]:
    """Server-sent events; None for [DONE]."""
    for line in response.iter_lines():
        if line:
            assert line.startswith("data: "), line
            yield None if line == "data: [DONE]" else json.loads(line.removeprefix("data: "))
