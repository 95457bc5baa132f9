"""What stands in a batch job's input, and in which order it is worked on."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdjax.jobs.order import BLOCK_CHARS, Agenda, at_random, by_prefix, shared_chars
from pdjax.jobs.rows import CHAT, COMPLETIONS, BadRow, Input, Row, parse, prefix_key


def parsed(*lines: Any, defaults: dict[str, Any] | None = None) -> Input:
    """`lines`: bytes as they are, anything else as JSON."""
    encoded = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    return parse(enumerate(encoded, 1), defaults or {}, "print")


def batch_line(custom_id: Any = "a", **changes: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": COMPLETIONS, "body": {"model": "m", "prompt": "Hi"}, **changes}


def row(line: int, key: str) -> Row:
    return Row(line, f"line-{line}", COMPLETIONS, b"{}", False, key)


def test_the_body_of_a_batch_line_stays_as_it_was_written() -> None:
    line = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model":"m",  "prompt": "\\u0048i", "seed": 1.0}}'
    [only] = parsed(line).rows
    assert only == Row(1, "a", COMPLETIONS, b'{"model":"m",  "prompt": "\\u0048i", "seed": 1.0}', False, "pHi")
    assert only.body_for("other") == only.body


def test_plain_prompts_get_the_defaults_and_the_served_model() -> None:
    source = parsed(
        "Hi",
        {"prompt": [1, 2], "max_tokens": 3},
        {"messages": [{"role": "user", "content": "Hi"}], "custom_id": "chat", "model": "mine"},
        defaults={"max_tokens": 9, "seed": 1},
    )
    assert not source.bad_rows
    assert [(each.custom_id, each.url) for each in source.rows] == [("line-1", COMPLETIONS), ("line-2", COMPLETIONS), ("chat", CHAT)]
    bodies = [json.loads(each.body_for("served")) for each in source.rows]
    assert bodies[0] == {"model": "served", "prompt": "Hi", "max_tokens": 9, "seed": 1}
    assert bodies[1] == {"model": "served", "prompt": [1, 2], "max_tokens": 3, "seed": 1}
    assert bodies[2] == {"model": "mine", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9, "seed": 1}


@pytest.mark.parametrize(
    ("line", "custom_id", "code", "part"),
    [
        (b'{"prompt": "half', None, "invalid_row", "not valid JSON"),
        (b'"\xff"', None, "invalid_row", "not valid JSON"),
        (b"[" * 100_000, None, "invalid_row", "nested too deeply"),
        (b"7", None, "invalid_row", "a row is a text or an object, got int"),
        ({"custom_id": "x", "text": "Hi"}, "x", "invalid_row", "either prompt or messages"),
        ({"prompt": "a", "messages": []}, None, "invalid_row", "either prompt or messages"),
        ({"prompt": "a", "custom_id": 7}, None, "invalid_row", "custom_id must be a text of 1 to 512 characters"),
        ({"prompt": "a", "custom_id": ""}, "", "invalid_row", "custom_id must be a text of 1 to 512 characters"),
        ({"prompt": "a", "stream": True}, None, "unsupported_value", "no streams"),
        (batch_line(body={"model": "m", "prompt": "a", "stream": True}), "a", "unsupported_value", "no streams"),
        (batch_line(method="GET"), "a", "invalid_method", "method must be POST, got 'GET'"),
        (batch_line(url="/v1/embeddings"), "a", "invalid_url", "got '/v1/embeddings'"),
        (batch_line(custom_id=5), None, "invalid_row", "$.custom_id"),
        (batch_line(extra=1), "a", "invalid_row", "`extra`"),
        ({"custom_id": "a", "body": {}}, "a", "invalid_row", "`method`"),
    ],
)
def test_a_malformed_line_is_a_bad_row_that_says_why(line: Any, custom_id: str | None, code: str, part: str) -> None:
    source = parsed("before", line, "behind")
    assert [good.line for good in source.rows] == [1, 3]
    [bad] = source.bad_rows
    assert (bad.line, bad.custom_id, bad.code) == (2, custom_id, code)
    assert bad.message.startswith("line 2: ") and part in bad.message


def test_of_several_rows_with_one_custom_id_the_first_is_good() -> None:
    source = parsed(batch_line("a"), batch_line("b"), batch_line("a"), {"prompt": "x", "custom_id": "b"})
    assert [good.line for good in source.rows] == [1, 2]
    assert source.bad_rows[0] == BadRow(3, "a", "duplicate_custom_id", "custom_id 'a' is that of line 1 already")
    assert (source.bad_rows[1].line, source.bad_rows[1].code) == (4, "duplicate_custom_id")


def test_prompts_of_different_kinds_never_share_a_beginning() -> None:
    bodies = [{"prompt": "[{"}, {"messages": [{"role": "user"}]}, {"prompt": [91, 123]}, {"prompt": ["[{", "x"]}]
    assert [prefix_key(body) for body in bodies] == ["p[{", 'c[{"role":"user"}]', "i[{", "p[{"]
    assert [prefix_key(body) for body in (None, {}, {"prompt": 3}, {"prompt": []})] == ["", "", "", "i"]


def test_rows_wait_for_the_first_that_shares_their_beginning() -> None:
    system, long = "s" * BLOCK_CHARS, "d" * BLOCK_CHARS
    rows = [row(1, system + "b"), row(2, "alone"), row(3, system + long + "x"), row(4, system + long + "y"), row(5, system + "a")]
    placed = by_prefix(rows)
    # By prompt: 2 "alone", 5 system+a, 1 system+b, 3 and 4 with the longer beginning.
    assert [each.row.line for each in placed] == [2, 5, 1, 3, 4]
    assert [each.leader for each in placed] == [None, None, 1, 1, 3]
    assert [each.shared_chars for each in placed] == [0, 0, BLOCK_CHARS, BLOCK_CHARS, 2 * BLOCK_CHARS]


def test_a_beginning_shorter_than_a_block_is_not_waited_for() -> None:
    placed = by_prefix([row(1, "x" * (BLOCK_CHARS - 1) + "a"), row(2, "x" * (BLOCK_CHARS - 1) + "b")])
    assert [each.leader for each in placed] == [None, None]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text("ab", max_size=5), max_size=12))
def test_a_leader_is_the_first_of_all_rows_that_share_as_much(blocks: list[str]) -> None:
    keys = ["".join(char * BLOCK_CHARS for char in text) for text in blocks]
    placed = by_prefix([row(line, key) for line, key in enumerate(keys)])
    for place, each in enumerate(placed):
        before = [shared_chars(placed[other].row.key, each.row.key) for other in range(place)]
        longest = max(before, default=0)
        assert each.shared_chars == longest
        assert each.leader == (before.index(longest) if longest else None)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text("ab", max_size=4), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_an_agenda_gives_every_row_once_and_never_before_its_leader(blocks: list[str], chance: random.Random) -> None:
    order = by_prefix([row(line, "".join(char * BLOCK_CHARS for char in text)) for line, text in enumerate(blocks)])
    agenda = Agenda(order)
    open_places: list[int] = []
    released: set[int] = set()
    taken: list[int] = []
    while True:
        next_row = agenda.take() if chance.random() < 0.7 or not open_places else None
        if next_row is not None:
            place, _ = next_row
            assert order[place].leader is None or order[place].leader in released
            taken.append(place)
            open_places.append(place)
        elif open_places:
            place = open_places.pop(chance.randrange(len(open_places)))
            for _ in range(2):  # the second time changes nothing
                agenda.release(place)
            released.add(place)
        else:
            break
    assert sorted(taken) == list(range(len(order)))
    assert agenda.is_empty


def test_a_random_order_waits_for_nobody_and_is_the_same_every_time() -> None:
    rows = [row(line, "same" * 100) for line in range(20)]
    first, second = at_random(rows, "seed"), at_random(rows, "seed")
    assert first == second != by_prefix(rows)
    assert {each.row.line for each in first} == set(range(20))
    assert all(each.leader is None for each in first)
    assert any(before.row.line > behind.row.line for before, behind in itertools.pairwise(first))
