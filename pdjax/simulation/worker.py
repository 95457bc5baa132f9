"""Simulated workers: the real schedulers, turned as the engine loop and the two roles turn them, over a simulated device."""

from __future__ import annotations

import abc
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from pdjax.protocol import Event, KVPoll, SequenceRequest, TokenOut, Tokens, WorkerInfo, WorkerLoad
from pdjax.scheduler.chunks import PrefillPart
from pdjax.scheduler.decode import DecodeScheduler
from pdjax.scheduler.outbound import Held, SendOrder
from pdjax.scheduler.outcomes import Outcome
from pdjax.scheduler.prefill import PrefillScheduler
from pdjax.scheduler.timeline import ClockRecorder
from pdjax.simulation.engine import Device, Engine
from pdjax.simulation.process import Chance, Process, Timeline
from pdjax.simulation.stages import check_stages
from pdjax.simulation.trace import Trace
from pdjax.simulation.wire import SinkPort, SourcePort

MAX_STEPS_IN_FLIGHT = 2
IDLE_TICKS = 8
"""Longest pause between two turns of a worker that holds anything."""

Listener = Callable[[Event | None], None]
"""Hears the events of one sequence on one worker; None: the stream broke."""


class Surroundings(NamedTuple):
    """What a worker lives in. `turn`: longest delay of a turn after its cause. `step_ticks()`: what the step that is launched takes."""

    timeline: Timeline
    chance: Chance
    trace: Trace
    turn: int
    step_ticks: Callable[[], int]


@dataclass(slots=True, eq=False)
class Stream:
    """The events of one sequence on one worker. `next_index`: of the token that comes next; None before the first."""

    room: int
    listener: Listener
    next_index: int | None = None

    def check_order(self, who: str, tokens: list[TokenOut]) -> None:
        """Each token comes once, without gaps."""
        for token in tokens:
            due = token.index if self.next_index is None else self.next_index
            assert token.index == due, f"{who} tells token {token.index} where {due} is due"
            self.next_index = due + 1


class Scheduler(Protocol):
    """What both schedulers have in common."""

    @property
    def num_waiting(self) -> int: ...
    @property
    def num_running(self) -> int: ...
    def submit(self, request: SequenceRequest) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def take_outcomes(self) -> list[Outcome]: ...
    def next_deadline_s(self) -> float | None: ...
    def check(self) -> None: ...


