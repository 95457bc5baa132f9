"""The router against scripted workers: the happy path, refusals, capacity, deadlines, and what it says of itself."""

from __future__ import annotations

import asyncio

import pytest

from pdjax.errors import BadRequest, DeadlineExceeded, NoWorker, OverCapacity
from pdjax.protocol import Finished, SequenceRequest, TokenOut, Tokens, WorkerLoad
from tests.test_router_fakes import (
    CACHED_TOKENS,
    HANG,
    Rig,
    Step,
    answer,
    collect,
    collect_rest,
    cut,
    decode_steps,
    failed,
    prefill_steps,
    run,
    worker_info,
)

PROMPT = [5, 6]


# ---- The happy path ----


def test_an_answer_is_whole_in_order_and_reports_what_prefill_found_cached() -> None:
    async def scenario() -> None:
        rig = Rig("p1 d1")
        tokens, finished = await collect(rig.generate(PROMPT))
        assert tokens == [11, 22, 44, 88, 79]
        assert finished == Finished(reason="length", cached_tokens=min(CACHED_TOKENS, len(PROMPT)))
        prefill, decode = rig.workers["p1"].calls[0], rig.workers["d1"].calls[0]
        assert prefill.room == decode.room and 0 <= decode.room < 1 << 63
        assert prefill.prefill is None and decode.prefill == rig.workers["p1"].info.peer
        rig.assert_nothing_held()

    run(scenario)


def test_both_workers_are_called_before_either_has_answered() -> None:
    async def scenario() -> None:
        rig = Rig("p1 d1")
        rig.plan("p1", lambda request: [rig.workers["d1"].called, *prefill_steps(request)])
        rig.plan("d1", lambda request: [rig.workers["p1"].called, *decode_steps(request)])
        assert (await collect(rig.generate(PROMPT)))[0] == answer(PROMPT, 5)

    run(scenario)


def test_decode_tokens_that_overtake_the_first_token_wait_for_it() -> None:
    async def scenario() -> None:
        rig = Rig("p1 d1")
        gate = asyncio.Event()

        rig.plan("p1", lambda request: [gate, *prefill_steps(request)])
        parts = rig.generate(PROMPT)
        first = asyncio.ensure_future(anext(parts))
        while rig.workers["d1"].open_streams or not rig.workers["d1"].calls:
            await asyncio.sleep(0)
        assert not first.done(), "a token was given before the first one"
        gate.set()
        assert await first == TokenOut(0, 11)
        assert [part.token async for part in parts if isinstance(part, TokenOut)] == [22, 44, 88, 79]
        rig.assert_nothing_held()

    run(scenario)


def test_the_first_token_is_given_before_decode_has_said_anything() -> None:
    async def scenario() -> None:
        rig = Rig("p1 d1")
        gate = asyncio.Event()
        rig.plan("d1", lambda request: [gate, *decode_steps(request)])
        parts = rig.generate(PROMPT)
        assert await anext(parts) == TokenOut(0, 11)
        gate.set()
        assert [part.token async for part in parts if isinstance(part, TokenOut)] == [22, 44, 88, 79]

    run(scenario)


def test_duplicates_are_dropped_by_index() -> None:
    async def scenario() -> None:
        rig = Rig("p1 d1")

        def stutter(request: SequenceRequest) -> list[Step]:
            first, second, *rest = decode_steps(request)
            return [prefill_steps(request)[0], first, first, second, first, *rest]

        rig.plan("d1", stutter)
        assert (await collect(rig.generate(PROMPT)))[0] == answer(PROMPT, 5)

    run(scenario)


@pytest.mark.parametrize(("max_tokens", "stop", "reason"), [(1, None, "length"), (5, 11, "stop")])
def test_a_first_token_that_ends_the_answer_cancels_decode(max_tokens: int, stop: int | None, reason: str) -> None:
    async def scenario() -> None:
        rig = Rig("p1 d1")
        tokens, finished = await collect(rig.generate(PROMPT, max_tokens, stop))
        assert (tokens, finished.reason, finished.stop_token) == ([11], reason, stop)
        assert len(rig.workers["d1"].calls) == 1
        rig.assert_nothing_held()

    run(scenario)


