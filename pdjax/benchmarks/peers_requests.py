"""How requests reach each kind of engine, and where it tells what prefill took.

All of them go through the project's own client and are timed by it; with vLLM's pair, the client plays the proxy between the two servers.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import time
import urllib.parse
from collections.abc import Callable, Sequence
from typing import Any

from pdjax.benchmarks.client import Clock, Endpoint, RequestFailed, Sample, Stream, get, measure, model_name, stream_completion
from pdjax.benchmarks.peers_measure import EndedEarly, Observed, Prompt, Requests
from pdjax.benchmarks.serve import completion_request

TIMEOUT_S = 300.0
SHOWN_BYTES = 300


class OpenAi:
    """A server that takes token ids over /v1/completions."""

    def __init__(self, endpoint: Endpoint, model: str, clock: Clock = time.perf_counter):
        self._endpoint = endpoint
        self._model = model
        self._clock = clock

    async def send(self, prompt: Prompt, out: int) -> Sample:
        return measure(await self.stream(prompt, out), out)

    async def observe(self, prompt: Prompt, out: int) -> Observed:
        return Observed(await self.send(prompt, out), None)

    async def text(self, prompt: Prompt, out: int) -> str:
        return text_of(await self.stream(prompt, out))

    async def stream(self, prompt: Prompt, out: int) -> Stream:
        """The answer as it came."""
        return await stream_completion(self._endpoint, completion_request(self._model, prompt.ids, out), self._clock, TIMEOUT_S)


class Pdjax:
    """pdjax, which says in the timeline of a request how long its prefill worker computed."""

    def __init__(self, endpoint: Endpoint, model: str, clock: Clock = time.perf_counter):
        self._endpoint = endpoint
        self._completions = OpenAi(endpoint, model, clock)

    async def send(self, prompt: Prompt, out: int) -> Sample:
        return await self._completions.send(prompt, out)

    async def observe(self, prompt: Prompt, out: int) -> Observed:
        stream = await self._completions.stream(prompt, out)
        sample = measure(stream, out)
        request_id = json.loads(stream.events[0].data)["id"]
        path = f"/v1/requests/{urllib.parse.quote(request_id, safe='')}/timeline"
        status, body = await get(self._endpoint, path, TIMEOUT_S)
        if status != 200:
            raise RequestFailed(f"HTTP {status} from {path}")
        return Observed(sample, forward_s(json.loads(body)["timeline"]))

    async def text(self, prompt: Prompt, out: int) -> str:
        return await self._completions.text(prompt, out)


class VllmPair:
    """A prefill and a decode server of vLLM. Prefill computes one token and says where its KV is; decode is sent there to fetch it.

    The first token that counts is the first one that decode streams: the client of a proxy sees no other.
    """

    def __init__(self, prefill: Endpoint, decode: Endpoint, model: str, clock: Clock = time.perf_counter):
        self._prefill = prefill
        self._decode = decode
        self._model = model
        self._clock = clock

    async def send(self, prompt: Prompt, out: int) -> Sample:
        return (await self.observe(prompt, out)).sample

    async def observe(self, prompt: Prompt, out: int) -> Observed:
        stream, prefill_s = await self._exchange(prompt, out)
        return Observed(measure(stream, out), prefill_s)

    async def text(self, prompt: Prompt, out: int) -> str:
        return text_of((await self._exchange(prompt, out))[0])

    async def _exchange(self, prompt: Prompt, out: int) -> tuple[Stream, float]:
        """What decode streams, on a clock that started before prefill was asked, and the seconds until prefill had answered."""
        start_s = self._clock()
        reply = await post(self._prefill, prefill_request(self._model, prompt.ids), TIMEOUT_S)
        prefill_s = self._clock() - start_s
        where = reply.get("kv_transfer_params")
        if not where:
            raise RequestFailed(f"prefill does not say where its KV is: {json.dumps(reply)[:SHOWN_BYTES]}")
        request = json.loads(completion_request(self._model, prompt.ids, out)) | {"kv_transfer_params": where}
        stream = await stream_completion(self._decode, json.dumps(request).encode(), self._clock, TIMEOUT_S)
        return Stream(start_s, stream.events), prefill_s


class LlamaCpp:
    """llama.cpp's server, which takes text only and does not count the tokens of a stream.

    It stops at an end of sequence. A bias against that token would keep it going, but costs it 3 ms a token.
    """

    def __init__(self, endpoint: Endpoint, model: str, clock: Clock = time.perf_counter):
        self._endpoint = endpoint
        self._model = model
        self._clock = clock

    async def send(self, prompt: Prompt, out: int) -> Sample:
        sample = measure(await self._stream(prompt, out), out)
        if sample.output_tokens != out:
            raise EndedEarly(f"answer of {sample.output_tokens} tokens, expected {out}")
        return sample

    async def observe(self, prompt: Prompt, out: int) -> Observed:
        return Observed(await self.send(prompt, out), None)

    async def text(self, prompt: Prompt, out: int) -> str:
        return text_of(await self._stream(prompt, out))

    async def _stream(self, prompt: Prompt, out: int) -> Stream:
        request = {"model": self._model, "prompt": prompt.text, "max_tokens": out, "temperature": 0, "stream": True}
        return await stream_completion(self._endpoint, json.dumps(request).encode(), self._clock, TIMEOUT_S)


async def _open_single(kind: Callable[[Endpoint, str], Requests], endpoints: Sequence[Endpoint]) -> Requests:
    (endpoint,) = endpoints
    return kind(endpoint, await model_name(endpoint, TIMEOUT_S))


async def open_requests(engine: str, endpoints: Sequence[Endpoint]) -> Requests:
    """The way to reach the started `engine`, whose servers listen at `endpoints` in the order of its specs. Raises RequestFailed."""
    match engine:
        case "pdjax":
            return await _open_single(Pdjax, endpoints)
        case "vllm" | "vllm-tuned":
            return await _open_single(OpenAi, endpoints)
        case "llamacpp":
            return await _open_single(LlamaCpp, endpoints)
        case "vllm-pd":
            prefill, decode = endpoints
            return VllmPair(prefill, decode, await model_name(prefill, TIMEOUT_S))
    raise AssertionError(f"no engine is called {engine!r}")


def text_of(stream: Stream) -> str:
    """All text of a completion's events. Raises RequestFailed where one of them reports an error."""
    text = ""
    for event in stream.events:
        message: dict[str, Any] = {} if event.data == b"[DONE]" else json.loads(event.data)
        if "error" in message:
            raise RequestFailed(f"error event: {json.dumps(message['error'])[:SHOWN_BYTES]}")
        text += "".join(choice.get("text") or "" for choice in message.get("choices") or [])
    return text


