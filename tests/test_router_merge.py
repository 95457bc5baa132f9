"""Merging the two streams of an attempt, by hand and over every interleaving that hypothesis finds."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdjax.protocol import Event, Failed, Finished, PromptToken, TokenOut, Tokens
from pdjax.router.merge import Broken, Ended, Merge, Side

P, D = Side.PREFILL, Side.DECODE
HANDED_OFF = Finished(reason="handed_off", cached_tokens=7)
LENGTH = Finished(reason="length", cached_tokens=2)
LOST = Failed(kind="internal", message="lost", retriable=True)
NO_TRANSFER = Failed(kind="transfer", message="no KV", retriable=True)


def token(index: int) -> Tokens:
    return Tokens([TokenOut(index, 100 + index)])


def play(merge: Merge, events: Iterable[tuple[Side, Event]]) -> list[int]:
    """Indices of the tokens given; checks that each carries the value of its index."""
    given_tokens = [out for side, event in events for out in merge.feed(side, event)]
    assert all(out.token == 100 + out.index for out in given_tokens)
    return [out.index for out in given_tokens]


def test_decode_tokens_wait_for_the_first_one() -> None:
    merge = Merge(0, max_tokens=4, has_prefill=True)
    assert play(merge, [(D, token(1)), (D, token(2))]) == []
    assert play(merge, [(P, token(0))]) == [0, 1, 2]
    assert play(merge, [(P, HANDED_OFF), (D, token(3))]) == [3]
    assert merge.outcome is None
    assert play(merge, [(D, LENGTH)]) == []
    assert merge.outcome == Ended(LENGTH)
    assert merge.cached_tokens == 7


def test_several_tokens_in_one_event_are_all_given() -> None:
    merge = Merge(0, max_tokens=4, has_prefill=False)
    assert play(merge, [(D, Tokens([TokenOut(i, 100 + i) for i in range(4)])), (D, LENGTH)]) == [0, 1, 2, 3]
    assert merge.outcome == Ended(LENGTH) and merge.cached_tokens == 2


def test_a_later_attempt_goes_on_where_the_client_is() -> None:
    merge = Merge(3, max_tokens=6, has_prefill=True)
    assert play(merge, [(P, token(3)), (D, token(4)), (D, token(4)), (D, token(5)), (D, LENGTH), (P, HANDED_OFF)]) == [3, 4, 5]
    assert merge.outcome == Ended(LENGTH)


def test_an_answer_that_is_complete_waits_for_prefills_count_of_cached_tokens() -> None:
    merge = Merge(0, max_tokens=2, has_prefill=True)
    play(merge, [(P, token(0)), (D, token(1)), (D, LENGTH)])
    assert merge.outcome is None and merge.is_settling
    merge.conclude()
    assert merge.outcome == Ended(LENGTH) and merge.cached_tokens == 2


@pytest.mark.parametrize(
    ("events", "side"),
    [
        ([(P, LOST)], P),
        ([(P, token(0)), (P, LOST)], P),
        ([(D, token(1)), (P, LOST)], P),
        ([(P, HANDED_OFF)], P),
        ([(P, token(1))], P),
        ([(P, token(0)), (D, LOST)], D),
        ([(D, LOST)], D),
        ([(P, token(0)), (P, HANDED_OFF), (D, token(2))], D),
        ([(P, token(0)), (P, HANDED_OFF), (D, LENGTH)], D),
        ([(P, token(0)), (D, token(1)), (D, HANDED_OFF)], D),
        ([(D, NO_TRANSFER), (P, HANDED_OFF)], P),
        ([(D, NO_TRANSFER), (P, token(0)), (P, HANDED_OFF)], D),
        ([(P, token(0)), (D, NO_TRANSFER)], D),
    ],
)
def test_an_attempt_breaks_on_the_side_that_is_at_fault(events: list[tuple[Side, Event]], side: Side) -> None:
    merge = Merge(0, max_tokens=9, has_prefill=True)
    play(merge, events)
    assert isinstance(merge.outcome, Broken) and merge.outcome.side is side
    assert play(merge, [(P, token(0)), (D, token(1))]) == [], "nothing is taken after the end"


def test_a_clean_end_without_a_single_token_is_a_failure() -> None:
    merge = Merge(0, max_tokens=9, has_prefill=False)
    play(merge, [(D, LENGTH)])
    assert isinstance(merge.outcome, Broken)


@pytest.mark.parametrize("events", [[(P, LOST)], [(P, LOST), (D, token(2))]])
def test_prefill_may_fail_once_decode_streams(events: list[tuple[Side, Event]]) -> None:
    merge = Merge(0, max_tokens=9, has_prefill=True)
    play(merge, [(P, token(0)), (D, token(1)), *events])
    assert merge.outcome is None


def test_tokens_beyond_the_budget_break_the_attempt() -> None:
    merge = Merge(0, max_tokens=2, has_prefill=False)
    assert play(merge, [(D, Tokens([TokenOut(i, 100 + i) for i in range(3)]))]) == [0, 1]
    assert isinstance(merge.outcome, Broken) and "max_tokens is 2" in merge.outcome.failed.message


def prompt(*positions: int) -> Tokens:
    return Tokens([], [PromptToken(position, 200 + position, -1.0) for position in positions])


def scored(merge: Merge) -> list[int]:
    return [token.position for token in merge.take_prompt()]


def test_the_prompt_comes_once_in_order_before_the_first_token() -> None:
    merge = Merge(0, max_tokens=2, has_prefill=True, prompt=range(1, 6))
    assert play(merge, [(D, token(1)), (P, prompt(1, 2))]) == []
    assert scored(merge) == [1, 2]
    assert play(merge, [(P, prompt(2, 3)), (P, prompt(4, 5))]) == []
    assert scored(merge) == [3, 4, 5] and scored(merge) == []
    assert play(merge, [(P, token(0)), (P, HANDED_OFF), (D, LENGTH)]) == [0, 1]
    assert merge.outcome == Ended(LENGTH)


def test_a_later_attempt_leaves_out_what_an_earlier_one_told_of_the_prompt() -> None:
    merge = Merge(0, max_tokens=1, has_prefill=False, prompt=range(3, 6))
    assert play(merge, [(D, prompt(1, 2, 3)), (D, prompt(4, 5)), (D, token(0))]) == [0]
    assert scored(merge) == [3, 4, 5]


def test_a_prompt_that_nobody_waits_for_is_dropped() -> None:
    merge = Merge(0, max_tokens=1, has_prefill=False)
    assert play(merge, [(D, prompt(1, 2)), (D, token(0)), (D, LENGTH)]) == [0]
    assert scored(merge) == [] and merge.outcome == Ended(LENGTH)


@pytest.mark.parametrize("events", [[prompt(1), prompt(3)], [prompt(2)], [prompt(1, 2), token(0)], [token(0)]])
def test_a_gap_in_the_prompt_breaks_the_attempt(events: list[Event]) -> None:
    merge = Merge(0, max_tokens=2, has_prefill=True, prompt=range(1, 4))
    assert play(merge, [(P, event) for event in events]) == []
    assert isinstance(merge.outcome, Broken) and merge.outcome.side is P and "due" in merge.outcome.failed.message


@st.composite
def interleavings(draw: st.DrawFn) -> tuple[int, int, list[tuple[Side, Event]], bool]:
    """num_prior, end, events of both sides in any order, and whether a side was cut short. Events may come twice."""
    prior, length = draw(st.integers(0, 3)), draw(st.integers(2, 6))
    prefill = [token(prior), HANDED_OFF]
    decode = [token(index) for index in range(prior + 1, prior + length)] + [LENGTH]
    cut = {P: draw(st.integers(0, 3)), D: draw(st.integers(0, length + 1))}
    sides = {}
    is_cut = False
    for side, events in ((P, prefill), (D, decode)):
        doubled = [event for event in events for _ in range(1 + (isinstance(event, Tokens) and draw(st.booleans())))]
        if cut[side] < len(doubled):
            doubled, is_cut = [*doubled[: cut[side]], LOST], True
        sides[side] = doubled
    order = draw(st.permutations([P] * len(sides[P]) + [D] * len(sides[D])))
    return prior, prior + length, [(side, sides[side].pop(0)) for side in order], is_cut


@given(interleavings())
def test_whatever_the_order_tokens_come_once_in_order_and_only_a_whole_answer_ends(case: tuple) -> None:
    prior, end, events, is_cut = case
    merge = Merge(prior, max_tokens=end, has_prefill=True)
    indices = play(merge, events)
    assert indices == list(range(prior, prior + len(indices)))
    assert merge.outcome is not None or merge.is_settling
    if isinstance(merge.outcome, Ended) or merge.is_settling:
        assert indices == list(range(prior, end))
    if not is_cut:
        assert merge.outcome == Ended(LENGTH) and merge.cached_tokens == 7
