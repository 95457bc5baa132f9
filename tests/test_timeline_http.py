"""The timeline of a request over HTTP, and the command that draws it, against a router with fake workers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import httpx
import pytest
import uvicorn
from rich.console import Console

from pdjax import bench
from pdjax.api.app import create_app
from pdjax.benchmarks import timeline
from pdjax.benchmarks.client import RequestFailed
from pdjax.benchmarks.timeline import TimelineSettings
from pdjax.config.schema import ServerConfig
from pdjax.protocol import SequenceRequest, Stage
from tests.fake_backend import MODEL as FAKE_MODEL
from tests.fake_backend import byte_tokenizer
from tests.fake_backend import serve as serve_fake
from tests.test_router_fakes import HANG, Rig, Step, decode_steps, prefill_steps
from tests.test_timeline_view import told

COMPUTE_S = 0.08


class _Server(uvicorn.Server):
    def capture_signals(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


@contextlib.asynccontextmanager
async def site(rig: Rig, keeps_timelines: bool = True) -> AsyncIterator[str]:
    """The HTTP application over `rig`'s router; its URL."""
    timelines = rig.router.timelines if keeps_timelines else None
    app = create_app(rig.router, byte_tokenizer(), None, ServerConfig(), None, timelines)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = _Server(uvicorn.Config(app, log_config=None, ws="none", lifespan="off", timeout_graceful_shutdown=1))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await serving


def prefill(request: SequenceRequest) -> list[Step]:
    now_s = time.time()
    stages = [
        Stage("bootstrap_queue", now_s, now_s),
        Stage("waiting", now_s, now_s + 0.01),
        Stage("forward", now_s + 0.01, now_s + COMPUTE_S),
        Stage("delivering", now_s + COMPUTE_S, now_s + COMPUTE_S),
        Stage("early_send", now_s + 0.01, now_s + 0.01, "sends", 3),
    ]
    return [_pause(COMPUTE_S), *told(prefill_steps(request), *stages)]


def _pause(seconds: float) -> asyncio.Event:
    gate = asyncio.Event()
    asyncio.get_running_loop().call_later(seconds, gate.set)
    return gate


def decode(request: SequenceRequest) -> list[Step]:
    now_s = time.time()
    first = [Stage("prealloc", now_s, now_s), Stage("transfer", now_s, now_s + COMPUTE_S)]
    then = [Stage("decode_queue", now_s + COMPUTE_S, now_s + COMPUTE_S), Stage("receive", now_s + 0.02, now_s + 0.02, "receives", 3)]
    return [_pause(COMPUTE_S), *told(decode_steps(request), *first, *then)]


def with_site(scenario: Callable[[Rig, str], Awaitable[None]], keeps_timelines: bool = True) -> None:
    async def run() -> None:
        rig = Rig("p1 d1")
        rig.plan("p1", *[prefill] * 8)
        rig.plan("d1", *[decode] * 8)
        async with asyncio.timeout(30), site(rig, keeps_timelines) as url:
            await scenario(rig, url)

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_a_timeline_is_found_by_the_request_id_that_came_with_the_answer(stream: bool) -> None:
    async def scenario(rig: Rig, url: str) -> None:
        async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
            started_s = time.perf_counter()
            body = {"model": "sum", "prompt": [[5, 6], [7]], "n": 2, "max_tokens": 4, "stream": stream}
            answer = await http.post("/v1/completions", json=body)
            took_s = time.perf_counter() - started_s
            found = await http.get(f"/v1/requests/{answer.headers['x-request-id']}/timeline")
        assert found.status_code == 200 and found.headers["content-type"] == "application/json"
        seen = found.json()["timeline"]
        assert seen["request_id"] == answer.headers["x-request-id"]
        assert [each["sequence_id"] for each in seen["sequences"]] == [f"{seen['request_id']}-{i}" for i in range(4)]
        for sequence in seen["sequences"]:
            assert sequence["outcome"] == "ok"
            steps = {step["name"]: step["end_s"] - step["start_s"] for step in sequence["ttft_path"]}
            assert list(steps) == ["tokenize", "route", "to worker", "bootstrap_queue", "waiting", "forward", "to router"]
            assert sum(steps.values()) == pytest.approx(sequence["ttft_s"])
            assert min(steps.values()) >= 0 and COMPUTE_S <= sequence["ttft_s"] <= took_s
        processes = {event["args"]["name"] for event in found.json()["trace"]["traceEvents"] if event["name"] == "process_name"}
        assert processes == {"router", "prefill p1:1", "KV transfer", "decode d1:1"}

    with_site(scenario)


