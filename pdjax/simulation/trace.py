"""What a traced seed tells: one line an event."""

from __future__ import annotations

import abc

from pdjax.simulation.process import Timeline


class Trace(abc.ABC):
    @abc.abstractmethod
    def note(self, who: str, message: str, *values: object) -> None:
        """`message` is a format for `values`, as in logging."""


class NoTrace(Trace):
    def note(self, who: str, message: str, *values: object) -> None:
        pass


class PrintedTrace(Trace):
    def __init__(self, timeline: Timeline):
        self._timeline = timeline

    def note(self, who: str, message: str, *values: object) -> None:
        print(f"{self._timeline.now:6d}  {who:<10} {message % values}")
