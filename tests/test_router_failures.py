"""Workers that fail, fall silent, leave or are replaced: every answer is the whole right one or an error, and nothing stays open."""

from __future__ import annotations

import asyncio

import pytest

from pdjax.errors import NoWorker, WorkerFailed
from pdjax.protocol import SequenceRequest, TokenOut, WorkerLoad
from tests.test_router_fakes import (
    HANG,
    LAYOUT,
    Rig,
    Step,
    answer,
    collect,
    collect_rest,
    cut,
    decode_steps,
    failed,
    lost,
    prefill_steps,
    run,
)

PROMPT = [5, 6]


@pytest.mark.parametrize("after", ["before_first_token", "after_first_token"])
def test_prefill_dying_before_hand_off_is_replaced_by_another(after: str) -> None:
    async def scenario() -> None:
        rig = Rig("p1 p2 d1")
        rig.plan("p1", cut(prefill_steps, 0 if after == "before_first_token" else 1))
        rig.plan("d1", lambda request: [HANG])
        assert (await collect(rig.generate(PROMPT)))[0] == answer(PROMPT, 5)
        (retry,) = rig.workers["p2"].calls
        given = [] if after == "before_first_token" else [11]
        assert (retry.prompt, retry.num_prior) == (PROMPT + given, len(given))
        assert retry.sampling.max_tokens == 5
        assert rig.metric("pdjax_router_retries_total", reason="internal") == 1
        assert rig.metric("pdjax_router_failed_attempts_total", worker="p1:1", reason="internal") == 1
        rig.assert_nothing_held()

    run(scenario)


def test_prefill_dying_while_decode_streams_disturbs_nothing() -> None:
    async def scenario() -> None:
        rig = Rig("p1 p2 d1 d2")
        streaming, dead = asyncio.Event(), asyncio.Event()
        rig.plan("p1", lambda request: [prefill_steps(request)[0], streaming, lost(), HANG])

        def decode(request: SequenceRequest) -> list[Step]:
            first, *rest = decode_steps(request)
            return [first, dead, *rest]

        rig.plan("d1", decode)
        parts = rig.generate(PROMPT)
        assert [(await anext(parts)).token for _ in range(2)] == [11, 22]
        streaming.set()
        while rig.workers["p1"].open_streams:
            await asyncio.sleep(0)
        dead.set()
        assert [part.token async for part in parts if isinstance(part, TokenOut)] == [44, 88, 79]
        assert not rig.workers["p2"].calls and not rig.workers["d2"].calls
        rig.assert_nothing_held()

    run(scenario)


@pytest.mark.parametrize("num_given", range(4))
def test_decode_dying_in_mid_stream_is_continued_elsewhere_with_nothing_lost_or_repeated(num_given: int) -> None:
    async def scenario() -> None:
        rig = Rig("p1 d1 d2")
        dies = asyncio.Event()
        rig.plan("d1", lambda request: decode_steps(request)[:num_given] + [dies, lost()])
        parts = rig.generate(PROMPT)
        given = [(await anext(parts)).token for _ in range(num_given + 1)]
        dies.set()
        tokens = given + [part.token async for part in parts if isinstance(part, TokenOut)]
        assert tokens == answer(PROMPT, 5)
        (retry,) = rig.workers["d2"].calls
        assert (retry.prompt, retry.num_prior) == (PROMPT + given, num_given + 1)
        rig.assert_nothing_held()

    run(scenario)


@pytest.mark.parametrize(("stop", "expected", "reason"), [(None, [11, 22, 44, 88, 79], "length"), (44, [11, 22, 44], "stop")])
def test_an_answer_whose_last_token_was_given_ends_without_another_attempt(stop: int | None, expected: list[int], reason: str) -> None:
    async def scenario() -> None:
        rig = Rig("p1 d1 d2", max_attempts=1)
        rig.plan("d1", cut(decode_steps, len(expected) - 1))
        tokens, finished = await collect(rig.generate(PROMPT, stop=stop))
        assert (tokens, finished.reason, finished.stop_token) == (expected, reason, stop)
        assert not rig.workers["d2"].calls
        rig.assert_nothing_held()

    run(scenario)


def test_a_gap_in_the_tokens_is_a_failed_attempt() -> None:
    async def scenario() -> None:
        rig = Rig("p1 d1 d2")
        rig.plan("d1", lambda request: decode_steps(request)[:1] + decode_steps(request)[2:])
        assert (await collect(rig.generate(PROMPT)))[0] == answer(PROMPT, 5)
        assert len(rig.workers["d2"].calls) == 1

    run(scenario)