class Worker(Process, abc.ABC):
    """One process start of one worker.

    `num_forwards`: prompts computed to their end, by attempt. `streams`: of each sequence that has not ended.
    `is_silent`: it died without anybody being told. `is_leaving`: it has told the router that it shuts down.
    """

    def __init__(self, info: WorkerInfo, engine: Engine, around: Surroundings):
        super().__init__(around.timeline)
        self.info = info
        self.num_forwards: Counter[str] = Counter()
        self.streams: dict[str, Stream] = {}
        self.is_silent = False
        self.is_leaving = False
        self._around = around
        self._engine = engine
        self._device = Device(self, around.step_ticks, self.wake)
        self._mail: list[tuple[Callable, tuple]] = []
        self._is_turn_due = False
        self._is_timer_set = False

    @property
    def name(self) -> str:
        return self.info.peer.instance_id

    @property
    @abc.abstractmethod
    def scheduler(self) -> Scheduler: ...

    @abc.abstractmethod
    def open_rooms(self) -> int: ...

    @abc.abstractmethod
    def room_state(self, room: int) -> KVPoll | None:
        """Of this worker's end of the room; None where it has none."""

    @abc.abstractmethod
    def num_timelines(self) -> int:
        """Requests whose timeline is being kept."""

    @abc.abstractmethod
    def reached(self) -> dict[str, int]:
        """How often the scheduler did what only pressure or luck brings about."""

    @abc.abstractmethod
    def load(self) -> WorkerLoad: ...

    @abc.abstractmethod
    def _work(self) -> None:
        """One turn of the role."""

    @property
    def is_idle(self) -> bool:
        scheduler = self.scheduler
        return not (scheduler.num_waiting or scheduler.num_running or self._device.num_in_flight or self._mail or self._is_turn_due)

    def submit(self, request: SequenceRequest, listener: Listener) -> None:
        self._mail.append((self._submit, (request, listener)))
        self.wake()

    def abort(self, request_id: str) -> None:
        self._mail.append((self.scheduler.abort, (request_id,)))
        self.wake()

    def wake(self) -> None:
        if not self._is_turn_due:
            self._is_turn_due = True
            self.post(self._around.chance.upto(self._around.turn), self._turn)

    def die(self, is_silent: bool) -> None:
        """Everything that the process held is lost. `is_silent`: connections do not break, they only fall silent."""
        self.kill()
        self.is_silent = is_silent
        streams = list(self.streams.values())
        self.streams.clear()
        for stream in () if is_silent else streams:
            stream.listener(None)

    def _turn(self) -> None:
        self._is_turn_due = False
        mail, self._mail = self._mail, []
        for action, args in mail:
            action(*args)
        failed = [name for name, stream in self.streams.items() if self.room_state(stream.room) == KVPoll.FAILED]
        self._work()
        for request_id, event in self.scheduler.take_outcomes():
            self._deliver(request_id, event)
        self.scheduler.check()
        for name in failed:
            assert name not in self.streams, f"the room of {name} has failed, and a turn of {self.name} later it goes on"
        if not (self._is_timer_set or self.is_idle):
            self._is_timer_set = True
            deadline = self.scheduler.next_deadline_s()
            patience = IDLE_TICKS if deadline is None else min(IDLE_TICKS, max(1, int(deadline) - self.timeline.now))
            self.post(patience, self._look_up)

    def _look_up(self) -> None:
        self._is_timer_set = False
        self.wake()

    def _submit(self, request: SequenceRequest, listener: Listener) -> None:
        assert request.request_id not in self.streams, f"{request.request_id} is in use on {self.name}"
        self.streams[request.request_id] = Stream(request.room, listener)
        self.scheduler.submit(request)

    def _deliver(self, request_id: str, event: Event) -> None:
        self._around.trace.note(self.name, "%s: %s", request_id, event)
        assert request_id in self.streams, f"{self.name} tells {event} of {request_id}, which is unknown or has ended"
        stream = self.streams[request_id]
        state = self.room_state(stream.room)
        if isinstance(event, Tokens):
            assert state != KVPoll.BOOTSTRAPPING, f"{self.name} tells a token of {request_id} before bootstrap has ended"
            stream.check_order(f"{self.name}: {request_id}", event.tokens)
        else:
            check_stages(request_id, event)
            assert state in (None, KVPoll.FAILED, KVPoll.SUCCESS), f"{self.name} ends {request_id}, whose room is still {state!r}"
            del self.streams[request_id]
        stream.listener(event)


class PrefillWorker(Worker):
    """`early_send`: whether the cached prefix leaves before the step that computes the rest."""

    def __init__(self, info: WorkerInfo, engine: Engine, around: Surroundings, early_send: bool):
        super().__init__(info, engine, around)
        self._early_sends: Callable[[list[PrefillPart]], Iterable[SendOrder]] = lambda parts: ()
        self._is_early = early_send
        self._num_held_pages = 0

    def start(self, scheduler: PrefillScheduler, port: SourcePort) -> None:
        """Both need the worker's own `wake`, so they come after it."""
        self._scheduler, self._port = scheduler, port
        if self._is_early:
            self._early_sends = scheduler.maybe_send_cached_prefix_chunk

    @property
    def scheduler(self) -> PrefillScheduler:
        return self._scheduler

    def open_rooms(self) -> int:
        return self._port.open_rooms()

    def room_state(self, room: int) -> KVPoll | None:
        return self._port.state(room)

    def num_timelines(self) -> int:
        return _num_timelines(self._scheduler)

    def load(self) -> WorkerLoad:
        return _load(self._scheduler)

    def reached(self) -> dict[str, int]:
        counts = self._scheduler.counts
        return {
            "optimistic retries": counts.retries,
            "early-sent pages": counts.early_sent_pages,
            "held pages": self._num_held_pages,
            "cached tokens": counts.cached_tokens,
        }

    def stop(self) -> None:
        super().stop()
        self._port.stop()

    def resume(self) -> None:
        super().resume()
        self._port.resume()

    def die(self, is_silent: bool) -> None:
        super().die(is_silent)
        self._port.die(is_silent)

    def _work(self) -> None:
        scheduler = self._scheduler
        for parts, tokens in self._device.take():
            for part, token in zip(parts, tokens, strict=True):
                scheduler.settle(part, _sampled(part, token))
        scheduler.advance(self.timeline.now)
        self._send(scheduler.sends())
        while self._device.num_in_flight < MAX_STEPS_IN_FLIGHT and (parts := scheduler.next_step()):
            self._send(self._early_sends(parts))
            self._device.launch(parts, self._compute(parts))
            self._send(scheduler.sends())
        scheduler.finish_sends()

    def _compute(self, parts: list[PrefillPart]) -> list[int]:
        for part in parts:
            if part.is_last:
                self.num_forwards[part.seq.answer.request_id] += 1
            self._around.trace.note(self.name, "%s: computes %d..%d", part.seq.answer.request_id, part.start, part.end)
        return self._engine.prefill(parts)

    def _send(self, orders: Iterable[SendOrder]) -> None:
        for order in orders:
            is_held = isinstance(order.sender, Held)
            assert is_held or order.sender.can_send(), f"pages from {order.first_page} on are sent before bootstrap or beyond the window"
            self._num_held_pages += len(order.pages) if is_held else 0
            what = "holds" if is_held else "sends"
            self._around.trace.note(self.name, "%s %d pages from %d on", what, len(order.pages), order.first_page)
            order.sender.send(order.first_page, len(order.pages), self._engine.gather(order.pages))


