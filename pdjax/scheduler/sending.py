"""Which pages of a sequence leave when, and in which chunks."""

from __future__ import annotations

from collections.abc import Iterator

from pdjax.scheduler.chunks import Computing
from pdjax.scheduler.outbound import Held, HoldingPlace, SendOrder
from pdjax.scheduler.prefill_states import Outgoing, PrefillCounts
from pdjax.scheduler.timeline import Recorder


class Sending:
    """Walks each sequence's `next_page` forward. Every order that is given out has to be carried out at once, in order."""

    def __init__(self, page_size: int, max_chunk_pages: int, max_held_pages: int, recorder: Recorder, counts: PrefillCounts):
        self._page_size = page_size
        self._max_chunk_pages = max_chunk_pages
        self._recorder = recorder
        self._counts = counts
        self.holding = HoldingPlace(max_held_pages)

    def new_held(self) -> Held:
        return Held(self.holding)

    def sendable_pages(self, seq: Computing) -> int:
        """Pages whose computation has been dispatched. A partial last page waits for the last chunk."""
        return len(seq.lease.pages) if seq.is_launched else seq.num_launched // self._page_size

    def cached_prefix(self, outgoing: Outgoing, num_tokens: int) -> Iterator[SendOrder]:
        """Full pages of the first `num_tokens`, which are in the pool before the step that is about to be launched."""
        for order in self._until(outgoing, num_tokens // self._page_size, "early_send"):
            if outgoing.ticket.is_bootstrapped:
                self._counts.early_sent_pages += len(order.pages)
            yield order

    def computed(self, outgoing: Outgoing) -> Iterator[SendOrder]:
        """Everything whose computation has been dispatched."""
        name = "last_send" if outgoing.seq.is_launched else "send"
        yield from self._until(outgoing, self.sendable_pages(outgoing.seq), name)

    def _until(self, outgoing: Outgoing, end: int, name: str) -> Iterator[SendOrder]:
        """Chunks of the pages before `end` that have not been handed over, as far as the sender has room. `name`: in the timeline."""
        ticket = outgoing.ticket
        if not ticket.is_bootstrapped:
            yield from self._holds_until(outgoing, end)
        self._send_held(outgoing)
        while ticket.next_page is not None and ticket.next_page < end and ticket.sender.can_send():
            first, ticket.next_page = ticket.next_page, min(end, ticket.next_page + self._max_chunk_pages)
            self._recorder.open(ticket.request_id, "transfer")
            self._recorder.note(ticket.request_id, name, "sends", ticket.next_page - first)
            yield SendOrder(ticket.sender, first, outgoing.seq.lease.pages[first : ticket.next_page])

    def _holds_until(self, outgoing: Outgoing, end: int) -> Iterator[SendOrder]:
        """Chunks of the pages before `end` for a sequence that may not send yet, as far as there is a place to hold them."""
        held = outgoing.held
        while (count := min(end - held.next_page, self._max_chunk_pages)) > 0 and held.ask(count):
            first = held.next_page - count
            yield SendOrder(held, first, outgoing.seq.lease.pages[first : held.next_page])

    def _send_held(self, outgoing: Outgoing) -> None:
        """Hand over what was held while bootstrap was pending. Where decode's prefix ends inside a chunk, all is gathered anew."""
        ticket = outgoing.ticket
        while ticket.next_page is not None and ticket.sender.can_send() and (chunk := outgoing.held.pop(ticket.next_page)):
            self._recorder.open(ticket.request_id, "transfer")
            self._recorder.note(ticket.request_id, "held_send", "sends", chunk.num_pages)
            ticket.next_page = chunk.end_page
            ticket.sender.send(*chunk)
