"""The one owner of a fixed set of numbered slots: request slots, metadata slots."""

from __future__ import annotations

import heapq


class SlotPool:
    """Gives out slots 0 .. total - 1, the lowest free one first, so that a run with the same events uses the same slots."""

    def __init__(self, total: int, name: str):
        """`name` says in messages what the slots are. Raises ValueError where there would be none."""
        if total < 1:
            raise ValueError(f"{name}: at least 1 slot is needed, got {total}")
        self.total = total
        self.name = name
        self._free = list(range(total))  # a heap
        self._is_held = bytearray(total)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        return self.total - len(self._free)

    def is_held(self, slot: int) -> bool:
        return 0 <= slot < self.total and bool(self._is_held[slot])

    def allocate(self) -> int | None:
        """Take a slot, which the caller then owns; None where none is free."""
        if not self._free:
            return None
        slot = heapq.heappop(self._free)
        self._is_held[slot] = 1
        return slot

    def free(self, slot: int) -> None:
        """Take back a slot that the caller owns. A slot that is not held, or not of this pool, is a broken invariant."""
        assert 0 <= slot < self.total, f"{self.name} slot {slot} is not one of 0..{self.total - 1}"
        assert self._is_held[slot], f"{self.name} slot {slot} is freed but not held"
        self._is_held[slot] = 0
        heapq.heappush(self._free, slot)
