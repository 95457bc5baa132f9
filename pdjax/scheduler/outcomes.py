"""What a scheduler has to tell the requests it serves, collected during a pass and delivered after it."""

from __future__ import annotations

from typing import NamedTuple

from pdjax.protocol import Event, Failed, Finished
from pdjax.scheduler.timeline import NO_RECORDER, Recorder


class Outcome(NamedTuple):
    request_id: str
    event: Event


class Outcomes:
    """Events in the order in which they happened. After a `Finished` or `Failed`, which carry its stages, nothing follows for the same
    request."""

    def __init__(self, recorder: Recorder = NO_RECORDER) -> None:
        self._recorder = recorder
        self._events: list[Outcome] = []

    def add(self, request_id: str, event: Event) -> None:
        self._events.append(Outcome(request_id, event))

    def fail(self, request_id: str, kind: str, message: str, retriable: bool) -> None:
        self.add(request_id, Failed(kind=kind, message=message, retriable=retriable, stages=self._recorder.failed(request_id)))

    def finish(self, request_id: str, reason: str, cached_tokens: int, stop_token: int | None = None) -> None:
        stages = self._recorder.finished(request_id)
        self.add(request_id, Finished(reason=reason, stop_token=stop_token, cached_tokens=cached_tokens, stages=stages))

    def take(self) -> list[Outcome]:
        events, self._events = self._events, []
        return events
