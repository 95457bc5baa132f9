"""What each request went through on this worker, and when: recorded by the schedulers, told with the request's last event.

At any moment a request is in one stage (`mark` ends it and begins the next), so its stages follow each other without gaps and their sum
is the time that it spent here. Beside them lie spans that overlap: bootstrap, chunks, the transfer. All this costs a few appends a request
and nothing a token.

Prefill: bootstrap_queue, waiting, forward, parked, delivering. Decode: prealloc, transfer or (local) forward, decode_queue, first_step,
decode, retracted. `docs/observability.md` says what each means.
"""

from __future__ import annotations

import abc
from collections import Counter
from collections.abc import Callable

from pdjax.protocol import Stage

Clock = Callable[[], float]
"""Seconds since the epoch. May jump: a recorder never goes back."""

INSTANTS = ("sends", "receives", "retries")
"""Tracks of what happens in no time."""

MAX_STAGES, MAX_SPANS = 96, 128
"""Of one request on one worker. Enough for a long prompt in small chunks; retries and retractions without end must not fill memory."""


class Timeline:
    """One request. Times are arguments; one that lies before the last counts as the last, so no duration is negative."""

    __slots__ = ("_chunk_end_s", "_last_s", "_open", "_since_s", "_spans", "_stage", "_stages")

    def __init__(self, stage: str, now_s: float):
        self._stage = stage
        self._since_s = self._last_s = self._chunk_end_s = now_s
        self._stages: list[Stage] = []
        self._spans: list[Stage] = []
        self._open: dict[str, float] = {}

    def mark(self, stage: str, now_s: float) -> None:
        """The stage so far ends and `stage` begins. Beyond `MAX_STAGES` the last stage goes on instead."""
        now_s = self._advance(now_s)
        if len(self._stages) < MAX_STAGES:
            self._stages.append(Stage(self._stage, self._since_s, now_s))
            self._stage, self._since_s = stage, now_s

    def open(self, track: str, now_s: float) -> None:
        """A span named like its track begins beside the stages; one that is open already goes on."""
        self._open.setdefault(track, self._advance(now_s))

    def close(self, track: str, now_s: float) -> None:
        """The span ends; no effect where none is open."""
        now_s = self._advance(now_s)
        start_s = self._open.pop(track, None)
        if start_s is not None:
            self._add(Stage(track, start_s, now_s, track))

    def note(self, name: str, track: str, count: int, now_s: float) -> None:
        """Something happened beside the stages, in no time."""
        now_s = self._advance(now_s)
        self._add(Stage(name, now_s, now_s, track, count))

    def chunk(self, launched_s: float, num_tokens: int, now_s: float) -> None:
        """The result of a chunk is here. The device took up the chunk when it was launched, or after the request's chunk before it."""
        now_s = self._advance(now_s)
        start_s = min(max(launched_s, self._chunk_end_s), now_s)
        self._chunk_end_s = now_s
        self._add(Stage("chunk", start_s, now_s, "chunks", num_tokens))

    def end(self, now_s: float) -> list[Stage]:
        """Everything, with what was still under way ending now. The timeline is used up."""
        now_s = self._advance(now_s)
        for track in list(self._open):
            self.close(track, now_s)
        return [*self._stages, Stage(self._stage, self._since_s, now_s), *self._spans]

    def _advance(self, now_s: float) -> float:
        self._last_s = max(self._last_s, now_s)
        return self._last_s

    def _add(self, span: Stage) -> None:
        """Beyond `MAX_SPANS` a span is merged into the last of its kind; there are few kinds."""
        if len(self._spans) >= MAX_SPANS:
            for i in range(len(self._spans) - 1, -1, -1):
                last = self._spans[i]
                if last.name == span.name:
                    self._spans[i] = Stage(last.name, last.start_s, span.end_s, last.track, last.count + span.count)
                    return
        self._spans.append(span)