def test_the_last_attempt_has_decode_compute_the_prompt() -> None:
    async def scenario() -> None:
        rig = Rig("p1 d1", max_attempts=3)
        rig.plan("p1", cut(prefill_steps, 0), cut(prefill_steps, 0))
        rig.plan("d1", lambda request: [HANG], lambda request: [HANG])
        assert (await collect(rig.generate(PROMPT)))[0] == answer(PROMPT, 5)
        assert [request.prefill is None for request in rig.workers["d1"].calls] == [False, False, True]
        rig.assert_nothing_held()

    run(scenario)


def test_one_attempt_allowed_still_uses_a_pair() -> None:
    async def scenario() -> None:
        rig = Rig("p1 d1", max_attempts=1)
        await collect(rig.generate(PROMPT))
        assert rig.workers["d1"].calls[0].prefill is not None

    run(scenario)


def test_when_every_worker_dies_the_answer_never_ends_cleanly() -> None:
    async def scenario() -> None:
        rig = Rig("p1 d1", max_attempts=3)
        dying = cut(decode_steps, 0)
        rig.plan("d1", dying, dying, dying)
        seen: list[object] = []
        with pytest.raises(WorkerFailed, match="3 attempts failed, the last: decode worker d1:1 failed"):
            async for part in rig.generate(PROMPT):
                seen.append(part)
        assert [part.token for part in seen] == answer(PROMPT, 5)[: len(seen)]
        rig.assert_nothing_held()

    run(scenario)


def test_a_sequence_under_way_waits_for_a_new_decode_worker() -> None:
    async def scenario() -> None:
        rig = Rig("p1 d1")
        link = rig.fleet.members()[1].link
        dies = asyncio.Event()
        rig.plan("d1", lambda request: [dies, lost()])
        parts = rig.generate(PROMPT)
        assert (await anext(parts)).token == 11
        rig.roster.lose("d1", link)
        dies.set()
        rest = asyncio.ensure_future(collect_rest(parts))
        await asyncio.sleep(0.02)  # longer than any pause before a retry: by now it waits for a worker
        rig.add("d2")
        assert await rest == [22, 44, 88, 79]

    run(scenario)


def test_a_sequence_under_way_fails_when_no_decode_worker_comes() -> None:
    async def scenario() -> None:
        rig = Rig("p1 d1", heartbeat_timeout_s=0.05)
        link = rig.fleet.members()[1].link
        rig.plan("d1", cut(decode_steps, 1))
        parts = rig.generate(PROMPT)
        assert (await anext(parts)).token == 11
        rig.roster.lose("d1", link)
        with pytest.raises(WorkerFailed, match="no decode worker is ready"):
            await collect_rest(parts)
        rig.assert_nothing_held()

    run(scenario)


def test_a_first_attempt_without_a_decode_worker_is_refused_at_once() -> None:
    async def scenario() -> None:
        rig = Rig("p1")
        with pytest.raises(NoWorker, match="no decode worker is ready"):
            await collect(rig.generate(PROMPT))
        assert not rig.workers["p1"].calls
        rig.assert_nothing_held()

    run(scenario)


def test_a_worker_that_falls_silent_is_given_up_when_it_misses_its_heartbeats() -> None:
    async def scenario() -> None:
        rig = Rig("p1 d1 d2", heartbeat_timeout_s=0.04)
        rig.plan("d1", lambda request: [*decode_steps(request)[:1], HANG])
        parts = rig.generate(PROMPT)
        given = [(await anext(parts)).token for _ in range(2)]
        rest = asyncio.ensure_future(collect_rest(parts))
        while not rest.done():
            for name in ("p1", "d2"):
                rig.roster.heartbeat(name, WorkerLoad(ready=True, free_pages=1000))
            await asyncio.sleep(0.005)
        assert given + await rest == answer(PROMPT, 5)
        assert len(rig.workers["d2"].calls) == 1
        rig.assert_nothing_held()

    run(scenario)


def test_a_prefill_worker_that_hangs_while_decode_streams_disturbs_nothing() -> None:
    async def scenario() -> None:
        rig = Rig("p1 d1 d2", heartbeat_timeout_s=0.03)
        gate = asyncio.Event()
        rig.plan("p1", cut(prefill_steps, 1, HANG))
        rig.plan("d1", lambda request: [*decode_steps(request)[:1], gate, *decode_steps(request)[1:]])
        parts = rig.generate(PROMPT)
        given = [(await anext(parts)).token for _ in range(2)]
        rest = asyncio.ensure_future(collect_rest(parts))
        for _ in range(12):
            rig.roster.heartbeat("d1", WorkerLoad(ready=True))
            await asyncio.sleep(0.005)
        assert rig.metric("pdjax_router_workers", role="prefill", health="silent") == 1
        gate.set()
        assert given + await rest == answer(PROMPT, 5)
        assert not rig.workers["d2"].calls
        rig.assert_nothing_held()

    run(scenario)