class DecodeWorker(Worker):
    def __init__(self, info: WorkerInfo, engine: Engine, around: Surroundings):
        super().__init__(info, engine, around)
        self._is_prefill_next = True
        self._num_local = 0

    def start(self, scheduler: DecodeScheduler, port: SinkPort) -> None:
        """Both need the worker's own `wake`, so they come after it."""
        self._scheduler, self._port = scheduler, port

    @property
    def scheduler(self) -> DecodeScheduler:
        return self._scheduler

    def open_rooms(self) -> int:
        return self._port.open_rooms()

    def room_state(self, room: int) -> KVPoll | None:
        return self._port.state(room)

    def num_timelines(self) -> int:
        return _num_timelines(self._scheduler)

    def load(self) -> WorkerLoad:
        return _load(self._scheduler)

    def reached(self) -> dict[str, int]:
        return {"retractions": self._scheduler.num_retractions, "prompts computed on decode": self._num_local}

    def die(self, is_silent: bool) -> None:
        super().die(is_silent)
        self._port.die(is_silent)

    def _work(self) -> None:
        scheduler = self._scheduler
        for parts, tokens in self._device.take():
            self._settle(parts, tokens)
        for order in scheduler.installs():
            self._engine.install(order.pages, order.kv)
        scheduler.advance(self.timeline.now)
        while self._device.num_in_flight < MAX_STEPS_IN_FLIGHT and self._launch_next():
            pass

    def _launch_next(self) -> bool:
        """Local prefill and decode take turns."""
        scheduler = self._scheduler
        prefill_first, self._is_prefill_next = self._is_prefill_next, not self._is_prefill_next
        for is_prefill in (prefill_first, not prefill_first):
            if is_prefill and (prefill_parts := scheduler.next_prefill()):
                self._num_local += sum(part.is_last for part in prefill_parts)
                self._device.launch(prefill_parts, self._engine.prefill(prefill_parts))
                return True
            if not is_prefill and (decode_parts := scheduler.next_decode()):
                self._device.launch(decode_parts, self._engine.decode(decode_parts))
                return True
        return False

    def _settle(self, parts: list, tokens: list[int]) -> None:
        scheduler = self._scheduler
        for part, token in zip(parts, tokens, strict=True):
            if isinstance(part, PrefillPart):
                scheduler.settle_prefill(part, _sampled(part, token))
            else:
                scheduler.settle_decode(part, TokenOut(part.index, token))


def _sampled(part: PrefillPart, token: int) -> TokenOut | None:
    """What the last chunk of a prompt sampled; None for the other chunks."""
    return TokenOut(part.seq.answer.index_at(part.end), token) if part.is_last else None


def _load(scheduler: PrefillScheduler | DecodeScheduler) -> WorkerLoad:
    memory = scheduler.memory
    return WorkerLoad(
        ready=True,
        waiting=scheduler.num_waiting,
        running=scheduler.num_running,
        free_pages=memory.pool.num_free + memory.cache.num_evictable_pages,
    )


def _num_timelines(scheduler: PrefillScheduler | DecodeScheduler) -> int:
    recorder = scheduler.recorder
    return len(recorder) if isinstance(recorder, ClockRecorder) else 0