def test_decode_hearing_of_the_end_before_prefill_reports_it_is_no_failure() -> None:
    async def scenario() -> None:
        rig = Rig("p1 d1")
        gate = asyncio.Event()
        rig.plan("p1", lambda request: [gate, *prefill_steps(request)])
        rig.plan("d1", lambda request: [failed("transfer")])
        parts = rig.generate(PROMPT, max_tokens=1)
        first = asyncio.ensure_future(anext(parts))
        while rig.workers["d1"].open_streams or not rig.workers["d1"].calls:
            await asyncio.sleep(0)
        gate.set()
        assert await first == TokenOut(0, 11)
        assert (await anext(parts)).reason == "length"
        assert len(rig.workers["p1"].calls) == 1
        assert rig.metric("pdjax_router_failed_attempts_total", worker="d1:1", reason="transfer") == 0

    run(scenario)


def test_a_missing_last_word_of_prefill_does_not_hold_the_answer_back_for_long() -> None:
    async def scenario() -> None:
        rig = Rig("p1 d1")
        rig.plan("p1", cut(prefill_steps, 1, HANG))
        tokens, finished = await collect(rig.generate(PROMPT))
        assert tokens == answer(PROMPT, 5) and finished.reason == "length"
        rig.assert_nothing_held()

    run(scenario)


def test_every_sequence_of_every_attempt_has_a_room_of_its_own() -> None:
    async def scenario() -> None:
        rig = Rig("p1 d1")
        rig.plan("d1", cut(decode_steps, 1), cut(decode_steps, 1))
        await asyncio.gather(collect(rig.generate(PROMPT)), collect(rig.generate(PROMPT)))
        for name, num_calls in (("p1", 4), ("d1", 4)):
            assert len({request.room for request in rig.workers[name].calls}) == num_calls

    run(scenario)


def test_without_a_prefill_worker_decode_computes_the_prompt() -> None:
    async def scenario() -> None:
        rig = Rig("d1")
        tokens, finished = await collect(rig.generate(PROMPT))
        assert tokens == answer(PROMPT, 5) and finished.cached_tokens == len(PROMPT)
        assert rig.workers["d1"].calls[0].prefill is None

    run(scenario)


# ---- Refusals, capacity, deadlines ----


def test_a_request_that_a_worker_finds_impossible_is_the_callers_fault() -> None:
    async def scenario() -> None:
        rig = Rig("p1 d1 d2")
        rig.plan("p1", lambda request: [failed("rejected", retriable=False)])
        rig.plan("d1", lambda request: [HANG])
        with pytest.raises(BadRequest, match="scripted rejected"):
            await collect(rig.generate(PROMPT))
        assert not rig.workers["d2"].calls
        rig.assert_nothing_held()

    run(scenario)


def test_a_full_worker_is_passed_over_and_costs_no_attempt() -> None:
    async def scenario() -> None:
        rig = Rig("p1 d1 d2", max_attempts=1)
        rig.plan("d1", lambda request: [failed("over_capacity")])
        rig.plan("p1", lambda request: [HANG])
        assert (await collect(rig.generate(PROMPT)))[0] == answer(PROMPT, 5)
        assert len(rig.workers["d2"].calls) == 1

    run(scenario)


@pytest.mark.parametrize("role", ["p", "d"])
def test_when_every_worker_of_a_role_is_full_a_new_request_is_turned_away(role: str) -> None:
    async def scenario() -> None:
        rig = Rig("p1 p2 d1 d2")
        for name in rig.workers:
            step = failed("over_capacity") if name.startswith(role) else HANG
            rig.plan(name, *[lambda request, step=step: [step]] * 2)
        with pytest.raises(OverCapacity, match=r"worker is full \(2 of them\)") as caught:
            await collect(rig.generate(PROMPT))
        assert caught.value.retry_after_s > 0
        assert rig.metric("pdjax_router_retries_total", reason="over_capacity") == 1
        rig.assert_nothing_held()

    run(scenario)


