"""One seed: a cluster, its router and its clients, run to the end, with every property checked on the way and at the end."""

from __future__ import annotations

import zlib
from collections import Counter
from typing import NamedTuple

from pdjax.protocol import Layout, Peer, WorkerInfo
from pdjax.scheduler.bootstrap import BootstrapQueue
from pdjax.scheduler.decode import DecodeLimits, DecodeScheduler
from pdjax.scheduler.faults import FaultHooks
from pdjax.scheduler.memory import KVMemory
from pdjax.scheduler.metadata import MetadataSlots
from pdjax.scheduler.pages import PagePool
from pdjax.scheduler.prefill import PrefillLimits, PrefillScheduler
from pdjax.scheduler.radix import NullCache, RadixCache
from pdjax.scheduler.slots import SlotPool
from pdjax.scheduler.timeline import NO_RECORDER, ClockRecorder, Recorder
from pdjax.simulation import router as simulated_router
from pdjax.simulation.call import Call
from pdjax.simulation.checks import check_answer, check_forwards, check_nothing_held
from pdjax.simulation.engine import Cost, Engine, Pace
from pdjax.simulation.process import Chance, Timeline
from pdjax.simulation.router import Router
from pdjax.simulation.scenario import (
    ANNOUNCE_TIMEOUT_TICKS,
    BOOTSTRAP_TIMEOUT_TICKS,
    HEARTBEAT_TICKS,
    HOLD_TIMEOUT_TICKS,
    LATE_TICKS,
    LEAVE_TICKS,
    NEVER,
    STALL_TIMEOUT_TICKS,
    Incident,
    Scenario,
    WorkerSize,
)
from pdjax.simulation.trace import Trace
from pdjax.simulation.wire import LinkDelays, Network, SinkPort, SourcePort
from pdjax.simulation.worker import DecodeWorker, PrefillWorker, Surroundings, Worker
from pdjax.transfer.base import TransferLimits

SETTLED_TICKS = 2 * (BOOTSTRAP_TIMEOUT_TICKS + HOLD_TIMEOUT_TICKS + LATE_TICKS)
"""After the last request has ended: by then every worker that runs has let go of everything."""

MAX_EVENTS = 40_000
"""Ten times what the busiest seed needs; more is a loop without progress."""

MAX_CONTEXT_TOKENS = 10_000


class Tally(NamedTuple):
    """What a seed was: faults by kind, ends of requests by outcome. `reached`: what the schedulers did that only pressure or luck brings
    about. `longest_wait`: of any request, as a share of the bound on it."""

    num_events: int
    faults: Counter[str]
    outcomes: Counter[str]
    reached: Counter[str]
    longest_wait: float


