"""What a router remembers of its last requests: when each passed through it, and the stages that the workers told with their last words.

Written and read in the router's event loop. All times are seconds since the epoch. `pdjax.observe.timeline_view` makes a picture of it.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from pdjax.protocol import Failed, Finished

Clock = Callable[[], float]

CAPACITY = 256
"""Sequences that are remembered: a few kilobytes each, 60 at the very most for each attempt."""


class Arrival(NamedTuple):
    """When the HTTP surface received a request, and when it had read and tokenized it."""

    received_s: float
    tokenized_s: float


@dataclass(slots=True)
class AttemptRecord:
    """One attempt. `workers`: side ("prefill", "decode") to address. `ended`: each side's last event, filled by its owner as they come."""

    room: int
    workers: dict[str, str]
    dispatched_s: float
    ended: Mapping[str, Finished | Failed]


@dataclass(slots=True)
class SequenceRecord:
    """One sequence. `token_times_s`: when the first two tokens were given out. `outcome` None while it goes on."""

    sequence_id: str
    clock: Clock
    began_s: float
    attempts: list[AttemptRecord] = field(default_factory=list)
    token_times_s: list[float] = field(default_factory=list)
    ended_s: float | None = None
    outcome: str | None = None

    @property
    def request_id(self) -> str:
        """Sequence ids are those of their request and a number; others are requests of their own."""
        return self.sequence_id.rpartition("-")[0] or self.sequence_id

    def dispatched(self, room: int, workers: dict[str, str], ended: Mapping[str, Finished | Failed]) -> None:
        """An attempt begins."""
        self.attempts.append(AttemptRecord(room, workers, self.clock(), ended))

    def gave_token(self) -> None:
        """Call for the first two tokens only: they end what is called TTFT and hand-off."""
        self.token_times_s.append(self.clock())

    def end(self, outcome: str) -> None:
        self.ended_s, self.outcome = self.clock(), outcome


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A request with its sequences that are still remembered, in the order in which they began; at least one."""

    request_id: str
    arrival: Arrival | None
    sequences: list[SequenceRecord]


class RequestTimelines:
    """Remembers the last `capacity` sequences, those under way included."""

    def __init__(self, clock: Clock = time.time, capacity: int = CAPACITY):
        self._clock = clock
        self._capacity = capacity
        self._arrivals: OrderedDict[str, Arrival] = OrderedDict()
        self._sequences: deque[SequenceRecord] = deque(maxlen=capacity)

    def arrived(self, request_id: str, seconds_ago: float) -> None:
        """A request that was received `seconds_ago` has been tokenized now."""
        now_s = self._clock()
        self._arrivals[request_id] = Arrival(now_s - seconds_ago, now_s)
        if len(self._arrivals) > self._capacity:
            self._arrivals.popitem(last=False)

    def begin(self, sequence_id: str) -> SequenceRecord:
        """A sequence has been taken; whoever called writes the rest into the record."""
        record = SequenceRecord(sequence_id, self._clock, self._clock())
        self._sequences.append(record)
        return record

    def find(self, request_id: str) -> RequestRecord | None:
        """None where no sequence of the request is remembered."""
        sequences = [each for each in self._sequences if each.request_id == request_id]
        return RequestRecord(request_id, self._arrivals.get(request_id), sequences) if sequences else None
