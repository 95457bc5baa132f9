"""The prefill role: computes prompts, gives the first token, sends the KV."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from pdjax.engine.base import StepEngine
from pdjax.engine.batch import PrefillSeq, StepOutput
from pdjax.protocol import SequenceRequest, TokenOut, WorkerLoad
from pdjax.scheduler.chunks import PrefillPart
from pdjax.scheduler.outbound import SendOrder
from pdjax.scheduler.outcomes import Outcome
from pdjax.scheduler.prefill import PrefillScheduler
from pdjax.scheduler.prompt_logprobs import LogprobCursor
from pdjax.transfer.base import KVSource, Wake
from pdjax.worker.gauges import prefill_gauges
from pdjax.worker.reader import PrefillStep, StepReader
from pdjax.worker.role import MAX_STEPS_IN_FLIGHT, Role
from pdjax.worker.tokens import token_out

EarlySends = Callable[[Sequence[PrefillPart]], Iterable[SendOrder]]


def no_early_sends(parts: Sequence[PrefillPart]) -> Iterable[SendOrder]:
    """Everything leaves after the step."""
    return ()


class PrefillRole(Role):
    """`early_sends`: what of a step's cached prefix leaves before the step; `scheduler.maybe_send_cached_prefix_chunk`, or
    `no_early_sends`. `page_bytes`: KV of one page over all layers."""

    def __init__(
        self, engine: StepEngine, scheduler: PrefillScheduler, source: KVSource, wake: Wake, early_sends: EarlySends, page_bytes: int
    ):
        self._early_sends = early_sends
        self._page_bytes = page_bytes
        self._engine = engine
        self._scheduler = scheduler
        self._source = source
        self._reader = StepReader(engine.read, wake, "prefill-reader")

    def submit(self, request: SequenceRequest) -> None:
        self._scheduler.submit(request)

    def abort(self, request_id: str) -> None:
        self._scheduler.abort(request_id)

    def turn(self, now_s: float) -> None:
        for step, output in self._reader.take():
            self._settle(step, output)
        self._scheduler.advance(now_s)
        self._send()
        while self._reader.num_in_flight < MAX_STEPS_IN_FLIGHT and (parts := self._scheduler.next_step()):
            self._launch(parts)
        self._scheduler.finish_sends()

    def take_outcomes(self) -> list[Outcome]:
        return self._scheduler.take_outcomes()

    def next_deadline_s(self) -> float | None:
        return self._scheduler.next_deadline_s()

    def load(self) -> WorkerLoad:
        scheduler = self._scheduler
        return WorkerLoad(
            ready=True,
            waiting=scheduler.num_waiting,
            running=scheduler.num_running,
            free_pages=scheduler.memory.pool.num_free + scheduler.memory.cache.num_evictable_pages,
            gauges={
                **prefill_gauges(scheduler, self._source.counters.snapshot(), self._page_bytes),
                "rooms_open": self._source.open_rooms(),
                "compilations_after_warm_up": self._engine.compilations_after_warm_up(),
            },
        )

    def check(self) -> None:
        self._scheduler.check()

    def close(self) -> None:
        self._reader.close()
        self._source.close()

    def _launch(self, parts: list[PrefillPart]) -> None:
        """Dispatch one step between the gathers that belong to it.

        A step takes the pool over (donation), so the order is all: first the cached prefix, which leaves while the step runs; then the
        step; then what it computes, before the next step takes the pool.
        """
        for part in parts:
            start_history(self._engine, part)
        self._gather_and_send(self._early_sends(parts))
        handle = self._engine.launch_prefill([prefill_seq(part) for part in parts])
        self._reader.put(PrefillStep(parts), handle)
        self._send()

    def _send(self) -> None:
        self._gather_and_send(self._scheduler.sends())

    def _gather_and_send(self, orders: Iterable[SendOrder]) -> None:
        for order in orders:
            order.sender.send(order.first_page, len(order.pages), self._engine.gather(order.pages))

    def _settle(self, step: PrefillStep, output: StepOutput) -> None:
        logprobs = LogprobCursor(output.prompt)
        for row, part in enumerate(step.parts):
            self._scheduler.settle(part, sampled(part, output, row), logprobs)


def prefill_seq(part: PrefillPart) -> PrefillSeq:
    answer, rows = part.seq.answer, part.rows
    return PrefillSeq(
        slot=part.seq.slot,
        tokens=answer.tokens[part.start : part.end],
        start=part.start,
        pages=part.seq.lease.pages,
        sampling=answer.request.sampling,
        output_index=answer.next_index if part.is_last else None,
        scored=range(rows.start - part.start, rows.stop - part.start),
        targets=answer.tokens[rows.start + 1 : rows.stop + 1] if rows else [],
    )


def sampled(part: PrefillPart, output: StepOutput, row: int) -> TokenOut | None:
    """The token that the last chunk of a prompt sampled; None for the other chunks."""
    answer = part.seq.answer
    if not part.is_last:
        return None
    token = token_out(output, row, answer.index_at(part.end), answer.request.sampling)
    return msgspec.structs.replace(token, cached_tokens=part.seq.num_cached)


def start_history(engine: StepEngine, part: PrefillPart) -> None:
    """Before a prompt's first chunk: tell the sampler what the sequence holds, where its sampling needs that."""
    answer = part.seq.answer
    if part.is_first and answer.request.sampling.uses_history:
        engine.set_history(part.seq.slot, *answer.split())
