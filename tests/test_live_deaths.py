"""Processes that die, hang, come and go while clients wait for answers. Two prefill and two decode workers, each started by hand.

Every test leaves a fleet from which the next one takes what it needs: missing workers are started first, by `Fleet.ensure`.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.goldens import load_goldens
from tests.live import (
    MODEL,
    SETTINGS,
    BrokenStream,
    Client,
    Served,
    check_idle,
    check_pages_sent,
    free_port,
    is_alive,
    pages_sent,
    wait_until,
)

pytestmark = pytest.mark.live

GOLDENS = {golden.name: golden for golden in load_goldens()}
STORY = GOLDENS["story"].prompt_ids
LONG = GOLDENS["long"]
STREAM_S = 90.0
"""Far more than it takes to notice a worker that is gone (3 s without a heartbeat) and compute again, less than a request's deadline."""


class Fleet:
    """A router at fixed ports and workers that may be killed. Prompts are computed in chunks of 48 tokens."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._ports = {"server.port": free_port(), "router.control_port": free_port()}
        self._settings = {**SETTINGS, **self._ports, "scheduler.max_step_tokens": 48}
        self._num_started = 0
        self.workers: dict[str, list[Served]] = {"prefill": [], "decode": []}
        self.router = self.start("router")
        self.client = Client(self.router.await_ready()["url"])

    def start(self, role: str, **settings: Any) -> Served:
        self._num_started += 1
        served = Served(self._folder, f"{role}-{self._num_started}", role, {**self._settings, **settings})
        if role != "router":
            self.workers[role].append(served)
        return served

    def ensure(self, num_prefill: int, num_decode: int) -> None:
        """Return once exactly that many workers run and the router knows all of them."""
        wanted = {"prefill": num_prefill, "decode": num_decode}
        for role, number in wanted.items():
            for extra in self.workers[role][number:]:
                self.end(extra)
            while len(self.workers[role]) < number:
                self.start(role)
        for served in self.workers["prefill"] + self.workers["decode"]:
            served.await_ready()
        for role, number in wanted.items():
            wait_until(lambda role=role, number=number: self.client.num_ready(role) == number, f"{number} {role} workers to join")

    def kill(self, served: Served) -> None:
        self._forget(served)
        served.kill()

    def end(self, served: Served) -> None:
        self._forget(served)
        assert served.end() == 0

    def busy(self, role: str, num_running: int = 1) -> Served:
        """The worker that so many requests are at work on, once there is one."""
        found: list[Served] = []

        def look() -> bool:
            running = self.client.samples("pdjax_worker_running")
            busy = {worker for (of_role, worker), value in running.items() if (of_role, value) == (role, num_running)}
            found[:] = [served for served in self.workers[role] if served.await_ready()["address"] in busy]
            return bool(found)

        wait_until(look, f"a busy {role} worker")
        return found[0]

    def stop(self) -> None:
        self.client.close()
        for served in [*self.workers["decode"], *self.workers["prefill"], self.router]:
            served.end()

    def _forget(self, served: Served) -> None:
        for workers in self.workers.values():
            if served in workers:
                workers.remove(served)


@pytest.fixture(scope="module")
def fleet(live_folder: Path) -> Iterator[Fleet]:
    fleet = Fleet(live_folder)
    yield fleet
    fleet.stop()


class Listener:
    """Reads a stream in a thread of its own, so that a test can act between two tokens."""

    def __init__(self, client: Client, prompt: list[int], max_tokens: int):
        self.ids: list[int] = []
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._read, args=(client.stream(prompt, max_tokens, ignore_eos=True),))
        self._thread.start()

    def await_tokens(self, number: int) -> None:
        wait_until(lambda: len(self.ids) >= number or not self._thread.is_alive(), f"{number} tokens")

    def result(self) -> list[int]:
        """Every token; raises what broke the stream."""
        self._thread.join(STREAM_S)
        assert not self._thread.is_alive(), "the stream does not end"
        if self.error is not None:
            raise self.error
        return self.ids

    def _read(self, stream: Iterator[int]) -> None:
        try:
            for token in stream:
                self.ids.append(token)
        except BaseException as error:
            self.error = error


def in_background(client: Client, prompt: list[int], max_tokens: int) -> Future[list[int]]:
    pool = ThreadPoolExecutor(1)
    future = pool.submit(client.ids, prompt, max_tokens)
    pool.shutdown(wait=False)
    return future


def test_a_prefill_worker_that_hangs_in_mid_transfer_is_passed_by_and_may_come_back(fleet: Fleet) -> None:
    """Row 21. The decode worker that waits for it goes on for others."""
    fleet.ensure(2, 1)
    bystander = Listener(fleet.client, STORY, 200)
    bystander.await_tokens(5)
    # A prompt that no cache holds: it takes seconds to compute and to send, chunk by chunk.
    prompt = LONG.prompt_ids[7:907]
    answer = in_background(fleet.client, prompt, 6)
    hung = fleet.busy("prefill", num_running=1)
    hung.send(signal.SIGSTOP)
    num_heard = len(bystander.ids)
    tokens = answer.result(STREAM_S)
    assert len(bystander.ids) > num_heard + 10
    bystander.result()
    assert fleet.client.num_ready("prefill") == fleet.client.num_ready("decode") == 1
    hung.send(signal.SIGCONT)
    wait_until(lambda: fleet.client.num_ready("prefill") == 2, "the worker to come back")
    check_idle(fleet.client)
    assert fleet.client.ids(prompt, 6) == tokens


def test_workers_started_by_hand_serve_prompts_in_small_chunks(fleet: Fleet) -> None:
    """Row 1: chunks of 48 tokens, far below the prompt."""
    fleet.ensure(2, 2)
    names = ("tokens-511", "tokens-513", "tokens-17", "chat-capital", "one-word")
    answers = [in_background(fleet.client, GOLDENS[name].prompt_ids, 24) for name in names]
    assert [answer.result() for answer in answers] == [GOLDENS[name].output_ids for name in names]
    check_idle(fleet.client)


def test_killing_prefill_workers_in_the_middle_of_a_prompt_changes_no_token(fleet: Fleet) -> None:
    """With two, the other one takes over; with the last one gone, decode computes the prompt itself. Row 21."""
    fleet.ensure(2, 2)
    for num_left in (1, 0):
        prompt = LONG.prompt_ids[num_left + 1 : num_left + 800]
        answer = in_background(fleet.client, prompt, 6)
        fleet.kill(fleet.busy("prefill"))
        tokens = answer.result()
        assert len(fleet.workers["prefill"]) == num_left
        assert fleet.client.num_ready("decode") == 2, "a dead peer makes no healthy worker unhealthy"
        assert fleet.client.is_ready()
        assert fleet.client.ids(prompt, 6) == tokens
        check_idle(fleet.client)
    golden = GOLDENS["tokens-33"]
    assert fleet.client.ids(golden.prompt_ids, 24) == golden.output_ids


def test_caches_are_used_on_either_side_alone_when_workers_come_new(fleet: Fleet) -> None:
    """Row 2, and workers that join at run time: the old ones use them without being started again."""
    golden = GOLDENS["tokens-33"]

    def check(cached_tokens: int, num_moved: int) -> None:
        """Ask; `cached_tokens`: what prefill finds in its cache; `num_moved`: pages that it sends."""
        check_idle(fleet.client)
        before = pages_sent(fleet.client)
        answer = fleet.client.complete(golden.prompt_ids, max_tokens=24, logprobs=0)
        assert (answer.ids, answer.cached_tokens) == (golden.output_ids, cached_tokens)
        check_pages_sent(fleet.client, before + num_moved)

    fleet.ensure(0, 1)
    [decode] = fleet.workers["decode"]
    fleet.client.ids(golden.prompt_ids, 24)
    fleet.ensure(1, 1)
    assert fleet.workers["decode"] == [decode]
    check(0, 1)  # decode holds two pages of three, the new prefill worker none
    fleet.kill(decode)
    fleet.ensure(1, 1)
    check(32, 3)  # prefill holds two pages, the new decode worker none
    check(32, 1)


def test_a_worker_that_leaves_in_order_costs_no_request(fleet: Fleet) -> None:
    fleet.ensure(2, 2)
    answers = [in_background(fleet.client, GOLDENS[name].prompt_ids, 24) for name in ("story", "french", "sql", "html")]
    leaving = [fleet.workers["prefill"][0], fleet.workers["decode"][0]]
    time.sleep(0.3)
    for served in leaving:
        fleet.end(served)
    assert [answer.result() for answer in answers] == [GOLDENS[name].output_ids for name in ("story", "french", "sql", "html")]
    wait_until(lambda: fleet.client.num_ready("prefill") == fleet.client.num_ready("decode") == 1, "the router to take note")
    check_idle(fleet.client)


def test_a_stream_goes_on_when_its_decode_worker_is_killed(fleet: Fleet) -> None:
    """Row 22: no token lost, none twice. With no decode worker left, an error event ends the stream, never a clean end."""
    fleet.ensure(1, 2)
    expected = fleet.client.ids(STORY, 60, ignore_eos=True)
    stream = Listener(fleet.client, STORY, 60)
    stream.await_tokens(10)
    fleet.kill(fleet.busy("decode"))
    assert stream.result() == expected

    stream = Listener(fleet.client, STORY, 200)
    stream.await_tokens(10)
    fleet.kill(fleet.busy("decode"))
    with pytest.raises(BrokenStream) as broken:
        stream.result()
    assert broken.value.error is not None and broken.value.error["message"]
    assert broken.value.ids[:60] == expected[: len(broken.value.ids)] and 10 <= len(broken.value.ids) < 200


def test_readiness_follows_the_fleet_and_keeps_its_promise(fleet: Fleet) -> None:
    """Row 23. Without a decode worker nobody is ready and a request is refused at once; ready means that the next request succeeds."""
    for served in list(fleet.workers["decode"]):
        fleet.kill(served)
    wait_until(lambda: not fleet.client.is_ready(), "the router to notice")
    response = fleet.client.post("/v1/completions", {"model": MODEL, "prompt": STORY, "max_tokens": 2})
    assert response.status_code == 503 and response.json()["error"]["message"]
    assert fleet.client.http.get("/health").status_code == 200
    fleet.start("decode")
    wait_until(fleet.client.is_ready, "a decode worker", 180.0)
    assert fleet.client.ids(STORY, 24) == GOLDENS["story"].output_ids


def test_a_new_router_finds_the_workers_and_the_old_ones_requests_are_gone(fleet: Fleet) -> None:
    fleet.ensure(1, 1)
    pids = [served.pid for workers in fleet.workers.values() for served in workers]
    stream = Listener(fleet.client, STORY, 300)
    stream.await_tokens(5)
    fleet.router.kill()
    with pytest.raises(Exception, match=r"peer closed|after|Server disconnected"):
        stream.result()
    fleet.router = fleet.start("router")
    fleet.router.await_ready()
    wait_until(fleet.client.is_ready, "the workers to find the new router", 30.0)
    assert fleet.client.ids(STORY, 24) == GOLDENS["story"].output_ids
    check_idle(fleet.client)
    assert all(is_alive(pid) for pid in pids)
    fleet.ensure(1, 1)


def test_a_worker_replaced_behind_the_same_address_is_noticed(fleet: Fleet) -> None:
    """The new process holds nothing of what the old one had promised; requests must not wait for it."""
    fleet.ensure(0, 1)
    port = free_port()
    first = fleet.start("prefill", **{"worker.port": port})
    fleet.ensure(1, 1)
    assert fleet.client.ids(STORY, 24) == GOLDENS["story"].output_ids
    fleet.kill(first)
    fleet.start("prefill", **{"worker.port": port})
    fleet.ensure(1, 1)
    check_idle(fleet.client)
    before = pages_sent(fleet.client)
    golden = GOLDENS["rust"]
    assert fleet.client.ids(golden.prompt_ids, 24) == golden.output_ids
    check_pages_sent(fleet.client, before + 3)  # computed and sent by the new process