def test_a_request_that_has_tokens_waits_for_room_beyond_its_attempts() -> None:
    async def scenario() -> None:
        rig = Rig("p1 d1", max_attempts=2)
        rig.plan("d1", cut(decode_steps, 1), *[lambda request: [failed("over_capacity")]] * 6)
        rig.plan("p1", prefill_steps, *[lambda request: [HANG]] * 6)
        parts = rig.generate(PROMPT)
        assert [(await anext(parts)).token for _ in range(2)] == [11, 22]
        assert await collect_rest(parts) == [44, 88, 79]
        assert len(rig.workers["d1"].calls) == 8

    run(scenario)


def test_sequences_beyond_the_bound_are_turned_away_and_the_bound_is_given_back() -> None:
    async def scenario() -> None:
        rig = Rig("p1 d1", max_in_flight=1)
        rig.plan("d1", lambda request: [HANG])
        parts = rig.generate(PROMPT)
        await anext(parts)
        assert not rig.router.is_ready()
        with pytest.raises(OverCapacity, match="1 sequences are in flight, the limit is 1"):
            await anext(rig.generate(PROMPT))
        assert rig.metric("pdjax_router_in_flight") == 1
        await parts.aclose()
        assert rig.router.is_ready()
        assert (await collect(rig.generate(PROMPT)))[0] == answer(PROMPT, 5)
        assert rig.metric("pdjax_router_requests_total", outcome="over_capacity") == 1
        assert rig.metric("pdjax_router_requests_total", outcome="cancelled") == 1
        assert rig.metric("pdjax_router_requests_total", outcome="ok") == 1

    run(scenario)


@pytest.mark.parametrize("hanging", ["p1", "d1"])
def test_the_deadline_ends_a_hanging_sequence(hanging: str) -> None:
    async def scenario() -> None:
        rig = Rig("p1 d1")
        rig.plan(hanging, lambda request: [HANG])
        with pytest.raises(DeadlineExceeded):
            await collect(rig.generate(PROMPT, in_s=0.03))
        rig.assert_nothing_held()

    run(scenario)


def test_a_deadline_that_has_passed_reaches_the_caller_whoever_notices_it() -> None:
    async def scenario() -> None:
        rig = Rig("p1 d1")
        rig.plan("p1", lambda request: [failed("deadline", retriable=False)])
        rig.plan("d1", lambda request: [HANG])
        with pytest.raises(DeadlineExceeded, match="scripted deadline"):
            await collect(rig.generate(PROMPT))
        rig.plan("p1", lambda request: [HANG])
        with pytest.raises(DeadlineExceeded):
            await collect(rig.generate(PROMPT, in_s=-1.0))
        rig.assert_nothing_held()

    run(scenario)


# ---- What the router says of itself ----


def test_the_model_card_has_the_smallest_limits_of_the_fleet() -> None:
    async def scenario() -> None:
        rig = Rig("")
        with pytest.raises(NoWorker):
            rig.router.model_card()
        rig.add("p1", max_prompt_tokens=50)
        rig.add("d1", max_context_tokens=70)
        card = rig.router.model_card()
        assert (card.name, card.vocab_size, card.eos_token_ids) == ("sum", 97, (0,))
        assert (card.max_prompt_tokens, card.max_context_tokens) == (50, 70)
        rig.roster.leave("p1")
        assert rig.router.model_card().max_prompt_tokens == 900

    run(scenario)


def test_ready_needs_a_decode_worker_that_is_ready() -> None:
    async def scenario() -> None:
        rig = Rig("p1")
        assert not rig.router.is_ready()
        rig.workers["d1"] = rig.workers["p1"].__class__(worker_info("d1"))
        rig.roster.join(worker_info("d1"))
        assert not rig.router.is_ready()
        assert rig.metric("pdjax_router_workers", role="decode", health="loading") == 1
        rig.roster.heartbeat("d1", WorkerLoad(ready=True))
        assert rig.router.is_ready()
        assert rig.metric("pdjax_router_workers", role="decode", health="ready") == 1

    run(scenario)


def test_a_worker_that_gives_more_than_was_asked_for_does_not_lengthen_the_answer() -> None:
    async def scenario() -> None:
        rig = Rig("p1 d1")
        rig.plan("d1", lambda request: [*decode_steps(request)[:-1], Tokens([TokenOut(5, 61)]), HANG])
        tokens, finished = await collect(rig.generate(PROMPT))
        assert tokens == answer(PROMPT, 5) and finished.reason == "length"
        rig.assert_nothing_held()

    run(scenario)
