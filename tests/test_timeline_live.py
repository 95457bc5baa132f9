"""Row 28 of what goes wrong in systems of this kind, on a running system: the stages that it reports are the time that a client waits."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.goldens import load_goldens
from tests.live import MODEL, Client

pytestmark = pytest.mark.live

LONG = {golden.name: golden for golden in load_goldens()}["long"].prompt_ids
NUM_TOKENS, NUM_CACHED = 1500, 1008
TOLERANCE = 0.05


def streamed(client: Client, prompt: list[int], max_tokens: int) -> tuple[str, float]:
    """The request's id, and when its first token arrived, in seconds after the request was sent."""
    body = {"model": MODEL, "temperature": 0, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    sent_s, first_s = time.perf_counter(), None
    with client.http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if first_s is None and line.startswith("data: {"):
                first_s = time.perf_counter() - sent_s
    assert first_s is not None, "a stream without an event"
    return response.headers["x-request-id"], first_s


def timeline_of(client: Client, request_id: str) -> dict[str, Any]:
    response = client.http.get(f"/v1/requests/{request_id}/timeline")
    assert response.status_code == 200, response.text
    return response.json()


def took(steps: list[dict[str, Any]], *leaving_out: str) -> float:
    return sum(step["end_s"] - step["start_s"] for step in steps if step["where"] not in leaving_out)


def test_the_stages_that_the_server_reports_are_the_time_to_the_first_token(pair: Client) -> None:
    """The prompt's first two thirds are cached on prefill and nowhere else, so that they leave before the rest is computed."""
    shifted = [*LONG[7 : NUM_TOKENS + 6], 1000]  # no other test computes this prompt
    streamed(pair, shifted[:NUM_CACHED], 1)
    request_id, ttft_s = streamed(pair, shifted, 6)
    told = timeline_of(pair, request_id)
    [sequence] = told["timeline"]["sequences"]
    [attempt] = sequence["attempts"]
    prefill, decode = attempt["workers"]

    # What workers and router did themselves, without the ways between them, is all but the whole of what the client waited for.
    assert took(sequence["ttft_path"], "wire") == pytest.approx(ttft_s, rel=TOLERANCE)
    assert took(sequence["ttft_path"]) == pytest.approx(sequence["ttft_s"])
    assert took(sequence["handoff_path"]) == pytest.approx(sequence["handoff_s"])

    assert [stage["name"] for stage in prefill["stages"] if not stage["track"]][-2:] == ["forward", "delivering"]
    path = ["prealloc", "transfer", "decode_queue", "first_step", "decode"]
    assert [stage["name"] for stage in decode["stages"] if not stage["track"]] == path
    for stage in (*prefill["stages"], *decode["stages"]):
        assert 0 <= stage["start_s"] <= stage["end_s"] <= sequence["end_s"], stage
    assert prefill["clock_shift_s"] == decode["clock_shift_s"] == 0.0, "both workers read this machine's clock"
    assert _arrived_under_the_computation(prefill, decode) >= NUM_CACHED // 16 // 2


def _arrived_under_the_computation(prefill: dict[str, Any], decode: dict[str, Any]) -> int:
    """Pages that decode had taken in before prefill had computed the prompt."""
    computed_s = max(stage["end_s"] for stage in prefill["stages"] if stage["track"] == "chunks")
    return sum(stage["count"] for stage in decode["stages"] if stage["track"] == "receives" and stage["end_s"] < computed_s)
