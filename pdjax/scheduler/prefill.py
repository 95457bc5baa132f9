"""Scheduling on a prefill worker: bootstrap, chunks under a token budget, sends behind them.

A request moves through four places and is in exactly one at a time: the bootstrap queue (sender only), waiting (and a metadata slot),
outgoing (and a request slot and pages: it is being computed and sent), delivering (all pages have left the pool; sender and
metadata slot stay until decode has everything).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from pdjax.protocol import KVPoll, SequenceRequest, TokenOut, Tokens
from pdjax.scheduler.bootstrap import BootstrapQueue, Sender, Waiting
from pdjax.scheduler.chunks import Computing, PrefillPart, StepBudget, take_chunks
from pdjax.scheduler.deadlines import Deadlines
from pdjax.scheduler.memory import KVMemory
from pdjax.scheduler.metadata import MetadataRow, MetadataSlots
from pdjax.scheduler.outcomes import Outcome, Outcomes
from pdjax.scheduler.sequence import Answer, answer_end, refuse_reason
from pdjax.scheduler.slots import SlotPool


class PrefillLimits(NamedTuple):
    """`max_queue`: requests that may wait, bootstrapping or bootstrapped; more are refused, so that a client hears of it at once."""

    max_step_tokens: int
    max_step_seqs: int
    max_chunk_pages: int
    max_queue: int
    max_context_tokens: int


@dataclass(slots=True, eq=False)
class Outgoing:
    """A sequence that is being computed and sent. `next_page` is the first page that has not been handed to the sender."""

    seq: Computing
    sender: Sender
    metadata_slot: int
    next_page: int
    has_row: bool = False


@dataclass(slots=True, eq=False)
class Delivering:
    request: SequenceRequest
    sender: Sender
    metadata_slot: int
    num_cached: int


class SendOrder(NamedTuple):
    """Gather `pages` of the pool now and hand them to `sender` as the prompt's pages from `first_page` on."""

    sender: Sender
    first_page: int
    pages: list[int]


