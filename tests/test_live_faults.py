"""Both techniques off, on, and with the faults on purpose that the workers have hooks for: no answer changes, and nothing stays held."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest
import xxhash

from pdjax.config.load import load_config
from tests.goldens import load_goldens
from tests.live import MODEL, WINDOW, BrokenStream, Client, Served, check_idle, free_port, serving, vocabulary, wait_until

pytestmark = pytest.mark.live

GOLDENS = {golden.name: golden for golden in load_goldens()}
FORCE_RETRY, FAILURE = "PDJAX_TEST_FORCE_RETRY_PROB", "PDJAX_TEST_FAILURE_PROB"
PROBABILITY = 0.1
MAX_ROUNDS = 20
"""Each of the rounds names one of its requests at least with a probability of 0.6, so all but one in 10^8 runs need fewer."""

T = TypeVar("T")


class Case(NamedTuple):
    """`expected`: the whole answer; None where it is what the plain system says."""

    name: str
    prompt: list[int]
    fields: dict[str, Any]
    expected: list[int] | None


GREEDY = [
    Case(name, GOLDENS[name].prompt_ids, {"temperature": 0}, GOLDENS[name].output_ids)
    for name in ("tokens-511", "tokens-513", "chat-capital", "chat-emoji", "story", "one-word", "tokens-17", "digits")
]
SAMPLED = [
    Case("sampled", GOLDENS["story"].prompt_ids, {"temperature": 0.9, "top_p": 0.95, "seed": 3, "ignore_eos": True}, None),
]
CASES = GREEDY + SAMPLED
LONG = [case for case in CASES if len(case.prompt) > 500]
CACHED = 256
"""Tokens of a long prompt that prefill has in its cache when the prompt comes, and decode has not."""


class Reply(NamedTuple):
    """`ids` None where the request failed, with `error` as its body or its stream says. `request_id`: of an answer that is no stream."""

    request_id: str
    ids: list[int] | None
    error: dict[str, Any] | None


def ask(client: Client, case: Case) -> Reply:
    body = {"model": MODEL, "prompt": case.prompt, "max_tokens": 24, "logprobs": 0, **case.fields}
    response = client.post("/v1/completions", body)
    if response.status_code != 200:
        assert response.status_code == 502, f"{case.name}: {response.status_code}: {response.text}"
        return Reply("", None, response.json()["error"])
    [choice] = response.json()["choices"]
    return Reply(response.headers["x-request-id"], vocabulary().ids(choice["logprobs"]), None)


def at_once(calls: Sequence[Callable[[], T]]) -> list[T]:
    """More than decode admits, so that some go ahead of their bootstrap."""
    with ThreadPoolExecutor(2 * WINDOW) as pool:
        return list(pool.map(lambda call: call(), calls))


def round_of(client: Client) -> list[Reply]:
    """Every case once. The starts of the long prompts come first; they end with their first token, so that decode never sees them."""
    at_once([partial(client.complete, case.prompt[:CACHED], max_tokens=1) for case in LONG])
    return at_once([partial(ask, client, case) for case in CASES])


def check_replies(replies: list[Reply], plain: dict[str, list[int]]) -> None:
    for case, reply in zip(CASES, replies, strict=True):
        assert reply.ids == plain[case.name], f"{case.name}: {reply.error}"


@pytest.fixture(scope="module")
def plain(live_folder: Path) -> dict[str, list[int]]:
    """What a system answers in which both techniques are off."""
    off = {"scheduler__optimistic_prefill_retries": 0, "scheduler__early_send_cached_prefix": False}
    with system(live_folder, "plain", **off) as client:
        answers = {case.name: reply.ids for case, reply in zip(CASES, round_of(client), strict=True) if reply.ids is not None}
        check_idle(client)
        assert client.figure("early_sent_pages_total") == client.figure("optimistic_retries_total") == num_held(client) == 0
    return answers


@contextmanager
def system(folder: Path, name: str, *, env: dict[str, str] | None = None, **settings: Any) -> Iterator[Client]:
    with serving(folder, name, "all", env=env, **settings) as served:
        client = Client(served.await_ready()["url"])
        try:
            yield client
        finally:
            client.close()


def num_held(client: Client) -> float:
    """Pages that were gathered while bootstrap was pending and have left afterwards."""
    return client.sample("pdjax_worker_kv_pages_handed_over_total", when="held")


def test_goldens_come_out_with_both_techniques_off(plain: dict[str, list[int]]) -> None:
    assert plain == {case.name: case.expected or plain[case.name] for case in CASES}
    assert len(plain["sampled"]) == 24


def test_goldens_come_out_with_both_techniques_on(pair: Client, plain: dict[str, list[int]]) -> None:
    defaults = load_config(None, []).scheduler
    assert defaults.optimistic_prefill_retries > 0 and defaults.early_send_cached_prefix
    check_replies(round_of(pair), plain)


def is_named(request_id: str, room: int) -> bool:
    """Whether the hook takes this attempt's first forward: its name on the worker, hashed."""
    return xxhash.xxh3_64_intdigest(f"{request_id}-0@{room:x}".encode()) < PROBABILITY * 2**64


