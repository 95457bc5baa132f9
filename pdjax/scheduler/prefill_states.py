"""Where a sequence stands on a prefill worker, the line it waits in, and what is counted."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from pdjax.protocol import TokenOut
from pdjax.scheduler.bootstrap import Ticket
from pdjax.scheduler.chunks import Computing
from pdjax.scheduler.outbound import Held


@dataclass(slots=True, eq=False)
class Outgoing:
    """A sequence that is being computed and sent. `parked`: the first token of a prompt that was computed before bootstrap ended."""

    ticket: Ticket
    seq: Computing
    held: Held
    parked: TokenOut | None = None
    has_row: bool = False


class WaitingLine:
    """Requests with a metadata slot. Those that are bootstrapped go before those that are ahead of it, retried ones before new ones."""

    def __init__(self) -> None:
        self._ready: deque[Ticket] = deque()
        self._hopeful: deque[Ticket] = deque()

    def __len__(self) -> int:
        return len(self._ready) + len(self._hopeful)

    def __iter__(self) -> Iterator[Ticket]:
        yield from self._ready
        yield from self._hopeful

    def add(self, ticket: Ticket) -> None:
        self._line_of(ticket).append(ticket)

    def put_back(self, ticket: Ticket) -> None:
        """Line up at the head."""
        self._line_of(ticket).appendleft(ticket)

    def head(self) -> Ticket | None:
        line = self._ready or self._hopeful
        return line[0] if line else None

    def last_hopeful(self) -> Ticket | None:
        return self._hopeful[-1] if self._hopeful else None

    def promote(self, ticket: Ticket) -> None:
        """Bootstrap of a hopeful ticket has ended."""
        self._hopeful.remove(ticket)
        self._ready.append(ticket)

    def remove(self, ticket: Ticket) -> None:
        (self._ready if ticket in self._ready else self._hopeful).remove(ticket)

    def find(self, request_id: str) -> Ticket | None:
        return next((ticket for ticket in self if ticket.request_id == request_id), None)

    def _line_of(self, ticket: Ticket) -> deque[Ticket]:
        return self._ready if ticket.is_bootstrapped else self._hopeful


@dataclass(slots=True)
class PrefillCounts:
    """Totals since the start. Tokens of retries are left out: only a request's first try says what the prefix cache is worth."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    retries: int = 0
    early_sent_pages: int = 0
