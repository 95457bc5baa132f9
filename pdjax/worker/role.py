"""What the engine loop drives: a scheduler and an engine, coupled the way the worker's role demands."""

from __future__ import annotations

import abc

from pdjax.protocol import SequenceRequest, WorkerLoad
from pdjax.scheduler.outcomes import Outcome

MAX_STEPS_IN_FLIGHT = 2
"""One step runs, the next waits on the device behind it: that hides all host work, and more would only delay new arrivals."""


class Role(abc.ABC):
    """Called by the engine loop only. No method blocks on the device or on a peer."""

    @abc.abstractmethod
    def submit(self, request: SequenceRequest) -> None:
        """Take in a request; a refusal is an outcome."""

    @abc.abstractmethod
    def abort(self, request_id: str) -> None:
        """End a request wherever it is; no effect on one that has ended."""

    @abc.abstractmethod
    def turn(self, now_s: float) -> None:
        """Settle what has finished, take note of what has happened, launch what can be launched. Raises what the device raised."""

    @abc.abstractmethod
    def take_outcomes(self) -> list[Outcome]:
        """Events for the requests' streams."""

    @abc.abstractmethod
    def next_deadline_s(self) -> float | None:
        """When `turn` has to be called even if nothing happens."""

    @abc.abstractmethod
    def load(self) -> WorkerLoad:
        """How busy the worker is. Any thread may call this; the numbers may be a turn old."""

    @abc.abstractmethod
    def check(self) -> None:
        """Assert that pages and slots have the owners they should have."""

    @abc.abstractmethod
    def close(self) -> None:
        """Stop the threads that belong to the role."""