def test_a_request_under_way_can_be_looked_at() -> None:
    async def scenario(rig: Rig, url: str) -> None:
        rig.workers["d1"].plans.appendleft(lambda request: [HANG])
        body = {"model": "sum", "prompt": [5, 6], "max_tokens": 4, "stream": True}
        async with httpx.AsyncClient(base_url=url, trust_env=False) as http, http.stream("POST", "/v1/completions", json=body) as answer:
            found = await http.get(f"/v1/requests/{answer.headers['x-request-id']}/timeline")
        [sequence] = found.json()["timeline"]["sequences"]
        assert (sequence["outcome"], sequence["handoff_s"], sequence["handoff_path"]) == (None, None, [])
        assert sequence["ttft_s"] >= COMPUTE_S
        [prefill, decode] = sequence["attempts"][0]["workers"]
        assert decode["ended"] is None and decode["stages"] == [], "it has not told anything yet"

    with_site(scenario)


def test_the_time_until_a_request_is_read_belongs_to_the_first_token() -> None:
    async def scenario(rig: Rig, url: str) -> None:
        async def slow_body() -> AsyncIterator[bytes]:
            yield b'{"model": "sum", "prompt": [5, 6],'
            await asyncio.sleep(COMPUTE_S)
            yield b' "max_tokens": 2}'

        async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
            answer = await http.post("/v1/completions", content=slow_body(), headers={"content-type": "application/json"})
            found = await http.get(f"/v1/requests/{answer.headers['x-request-id']}/timeline")
        [sequence] = found.json()["timeline"]["sequences"]
        tokenize = sequence["ttft_path"][0]
        assert tokenize["name"] == "tokenize" and tokenize["end_s"] - tokenize["start_s"] > 0.5 * COMPUTE_S
        assert sequence["ttft_s"] > 1.5 * COMPUTE_S

    with_site(scenario)


def test_the_hand_off_is_measured_once_an_answer() -> None:
    with serve_fake() as served:
        for max_tokens in (1, 2, 5):
            served.http.post("/v1/completions", json={"model": FAKE_MODEL, "prompt": "A", "n": 2, "max_tokens": max_tokens})
        served.backend.wait_until_open(0)
        assert served.registry.get_sample_value("pdjax_handoff_seconds_count") == 4
        assert served.registry.get_sample_value("pdjax_inter_token_latency_seconds_count") == 2 * (1 + 4)


def test_an_unknown_request_is_a_404_in_the_usual_shape() -> None:
    with serve_fake() as served:
        for name in ("cmpl-nobody", "%F0%9F%98%80", "x" * 5000):
            response = served.http.get(f"/v1/requests/{name}/timeline")
            error = response.json()["error"]
            assert (response.status_code, error["code"], error["param"]) == (404, "request_not_found", "id")
            assert len(error["message"]) < 300
        assert served.http.post("/v1/requests/x/timeline").status_code == 405


# The command


@pytest.fixture
def small_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake workers know 97 tokens."""
    monkeypatch.setattr(timeline, "FIRST_TOKEN_ID", 1)


def test_the_command_warms_the_prefix_and_shows_where_the_time_went(small_vocabulary: None, tmp_path: Path) -> None:
    async def scenario(rig: Rig, url: str) -> None:
        observed = await timeline.run(TimelineSettings(url, prompt_tokens=9, cached=6, out_tokens=4, vocab=97))
        warm, measured = (call.prompt for call in rig.workers["p1"].calls)
        assert len(warm) == 6 and measured[:6] == warm and len(measured) == 9
        assert [call.sampling.max_tokens for call in rig.workers["p1"].calls] == [1, 4]
        console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
        with console.file:
            timeline.print_timeline(console, observed)
        text = console.export_text()
        for word in ("bootstrap_queue", "forward", "sum of the stages", "as seen here", "early_send", "prefill p1:1", "decode d1:1"):
            assert word in text, word
        timeline.write_trace(tmp_path / "trace.json", observed)
        timeline.plot_timeline(tmp_path / "trace.png", observed)
        assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        assert (tmp_path / "trace.png").read_bytes().startswith(b"\x89PNG")

    with_site(scenario)


def test_a_server_that_keeps_no_timelines_is_named_as_such(small_vocabulary: None) -> None:
    async def scenario(rig: Rig, url: str) -> None:
        with pytest.raises(RequestFailed, match="HTTP 404 .* keeps no timelines"):
            await timeline.run(TimelineSettings(url, prompt_tokens=3, cached=0, vocab=97))

    with_site(scenario, keeps_timelines=False)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--cached", "9", "--prompt-tokens", "9"], "below prompt_tokens 9, got 9"),
        (["--prompt-tokens", "0", "--cached", "0"], "at least 1, got 0"),
        (["--out-tokens", "1"], "at least 2"),
        (["--url", "ftp://x"], "looks like http://"),
        (["--out", "/nowhere/trace.json"], "cannot write /nowhere/trace.json"),
    ],
)
def test_a_bad_command_line_is_refused_before_anything_is_sent(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.main(["timeline", "--url", "http://127.0.0.1:9", "--out", "trace.json", *words])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