def test_a_worker_that_streams_is_not_given_up_for_missing_heartbeats() -> None:
    async def scenario() -> None:
        rig = Rig("p1 d1 d2", heartbeat_timeout_s=0.05)
        gates = [asyncio.Event() for _ in range(4)]

        def slow(request: SequenceRequest) -> list[Step]:
            *tokens, end = decode_steps(request)
            return [step for pair in zip(gates, tokens, strict=True) for step in pair] + [end]

        rig.plan("d1", slow)
        parts = rig.generate(PROMPT)
        given = [(await anext(parts)).token]
        for gate in gates:
            await asyncio.sleep(0.02)
            gate.set()
            given.append((await anext(parts)).token)
        assert given == answer(PROMPT, 5)
        assert not rig.workers["d2"].calls

    run(scenario)


def test_a_replaced_worker_loses_its_sequences_at_once() -> None:
    async def scenario() -> None:
        rig = Rig("p1 d1 d2")
        rig.plan("d1", lambda request: [*decode_steps(request)[:1], HANG])
        parts = rig.generate(PROMPT)
        given = [(await anext(parts)).token for _ in range(2)]
        rest = asyncio.ensure_future(collect_rest(parts))
        rig.add("d1b", address="d1:1")
        assert given + await rest == answer(PROMPT, 5)
        await rig.workers["d1"].closed.wait()
        assert [member.instance_id for member in rig.fleet.members()] == ["p1", "d2", "d1b"]
        rig.assert_nothing_held()

    run(scenario)


def test_a_worker_that_leaves_in_order_may_end_what_it_has_begun() -> None:
    async def scenario() -> None:
        rig = Rig("p1 d1 d2")
        gate = asyncio.Event()
        rig.plan("d1", lambda request: [*decode_steps(request)[:1], gate, *decode_steps(request)[1:]])
        parts = rig.generate(PROMPT)
        given = [(await anext(parts)).token for _ in range(2)]
        rig.roster.leave("d1")
        gate.set()
        assert given + await collect_rest(parts) == answer(PROMPT, 5)
        assert not rig.workers["d2"].calls
        await rig.workers["d1"].closed.wait()
        assert len(rig.fleet.members()) == 2

    run(scenario)


def test_a_transfer_that_failed_is_tried_with_the_other_pair() -> None:
    async def scenario() -> None:
        rig = Rig("p1 p2 d1 d2")
        rig.plan("p1", lambda request: [HANG])
        rig.plan("d1", lambda request: [failed("bootstrap")])
        assert (await collect(rig.generate(PROMPT)))[0] == answer(PROMPT, 5)
        assert [len(rig.workers[name].calls) for name in ("p1", "p2", "d1", "d2")] == [1, 1, 1, 1]

    run(scenario)


def test_a_pair_refused_for_its_layout_is_not_tried_again() -> None:
    async def scenario() -> None:
        rig = Rig("p1 d1")
        rig.plan("p1", lambda request: [HANG])
        rig.plan("d1", lambda request: [failed("bootstrap", retriable=False)])
        assert (await collect(rig.generate(PROMPT)))[0] == answer(PROMPT, 5)
        assert len(rig.workers["p1"].calls) == 1
        assert rig.workers["d1"].calls[1].prefill is None

    run(scenario)


def test_an_answer_is_never_continued_by_another_model() -> None:
    async def scenario() -> None:
        rig = Rig("p1 d1", heartbeat_timeout_s=0.03, max_attempts=2)
        other = LAYOUT.__class__(model_fingerprint="g", page_size=4, kv_dtype="float32", num_layers=2, num_kv_heads=1, head_dim=8)
        rig.plan("d1", cut(decode_steps, 1))
        parts = rig.generate(PROMPT)
        await anext(parts)
        rig.roster.leave("d1")
        rig.add("d2", layout=other)
        with pytest.raises(WorkerFailed):
            await collect_rest(parts)
        assert not rig.workers["d2"].calls

    run(scenario)


def test_a_client_that_raises_is_a_failed_attempt() -> None:
    def explode(request: SequenceRequest) -> list[Step]:
        raise RuntimeError("boom")

    async def scenario() -> None:
        rig = Rig("p1 d1 d2")
        rig.plan("d1", explode)
        assert (await collect(rig.generate(PROMPT)))[0] == answer(PROMPT, 5)
        rig.assert_nothing_held()

    run(scenario)