def forced_and_lost(client: Client, reply: Reply) -> tuple[bool, int]:
    """Whether the hook names the request in its last attempt, of which a busy machine may need more than one, and how many of that
    attempt's forwards were lost."""
    timeline = client.http.get(f"/v1/requests/{reply.request_id}/timeline").json()["timeline"]
    attempt = timeline["sequences"][0]["attempts"][-1]
    stages = attempt["workers"][0]["stages"]
    return is_named(reply.request_id, int(attempt["room"], 16)), sum(stage["count"] for stage in stages if stage["name"] == "retry")


def test_forwards_that_are_lost_on_purpose_change_no_answer(live_folder: Path, plain: dict[str, list[int]]) -> None:
    """The requests that the hook names lose their first forward, and no answer tells which they were."""
    with system(live_folder, "retried", env={FORCE_RETRY: str(PROBABILITY)}) as client:
        seen: list[tuple[bool, int]] = []
        while not any(forced for forced, _ in seen):
            assert len(seen) < MAX_ROUNDS * len(CASES)
            replies = round_of(client)
            check_replies(replies, plain)
            seen += [forced_and_lost(client, reply) for reply in replies]
        assert all(num_lost >= forced for forced, num_lost in seen)
        assert num_held(client) > 0, "nobody was ahead of its bootstrap"
        check_idle(client)
        assert client.figure("early_sent_pages_total") > 0
        assert client.figure("optimistic_retries_total") >= sum(num_lost for _, num_lost in seen) > 0


class Failing:
    """A router and two workers, of which prefill finds its senders failed at every tenth look."""

    def __init__(self, folder: Path, stack: ExitStack):
        self._folder = folder
        self._stack = stack
        self._ports = {"server__port": free_port(), "router__control_port": free_port()}
        self._router: Served | None = None
        self._start("prefill", env={FAILURE: str(PROBABILITY)})
        self._start("decode")

    def route(self, max_attempts: int) -> Client:
        """A client of a new router, which the workers have found."""
        if self._router is not None:
            self._router.kill()
        self._router = self._start("router", name=f"router-{max_attempts}", router__max_attempts=max_attempts)
        client = Client(self._router.await_ready()["url"])
        self._stack.callback(client.close)
        for role in ("prefill", "decode"):
            wait_until(lambda role=role: client.num_ready(role) == 1, f"the {role} worker to join", 180.0)
        return client

    def _start(self, role: str, name: str | None = None, env: dict[str, str] | None = None, **settings: Any) -> Served:
        return self._stack.enter_context(serving(self._folder, f"failing-{name or role}", role, env=env, **self._ports, **settings))


def listen(client: Client, case: Case) -> Reply:
    """As a stream. What came before an error event must be right."""
    ids: list[int] = []
    try:
        ids += client.stream(case.prompt, 24, **case.fields)
    except BrokenStream as broken:
        assert broken.error is not None, f"{case.name}: the stream ends without a word"
        assert broken.ids == (case.expected or broken.ids)[: len(broken.ids)], case.name
        return Reply("", None, broken.error)
    return Reply("", ids, None)


def test_senders_that_fail_at_random_cost_attempts_and_no_answer(live_folder: Path, plain: dict[str, list[int]]) -> None:
    """The router tries again, at last on decode alone. With one attempt a request may fail; it does so in OpenAI's shape."""
    with ExitStack() as stack:
        failing = Failing(live_folder, stack)
        client = failing.route(max_attempts=4)
        check_replies(round_of(client), plain)
        assert client.sample("pdjax_router_failed_attempts_total") > 0
        check_idle(client)

        client = failing.route(max_attempts=1)
        cases = CASES * 2
        calls = [partial(how, client, case) for how in (ask, listen) for case in CASES]
        num_failed = 0
        for case, reply in zip(cases, at_once(calls), strict=True):
            if reply.ids is not None:
                assert reply.ids == plain[case.name]
                continue
            num_failed += 1
            assert reply.error is not None and set(reply.error) == {"message", "type", "param", "code"}
            assert (reply.error["type"], reply.error["code"]) == ("server_error", "worker_failed") and reply.error["message"]
        assert num_failed > 0
        assert client.sample("pdjax_router_failed_attempts_total") >= num_failed
        check_idle(client)
