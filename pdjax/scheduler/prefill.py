"""Scheduling on a prefill worker: bootstrap, chunks under a token budget, sends behind them.

A request is in exactly one place at a time: the bootstrap queue (sender only), the waiting line (and a metadata slot), outgoing (and a
request slot and pages: it is being computed and sent), delivering (all pages have left the pool; sender and metadata slot stay until
decode has everything).

With optimistic prefill a request may leave the bootstrap queue early. It computes like any other, but until its bootstrap has ended
nothing of it is sent, and its first token stays here: at the end of the prompt it is parked. It goes on when bootstrap ends, and the
chunks that were gathered meanwhile leave at once. Where a request that is bootstrapped needs its pages or slots, it is retried instead:
what it has computed goes into the tree, and it goes back to the bootstrap queue, from where it may go ahead again after a while, until
its budget is used up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pdjax.protocol import KVPoll, SequenceRequest, TokenOut, Tokens
from pdjax.scheduler.bootstrap import LOOKS_A_PASS, BootstrapQueue
from pdjax.scheduler.chunks import Computing, PrefillPart, StepBudget, take_chunks
from pdjax.scheduler.deadlines import Deadlines
from pdjax.scheduler.forwards import Forwards
from pdjax.scheduler.memory import KVMemory
from pdjax.scheduler.metadata import MetadataRow, MetadataSlots
from pdjax.scheduler.outbound import SendOrder
from pdjax.scheduler.outcomes import Outcome, Outcomes
from pdjax.scheduler.prefill_states import Outgoing, PrefillCounts, WaitingLine
from pdjax.scheduler.prompt_logprobs import NO_LOGPROBS, LogprobCursor, prompt_messages
from pdjax.scheduler.sending import Sending
from pdjax.scheduler.sequence import answer_end, refuse_reason
from pdjax.scheduler.slots import SlotPool
from pdjax.scheduler.ticket import Ticket
from pdjax.scheduler.timeline import NO_RECORDER, Recorder


class PrefillLimits(NamedTuple):
    """`max_queue`: requests that may wait, bootstrapping or bootstrapped; more are refused, so that a client hears of it at once.

    `max_held_pages`: pages that are kept gathered, beside the pool, for sequences whose bootstrap is pending.
    `drop_on_miss`: a prompt that is computed before its bootstrap has ended is retried at once instead of being parked.
    """

    max_step_tokens: int
    max_step_seqs: int
    max_chunk_pages: int
    max_queue: int
    max_context_tokens: int
    drop_on_miss: bool = False
    max_held_pages: int = 0


class PrefillScheduler:
    """For the engine loop only. What gives out sends or steps commits them: the caller carries them out at once, in order."""

    def __init__(
        self,
        memory: KVMemory,
        slots: SlotPool,
        metadata: MetadataSlots,
        bootstrap: BootstrapQueue,
        limits: PrefillLimits,
        recorder: Recorder = NO_RECORDER,
    ):
        """`recorder`: the same as that of `bootstrap`."""
        self.memory = memory
        self.slots = slots
        self.metadata = metadata
        self.bootstrap = bootstrap
        self.limits = limits
        # With `drop_on_miss` a lost forward is worth what stays of it in the tree; half of the pool is for those that are bootstrapped.
        self._line = WaitingLine(memory.pool.total // 2 if limits.drop_on_miss else memory.pool.total)
        self._delivering: dict[str, Ticket] = {}
        self._deadlines = Deadlines()
        self._next_hopeful_s: float | None = None
        self.recorder = recorder
        self._outcomes = Outcomes(recorder)
        self.counts = PrefillCounts()
        self._sending = Sending(memory.page_size, limits.max_chunk_pages, limits.max_held_pages, recorder, self.counts)
        self._forwards = Forwards(memory, slots, self._sending, recorder, self.counts)

    @property
    def num_waiting(self) -> int:
        return len(self.bootstrap) + len(self._line)

    @property
    def num_running(self) -> int:
        return len(self._forwards) + len(self._delivering)

    @property
    def num_parked(self) -> int:
        """Any thread may ask."""
        return sum(outgoing.parked is not None for outgoing in self._forwards)

    def queue_lengths(self) -> dict[str, int]:
        """Requests by the place where they are. Any thread may ask."""
        return {
            "bootstrap": len(self.bootstrap),
            "waiting": len(self._line),
            "parked": self.num_parked,
            "outgoing": len(self._forwards),
            "delivering": len(self._delivering),
        }

    def take_outcomes(self) -> list[Outcome]:
        return self._outcomes.take()

    def next_deadline_s(self) -> float | None:
        """When `advance` has to be called even if nothing happens: a request's deadline, or the end of its grace before it goes ahead."""
        times = [time_s for time_s in (self._deadlines.next_s(), self._next_hopeful_s) if time_s is not None]
        return min(times, default=None)

    def submit(self, request: SequenceRequest) -> None:
        """Open the request's room, or refuse it with an outcome; a refused request leaves nothing behind."""
        reason = refuse_reason(request, len(request.prompt), self.memory.capacity_tokens, self.limits.max_context_tokens)
        if reason:
            return self._outcomes.fail(request.request_id, "rejected", reason, retriable=False)
        if self.num_waiting >= self.limits.max_queue:
            message = f"{self.num_waiting} requests wait already, the limit is {self.limits.max_queue}"
            return self._outcomes.fail(request.request_id, "over_capacity", message, retriable=True)
        try:
            self.bootstrap.create_sender(request)
        except ValueError as error:
            return self._outcomes.fail(request.request_id, "bootstrap", str(error), retriable=True)
        self._deadlines.add(request.request_id, request.deadline_s)

    def abort(self, request_id: str, kind: str = "aborted", message: str = "aborted by the client") -> None:
        """End the request wherever it is and free what it holds; no effect on one that has ended."""
        ticket = self._take_out(request_id)
        if ticket is not None:
            self.handle_bootstrap_failure(ticket, kind, message)

    def handle_bootstrap_failure(self, ticket: Ticket, kind: str, message: str) -> None:
        """The end of a request that is in no queue any more: its room fails, its slot is free, its stream hears why."""
        self._line.is_ahead_no_more(ticket)
        ticket.sender.fail(message)
        self._close(ticket)
        self._outcomes.fail(ticket.request_id, kind, message, retriable=kind not in ("aborted", "deadline"))

    def advance(self, now_s: float) -> None:
        """Take note of everything that happened outside: deadlines, ended bootstraps, failed and finished transfers."""
        for request_id in self._deadlines.pop_due(now_s):
            self.abort(request_id, "deadline", "the deadline passed during prefill")
        self._take_bootstrapped()
        self._feed_starved()
        for ticket in self.bootstrap.pop_optimistic(now_s):
            self._line.add(ticket)
        self._next_hopeful_s = self.bootstrap.next_hopeful_s()
        for ticket in self._line.next(LOOKS_A_PASS):
            self._look_at_waiting(ticket)
        for outgoing in self._forwards:
            self._look_at_outgoing(outgoing)
        for ticket in list(self._delivering.values()):
            self._look_at_delivery(ticket)

    def next_step(self) -> list[PrefillPart]:
        """The next prefill step: prompts in progress before new ones, while request slots and pages last.

        Whatever is bootstrapped goes before whatever is ahead of its bootstrap, which may be half computed: nobody waits for that one.
        """
        budget = StepBudget(self.limits.max_step_tokens, self.limits.max_step_seqs)
        parts = self._forwards.take_chunks(budget, is_bootstrapped=True)
        while not budget.is_spent and self._line.has_ready and (seq := self._admit()):
            parts += take_chunks(budget, [seq], self.memory.page_size)
        parts += self._forwards.take_chunks(budget, is_bootstrapped=False)
        while not budget.is_spent and (seq := self._admit()):
            parts += take_chunks(budget, [seq], self.memory.page_size)
        now_s = self.recorder.now_s()
        return [part._replace(launched_s=now_s) for part in parts]

    def maybe_send_cached_prefix_chunk(self, parts: Sequence[PrefillPart]) -> Iterator[SendOrder]:
        """Full pages of the sequences of a step that are in the pool before it: to be gathered before the step is launched.

        Nothing that decode holds already. What a sequence whose bootstrap is pending has is gathered too, but held.
        """
        for part in parts:
            yield from self._sending.cached_prefix(self._forwards[part.seq.answer.request_id], part.start)

    def sends(self) -> Iterator[SendOrder]:
        """Pages whose computation has been dispatched and that a sender has room for."""
        for outgoing in self._forwards:
            yield from self._sending.computed(outgoing)

    def settle(self, part: PrefillPart, token: TokenOut | None, logprobs: LogprobCursor = NO_LOGPROBS) -> None:
        """Take in the result of a step, part by part in order: `token` is what the last chunk sampled, None for the other chunks;
        `logprobs` goes over the prompt log probabilities of the whole step.

        Before anything comes of it bootstrap is looked at once more.
        """
        if part.seq.is_aborted:
            logprobs.advance_logprob_pt(part)
            return
        outgoing = self._forwards[part.seq.answer.request_id]
        outgoing.ticket.scored += logprobs.take(part)
        self.recorder.chunk(part.seq.answer.request_id, part.launched_s, part.end - part.start)
        if token is None:
            return
        self._look_at_outgoing(outgoing)
        if part.seq.is_aborted:
            return
        if self.bootstrap.should_force_retry(outgoing.ticket):
            self._retry(outgoing)
        elif outgoing.ticket.is_bootstrapped:
            self._commit(outgoing, token)
        elif self.limits.drop_on_miss:
            self._retry(outgoing)
        else:
            outgoing.parked = token
            self.recorder.mark(outgoing.ticket.request_id, "parked")

    def finish_sends(self) -> None:
        """Where every page has been handed over and the first token is known: send the metadata row, free pages and request slot."""
        for outgoing in self._forwards:
            ticket = outgoing.ticket
            if not outgoing.has_row or (ticket.next_page or 0) < self._sending.sendable_pages(outgoing.seq):
                continue
            assert ticket.metadata_slot is not None, f"{ticket.request_id} has a row and no slot"
            self.recorder.open(ticket.request_id, "transfer")  # has begun with the first page, if there was one
            ticket.sender.finish(self.metadata.read(ticket.metadata_slot).to_bytes())
            self._forwards.free(outgoing)
            self._delivering[ticket.request_id] = ticket

    def check(self) -> None:
        """Assert that slots and pages are held by exactly those who should."""
        self._forwards.check()
        rows = len(self._line) + len(self._forwards) + len(self._delivering)
        assert self.metadata.num_held == rows, f"{self.metadata.num_held} metadata slots held by {rows} sequences"

    def _admit(self) -> Computing | None:
        """Move the head of the line to outgoing; None where it has to wait for a slot, for pages or for those that are ahead."""
        ticket = self._line.head()
        if ticket is None or not self._line.may_go_ahead(ticket, self.memory.pages_for(len(ticket.request.prompt))):
            return None
        seq = self._forwards.start(ticket)
        while seq is None and ticket.is_bootstrapped and (parked := self._forwards.last_parked()):
            self._retry(parked)
            seq = self._forwards.start(ticket)
        if seq is not None:
            self._line.remove(ticket.request_id)
        return seq

    def _take_bootstrapped(self) -> None:
        ready, failed = self.bootstrap.pop_bootstrapped()
        for ticket in ready:
            self._line.add(ticket)
        for ticket in failed:
            self.handle_bootstrap_failure(ticket, "bootstrap", ticket.sender.failure() or "bootstrap failed")

    def _look_at_waiting(self, ticket: Ticket) -> None:
        if not self._has_failed(ticket) and not ticket.is_bootstrapped and self.bootstrap.finalize_bootstrap(ticket):
            self._line.promote(ticket)

    def _look_at_outgoing(self, outgoing: Outgoing) -> None:
        """At every turn, and so at every chunk border and while parked: has bootstrap ended, or the transfer failed?"""
        if not self._has_failed(outgoing.ticket) and self.bootstrap.finalize_bootstrap(outgoing.ticket) and outgoing.parked is not None:
            token, outgoing.parked = outgoing.parked, None
            self._commit(outgoing, token)

    def _look_at_delivery(self, ticket: Ticket) -> None:
        if not self._has_failed(ticket) and ticket.sender.poll() == KVPoll.SUCCESS:
            del self._delivering[ticket.request_id]
            self._close(ticket)
            self._outcomes.finish(ticket.request_id, "handed_off", ticket.num_cached or 0)

    def _has_failed(self, ticket: Ticket) -> bool:
        """Whether the transfer has failed; the request has ended then."""
        has_failed = self.bootstrap.poll(ticket) == KVPoll.FAILED
        if has_failed:
            self.abort(ticket.request_id, "transfer", ticket.sender.failure() or "transfer failed")
        return has_failed

    def _feed_starved(self) -> None:
        """Requests that are bootstrapped must not wait for metadata slots that optimists hold: those go back, the last first."""
        while self.metadata.num_free == 0 and self.bootstrap.num_starved():
            hopeful, parked = self._line.last_hopeful(), self._forwards.last_parked()
            if hopeful is not None:
                self._line.remove(hopeful.request_id)
                self.bootstrap.add(hopeful)
            elif parked is not None:
                self._retry(parked)
            else:
                return
            self._take_bootstrapped()

    def _retry(self, outgoing: Outgoing) -> None:
        """Let go of a forward that came to nothing; the request lines up for the next one."""
        self._forwards.lose(outgoing)
        if outgoing.ticket.is_bootstrapped:
            self._line.add(outgoing.ticket)
            self.bootstrap.reset_prefill_retry_time(outgoing.ticket)
        else:
            self.bootstrap.add(outgoing.ticket)

    def _commit(self, outgoing: Outgoing, token: TokenOut) -> None:
        """Bootstrap has ended and the prompt is computed: publish its KV, tell the token, write the row."""
        ticket, request = outgoing.ticket, outgoing.ticket.request
        self._line.is_ahead_no_more(ticket)
        self.memory.publish(outgoing.seq.lease, request.prompt)
        for message in [*prompt_messages(ticket.scored), Tokens([token])]:
            self._outcomes.add(request.request_id, message)
        ticket.scored.clear()
        if end := answer_end(token.token, token.index, request.sampling):
            self._end_with_first_token(outgoing, token, end)
            return
        assert ticket.metadata_slot is not None, f"{request.request_id} is computed and has no metadata slot"
        self.metadata.write(ticket.metadata_slot, _metadata_row(request, token, ticket.num_cached or 0))
        self.recorder.mark(request.request_id, "delivering")
        outgoing.has_row = True

    def _end_with_first_token(self, outgoing: Outgoing, token: TokenOut, end: str) -> None:
        ticket = outgoing.ticket
        ticket.sender.fail("the answer ended with its first token")
        self._forwards.free(outgoing)
        self._close(ticket)
        self._outcomes.finish(ticket.request_id, end, ticket.num_cached or 0, token.token if end == "stop" else None)

    def _close(self, ticket: Ticket) -> None:
        """Free what a request holds in every place."""
        self.bootstrap.maybe_release_metadata_buffer(ticket)
        self._deadlines.remove(ticket.request_id)

    def _take_out(self, request_id: str) -> Ticket | None:
        """Remove the request from wherever it is, with its pages and request slot; None where it is nowhere."""
        if request_id in self.bootstrap:
            return self.bootstrap.pop(request_id)
        if request_id in self._delivering:
            return self._delivering.pop(request_id)
        if request_id in self._forwards:
            return self._forwards.abort(request_id)
        return self._line.remove(request_id)


def _metadata_row(request: SequenceRequest, token: TokenOut, num_cached: int) -> MetadataRow:
    return MetadataRow(
        room=request.room,
        first_token=token.token,
        step=token.index,
        seed=request.sampling.seed,
        cached_device_tokens=num_cached,
        logprob=token.logprob,
        top_logprobs=tuple(token.top_logprobs or ()),
    )
