"""What leaves a prefill worker, and what is kept ready to leave.

A gather can only be dispatched in program order: behind the steps that are in flight when it is asked for. A sequence whose bootstrap is
pending therefore has its pages gathered when anybody else's would be, around the step that computes them, and the chunks are held
here. When bootstrap ends they leave at once, not behind the forwards of others.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple, Protocol


class Target(Protocol):
    """Where a gathered chunk goes: a sender, or `Held`."""

    def send(self, first_page: int, num_pages: int, kv: object) -> None: ...


class SendOrder(NamedTuple):
    """Gather `pages` of the pool now and hand them to `sender` as the prompt's pages from `first_page` on."""

    sender: Target
    first_page: int
    pages: list[int]


class HeldChunk(NamedTuple):
    first_page: int
    num_pages: int
    kv: object

    @property
    def end_page(self) -> int:
        return self.first_page + self.num_pages


class HoldingPlace:
    """Bounds what all sequences of a worker hold together: each page here is a copy beside the pool."""

    def __init__(self, max_pages: int):
        self._max_pages = max_pages
        self.num_pages = 0

    def take(self, num_pages: int) -> bool:
        if self.num_pages + num_pages > self._max_pages:
            return False
        self.num_pages += num_pages
        return True

    def give_back(self, num_pages: int) -> None:
        self.num_pages -= num_pages
        assert self.num_pages >= 0, f"{self.num_pages} pages held"


class Held:
    """The gathered chunks of one sequence, from its first page on. `next_page`: the first page that has not been asked for."""

    def __init__(self, place: HoldingPlace):
        self._place = place
        self._chunks: deque[HeldChunk] = deque()
        self.next_page = 0

    def send(self, first_page: int, num_pages: int, kv: object) -> None:
        self._chunks.append(HeldChunk(first_page, num_pages, kv))

    def ask(self, num_pages: int) -> bool:
        """Make room for the next `num_pages`, which the caller gathers at once; False where the place is full."""
        if not self._place.take(num_pages):
            return False
        self.next_page += num_pages
        return True

    def pop(self, next_page: int) -> HeldChunk | None:
        """The chunk that starts at `next_page`. What decode has already is let go; so is everything where no chunk starts there."""
        while self._chunks and self._chunks[0].end_page <= next_page:
            self._place.give_back(self._chunks.popleft().num_pages)
        if not self._chunks or self._chunks[0].first_page != next_page:
            self.drop()
            return None
        chunk = self._chunks.popleft()
        self._place.give_back(chunk.num_pages)
        return chunk

    def drop(self) -> None:
        """Let go of everything. Idempotent."""
        self._place.give_back(sum(chunk.num_pages for chunk in self._chunks))
        self._chunks.clear()