class PrefillScheduler:
    """For the engine loop only. `sends` and `next_step` commit what they give out: the caller carries it out at once, in order."""

    def __init__(self, memory: KVMemory, slots: SlotPool, metadata: MetadataSlots, bootstrap: BootstrapQueue, limits: PrefillLimits):
        self.memory = memory
        self.slots = slots
        self.metadata = metadata
        self.bootstrap = bootstrap
        self.limits = limits
        self._waiting: deque[Waiting] = deque()
        self._outgoing: dict[str, Outgoing] = {}
        self._delivering: dict[str, Delivering] = {}
        self._deadlines = Deadlines()
        self._outcomes = Outcomes()

    @property
    def num_waiting(self) -> int:
        return len(self.bootstrap) + len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._outgoing) + len(self._delivering)

    def take_outcomes(self) -> list[Outcome]:
        return self._outcomes.take()

    def next_deadline_s(self) -> float | None:
        return self._deadlines.next_s()

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
        if request_id in self.bootstrap:
            self.bootstrap.pop(request_id).sender.fail(message)
        elif request_id in self._outgoing:
            self._drop(self._outgoing[request_id], message)
        elif request_id in self._delivering:
            entry = self._delivering.pop(request_id)
            entry.sender.fail(message)
            self.metadata.free(entry.metadata_slot)
        elif waiting := next((entry for entry in self._waiting if entry.request.request_id == request_id), None):
            self._waiting.remove(waiting)
            self._fail_waiting(waiting, message)
        else:
            return
        self._deadlines.remove(request_id)
        self._outcomes.fail(request_id, kind, message, retriable=kind not in ("aborted", "deadline"))

    def advance(self, now_s: float) -> None:
        """Take note of everything that happened outside: deadlines, ended bootstraps, failed and finished transfers."""
        for request_id in self._deadlines.pop_due(now_s):
            self.abort(request_id, "deadline", "the deadline passed during prefill")
        ready, failed = self.bootstrap.pop_bootstrapped()
        self._waiting.extend(ready)
        for entry in failed:
            self._deadlines.remove(entry.request.request_id)
            self._outcomes.fail(entry.request.request_id, "bootstrap", entry.sender.failure() or "bootstrap failed", retriable=True)
        self._clean_up_failed_waiting()
        for request_id, outgoing in list(self._outgoing.items()):
            if outgoing.sender.poll() == KVPoll.FAILED:
                self.abort(request_id, "transfer", outgoing.sender.failure() or "transfer failed")
        for request_id, entry in list(self._delivering.items()):
            self._advance_delivery(request_id, entry)

    def next_step(self) -> list[PrefillPart]:
        """The next prefill step: first the prompts in progress, then new ones while request slots and pages last."""
        budget = StepBudget(self.limits.max_step_tokens, self.limits.max_step_seqs)
        parts = take_chunks(budget, (outgoing.seq for outgoing in self._outgoing.values()), self.memory.page_size)
        while self._waiting and not budget.is_spent and (seq := self._admit()):
            parts += take_chunks(budget, [seq], self.memory.page_size)
        return parts

    def sends(self) -> Iterator[SendOrder]:
        """Pages whose computation has been dispatched and that a sender has room for. A partial last page waits for the last chunk."""
        for outgoing in self._outgoing.values():
            while outgoing.sender.can_send():
                count = min(self._num_sendable_pages(outgoing.seq) - outgoing.next_page, self.limits.max_chunk_pages)
                if count <= 0:
                    break
                first, outgoing.next_page = outgoing.next_page, outgoing.next_page + count
                yield SendOrder(outgoing.sender, first, outgoing.seq.lease.pages[first : first + count])

    def settle(self, part: PrefillPart, token: TokenOut | None) -> None:
        """Take in the result of a step: `token` is what the last chunk sampled, None for the other chunks."""
        seq = part.seq
        if seq.is_dropped or token is None:
            return
        outgoing, request = self._outgoing[seq.answer.request_id], seq.answer.request
        self.memory.publish(seq.lease, request.prompt)
        self._outcomes.add(request.request_id, Tokens([token]))
        if end := answer_end(token.token, token.index, request.sampling):
            self._drop(outgoing, "the answer ended with its first token")
            self._deadlines.remove(request.request_id)
            stop_token = token.token if end == "stop" else None
            return self._outcomes.finish(request.request_id, end, seq.num_cached, stop_token)
        self.metadata.write(outgoing.metadata_slot, _metadata_row(request, token, seq.num_cached))
        outgoing.has_row = True

    def finish_sends(self) -> None:
        """Where every page has been handed over and the first token is known: send the metadata row, free pages and request slot."""
        for request_id, outgoing in list(self._outgoing.items()):
            seq = outgoing.seq
            if not outgoing.has_row or outgoing.next_page < self._num_sendable_pages(seq):
                continue
            outgoing.sender.finish(self.metadata.read(outgoing.metadata_slot).to_bytes())
            self._free_computing(request_id)
            self._delivering[request_id] = Delivering(seq.answer.request, outgoing.sender, outgoing.metadata_slot, seq.num_cached)

    def check(self) -> None:
        """Assert that slots and pages are held by exactly those who should."""
        self.memory.check([outgoing.seq.lease for outgoing in self._outgoing.values()])
        rows = len(self._waiting) + len(self._outgoing) + len(self._delivering)
        assert self.slots.num_held == len(self._outgoing), f"{self.slots.num_held} slots held by {len(self._outgoing)} sequences"
        assert self.metadata.num_held == rows, f"{self.metadata.num_held} metadata slots held by {rows} sequences"

    def _admit(self) -> Computing | None:
        """Move the head of the waiting queue to outgoing; None where it has to wait for a slot or for pages."""
        waiting = self._waiting[0]
        prompt = waiting.request.prompt
        slot = self.slots.allocate()
        if slot is None:
            return None
        # At least the last token is computed: its logits choose the first token of the answer.
        lease = self.memory.lease(prompt, len(prompt) - 1, len(prompt))
        if lease is None:
            self.slots.free(slot)
            return None
        self._waiting.popleft()
        cached = lease.num_shared * self.memory.page_size
        seq = Computing(Answer.start(waiting.request), slot, lease, cached, cached)
        self._outgoing[waiting.request.request_id] = Outgoing(
            seq, waiting.sender, waiting.metadata_slot, waiting.decode_prefix_pages
        )
        return seq

    def _num_sendable_pages(self, seq: Computing) -> int:
        return len(seq.lease.pages) if seq.is_launched else seq.num_launched // self.memory.page_size

    def _advance_delivery(self, request_id: str, entry: Delivering) -> None:
        state = entry.sender.poll()
        if state == KVPoll.FAILED:
            return self.abort(request_id, "transfer", entry.sender.failure() or "transfer failed")
        if state == KVPoll.SUCCESS:
            del self._delivering[request_id]
            self._deadlines.remove(request_id)
            self.metadata.free(entry.metadata_slot)
            self._outcomes.finish(request_id, "handed_off", entry.num_cached)

    def _clean_up_failed_waiting(self) -> None:
        failed = [waiting for waiting in self._waiting if waiting.sender.poll() == KVPoll.FAILED]
        for waiting in failed:
            self.abort(waiting.request.request_id, "transfer", waiting.sender.failure() or "transfer failed")

    def _fail_waiting(self, waiting: Waiting, message: str) -> None:
        waiting.sender.fail(message)
        self.metadata.free(waiting.metadata_slot)

    def _drop(self, outgoing: Outgoing, message: str) -> None:
        outgoing.sender.fail(message)
        outgoing.seq.is_dropped = True
        self.metadata.free(outgoing.metadata_slot)
        self._free_computing(outgoing.seq.answer.request_id)

    def _free_computing(self, request_id: str) -> None:
        seq = self._outgoing.pop(request_id).seq
        self.memory.release(seq.lease)
        self.slots.free(seq.slot)


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
