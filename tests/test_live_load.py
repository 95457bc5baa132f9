"""Running systems under pressure: more work than fits, too little memory, and clients that leave whenever they like."""

from __future__ import annotations

import asyncio
import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.goldens import load_goldens
from tests.live import MODEL, NUM_PAGES, SETTINGS, WINDOW, Client, check_idle

pytestmark = pytest.mark.live

GOLDENS = {golden.name: golden for golden in load_goldens()}
LONG = GOLDENS["long"].prompt_ids
PAGE = 16


def test_a_burst_far_above_the_window_is_served_without_failures(pair: Client) -> None:
    """Row 16. The last requests wait for decode many times as long as a peer may take to answer, which is no failure of anybody."""
    failed = pair.sample("pdjax_router_failed_attempts_total")
    golden = GOLDENS["tokens-31"]
    prompts = [[*golden.prompt_ids[:-1], token] for token in range(1000, 1000 + 8 * WINDOW)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda prompt: pair.complete(prompt, max_tokens=16, ignore_eos=True), prompts))
    assert [answer.usage["completion_tokens"] for answer in answers] == [16] * len(prompts)
    assert pair.sample("pdjax_router_failed_attempts_total") == failed


def test_page_pressure_takes_sequences_back_and_changes_no_answer(pair: Client) -> None:
    """Row 9. Four prompts fit together with what admission reserves for their answers, but not with their whole answers."""
    num_tokens, answer_tokens = 390, 64
    assert 4 * (num_tokens + 32) <= (NUM_PAGES - 4) * PAGE and 4 * (num_tokens + answer_tokens) > NUM_PAGES * PAGE
    prompts = [LONG[start : start + num_tokens] for start in (5, 405, 805, 1205)]

    def ask(num_at_once: int, max_tokens: int) -> list[list[int]]:
        with ThreadPoolExecutor(num_at_once) as pool:
            return list(pool.map(lambda prompt: pair.ids(prompt, max_tokens, ignore_eos=True), prompts))

    ask(4, 1)  # prefill has the prompts in its cache, so that they reach decode at about the same time
    retractions = pair.figure("retractions_total")
    together = ask(4, answer_tokens)
    check_idle(pair)
    taken_back = pair.figure("retractions_total")
    assert taken_back > retractions
    assert ask(2, answer_tokens) == together
    assert pair.figure("retractions_total") == taken_back


def test_a_request_larger_than_the_pool_is_refused_with_both_numbers(pair: Client) -> None:
    response = pair.post("/v1/completions", {"model": MODEL, "prompt": LONG, "max_tokens": 100})
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert str(len(LONG)) in message and str((NUM_PAGES - 1) * PAGE + 1) in message


NUM_STORM = 100


def test_clients_that_leave_at_any_moment_leave_nothing_behind(pair: Client) -> None:
    """Row 18, beside clients that stay and must not notice."""
    rng = random.Random(18)

    async def storm() -> list[bytes]:
        stayers = [asyncio.create_task(_stay(pair.url, golden.prompt_ids)) for golden in list(GOLDENS.values())[:6]]
        gate = asyncio.Semaphore(12)
        leavers = [_leave(pair.url, gate, _impatient(rng), rng.random() ** 3 * 1.5) for _ in range(NUM_STORM)]
        await asyncio.gather(*leavers)
        return await asyncio.gather(*stayers)

    answers = asyncio.run(storm())
    check_idle(pair)
    for answer, golden in zip(answers, GOLDENS.values(), strict=False):
        body = json.loads(answer.partition(b"\r\n\r\n")[2])
        assert body["usage"]["completion_tokens"] == len(golden.output_ids), golden.name
    assert pair.ids(GOLDENS["story"].prompt_ids, 24) == GOLDENS["story"].output_ids


def _impatient(rng: random.Random) -> dict[str, Any]:
    start, length = rng.randrange(0, 1000), rng.choice([3, 40, 300])
    return {
        "prompt": LONG[start : start + length],
        "max_tokens": rng.choice([1, 20, 200]),
        "stream": rng.random() < 0.5,
        "n": rng.choice([1, 1, 2]),
    }


async def _leave(url: str, gate: asyncio.Semaphore, fields: dict[str, Any], patience_s: float) -> None:
    async with gate:
        _, writer = await _send(url, fields)
        await asyncio.sleep(patience_s)
        writer.transport.abort() if patience_s > 0.5 else writer.close()


async def _stay(url: str, prompt: list[int]) -> bytes:
    reader, writer = await _send(url, {"prompt": prompt, "max_tokens": 24})
    answer = await reader.read()
    writer.close()
    return answer


async def _send(url: str, fields: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    body = json.dumps({"model": MODEL, "temperature": 0, **fields}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: test\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()
    return reader, writer


def test_the_settings_make_the_waits_of_a_burst_longer_than_a_peer_may_be_silent() -> None:
    assert SETTINGS["transfer.bootstrap_timeout_s"] <= 2
