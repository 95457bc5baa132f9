"""Points in time that concern what a scheduler holds, soonest first."""

from __future__ import annotations

import heapq
import itertools


class Deadlines:
    """A heap of times from which ended requests drop out lazily: a pass costs O(log n) for each one that is due. Equal times keep the order
    in which they came."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, str]] = []
        self._numbers = itertools.count()
        self._deadline: dict[str, float] = {}

    def add(self, request_id: str, deadline_s: float) -> None:
        self._deadline[request_id] = deadline_s
        heapq.heappush(self._heap, (deadline_s, next(self._numbers), request_id))

    def remove(self, request_id: str) -> None:
        self._deadline.pop(request_id, None)

    def pop_due(self, now_s: float) -> list[str]:
        """Request ids whose deadline has passed; each is given once."""
        due = []
        while self._heap and self._heap[0][0] <= now_s:
            deadline_s, _, request_id = heapq.heappop(self._heap)
            if self._deadline.get(request_id) == deadline_s:
                del self._deadline[request_id]
                due.append(request_id)
        return due

    def next_s(self) -> float | None:
        """When the next deadline falls; None where nothing is waited for."""
        while self._heap and self._deadline.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None
