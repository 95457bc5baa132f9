"""Scheduling on a decode worker: admission, transfer, local prefill, continuous batching, retraction.

A sequence moves through queued (holds nothing), then either receiving (its KV comes from a prefill worker) or computing (its prompt is
computed here: no prefill worker was given, or it was retracted), then running. Queued sequences come in two lines: retracted ones go
before new ones, and while one of them waits nothing new is admitted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from pdjax.protocol import SequenceRequest, TokenOut, Tokens
from pdjax.scheduler.chunks import Computing, PrefillPart, StepBudget, take_chunks
from pdjax.scheduler.deadlines import Deadlines
from pdjax.scheduler.decode_states import DecodePart, InstallOrder, Receiving, Running, Sink, WaitingLine
from pdjax.scheduler.memory import KVMemory, Lease
from pdjax.scheduler.metadata import MetadataRow, MetadataSlots
from pdjax.scheduler.outcomes import Outcome, Outcomes
from pdjax.scheduler.prompt_logprobs import NO_LOGPROBS, LogprobCursor, max_cached_tokens, prompt_messages, rows_wanted
from pdjax.scheduler.receptions import Receptions, TransferFault
from pdjax.scheduler.sequence import Answer, answer_end, longest_tokens, refuse_reason
from pdjax.scheduler.slots import SlotPool
from pdjax.scheduler.timeline import NO_RECORDER, Recorder


class DecodeLimits(NamedTuple):
    """`reserve_tokens`: room for output tokens that admission takes at once; what an answer needs beyond it is taken page by page."""

    max_step_tokens: int
    max_step_seqs: int
    max_queue: int
    max_context_tokens: int
    reserve_tokens: int


class DecodeScheduler:
    """For the engine loop only. `next_prefill` and `next_decode` commit what they give out: the caller launches it at once, in order."""

    def __init__(
        self,
        memory: KVMemory,
        slots: SlotPool,
        metadata: MetadataSlots,
        sink: Sink,
        limits: DecodeLimits,
        recorder: Recorder = NO_RECORDER,
    ):
        self.memory = memory
        self.slots = slots
        self.metadata = metadata
        self.limits = limits
        self._line = WaitingLine()
        self._receptions = Receptions(memory, slots, metadata, sink, recorder)
        self._computing: dict[str, Computing] = {}
        self._running: dict[str, Running] = {}
        self._deadlines = Deadlines()
        self.recorder = recorder
        self._outcomes = Outcomes(recorder)
        self.num_admitted = 0
        self.num_retractions = 0

    @property
    def num_waiting(self) -> int:
        return len(self._line)

    @property
    def num_running(self) -> int:
        return len(self._receptions) + len(self._computing) + len(self._running)

    def queue_lengths(self) -> dict[str, int]:
        """Sequences by the place where they are. Any thread may ask."""
        return {
            "prealloc": self._line.num_new,
            "retracted": self._line.num_retracted,
            "receiving": len(self._receptions),
            "computing": len(self._computing),
            "running": len(self._running),
        }

    def take_outcomes(self) -> list[Outcome]:
        return self._outcomes.take()

    def next_deadline_s(self) -> float | None:
        return self._deadlines.next_s()

    def submit(self, request: SequenceRequest) -> None:
        """Queue the request, or refuse it with an outcome; a refused request leaves nothing behind."""
        # The last token of an answer is never an input, so its KV is never held.
        needed = longest_tokens(request) - 1
        reason = refuse_reason(request, needed, self.memory.capacity_tokens, self.limits.max_context_tokens)
        if reason:
            return self._outcomes.fail(request.request_id, "rejected", reason, retriable=False)
        if self.num_waiting >= self.limits.max_queue:
            message = f"{self.num_waiting} requests wait already, the limit is {self.limits.max_queue}"
            return self._outcomes.fail(request.request_id, "over_capacity", message, retriable=True)
        self._deadlines.add(request.request_id, request.deadline_s)
        self._line.add(Answer.start(request))
        self.recorder.begin(request.request_id, "prealloc")

    def abort(self, request_id: str, kind: str = "aborted", message: str = "aborted by the client") -> None:
        """End the request wherever it is and free what it holds; no effect on one that has ended."""
        if request_id in self._running:
            self._free_running(self._running[request_id])
        elif request_id in self._computing:
            self._free_computing(self._computing[request_id])
        elif request_id in self._receptions:
            self._receptions.abort(request_id)
        elif not self._line.remove(request_id):
            return
        self._deadlines.remove(request_id)
        self._outcomes.fail(request_id, kind, message, retriable=kind not in ("aborted", "deadline", "rejected"))

    def installs(self) -> Iterator[InstallOrder]:
        """Chunks that have arrived. To be exhausted before each `advance`."""
        return self._receptions.installs()

    def advance(self, now_s: float) -> list[Running]:
        """Take note of deadlines and of ended transfers, then admit what fits. Returns the sequences that start to run now."""
        for request_id in self._deadlines.pop_due(now_s):
            self.abort(request_id, "deadline", "the deadline passed during decode")
        started = [seq for entry in self._receptions if (seq := self._advance_transfer(entry))]
        while self._admit():
            pass
        return started

    def next_prefill(self) -> list[PrefillPart]:
        """The next local prefill step; empty where no prompt has to be computed here."""
        budget = StepBudget(self.limits.max_step_tokens, self.limits.max_step_seqs)
        now_s = self.recorder.now_s()
        chunks = take_chunks(budget, self._computing.values(), self.memory.page_size)
        parts = [part._replace(launched_s=now_s) for part in chunks]
        for part in parts:
            if part.is_last:
                self._start_local(part.seq)
        return parts

    def next_decode(self) -> list[DecodePart]:
        """The next decode step: every running sequence whose next token is not in flight already and whose page could be had."""
        ready = []
        for seq in list(self._running.values()):
            if not seq.is_dropped and not seq.is_launched and self._make_room(seq):
                ready.append(seq)
        return [self._launch(seq) for seq in ready if not seq.is_dropped]

    def settle_prefill(self, part: PrefillPart, token: TokenOut | None, logprobs: LogprobCursor = NO_LOGPROBS) -> None:
        """Take in what a local prefill step sampled, part by part in order; None for chunks that are not the last. `logprobs` goes over
        the prompt log probabilities of the whole step."""
        answer = part.seq.answer
        if not part.seq.is_aborted:
            self.recorder.chunk(answer.request_id, part.launched_s, part.end - part.start)
        if not self._is_alive(part.seq):
            logprobs.advance_logprob_pt(part)
            return
        scored = logprobs.take(part)
        answer.num_scored += len(scored)
        for message in prompt_messages(scored):
            self._outcomes.add(answer.request_id, message)
        if token is not None:
            self.recorder.mark(answer.request_id, "decode")
            self._take_token(self._running[answer.request_id], token)

    def settle_decode(self, part: DecodePart, token: TokenOut) -> None:
        """Take in what a decode step sampled."""
        if not part.seq.is_dropped:
            if part.token is not None:  # the first step behind a transfer
                self.recorder.mark(part.seq.answer.request_id, "decode")
            self._take_token(part.seq, token)

    def check(self) -> None:
        """Assert that slots and pages are held by exactly those who should."""
        holders = [*self._receptions, *self._computing.values(), *self._running.values()]
        self.memory.check([holder.lease for holder in holders])
        assert self.slots.num_held == len(holders), f"{self.slots.num_held} slots held by {len(holders)} sequences"
        num_receiving = len(self._receptions)
        assert self.metadata.num_held == num_receiving, f"{self.metadata.num_held} metadata slots held by {num_receiving} sequences"

    def _admit(self) -> bool:
        """Admit the head of the line; False where nobody waits or it has to wait on."""
        answer = self._line.head()
        if answer is None or self.slots.num_free == 0:
            return False
        is_admitted = self._admit_remote(answer) if self._line.is_remote(answer) else self._admit_local(answer)
        if is_admitted:
            self._line.remove(answer.request_id)
        return is_admitted

    def _reserve(self, answer: Answer, max_prefix_tokens: int) -> Lease | None:
        """Pages for the tokens so far and the start of the answer, leaving each running sequence a page to grow into."""
        wanted = min(len(answer.tokens) + self.limits.reserve_tokens, longest_tokens(answer.request) - 1)
        return self.memory.lease(answer.tokens, max_prefix_tokens, wanted, spare_pages=len(self._running))

    def _is_alive(self, seq: Computing) -> bool:
        """Whether what this forward gives still counts: the prompt is being computed, or its last chunk has been launched since."""
        request_id = seq.answer.request_id
        running = self._running.get(request_id)
        # A retracted sequence comes back with an answer object of its own.
        return self._computing.get(request_id) is seq or (running is not None and running.answer is seq.answer)

    def _admit_local(self, answer: Answer) -> bool:
        # At least the last token is computed: its logits choose the next one.
        rows = rows_wanted(answer.request, answer.num_scored)
        lease = self._reserve(answer, max_cached_tokens(rows, len(answer.tokens)))
        if lease is None:
            return False
        cached = lease.num_shared * self.memory.page_size
        self._computing[answer.request_id] = Computing(answer, self._take_slot(), lease, cached, cached, rows)
        self.recorder.mark(answer.request_id, "forward")
        return True

    def _admit_remote(self, answer: Answer) -> bool:
        metadata_slot = self.metadata.allocate()
        if metadata_slot is None:
            return False
        lease = self._reserve(answer, len(answer.tokens))
        if lease is None:
            self.metadata.free(metadata_slot)
            return False
        self._receptions.open(answer, self._take_slot(), metadata_slot, lease)
        return True

    def _take_slot(self) -> int:
        slot = self.slots.allocate()
        assert slot is not None, "admission goes on only while request slots are free"
        return slot

    def _advance_transfer(self, entry: Receiving) -> Running | None:
        """The running sequence where the transfer is complete and right; None where it goes on or has failed."""
        result = self._receptions.result(entry)
        if isinstance(result, TransferFault):
            return self.abort(entry.answer.request_id, result.kind, result.message)
        return None if result is None else self._start_received(entry, result)

    def _start_received(self, entry: Receiving, row: MetadataRow) -> Running | None:
        answer = entry.answer
        self._receptions.close(entry)
        self.recorder.mark(answer.request_id, "decode_queue")
        self.memory.publish(entry.lease, answer.tokens)
        running = self._start(answer, entry.slot, entry.lease, row.first_token, row.cached_tokens)
        answer.tokens.append(row.first_token)
        if end := answer_end(row.first_token, row.step, answer.request.sampling):
            self._finish(running, end)
            return None
        return running

    def _start_local(self, seq: Computing) -> None:
        """The last chunk is launched: the sequence decodes from the next step on, its first token still on the device."""
        del self._computing[seq.answer.request_id]
        self.memory.publish(seq.lease, seq.answer.tokens)
        self._start(seq.answer, seq.slot, seq.lease, None, seq.num_cached)

    def _start(self, answer: Answer, slot: int, lease: Lease, next_token: int | None, num_cached: int) -> Running:
        self.num_admitted += 1
        running = Running(answer, slot, lease, len(answer.tokens), next_token, num_cached, self.num_admitted)
        self._running[answer.request_id] = running
        return running

    def _launch(self, seq: Running) -> DecodePart:
        part = DecodePart(seq, seq.next_token, seq.position, seq.next_index)
        if part.token is not None:  # the first step behind a transfer
            self.recorder.mark(seq.answer.request_id, "first_step")
        seq.position += 1
        seq.next_token = None
        return part

    def _make_room(self, seq: Running) -> bool:
        """Get the page that the next step of `seq` writes to. The youngest running sequence gives way first, `seq` itself if need be;
        alone, `seq` waits for those that are being received or computed."""
        while not self.memory.extend(seq.lease, seq.position + 1):
            youngest = max(self._running.values(), key=lambda running: running.admitted)
            if len(self._running) > 1:
                self._retract(youngest)
            if youngest is seq:
                return False
        return True

    def _retract(self, seq: Running) -> None:
        """Take pages and slot from `seq`; it will be computed again from its tokens so far, most of them out of the tree with luck."""
        num_computed = min(seq.position, len(seq.answer.tokens))
        self.memory.publish(seq.lease, seq.answer.tokens[:num_computed])
        self._free_running(seq)
        self.num_retractions += 1
        self.recorder.mark(seq.answer.request_id, "retracted")
        self._line.put_back(replace(seq.answer))

    def _take_token(self, seq: Running, token: TokenOut) -> None:
        answer = seq.answer
        assert token.index == answer.next_index, f"token {token.index} of {answer.request_id} came where {answer.next_index} was due"
        answer.tokens.append(token.token)
        self._outcomes.add(answer.request_id, Tokens([token]))
        if end := answer_end(token.token, token.index, answer.request.sampling):
            self._finish(seq, end)

    def _finish(self, seq: Running, reason: str) -> None:
        answer = seq.answer
        # The last token was never an input, so its KV does not exist.
        self.memory.publish(seq.lease, answer.tokens[:-1])
        self._free_running(seq)
        self._deadlines.remove(answer.request_id)
        stop_token = answer.tokens[-1] if reason == "stop" else None
        self._outcomes.finish(answer.request_id, reason, seq.num_cached, stop_token)

    def _free_running(self, seq: Running) -> None:
        seq.is_dropped = True
        del self._running[seq.answer.request_id]
        self.memory.release(seq.lease)
        self.slots.free(seq.slot)

    def _free_computing(self, seq: Computing) -> None:
        seq.is_aborted = True
        del self._computing[seq.answer.request_id]
        self.memory.release(seq.lease)
        self.slots.free(seq.slot)
