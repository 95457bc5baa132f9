"""What a scheduler has to tell the requests it serves, collected during a pass and delivered after it."""

from __future__ import annotations

from typing import NamedTuple

from pdjax.protocol import Event, Failed, Finished


class Outcome(NamedTuple):
    request_id: str
    event: Event


class Outcomes:
    """Events in the order in which they happened. After a `Finished` or `Failed` nothing follows for the same request."""

    def __init__(self) -> None:
        self._events: list[Outcome] = []

    def add(self, request_id: str, event: Event) -> None:
        self._events.append(Outcome(request_id, event))

    def fail(self, request_id: str, kind: str, message: str, retriable: bool) -> None:
        self.add(request_id, Failed(kind=kind, message=message, retriable=retriable))

    def finish(self, request_id: str, reason: str, cached_tokens: int, stop_token: int | None = None) -> None:
        self.add(request_id, Finished(reason=reason, stop_token=stop_token, cached_tokens=cached_tokens))

    def take(self) -> list[Outcome]:
        events, self._events = self._events, []
        return events
