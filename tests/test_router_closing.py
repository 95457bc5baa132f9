"""Closing, cancelling and failing at every point: nothing stays open, and what was given is right.

Hypothesis decides, event by event, who moves next: a worker's stream by one step, or the reader by one part.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import defaultdict
from collections.abc import Coroutine
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdjax.errors import PdjaxError
from pdjax.protocol import Failed, Finished, SequenceRequest, TokenOut
from pdjax.router import attempt
from tests.test_router_fakes import Plan, Rig, Step, answer, decode_steps, failed, lost, prefill_steps

PROMPT = [5, 6]
MAX_TOKENS = 4
WORKERS = ("p1", "p2", "d1", "d2")
NUM_PLANS = 3
FAULTS = [None, lost(), failed("transfer"), failed("bootstrap"), failed("over_capacity"), failed("aborted", retriable=False)]


@dataclass(frozen=True)
class Fault:
    """A call that ends with `end` after `after` events; None: it does not."""

    after: int
    end: Failed | None


@dataclass(frozen=True)
class Case:
    faults: dict[str, list[Fault]]
    moves: list[str]
    is_cancelled: bool


@st.composite
def cases(draw: st.DrawFn) -> Case:
    fault = st.builds(Fault, st.integers(0, MAX_TOKENS), st.sampled_from(FAULTS))
    return Case(
        faults={name: draw(st.lists(fault, max_size=NUM_PLANS)) for name in WORKERS},
        moves=draw(st.lists(st.sampled_from([*WORKERS, "read"]), max_size=25)),
        is_cancelled=draw(st.booleans()),
    )


class Stepper:
    """Gates in front of every event; `move` opens the next one of a worker, `open_all` every one there is or will be."""

    def __init__(self) -> None:
        self._gates: defaultdict[str, list[asyncio.Event]] = defaultdict(list)
        self._is_open = False

    def plan(self, name: str, fault: Fault) -> Plan:
        def steps(request: SequenceRequest) -> list[Step]:
            events = prefill_steps(request) if name.startswith("p") else decode_steps(request)
            if fault.end is not None:
                events = [*events[: fault.after], fault.end]
            return [step for event in events for step in (self._gate(name), event)]

        return steps

    def move(self, name: str) -> None:
        shut = [gate for gate in self._gates[name] if not gate.is_set()]
        if shut:
            shut[0].set()

    def open_all(self) -> None:
        self._is_open = True
        for gates in self._gates.values():
            for gate in gates:
                gate.set()

    def _gate(self, name: str) -> asyncio.Event:
        gate = asyncio.Event()
        if self._is_open:
            gate.set()
        self._gates[name].append(gate)
        return gate


def build(case: Case) -> tuple[Rig, Stepper]:
    rig, stepper = Rig(" ".join(WORKERS), heartbeat_timeout_s=5.0, max_attempts=4), Stepper()
    for name in WORKERS:
        healthy = [Fault(0, None)] * 8
        rig.plan(name, *(stepper.plan(name, fault) for fault in case.faults[name] + healthy))
    return rig, stepper


async def turn_over() -> None:
    for _ in range(6):
        await asyncio.sleep(0)


async def stop_midway(case: Case) -> None:
    rig, stepper = build(case)
    parts = rig.generate(PROMPT, MAX_TOKENS)
    given_parts: list[TokenOut | Finished] = []
    reading: asyncio.Task | None = None
    for move in case.moves:
        if reading is not None and reading.done():
            if reading.exception() is not None:
                break
            given_parts.append(reading.result())
            reading = None
            if isinstance(given_parts[-1], Finished):
                rig.assert_nothing_held()
                break
        if move != "read":
            stepper.move(move)
        elif reading is None:
            reading = asyncio.ensure_future(anext(parts))
        await turn_over()
    if reading is not None:
        if case.is_cancelled:
            reading.cancel()
        else:
            stepper.open_all()
        with contextlib.suppress(asyncio.CancelledError, PdjaxError):
            given_parts.append(await reading)
    await parts.aclose()
    tokens = [part.token for part in given_parts if isinstance(part, TokenOut)]
    assert tokens == answer(PROMPT, MAX_TOKENS)[: len(tokens)]
    rig.assert_nothing_held()


async def read_to_the_end(case: Case) -> None:
    rig, stepper = build(case)
    for move in case.moves:
        if move != "read":
            stepper.move(move)
    stepper.open_all()
    tokens: list[int] = []
    is_finished = False
    try:
        async for part in rig.generate(PROMPT, MAX_TOKENS):
            assert not is_finished
            if isinstance(part, Finished):
                is_finished = True
                rig.assert_nothing_held()
            else:
                assert part.index == len(tokens)
                tokens.append(part.token)
    except PdjaxError:
        assert not is_finished
        assert any(fault.end for faults in case.faults.values() for fault in faults), "an error without a fault"
    expected = answer(PROMPT, MAX_TOKENS)
    assert tokens == (expected if is_finished else expected[: len(tokens)])
    rig.assert_nothing_held()


def run_bounded(scenario: Coroutine[None, None, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await scenario

    asyncio.run(bounded())


@settings(max_examples=150, deadline=None)
@given(cases())
def test_stopping_at_any_point_leaves_no_stream_open_and_nothing_outstanding(case: Case) -> None:
    run_bounded(stop_midway(case))


@settings(max_examples=150, deadline=None)
@given(cases())
def test_whatever_fails_the_answer_is_whole_and_right_or_an_error(case: Case) -> None:
    run_bounded(read_to_the_end(case))


def test_a_generator_that_was_never_started_has_taken_nothing() -> None:
    async def scenario() -> None:
        rig = Rig("p1 d1")
        await rig.generate(PROMPT).aclose()
        assert not rig.workers["p1"].calls
        rig.assert_nothing_held()

    asyncio.run(scenario())


def test_closing_reaches_both_workers_in_the_same_turn() -> None:
    async def scenario() -> None:
        rig, stepper = build(Case({name: [] for name in WORKERS}, [], False))
        parts = rig.generate(PROMPT, MAX_TOKENS)
        reading = asyncio.ensure_future(anext(parts))
        await turn_over()
        stepper.move("p1")
        assert (await reading).token == 11
        assert rig.workers["p1"].open_streams == rig.workers["d1"].open_streams == 1
        await parts.aclose()
        rig.assert_nothing_held()

    asyncio.run(scenario())


def test_a_stream_that_does_not_close_is_given_up_after_a_bounded_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt, "CLOSE_TIMEOUT_S", 0.02)

    async def scenario() -> None:
        rig = Rig("d1")
        released = asyncio.Event()

        class Stuck:
            """An iterator whose closing hangs."""

            def __aiter__(self):
                return self

            async def __anext__(self):
                try:
                    await asyncio.Event().wait()
                finally:
                    await released.wait()

            async def aclose(self) -> None:
                await released.wait()

        rig.workers["d1"].decode = lambda request: Stuck()
        parts = rig.generate(PROMPT, MAX_TOKENS)
        reading = asyncio.ensure_future(anext(parts))
        await turn_over()
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reading
        rig.assert_nothing_held()
        released.set()
        await turn_over()
        await rig.roster.close()

    asyncio.run(scenario())


def test_many_sequences_at_once_over_workers_that_fail_at_random_all_get_their_answers() -> None:
    async def scenario() -> None:
        rng = random.Random(7)
        rig, stepper = Rig("p1 p2 p3 d1 d2 d3", max_attempts=8), Stepper()
        stepper.open_all()
        for name in rig.workers:
            rig.plan(name, *(stepper.plan(name, Fault(rng.randrange(4), rng.choice([None, None, lost()]))) for _ in range(20)))
        prompts = [[rng.randrange(97) for _ in range(rng.randrange(1, 30))] for _ in range(40)]

        async def ask(prompt: list[int]) -> list[int]:
            return [part.token async for part in rig.generate(prompt, MAX_TOKENS) if isinstance(part, TokenOut)]

        answers = await asyncio.gather(*(ask(prompt) for prompt in prompts))
        assert answers == [answer(prompt, MAX_TOKENS) for prompt in prompts]
        rooms = [request.room for name, worker in rig.workers.items() if name.startswith("d") for request in worker.calls]
        assert len(set(rooms)) == len(rooms)
        rig.assert_nothing_held()

    asyncio.run(scenario())
