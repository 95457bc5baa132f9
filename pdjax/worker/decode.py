"""The decode role: receives KV, generates; computes prompts itself where no prefill worker does."""

from __future__ import annotations

from pdjax.engine.base import StepEngine
from pdjax.engine.batch import DecodeSeq, StepOutput
from pdjax.protocol import SequenceRequest, WorkerLoad
from pdjax.scheduler.decode import DecodeScheduler
from pdjax.scheduler.decode_states import DecodePart, Running
from pdjax.scheduler.outcomes import Outcome
from pdjax.scheduler.prompt_logprobs import LogprobCursor
from pdjax.transfer.base import KVSink, Wake
from pdjax.worker.gauges import decode_gauges
from pdjax.worker.prefill import prefill_seq, sampled, start_history
from pdjax.worker.reader import DecodeStep, PrefillStep, Step, StepReader
from pdjax.worker.role import MAX_STEPS_IN_FLIGHT, Role
from pdjax.worker.tokens import token_out


class DecodeRole(Role):
    def __init__(self, engine: StepEngine, scheduler: DecodeScheduler, sink: KVSink, wake: Wake):
        self._engine = engine
        self._scheduler = scheduler
        self._sink = sink
        self._reader = StepReader(engine.read, wake, "decode-reader")
        self._is_prefill_next = True

    def submit(self, request: SequenceRequest) -> None:
        self._scheduler.submit(request)

    def abort(self, request_id: str) -> None:
        self._scheduler.abort(request_id)

    def turn(self, now_s: float) -> None:
        for step, output in self._reader.take():
            self._settle(step, output)
        for order in self._scheduler.installs():
            self._engine.install(order.pages, order.kv)
        for seq in self._scheduler.advance(now_s):
            self._start_history(seq)
        while self._reader.num_in_flight < MAX_STEPS_IN_FLIGHT and (step := self._next_step()):
            self._launch(step)

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
                **decode_gauges(scheduler, self._sink.counters.snapshot()),
                "rooms_open": self._sink.open_rooms(),
                "compilations_after_warm_up": self._engine.compilations_after_warm_up(),
            },
        )

    def check(self) -> None:
        self._scheduler.check()

    def close(self) -> None:
        self._reader.close()
        self._sink.close()

    def _next_step(self) -> Step | None:
        """Local prefill and decode take turns, so that neither starves the other."""
        prefill_first, self._is_prefill_next = self._is_prefill_next, not self._is_prefill_next
        for is_prefill in (prefill_first, not prefill_first):
            if is_prefill and (prefill_parts := self._scheduler.next_prefill()):
                return PrefillStep(prefill_parts)
            if not is_prefill and (decode_parts := self._scheduler.next_decode()):
                return DecodeStep(decode_parts)
        return None

    def _launch(self, step: Step) -> None:
        if isinstance(step, PrefillStep):
            for part in step.parts:
                start_history(self._engine, part)
            handle = self._engine.launch_prefill([prefill_seq(part) for part in step.parts])
        else:
            handle = self._engine.launch_decode([_decode_seq(part) for part in step.parts])
        self._reader.put(step, handle)

    def _settle(self, step: Step, output: StepOutput) -> None:
        if isinstance(step, PrefillStep):
            logprobs = LogprobCursor(output.prompt)
            for row, part in enumerate(step.parts):
                self._scheduler.settle_prefill(part, sampled(part, output, row), logprobs)
        else:
            for row, part in enumerate(step.parts):
                sampling = part.seq.answer.request.sampling
                self._scheduler.settle_decode(part, token_out(output, row, part.index, sampling))

    def _start_history(self, seq: Running) -> None:
        if seq.answer.request.sampling.uses_history:
            self._engine.set_history(seq.slot, *seq.answer.split())


def _decode_seq(part: DecodePart) -> DecodeSeq:
    return DecodeSeq(
        slot=part.seq.slot,
        token=part.token,
        position=part.position,
        pages=part.seq.lease.pages,
        sampling=part.seq.answer.request.sampling,
        output_index=part.index,
    )