class World:
    """Owns everything of one seed. `run` once."""

    def __init__(self, scenario: Scenario, timeline: Timeline, trace: Trace):
        self.scenario = scenario
        self.timeline = timeline
        self.trace = trace
        self.chance = Chance(f"run {scenario.seed}")
        delays, policy = scenario.delays, scenario.policy
        limits = TransferLimits(
            max_chunks_in_flight=policy.window,
            bootstrap_timeout_s=BOOTSTRAP_TIMEOUT_TICKS,
            stall_timeout_s=STALL_TIMEOUT_TICKS,
            hold_timeout_s=HOLD_TIMEOUT_TICKS,
            announce_timeout_s=ANNOUNCE_TIMEOUT_TICKS if scenario.can_fail else NEVER,
        )
        link = LinkDelays(delays.announce, delays.chunk, delays.message, LATE_TICKS)
        self.network = Network(timeline, self.chance, link, scenario.link_faults, limits, trace)
        self.router = Router(simulated_router.Surroundings(timeline, self.chance, trace, delays.message), scenario.seed)
        self.calls = [Call(self.router, job, policy.max_attempts, self._ended) for job in scenario.jobs]
        self.places: list[Worker] = []
        self.ever: list[Worker] = []
        self.num_faults = self.network.num_faults
        self._num_open = len(self.calls)

    def run(self) -> Tally:
        """Raises AssertionError, or whatever the code under test raises, where a property does not hold."""
        self._plan()
        patient_until = max(job.at for job in self.scenario.jobs) + self.scenario.patience
        while self._num_open:
            assert self.timeline.step(), "nothing happens any more"
            assert self.timeline.now <= patient_until, f"every request should have ended by {patient_until}: {self._held()}"
            assert self.timeline.num_events < MAX_EVENTS, f"{MAX_EVENTS} events and no end: {self._held()}"
        settled_by = self.timeline.now + SETTLED_TICKS
        while not self._is_settled():
            assert self.timeline.now <= settled_by, f"{SETTLED_TICKS} ticks after the last request: {self._held()}"
            assert self.timeline.step(), "nothing happens any more"
        self._check_end()
        return self._tally()

    def _plan(self) -> None:
        sizes = [*self.scenario.prefills, *self.scenario.decodes]
        for place, size in enumerate(sizes):
            self.places.append(self._spawn(place, size))
        for call in self.calls:
            self.timeline.at(call.job.at, call.begin)
        for incident in self.scenario.incidents:
            self.timeline.at(incident.at, self._befall, incident, sizes[incident.place])

    def _ended(self) -> None:
        self._num_open -= 1

    # -- workers --

    def _spawn(self, place: int, size: WorkerSize) -> Worker:
        """A new process start at a place; it joins after its first message has reached the router."""
        is_prefill = place < len(self.scenario.prefills)
        side = "prefill" if is_prefill else "decode"
        peer = Peer(f"{side}:{place}", f"{side}{place}.{len(self.ever)}")
        page_size = self.scenario.policy.page_size
        layout = Layout(model_fingerprint="m", page_size=page_size, kv_dtype="chain", num_layers=1, num_kv_heads=1, head_dim=1)
        info = WorkerInfo(
            role=side,
            peer=peer,
            layout=layout,
            model_name="m",
            max_context_tokens=MAX_CONTEXT_TOKENS,
            max_prompt_tokens=MAX_CONTEXT_TOKENS,
            max_running=size.slots,
        )
        worker = self._build_prefill(info, size) if is_prefill else self._build_decode(info, size)
        self.ever.append(worker)
        self.timeline.at(self.chance.upto(2), self._beat, worker)
        return worker

    def _surroundings(self, engine: Engine, cost: Cost | None) -> Surroundings:
        delays, chance = self.scenario.delays, self.chance
        step_ticks = (lambda: 1 + chance.upto(delays.step)) if cost is None else Pace(engine, cost)
        return Surroundings(self.timeline, chance, self.trace, delays.turn, step_ticks)

    def _build_prefill(self, info: WorkerInfo, size: WorkerSize) -> PrefillWorker:
        policy = self.scenario.policy
        engine, cost = Engine(size.pages, policy.page_size), self.scenario.cost
        worker = PrefillWorker(info, engine, self._surroundings(engine, cost and cost.prefill), policy.early_send)
        port = SourcePort(self.network, worker, info.layout, info.peer, worker.wake)
        limits = PrefillLimits(
            max_step_tokens=policy.step_tokens,
            max_step_seqs=policy.step_seqs,
            max_chunk_pages=policy.chunk_pages,
            max_queue=policy.max_queue,
            max_context_tokens=MAX_CONTEXT_TOKENS,
            drop_on_miss=policy.drop_on_miss,
            max_held_pages=policy.max_held_pages,
        )
        slots, metadata, recorder = SlotPool(size.slots, "request"), MetadataSlots(size.metadata), self._recorder()
        faults = FaultHooks(self._force_retry, self._fail_poll)
        bootstrap = BootstrapQueue(port, metadata, policy.page_size, policy.retries, faults, recorder, policy.grace, policy.backoff)
        worker.start(PrefillScheduler(self._memory(size), slots, metadata, bootstrap, limits, recorder), port)
        return worker

    def _build_decode(self, info: WorkerInfo, size: WorkerSize) -> DecodeWorker:
        policy = self.scenario.policy
        engine, cost = Engine(size.pages, policy.page_size), self.scenario.cost
        worker = DecodeWorker(info, engine, self._surroundings(engine, cost and cost.decode))
        port = SinkPort(self.network, worker, info.layout, info.peer, worker.wake)
        limits = DecodeLimits(policy.step_tokens, policy.step_seqs, policy.max_queue, MAX_CONTEXT_TOKENS, policy.reserve_tokens)
        slots, metadata = SlotPool(size.slots, "request"), MetadataSlots(size.metadata)
        worker.start(DecodeScheduler(self._memory(size), slots, metadata, port, limits, self._recorder()), port)
        return worker

    def _recorder(self) -> Recorder:
        return ClockRecorder(self.timeline.clock) if self.scenario.policy.is_recorded else NO_RECORDER

    def _memory(self, size: WorkerSize) -> KVMemory:
        policy = self.scenario.policy
        pool = PagePool(size.pages)
        return KVMemory(pool, RadixCache(pool, policy.page_size) if policy.prefix_cache else NullCache(), policy.page_size)

    def _force_retry(self, request_id: str) -> bool:
        """Decided by the request's name alone."""
        share = zlib.crc32(f"{self.scenario.seed} {request_id}".encode()) / 2**32
        is_forced = share < self.scenario.scheduler_faults.force_retry
        self.num_faults["forced retry"] += is_forced
        return is_forced

    def _fail_poll(self) -> bool:
        return self.network.is_faulty("failed poll", self.scenario.scheduler_faults.fail_poll)

    def _beat(self, worker: Worker) -> None:
        """Membership: a sign of life every few ticks, while the process runs."""
        if worker.is_dead or worker.is_leaving:
            return
        if not worker.is_stopped:
            self.router.heartbeat(worker)
        self.timeline.at(HEARTBEAT_TICKS, self._beat, worker)

    # -- incidents --

    def _befall(self, incident: Incident, size: WorkerSize) -> None:
        worker = self.places[incident.place]
        if worker.is_dead or worker.is_stopped or worker.is_leaving:
            return
        self.num_faults[f"{incident.kind}{', silent' if incident.is_silent and incident.kind == 'kill' else ''}"] += 1
        self.trace.note("world", "%s %s", incident.kind, worker.name)
        if incident.kind == "stop":
            worker.stop()
            if incident.until is not None:
                self.timeline.at(incident.until - incident.at, self._resume, worker)
            return
        if incident.kind == "leave":
            self.router.leave(worker)
            self.timeline.at(LEAVE_TICKS, self._die, worker, False)
        else:
            self._die(worker, incident.is_silent)
        if incident.until is not None:
            self.timeline.at(incident.until - incident.at, self._succeed, incident.place, size)

    def _die(self, worker: Worker, is_silent: bool) -> None:
        if worker.is_dead:
            return
        worker.die(is_silent)
        if not is_silent:
            self.timeline.at(self.chance.upto(self.scenario.delays.message), self.router.lose, worker)

    def _resume(self, worker: Worker) -> None:
        self.trace.note("world", "%s goes on", worker.name)
        worker.resume()

    def _succeed(self, place: int, size: WorkerSize) -> None:
        self._die(self.places[place], is_silent=False)  # one that leaves may not be through yet
        self.trace.note("world", "a new worker starts at place %d", place)
        self.places[place] = self._spawn(place, size)

    # -- properties --

    def _running(self) -> list[Worker]:
        return [worker for worker in self.ever if not (worker.is_dead or worker.is_stopped)]

    def _is_settled(self) -> bool:
        return not self.router.fleet.num_outstanding and all(
            worker.is_idle and not worker.streams and not worker.open_rooms() for worker in self._running()
        )

    def _held(self) -> str:
        busy = [
            f"{worker.name}: {worker.scheduler.num_waiting} waiting, {worker.scheduler.num_running} running, {worker.open_rooms()} rooms, "
            f"streams {list(worker.streams)}"
            for worker in self._running()
            if not worker.is_idle or worker.streams or worker.open_rooms()
        ]
        open_calls = [call.job.name for call in self.calls if call.outcome is None]
        return f"open requests {open_calls}, {self.router.fleet.num_outstanding} dispatches; {'; '.join(busy) or 'workers idle'}"

    def _check_end(self) -> None:
        for worker in self._running():
            check_nothing_held(worker)
        for worker in self.ever:
            check_forwards(worker, self.scenario.policy.retries)
        for member in self.router.fleet.members():
            assert not member.outstanding_sequences and not member.outstanding_tokens, f"{member.instance_id} has outstanding work"
        for call in self.calls:
            check_answer(call, self.scenario)

    def _tally(self) -> Tally:
        waits = [(call.ended_at - call.job.at) / self.scenario.patience for call in self.calls]
        outcomes = Counter(call.outcome or "" for call in self.calls)
        reached: Counter[str] = Counter()
        for worker in self.ever:
            reached.update(worker.reached())
        return Tally(self.timeline.num_events, self.num_faults, outcomes, reached, max(waits))
