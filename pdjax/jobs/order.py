"""In which order rows are worked on, so that a prefix that several of them share is computed once.

Sorted by prompt, rows that share a beginning stand side by side. Of the rows that share one, the first computes it; the others wait until
it has, and then find it in the prefix cache, before it makes room for anything else. Rows that share nothing wait for nobody.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from typing import NamedTuple

from pdjax.jobs.rows import Row

BLOCK_CHARS = 64
"""Shared beginnings are counted in blocks. About a page of tokens; less is computed again sooner than waited for."""


class Placed(NamedTuple):
    """A row in the order. `leader`: place of the row that computes the beginning that this one shares, None where it shares none;
    `shared_chars`: how much of `row.key` that is, rounded down to blocks."""

    row: Row
    leader: int | None
    shared_chars: int


def by_prefix(rows: Sequence[Row]) -> list[Placed]:
    """Every row right after those that it shares most with. A leader always stands before its followers."""
    ordered = sorted(rows, key=lambda row: (row.key, row.line))
    placed: list[Placed] = []
    # Beginnings that the last row has in common with rows before it, each with the first row that has it: (characters, place), both rising
    # in opposite directions, the longest beginning on top.
    open_prefixes: list[tuple[int, int]] = []
    for place, row in enumerate(ordered):
        shared = shared_chars(ordered[place - 1].key, row.key) if place else 0
        leader = place - 1
        while open_prefixes and open_prefixes[-1][0] >= shared:
            leader = open_prefixes.pop()[1]
        if shared:
            open_prefixes.append((shared, leader))
        placed.append(Placed(row, leader if shared else None, shared))
    return placed


def at_random(rows: Sequence[Row], seed: str) -> list[Placed]:
    """Nobody waits for anybody. The same order for the same seed."""
    shuffled = list(rows)
    random.Random(seed).shuffle(shuffled)
    return [Placed(row, None, 0) for row in shuffled]


def shared_chars(first: str, second: str) -> int:
    """Length of the common beginning, in whole blocks."""
    end = 0
    while end + BLOCK_CHARS <= min(len(first), len(second)) and first[end : end + BLOCK_CHARS] == second[end : end + BLOCK_CHARS]:
        end += BLOCK_CHARS
    return end


class Agenda:
    """The rows that are still to be started. Of those that wait for nobody, the first in the order comes next."""

    def __init__(self, order: Sequence[Placed]):
        self._order = order
        self._ready = [place for place, placed in enumerate(order) if placed.leader is None]  # a heap: it is sorted
        self._followers: dict[int, list[int]] = {}
        for place, placed in enumerate(order):
            if placed.leader is not None:
                self._followers.setdefault(placed.leader, []).append(place)

    @property
    def is_empty(self) -> bool:
        return not self._ready and not self._followers

    def take(self) -> tuple[int, Row] | None:
        """The next row with its place; None while every row that is left waits for another."""
        if not self._ready:
            return None
        place = heapq.heappop(self._ready)
        return place, self._order[place].row

    def release(self, place: int) -> None:
        """The prompt at `place` has been computed, or will never be: nobody waits for it any more. Idempotent."""
        for follower in self._followers.pop(place, ()):
            heapq.heappush(self._ready, follower)
