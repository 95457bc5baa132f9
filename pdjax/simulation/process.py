"""Virtual time, and processes that live in it: they can be stopped, go on, and be killed."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any

Action = Callable[..., Any]


class Timeline:
    """Everything that will happen, soonest first; at the same tick in the order in which it was planned. Time is counted in ticks."""

    def __init__(self) -> None:
        self.now = 0
        self.num_events = 0
        self._planned: list[tuple[int, int, Action, tuple]] = []
        self._order = 0

    def at(self, delay: int, action: Action, *args: Any) -> None:
        """Call `action(*args)` in `delay` ticks."""
        self._order += 1
        heapq.heappush(self._planned, (self.now + delay, self._order, action, args))

    def step(self) -> bool:
        """Let the next thing happen; False where nothing is planned."""
        if not self._planned:
            return False
        self.now, _, action, args = heapq.heappop(self._planned)
        self.num_events += 1
        action(*args)
        return True

    def clock(self) -> float:
        return self.now


class Chance:
    """Seeded choices, the cheap ones that a running simulation makes all the time."""

    def __init__(self, seed: int | str):
        self._rng = random.Random(seed)
        self._draw = self._rng.random

    def upto(self, most: int) -> int:
        """0 .. most."""
        return int(self._draw() * (most + 1))

    def hits(self, probability: float) -> bool:
        return probability > 0 and self._draw() < probability


class Process:
    """What is posted to a stopped process happens when it goes on, in order; what is posted to a dead one never happens."""

    def __init__(self, timeline: Timeline):
        self.timeline = timeline
        self.is_dead = False
        self.is_stopped = False
        self._backlog: list[tuple[Action, tuple]] = []

    def post(self, delay: int, action: Action, *args: Any) -> None:
        self.timeline.at(delay, self.run, action, *args)

    def run(self, action: Action, *args: Any) -> None:
        """Now, if the process runs."""
        if self.is_dead:
            return
        if self.is_stopped:
            self._backlog.append((action, args))
        else:
            action(*args)

    def stop(self) -> None:
        self.is_stopped = True

    def resume(self) -> None:
        self.is_stopped = False
        backlog, self._backlog = self._backlog, []
        for action, args in backlog:
            self.run(action, *args)

    def kill(self) -> None:
        self.is_dead = True
        self._backlog.clear()
