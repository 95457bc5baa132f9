"""A turn of the comparison with other servers: what is sent and timed, in which order, and that no process outlives it."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from pdjax.api.tokenizer import Tokenizer
from pdjax.benchmarks import peers_engines
from pdjax.benchmarks.client import Endpoint, RequestFailed, Sample, parse_url
from pdjax.benchmarks.peers_engines import ENGINES, ServerFailed, ServerSpec, free_port, running, shown
from pdjax.benchmarks.peers_measure import KNOWN_ANSWER, KNOWN_PROMPT, MAX_TRIES, EndedEarly, Measurement, Observed, Plan, Prompt, Words
from pdjax.benchmarks.peers_requests import LlamaCpp, OpenAi, Pdjax, VllmPair, forward_s
from pdjax.benchmarks.peers_setup import Peers
from pdjax.checkpoints import open_checkpoint
from tests.scripted_server import OK, ScriptedServer, answer, chunk, readings, sse, token

PROMPT = Prompt([101, 102, 103], " one two three")


# What is sent


def test_servers_that_take_ids_get_them_and_are_timed() -> None:
    server = ScriptedServer(lambda request: answer(3, cached_tokens=2))
    with server.running():
        requests = OpenAi(parse_url(server.url), "scripted", readings(10.0, 11.0, 11.5, 12.5, 13.0, 14.0))
        sample, prefill_s = asyncio.run(requests.observe(PROMPT, 3))
    assert server.requests[0] | {"prompt": PROMPT.ids, "max_tokens": 3, "ignore_eos": True, "temperature": 0} == server.requests[0]
    assert (sample, prefill_s) == (Sample(1.0, (0.5, 1.0), 4.0, 3, 2), None)


def test_llamacpp_gets_text_and_may_end_early() -> None:
    events = [OK, *(chunk(sse(token())) for _ in range(3)), chunk(sse(token("", "length"))), chunk(b"data: [DONE]\n\n"), chunk(b"")]
    server = ScriptedServer(lambda request: list(events))
    with server.running():
        requests = LlamaCpp(parse_url(server.url), "scripted", itertools.count().__next__)
        sample = asyncio.run(requests.send(PROMPT, 3))
        with pytest.raises(EndedEarly, match="answer of 3 tokens, expected 4"):
            asyncio.run(requests.send(PROMPT, 4))
    assert (server.requests[0]["prompt"], server.requests[0]["max_tokens"], server.requests[0]["temperature"]) == (PROMPT.text, 3, 0)
    assert (sample.ttft_s, sample.itl_s) == (1, (1, 1))


def plain(message: dict[str, Any], status: str = "200 OK") -> list[bytes]:
    return [f"HTTP/1.1 {status}\r\nConnection: close\r\n\r\n{json.dumps(message)}".encode()]


def test_a_pair_of_vllm_is_asked_in_turn_and_timed_as_one() -> None:
    prefill = ScriptedServer(lambda request: plain({"kv_transfer_params": {"remote_port": 7}}))
    decode = ScriptedServer(lambda request: answer(2))
    # Prefill is asked at 10 and has answered at 12; decode is asked at 12.5 and streams from 13.
    clock = readings(10.0, 12.0, 12.5, 13.0, 13.5, 14.0, 15.0)
    with prefill.running(), decode.running():
        pair = VllmPair(parse_url(prefill.url), parse_url(decode.url), "scripted", clock)
        sample, prefill_s = asyncio.run(pair.observe(PROMPT, 2))
    assert (sample.ttft_s, sample.itl_s, sample.e2e_s, prefill_s) == (3.0, (0.5,), 5.0, 2.0)
    asked = prefill.requests[0]
    assert (asked["prompt"], asked["max_tokens"], asked["stream"]) == (PROMPT.ids, 1, False)
    assert asked["kv_transfer_params"]["do_remote_decode"]
    assert (decode.requests[0]["kv_transfer_params"], decode.requests[0]["max_tokens"]) == ({"remote_port": 7}, 2)


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (plain({"choices": []}), "does not say where its KV is"),
        (plain({"error": "full"}, "503 Service Unavailable"), "HTTP 503: .*full"),
        ([b"HTTP/1.1 200 OK\r\n\r\nno JSON"], "no answer to a request for KV"),
    ],
)
def test_a_prefill_that_gives_no_kv_is_one_failed_request(reply: list[bytes], message: str) -> None:
    with ScriptedServer(lambda request: list(reply)).running() as prefill:
        pair = VllmPair(parse_url(prefill.url), Endpoint("127.0.0.1", free_port(), "", False), "scripted")
        with pytest.raises(RequestFailed, match=message):
            asyncio.run(pair.send(PROMPT, 2))


def a_timeline(*stages: tuple[str, str, float, float]) -> dict[str, Any]:
    """Of one sequence and one attempt; each stage is (side, name, start, end)."""
    workers = [{"side": side, "stages": [{"name": name, "start_s": start, "end_s": end}]} for side, name, start, end in stages]
    return {"sequences": [{"attempts": [{"workers": []}, {"workers": workers}]}]}


def test_prefills_own_time_is_its_forwards_of_the_last_attempt() -> None:
    forwards = [("prefill", "forward", 1.0, 1.5), ("prefill", "forward", 2.0, 2.25)]
    assert forward_s(a_timeline(("prefill", "waiting", 0.0, 1.0), *forwards, ("decode", "forward", 0.0, 9.0))) == 0.75
    with pytest.raises(RequestFailed, match="no forward"):
        forward_s(a_timeline(("decode", "forward", 0.0, 9.0)))


def test_pdjax_is_asked_for_the_timeline_of_the_request_that_was_timed() -> None:
    timeline = a_timeline(("prefill", "forward", 0.0, 0.5))

    async def answer_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET /v1/requests/cmpl-7/timeline "):
            writer.writelines(plain({"timeline": timeline}))
        else:
            assert head.startswith(b"POST /v1/completions ")
            writer.writelines([OK, *(chunk(sse(token() | {"id": "cmpl-7"})) for _ in range(2)), chunk(b"data: [DONE]\n\n"), chunk(b"")])
        await writer.drain()
        writer.close()

    async def observe() -> Observed:
        server = await asyncio.start_server(answer_one, "127.0.0.1", 0)
        async with server:
            endpoint = Endpoint("127.0.0.1", server.sockets[0].getsockname()[1], "", False)
            return await Pdjax(endpoint, "scripted", itertools.count().__next__).observe(PROMPT, 2)

    sample, prefill_s = asyncio.run(observe())
    assert (sample.ttft_s, prefill_s) == (1, 0.5)


# Prompts and the order of measurement


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(open_checkpoint("embedded:smollm2-135m-instruct").tokenizer_data())


def test_prompts_are_the_same_as_ids_and_as_text(tokenizer: Tokenizer) -> None:
    words = Words(tokenizer, seed=1)
    first, second = words.draw(300), words.draw(300)
    assert tokenizer.encode(first.text) == first.ids and len(first.ids) == 300
    assert first.ids[:2] != second.ids[:2]
    longer = words.extend(first.ids, 400)
    assert longer.ids[:300] == first.ids and tokenizer.encode(longer.text) == longer.ids and len(longer.ids) == 400


class ScriptedRequests:
    """Answers every request alike: a millisecond to the first token for each of prompt, 9 s to the second, then gaps of 0.1 s, 0.2 s..."""

    def __init__(self, known: str = KNOWN_ANSWER, num_cached: int | None = None, num_good: int = 10**6, num_early: int = 0):
        self.prompts: list[tuple[list[int], int]] = []
        self._known = known
        self._num_cached = num_cached
        self._num_good = num_good
        self._num_early = num_early

    async def send(self, prompt: Prompt, out: int) -> Sample:
        self.prompts.append((prompt.ids, out))
        if len(self.prompts) <= self._num_early:
            raise EndedEarly("answer of 1 token")
        if len(self.prompts) > self._num_good:
            raise RequestFailed("no more")
        gaps_s = (9.0, *(0.1 * place for place in range(1, out - 1)))
        return Sample(len(prompt.ids) / 1e3, gaps_s, 99.0, out, self._num_cached)

    async def observe(self, prompt: Prompt, out: int) -> Observed:
        return Observed(await self.send(prompt, out), 0.004)

    async def text(self, prompt: Prompt, out: int) -> str:
        assert prompt.text == KNOWN_PROMPT and len(prompt.ids) == 13
        return self._known


SMALL = Plan(repeats=2, lens=(8, 16), cached=12, clients=3, client_requests=2, client_prompt=4, client_out=5)


def measure(requests: ScriptedRequests, tokenizer: Tokenizer) -> Measurement:
    """The clock ticks once a reading."""
    return Measurement(requests, SMALL, Words(tokenizer, seed=2), lambda line: None, itertools.count().__next__)


def test_a_turn_measures_every_row_as_often_as_asked(tokenizer: Tokenizer) -> None:
    requests = ScriptedRequests(num_cached=12)
    measurement = measure(requests, tokenizer)
    asyncio.run(measurement.run())
    figures = measurement.figures
    assert figures["ttft_8"] == [0.008, 0.008] and figures["ttft_16"] == [0.016, 0.016] and figures["ttft_16_cached"] == [0.016, 0.016]
    # 18 tokens have 16 gaps behind the second token: 0.1 to 1.6 s.
    assert figures["second_8"] == pytest.approx([9.008, 9.008]) and figures["itl_8"] == pytest.approx([0.85, 0.85])
    assert figures["prefill_8"] == [0.004, 0.004] and figures["beyond_prefill_16"] == pytest.approx([0.012, 0.012])
    # A round takes one tick, in which 6 requests bring 5 tokens each.
    assert figures["clients_tokens_per_s"] == [30.0, 30.0] and figures["clients_ttft"] == [0.004, 0.004]
    # Warm-up of 2 lengths, 2 of each, 1 for the prefix and 2 behind it, 2 rounds of 6.
    assert [len(ids) for ids, _ in requests.prompts] == [8, 16, 8, 8, 16, 16, 13, 16, 16, *[4] * 12]


def test_no_two_prompts_share_a_prefix_but_those_that_should(tokenizer: Tokenizer) -> None:
    requests = ScriptedRequests()
    asyncio.run(measure(requests, tokenizer).run())
    prompts = [ids for ids, _ in requests.prompts]
    primed, *cached = prompts[6:9]
    assert all(ids[:12] == primed[:12] for ids in cached) and cached[0][12:] != cached[1][12:]
    starts = [tuple(ids[:3]) for place, ids in enumerate(prompts) if place not in (7, 8)]
    assert len(set(starts)) == len(starts)


def test_a_model_that_answers_otherwise_is_not_measured(tokenizer: Tokenizer) -> None:
    requests = ScriptedRequests(known=" cheese\n- eggs\n- beer")
    with pytest.raises(RequestFailed, match="beer"):
        asyncio.run(measure(requests, tokenizer).run())
    assert not requests.prompts


def test_a_prefix_that_was_not_found_cached_is_a_failure_that_keeps_what_was_measured(tokenizer: Tokenizer) -> None:
    measurement = measure(ScriptedRequests(num_cached=11), tokenizer)
    with pytest.raises(RequestFailed, match="11 of 16 prompt tokens were cached, expected 12"):
        asyncio.run(measurement.run())
    assert measurement.figures["ttft_16"] == [0.016, 0.016] and "ttft_16_cached" not in measurement.figures


def test_an_answer_that_ends_early_is_asked_for_again_with_another_prompt(tokenizer: Tokenizer) -> None:
    requests = ScriptedRequests(num_early=MAX_TRIES - 1)
    asyncio.run(measure(requests, tokenizer).run())
    first = [tuple(ids) for ids, _ in requests.prompts[:MAX_TRIES]]
    assert [len(ids) for ids in first] == MAX_TRIES * [8] and len(set(first)) == MAX_TRIES
    with pytest.raises(EndedEarly):
        asyncio.run(measure(ScriptedRequests(num_early=MAX_TRIES), tokenizer).run())


def test_a_client_that_fails_ends_the_turn(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestFailed, match="no more"):
        asyncio.run(measure(ScriptedRequests(num_good=12), tokenizer).run())


@pytest.mark.parametrize(("repeats", "out"), [(1, 34), (2, 18), (3, 13), (4, 12), (30, 12)])
def test_all_repeats_together_have_enough_gaps(repeats: int, out: int) -> None:
    assert Plan(repeats=repeats).out == out and repeats * (out - 2) >= 32


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"repeats": 0}, "repeats must be at least 1, got 0"),
        ({"lens": ()}, "prompt lengths"),
        ({"lens": (8, 8), "cached": 4}, r"differ, got \[8, 8\]"),
        ({"cached": 2048}, "below the longest prompt of 2048 tokens, got 2048"),
        ({"cached": 0}, "above 0"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan(**settings)


# Servers


SERVER = """\
import http.server, os, pathlib, signal, subprocess, sys
port, folder, how = int(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3]
def stop(number, frame):
    (folder / "stopped").touch()
    sys.exit()
