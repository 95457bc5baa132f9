"""Where a sequence stands on a prefill worker, the line it waits in, and what is counted."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from pdjax.protocol import TokenOut
from pdjax.scheduler.chunks import Computing
from pdjax.scheduler.outbound import Held
from pdjax.scheduler.rotation import Rotation
from pdjax.scheduler.ticket import Ticket


@dataclass(slots=True, eq=False)
class Outgoing:
    """A sequence that is being computed and sent. `parked`: the first token of a prompt that was computed before bootstrap ended."""

    ticket: Ticket
    seq: Computing
    held: Held
    parked: TokenOut | None = None
    has_row: bool = False


class WaitingLine:
    """Requests with a metadata slot. Those that are bootstrapped go before those that are ahead of it, retried ones before new ones.

    `max_ahead_pages`: of all prompts that have gone ahead and not been told a token yet, wherever they are. If more of them were computed
    than the prefix cache holds, each would evict what a lost forward has left of another, and all would be computed twice.
    """

    def __init__(self, max_ahead_pages: int) -> None:
        self._max_ahead_pages = max_ahead_pages
        self._ahead: dict[str, int] = {}
        self._num_ahead_pages = 0
        self._ready: OrderedDict[str, Ticket] = OrderedDict()
        self._hopeful: OrderedDict[str, Ticket] = OrderedDict()
        self._looks: Rotation[Ticket] = Rotation()

    def __len__(self) -> int:
        return len(self._looks)

    def add(self, ticket: Ticket) -> None:
        """Line up, at the head after a lost forward."""
        line = self._ready if ticket.is_bootstrapped else self._hopeful
        line[ticket.request_id] = ticket
        if ticket.num_retries:
            line.move_to_end(ticket.request_id, last=False)
        self._looks.add(ticket.request_id, ticket)

    def head(self) -> Ticket | None:
        return next(iter((self._ready or self._hopeful).values()), None)

    @property
    def has_ready(self) -> bool:
        """Whether one that is bootstrapped waits."""
        return bool(self._ready)

    def may_go_ahead(self, ticket: Ticket, num_pages: int) -> bool:
        """Whether `ticket` may be computed now. One that is not bootstrapped counts as ahead from here on; the first one always may."""
        if ticket.is_bootstrapped or ticket.request_id in self._ahead:
            return True
        if self._ahead and self._num_ahead_pages + num_pages > self._max_ahead_pages:
            return False
        self._ahead[ticket.request_id] = num_pages
        self._num_ahead_pages += num_pages
        return True

    def is_ahead_no_more(self, ticket: Ticket) -> None:
        """Its bootstrap has ended and its prompt is computed, or the request has ended."""
        self._num_ahead_pages -= self._ahead.pop(ticket.request_id, 0)

    def last_hopeful(self) -> Ticket | None:
        return next(reversed(self._hopeful.values()), None)

    def next(self, number: int) -> list[Ticket]:
        """The `number` requests that were looked at longest ago, or all."""
        return self._looks.next(number)

    def promote(self, ticket: Ticket) -> None:
        """Bootstrap of a hopeful ticket has ended."""
        del self._hopeful[ticket.request_id]
        self._ready[ticket.request_id] = ticket

    def remove(self, request_id: str) -> Ticket | None:
        """None where the request does not stand in line."""
        if request_id not in self._looks:
            return None
        del (self._ready if request_id in self._ready else self._hopeful)[request_id]
        return self._looks.pop(request_id)


@dataclass(slots=True)
class PrefillCounts:
    """Totals since the start. Tokens of retries are left out: only a request's first try says what the prefix cache is worth."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    retries: int = 0
    early_sent_pages: int = 0
