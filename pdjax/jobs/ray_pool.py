"""Which engine of a cluster answers which row. Pure asyncio: knows nothing of Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import msgspec

from pdjax.jobs.backend import Unreachable
from pdjax.jobs.order import BLOCK_CHARS
from pdjax.jobs.rows import prefix_key
from pdjax.router.affinity import PrefixMemory, block_keys

MAX_REMEMBERED_BLOCKS = 1 << 17
"""Beginnings of prompts that are remembered over all engines, in blocks of characters: about 20 MB."""

_Handle = TypeVar("_Handle")


@dataclass(slots=True, eq=False)
class Seat(Generic[_Handle]):
    """One engine that takes rows. `outstanding_chars`: of prompts that it has been given to compute and has not answered."""

    handle: _Handle
    node: str
    name: str
    num_rows: int = 0
    outstanding_chars: int = 0


class Prompt(NamedTuple):
    """What placing goes by: one key for each whole block of characters, and how many characters there are."""

    keys: list[int]
    num_chars: int


def prompt_of(body: bytes) -> Prompt:
    """`body`: the JSON of a request."""
    key = prefix_key(msgspec.json.decode(body))
    return Prompt(block_keys([ord(char) for char in key], BLOCK_CHARS), len(key))


class Pool(Generic[_Handle]):
    """The engines that are ready. `max_rows`: what one of them is given at a time. For one event loop.

    Rows go to the engine with the fewest characters still to compute ahead, what it has computed before left out: so rows of one
    document stay together, until another engine has nothing to do.
    """

    def __init__(self, max_rows: int, is_hopeful: Callable[[], bool]):
        """`is_hopeful`: whether an engine is being started, so that waiting for one makes sense."""
        self.seats: list[Seat[_Handle]] = []
        self._max_rows = max_rows
        self._is_hopeful = is_hopeful
        self._memory = PrefixMemory(MAX_REMEMBERED_BLOCKS)
        self._changed = asyncio.Condition()

    async def add(self, seat: Seat[_Handle]) -> None:
        self.seats.append(seat)
        await self.tell()

    async def remove(self, seat: Seat[_Handle]) -> bool:
        """It takes no more rows. False where it was removed before."""
        if seat not in self.seats:
            return False
        self.seats.remove(seat)
        await self.tell()
        return True

    async def tell(self) -> None:
        """Whether there are engines, or hope for some, may have changed."""
        async with self._changed:
            self._changed.notify_all()

    async def take(self, prompt: Prompt) -> tuple[Seat[_Handle], int]:
        """The best engine with a free place, waiting for one; and what to give back. Raises Unreachable where there will be none."""
        async with self._changed:
            while not (free := [seat for seat in self.seats if seat.num_rows < self._max_rows]):
                if not self.seats and not self._is_hopeful():
                    raise Unreachable("no node of the cluster runs an engine")
                await self._changed.wait()
        costs = {seat.name: self._cost(seat, prompt) for seat in free}
        best = min(free, key=lambda seat: (seat.outstanding_chars + costs[seat.name], seat.num_rows))
        best.num_rows += 1
        best.outstanding_chars += costs[best.name]
        return best, costs[best.name]

    async def give_back(self, seat: Seat[_Handle], cost: int) -> None:
        """The row that was given to `seat` at `cost` has ended."""
        seat.num_rows -= 1
        seat.outstanding_chars -= cost
        async with self._changed:
            self._changed.notify()

    def computed(self, seat: Seat[_Handle], prompt: Prompt) -> None:
        """`seat` has the prompt in its prefix cache: prompts that begin alike had better go there too."""
        self._memory.remember(seat.name, prompt.keys)

    def _cost(self, seat: Seat[_Handle], prompt: Prompt) -> int:
        return max(prompt.num_chars - self._memory.num_known(seat.name, prompt.keys) * BLOCK_CHARS, 1)