signal.signal(signal.SIGTERM, signal.SIG_IGN if how == "deaf" else stop)
if how == "dying":
    sys.exit("its last words")
helper = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"])
(folder / "pids").write_text(f"{os.getpid()} {helper.pid}")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/ready" else 404)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def a_server(folder: Path, how: str) -> ServerSpec:
    port = free_port()
    return ServerSpec("small", (sys.executable, "-c", SERVER, str(port), str(folder), how), port, "/ready")


def is_alive(pid: int) -> bool:
    """False for a zombie too: a helper whose parent is gone is reaped by whoever adopts it, sooner or later."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def pids(folder: Path) -> list[int]:
    return [int(pid) for pid in (folder / "pids").read_text().split()]


async def none_alive(folder: Path) -> None:
    async with asyncio.timeout(30):
        while any(map(is_alive, pids(folder))):
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(("how", "stop_s"), [("polite", 60.0), ("deaf", 0.5)])
def test_a_server_and_what_it_started_are_gone_afterwards(how: str, stop_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_engines, "STOP_S", stop_s)
    lines: list[str] = []

    async def use() -> None:
        async with running([a_server(tmp_path, how)], tmp_path, lines.append) as ready_s:
            assert ready_s > 0 and all(map(is_alive, pids(tmp_path)))
        await none_alive(tmp_path)

    asyncio.run(use())
    assert len(lines) == 1 and lines[0].startswith("small: ready after")
    assert (tmp_path / "stopped").exists() == (how == "polite")


def test_a_cancelled_measurement_leaves_no_process(tmp_path: Path) -> None:
    async def use() -> None:
        is_up = asyncio.Event()

        async def hold() -> None:
            async with running([a_server(tmp_path, "polite")], tmp_path, lambda line: is_up.set()):
                await asyncio.Event().wait()

        task = asyncio.create_task(hold())
        await is_up.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await none_alive(tmp_path)

    asyncio.run(use())


def test_a_server_that_dies_while_starting_is_told_with_its_last_words(tmp_path: Path) -> None:
    async def use() -> None:
        async with running([a_server(tmp_path, "dying")], tmp_path, lambda line: None):
            pass

    with pytest.raises(ServerFailed, match=r"small ended with exit status 1(.|\n)*its last words"):
        asyncio.run(use())


def test_a_server_that_never_gets_ready_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_engines, "READY_S", 0.0)

    async def use() -> None:
        async with running([a_server(tmp_path, "polite")._replace(ready_path="/never")], tmp_path, lambda line: None):
            pass

    with pytest.raises(ServerFailed, match="was not ready after 0 s"):
        asyncio.run(use())


def test_every_engine_listens_on_the_loopback_at_ports_of_its_own(tmp_path: Path) -> None:
    peers_here = Peers(tmp_path / "cache", tmp_path / "model.gguf")
    for engine in ENGINES.values():
        servers = engine.make_servers(peers_here)
        assert len({server.port for server in servers}) == len(servers)
        for server in servers:
            assert server.command[server.command.index("--host") + 1] == "127.0.0.1"
            assert server.command[server.command.index("--port") + 1] == str(server.port)
            assert str(tmp_path) not in shown(server.command, peers_here)