class Totals:
    """Sums over all requests that ended well. Written by the engine loop, read from any thread.

    `seconds` and `ends` by stage or span. `counts` by name: pages sent or received, tokens of chunks, retries. `speed_pages_per_s`: of the
    last transfer, pages handed over from the launch of the last chunk on, over the time from the first token to the end of the
    transfer. Pages that left earlier, under the computation, do not count: they would make any link look fast.
    """

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.speed_pages_per_s = 0.0

    def add(self, stages: list[Stage]) -> None:
        late_pages, delivering_s = 0, 0.0
        for stage in stages:
            self.counts[stage.name] += stage.count
            if stage.track not in INSTANTS:
                self.seconds[stage.name] += stage.end_s - stage.start_s
                self.ends[stage.name] += 1
            late_pages += stage.count if stage.name == "last_send" else 0
            delivering_s += stage.end_s - stage.start_s if stage.name == "delivering" else 0.0
        if late_pages and delivering_s:
            self.speed_pages_per_s = late_pages / delivering_s


class Recorder(abc.ABC):
    """The timelines of one worker's requests, by request id. For the engine loop only. Requests that are not known are left alone."""

    totals: Totals

    @abc.abstractmethod
    def now_s(self) -> float:
        """The recorder's clock, for a launch whose result comes later."""

    @abc.abstractmethod
    def begin(self, request_id: str, stage: str) -> None:
        """The request has come; `stage` is its first."""

    @abc.abstractmethod
    def mark(self, request_id: str, stage: str) -> None:
        """See `Timeline.mark`."""

    @abc.abstractmethod
    def open(self, request_id: str, track: str) -> None:
        """See `Timeline.open`."""

    @abc.abstractmethod
    def close(self, request_id: str, track: str) -> None:
        """See `Timeline.close`."""

    @abc.abstractmethod
    def note(self, request_id: str, name: str, track: str, count: int) -> None:
        """See `Timeline.note`."""

    @abc.abstractmethod
    def chunk(self, request_id: str, launched_s: float, num_tokens: int) -> None:
        """See `Timeline.chunk`."""

    @abc.abstractmethod
    def finished(self, request_id: str) -> list[Stage]:
        """The request ended well: its stages, which also count in `totals`."""

    @abc.abstractmethod
    def failed(self, request_id: str) -> list[Stage]:
        """The request ended badly: its stages."""


class ClockRecorder(Recorder):
    """Records by `clock`: the worker's wall clock, or a virtual one."""

    def __init__(self, clock: Clock):
        self.totals = Totals()
        self._clock = clock
        self._timelines: dict[str, Timeline] = {}

    def __len__(self) -> int:
        """Requests that have begun and not ended."""
        return len(self._timelines)

    def now_s(self) -> float:
        return self._clock()

    def begin(self, request_id: str, stage: str) -> None:
        self._timelines[request_id] = Timeline(stage, self._clock())

    def mark(self, request_id: str, stage: str) -> None:
        if timeline := self._timelines.get(request_id):
            timeline.mark(stage, self._clock())

    def open(self, request_id: str, track: str) -> None:
        if timeline := self._timelines.get(request_id):
            timeline.open(track, self._clock())

    def close(self, request_id: str, track: str) -> None:
        if timeline := self._timelines.get(request_id):
            timeline.close(track, self._clock())

    def note(self, request_id: str, name: str, track: str, count: int) -> None:
        if timeline := self._timelines.get(request_id):
            timeline.note(name, track, count, self._clock())

    def chunk(self, request_id: str, launched_s: float, num_tokens: int) -> None:
        if timeline := self._timelines.get(request_id):
            timeline.chunk(launched_s, num_tokens, self._clock())

    def finished(self, request_id: str) -> list[Stage]:
        stages = self.failed(request_id)
        self.totals.add(stages)
        return stages

    def failed(self, request_id: str) -> list[Stage]:
        timeline = self._timelines.pop(request_id, None)
        return [] if timeline is None else timeline.end(self._clock())


class NullRecorder(Recorder):
    """Records nothing."""

    def __init__(self) -> None:
        self.totals = Totals()

    def now_s(self) -> float:
        return 0.0

    def begin(self, request_id: str, stage: str) -> None:
        pass

    def mark(self, request_id: str, stage: str) -> None:
        pass

    def open(self, request_id: str, track: str) -> None:
        pass

    def close(self, request_id: str, track: str) -> None:
        pass

    def note(self, request_id: str, name: str, track: str, count: int) -> None:
        pass

    def chunk(self, request_id: str, launched_s: float, num_tokens: int) -> None:
        pass

    def finished(self, request_id: str) -> list[Stage]:
        return []

    def failed(self, request_id: str) -> list[Stage]:
        return []


NO_RECORDER = NullRecorder()
