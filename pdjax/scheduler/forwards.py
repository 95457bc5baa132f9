"""The forwards of a prefill worker, and what each of them holds."""

from __future__ import annotations

from collections.abc import Iterator

from pdjax.scheduler.chunks import Computing, PrefillPart, StepBudget, take_chunks
from pdjax.scheduler.memory import KVMemory
from pdjax.scheduler.prefill_states import Outgoing, PrefillCounts
from pdjax.scheduler.prompt_logprobs import max_cached_tokens, rows_wanted
from pdjax.scheduler.sending import Sending
from pdjax.scheduler.sequence import Answer
from pdjax.scheduler.slots import SlotPool
from pdjax.scheduler.ticket import Ticket
from pdjax.scheduler.timeline import Recorder


class Forwards:
    """Sequences that are being computed and sent, in order of their start. Owns their request slots, leases and held chunks."""

    def __init__(self, memory: KVMemory, slots: SlotPool, sending: Sending, recorder: Recorder, counts: PrefillCounts):
        self._memory = memory
        self._slots = slots
        self._sending = sending
        self._recorder = recorder
        self._counts = counts
        self._outgoing: dict[str, Outgoing] = {}

    def __len__(self) -> int:
        return len(self._outgoing)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._outgoing

    def __getitem__(self, request_id: str) -> Outgoing:
        return self._outgoing[request_id]

    def __iter__(self) -> Iterator[Outgoing]:
        """Of those that there are now, whatever ends meanwhile. Any thread may ask."""
        return iter(list(self._outgoing.values()))

    def start(self, ticket: Ticket) -> Computing | None:
        """A forward of the ticket's prompt; None, and nothing taken, where it has to wait for a slot or for pages."""
        prompt = ticket.request.prompt
        if self._slots.num_free == 0:
            return None
        # At least the last token is computed: its logits choose the first token of the answer.
        rows = rows_wanted(ticket.request, len(ticket.scored))
        lease = self._memory.lease(prompt, max_cached_tokens(rows, len(prompt)), len(prompt))
        slot = self._slots.allocate() if lease is not None else None
        if lease is None or slot is None:
            return None
        cached = lease.num_shared * self._memory.page_size
        if ticket.num_cached is None:
            ticket.num_cached = cached
            self._counts.prompt_tokens += len(prompt)
            self._counts.cached_tokens += cached
        seq = Computing(Answer.start(ticket.request), slot, lease, ticket.num_cached, cached, rows)
        self._outgoing[ticket.request_id] = Outgoing(ticket, seq, self._sending.new_held())
        self._recorder.mark(ticket.request_id, "forward")
        return seq

    def take_chunks(self, budget: StepBudget, is_bootstrapped: bool) -> list[PrefillPart]:
        """Of the prompts in progress that are bootstrapped, or of those that are not."""
        seqs = [outgoing.seq for outgoing in self if outgoing.ticket.is_bootstrapped == is_bootstrapped]
        return take_chunks(budget, seqs, self._memory.page_size)

    def last_parked(self) -> Outgoing | None:
        return next((outgoing for outgoing in reversed(self._outgoing.values()) if outgoing.parked is not None), None)

    def lose(self, outgoing: Outgoing) -> None:
        """Let go of a forward that came to nothing. The next one finds what it has computed in the tree, unless that is evicted first."""
        ticket = outgoing.ticket
        self._memory.publish(outgoing.seq.lease, outgoing.seq.answer.tokens)
        outgoing.seq.is_aborted = True
        self.free(outgoing)
        ticket.num_retries += 1
        ticket.ahead_s = None
        self._recorder.note(ticket.request_id, "retry", "retries", 1)
        self._counts.retries += 1

    def abort(self, request_id: str) -> Ticket:
        """End the forward, whose steps in flight are then ignored."""
        outgoing = self._outgoing[request_id]
        outgoing.seq.is_aborted = True
        self.free(outgoing)
        return outgoing.ticket

    def free(self, outgoing: Outgoing) -> None:
        """Take back what the forward holds. Pages that are yet to be read by a gather in flight may be given out again."""
        del self._outgoing[outgoing.ticket.request_id]
        self._memory.release(outgoing.seq.lease)
        self._slots.free(outgoing.seq.slot)
        outgoing.held.drop()

    def check(self) -> None:
        """Assert that slots, pages and places for gathered pages are held by exactly these sequences."""
        self._memory.check([outgoing.seq.lease for outgoing in self])
        assert self._slots.num_held == len(self), f"{self._slots.num_held} slots held by {len(self)} sequences"
        assert len(self) or not self._sending.holding.num_pages, f"{self._sending.holding.num_pages} gathered pages are held for nobody"