def forward_s(timeline: dict[str, Any]) -> float:
    """What the prefill worker computed for the last attempt at a request of one sequence, in seconds. Raises RequestFailed."""
    (sequence,) = timeline["sequences"]
    workers = [worker for worker in sequence["attempts"][-1]["workers"] if worker["side"] == "prefill"]
    stages = [stage for worker in workers for stage in worker["stages"] if stage["name"] == "forward"]
    if not stages:
        raise RequestFailed("the timeline shows no forward on a prefill worker")
    return sum(stage["end_s"] - stage["start_s"] for stage in stages)


def prefill_request(model: str, prompt: list[int]) -> bytes:
    """The body of the request for one token, not streamed, that leaves its KV to be fetched by another server."""
    request: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0, "stream": False}
    fetched_by = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
    request["kv_transfer_params"] = {"do_remote_decode": True, "do_remote_prefill": False, **fetched_by}
    return json.dumps(request).encode()


async def post(endpoint: Endpoint, request: bytes, timeout_s: float) -> dict[str, Any]:
    """POST to /v1/completions; the JSON of an answer that is not streamed. Raises RequestFailed."""
    try:
        status, body = await asyncio.to_thread(_post, endpoint, request, timeout_s)
        if status != 200:
            raise RequestFailed(f"HTTP {status}: {body[:SHOWN_BYTES].decode('utf-8', 'replace')}")
        return json.loads(body)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise RequestFailed(f"no answer to a request for KV: {error}") from error


def _post(endpoint: Endpoint, request: bytes, timeout_s: float) -> tuple[int, bytes]:
    with contextlib.closing(http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=timeout_s)) as connection:
        connection.request("POST", "/v1/completions", request, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()
