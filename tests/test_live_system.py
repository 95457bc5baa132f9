"""Whole systems from start to end: Ctrl-C, a supervisor that is killed, a router at its limit, and workers that do not fit together."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from tests.goldens import load_goldens
from tests.live import MODEL, STOP_S, BrokenStream, Client, Served, check_idle, free_port, is_alive, serving, wait_until

pytestmark = pytest.mark.live

GOLDENS = {golden.name: golden for golden in load_goldens()}
STORY = GOLDENS["story"]


def test_ctrl_c_stops_everything_in_order_while_it_serves(live_folder: Path) -> None:
    with serving(live_folder, "ctrl-c", "all") as served:
        client = Client(served.await_ready()["url"])
        assert set(served.children()) == {"router", "prefill-0", "decode-0"}
        stream = client.stream(STORY.prompt_ids, 1000)
        assert [next(stream) for _ in range(5)] == STORY.output_ids[:5]
        served.send(signal.SIGINT)
        with pytest.raises((BrokenStream, httpx.TransportError)):
            list(stream)
        assert served.process.wait(STOP_S) == 0
        assert not [pid for pid in served.all_pids() if is_alive(pid)]
        assert "Traceback" not in served.err
        client.close()


def test_a_dead_worker_is_started_again_and_a_dead_supervisor_leaves_nothing(live_folder: Path) -> None:
    with serving(live_folder, "killed", "all") as served:
        client = Client(served.await_ready()["url"])
        stream = client.stream(STORY.prompt_ids, 1000)
        assert [next(stream) for _ in range(5)] == STORY.output_ids[:5]
        os.kill(served.children()["decode-0"], signal.SIGKILL)
        with pytest.raises(BrokenStream) as broken:
            list(stream)
        assert broken.value.error is not None, "an answer that is cut off must not look like a whole one"
        wait_until(lambda: "decode-0 was killed by SIGKILL" in served.err, "the supervisor to notice")
        wait_until(client.is_ready, "a new decode worker", 180.0)
        assert client.ids(STORY.prompt_ids, 24) == STORY.output_ids
        pids = served.all_pids()
        assert len(pids) == 5  # the supervisor, three children, one of them twice
        served.kill()
        wait_until(lambda: not any(is_alive(pid) for pid in pids), "the children to end")
        client.close()


class Narrow(NamedTuple):
    served: Served
    client: Client
    control: str


@pytest.fixture(scope="module")
def narrow(live_folder: Path) -> Iterator[Narrow]:
    """One worker behind a router that takes six sequences at a time."""
    port = free_port()
    with serving(live_folder, "narrow", "unified", router__max_in_flight=6, router__control_port=port) as served:
        client = Client(served.await_ready()["url"])
        yield Narrow(served, client, f"127.0.0.1:{port}")
        client.close()


def test_what_exceeds_the_routers_limit_gets_a_429_at_once_and_the_rest_an_answer(narrow: Narrow) -> None:
    body = {"model": MODEL, "prompt": STORY.prompt_ids, "max_tokens": 24, "temperature": 0}
    with ThreadPoolExecutor(20) as pool:
        responses = list(pool.map(lambda _: narrow.client.post("/v1/completions", body), range(20)))
    statuses = Counter(response.status_code for response in responses)
    assert set(statuses) == {200, 429} and statuses[200] >= 6, statuses
    for response in responses:
        if response.status_code == 429:
            assert int(response.headers["retry-after"]) >= 1
            assert response.json()["error"]["message"]
    check_idle(narrow.client)
    assert narrow.client.ids(STORY.prompt_ids, 24) == STORY.output_ids


def test_a_worker_of_another_layout_is_never_paired_and_the_request_is_served(narrow: Narrow, live_folder: Path) -> None:
    """Row 24: both values are named."""
    settings = {
        "engine__page_size": 8,
        "engine__prefill_buckets": [64],
        "engine__transfer_buckets": [4],
        "scheduler__max_step_tokens": 64,
        "worker__router": narrow.control,
    }
    with serving(live_folder, "stranger", "prefill", **settings) as stranger:
        address = stranger.await_ready()["address"]
        wait_until(lambda: narrow.client.num_ready("prefill") == 1, "the stranger to join")
        golden = GOLDENS["sql"]
        assert narrow.client.ids(golden.prompt_ids, 24) == golden.output_ids
        wait_until(lambda: "page_size 8 here, 16 there" in narrow.served.err, "the reason in the log")
        assert f"prefill worker {address} and decode worker" in narrow.served.err
        check_idle(narrow.client)
