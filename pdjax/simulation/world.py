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
from pdjax.simulation import router as simulated_router
from pdjax.simulation.call import Call
from pdjax.simulation.engine import Engine
from pdjax.simulation.process import Chance, Timeline
from pdjax.simulation.router import HEARTBEAT_TICKS, Router
from pdjax.simulation.scenario import Incident, Job, Scenario, WorkerSize
from pdjax.simulation.trace import Trace
from pdjax.simulation.wire import LinkDelays, Network, SinkPort, SourcePort
from pdjax.simulation.worker import DecodeWorker, PrefillWorker, Surroundings, Worker
from pdjax.transfer.base import TransferLimits

BOOTSTRAP_TIMEOUT_TICKS = 150
STALL_TIMEOUT_TICKS = 60
HOLD_TIMEOUT_TICKS = 120
LATE_TICKS = 80
"""How much longer a message takes that is held back."""

SETTLED_TICKS = 2 * (BOOTSTRAP_TIMEOUT_TICKS + HOLD_TIMEOUT_TICKS + LATE_TICKS)
"""After the last request has ended: by then every worker that runs has let go of everything."""

MAX_EVENTS = 100_000
"""Many times what any seed needs; more is a loop without progress."""

MAX_CONTEXT_TOKENS = 10_000


class Tally(NamedTuple):
    """What a seed was: `faults` by kind, ends of requests by outcome; `longest_wait`: of a calm seed, as a share of its bound."""

    num_events: int
    faults: Counter[str]
    outcomes: Counter[str]
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
        )
        link = LinkDelays(delays.announce, delays.chunk, delays.message, LATE_TICKS)
        self.network = Network(timeline, self.chance, link, scenario.link_faults, limits, trace)
        self.router = Router(simulated_router.Surroundings(timeline, self.chance, trace, delays.message), scenario.seed)
        self.calls = [Call(self.router, job, policy.max_attempts, self._ended) for job in scenario.jobs]
        self.places: list[Worker] = []
        self.ever: list[Worker] = []
        self.num_faults = self.network.num_faults
        self._num_open = len(self.calls)
        self._is_forced: dict[str, bool] = {}

    def run(self) -> Tally:
        """Raises AssertionError, or whatever the code under test raises, where a property does not hold."""
        self._plan()
        while self._num_open:
            assert self.timeline.step(), "nothing happens any more"
            self._check_progress()
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

    def _check_progress(self) -> None:
        assert self.timeline.num_events < MAX_EVENTS, f"{MAX_EVENTS} events and no end: {self._held()}"

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

    def _surroundings(self) -> Surroundings:
        delays = self.scenario.delays
        return Surroundings(self.timeline, self.chance, self.trace, delays.turn, delays.step)

    def _build_prefill(self, info: WorkerInfo, size: WorkerSize) -> PrefillWorker:
        policy = self.scenario.policy
        worker = PrefillWorker(info, Engine(size.pages, policy.page_size), self._surroundings(), policy.early_send)
        port = SourcePort(self.network, worker, info.layout, info.peer, worker.wake)
        limits = PrefillLimits(
            policy.step_tokens, policy.step_seqs, policy.chunk_pages, policy.max_queue, MAX_CONTEXT_TOKENS, policy.drop_on_miss
        )
        metadata = MetadataSlots(size.metadata)
        bootstrap = BootstrapQueue(port, metadata, policy.page_size, policy.retries, FaultHooks(self._force_retry, self._fail_poll))
        worker.start(PrefillScheduler(self._memory(size), SlotPool(size.slots, "request"), metadata, bootstrap, limits), port)
        return worker

    def _build_decode(self, info: WorkerInfo, size: WorkerSize) -> DecodeWorker:
        policy = self.scenario.policy
        worker = DecodeWorker(info, Engine(size.pages, policy.page_size), self._surroundings())
        port = SinkPort(self.network, worker, info.layout, info.peer, worker.wake)
        limits = DecodeLimits(policy.step_tokens, policy.step_seqs, policy.max_queue, MAX_CONTEXT_TOKENS, policy.reserve_tokens)
        slots, metadata = SlotPool(size.slots, "request"), MetadataSlots(size.metadata)
        worker.start(DecodeScheduler(self._memory(size), slots, metadata, port, limits), port)
        return worker

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
        if worker.is_dead:
            return
        if not worker.is_stopped:
            self.router.heartbeat(worker)
        self.timeline.at(HEARTBEAT_TICKS, self._beat, worker)

    # -- incidents --

    def _befall(self, incident: Incident, size: WorkerSize) -> None:
        worker = self.places[incident.place]
        if worker.is_dead or worker.is_stopped:
            return
        self.num_faults[f"{incident.kind}{', silent' if incident.is_silent and incident.kind == 'kill' else ''}"] += 1
        self.trace.note("world", "%s %s", incident.kind, worker.name)
        if incident.kind == "stop":
            worker.stop()
            if incident.until is not None:
                self.timeline.at(incident.until - incident.at, self._resume, worker)
            return
        worker.die(incident.is_silent)
        if not incident.is_silent:
            self.timeline.at(self.chance.upto(self.scenario.delays.message), self.router.lose, worker)
        if incident.until is not None:
            self.timeline.at(incident.until - incident.at, self._succeed, incident.place, size)

    def _resume(self, worker: Worker) -> None:
        self.trace.note("world", "%s goes on", worker.name)
        worker.resume()

    def _succeed(self, place: int, size: WorkerSize) -> None:
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
            for attempt, count in worker.num_forwards.items():
                most = self.scenario.policy.retries + 1
                assert count <= most, f"{attempt} was computed {count} times on {worker.name}, at most {most} are allowed"
        for member in self.router.fleet.members():
            assert not member.outstanding_sequences and not member.outstanding_tokens, f"{member.instance_id} has outstanding work"
        for call in self.calls:
            check_answer(call, self.scenario)

    def _tally(self) -> Tally:
        waits = [(call.ended_at - call.job.at) / self.scenario.patience for call in self.calls]
        outcomes = Counter(call.outcome or "" for call in self.calls)
        return Tally(self.timeline.num_events, self.num_faults, outcomes, 0.0 if self.scenario.can_fail else max(waits))


def check_nothing_held(worker: Worker) -> None:
    """On a worker that has nothing to do: slots, pages, rows, rooms, deadlines and streams are all back; the tree lets go of every page."""
    scheduler = worker.scheduler
    assert isinstance(scheduler, PrefillScheduler | DecodeScheduler), worker.name
    scheduler.check()
    memory = scheduler.memory
    held = {
        "request slots": scheduler.slots.num_held,
        "metadata slots": scheduler.metadata.num_held,
        "private pages": memory.num_private,
        "locked pages": memory.cache.num_pages - memory.cache.num_evictable_pages,
        "rooms": worker.open_rooms(),
        "streams": len(worker.streams),
        "deadlines": int(scheduler.next_deadline_s() is not None),
    }
    assert not any(held.values()), f"{worker.name} still holds {held}"
    memory.cache.reset()
    assert memory.pool.num_free == memory.pool.total, f"{worker.name} has lost {memory.pool.total - memory.pool.num_free} pages"


def check_answer(call: Call, scenario: Scenario) -> None:
    """The end of a request: a whole answer, or one that breaks off for a reason that the scenario explains."""
    job, num_tokens = call.job, len(call.tokens)
    where = f"{job.name} ended with {call.outcome} at {call.ended_at} after {num_tokens} of {len(call.expected)} tokens"
    if call.outcome == "ok":
        check_whole(call, where)
    elif call.outcome == "deadline":
        assert call.ended_at >= job.deadline, f"{where}, its deadline is {job.deadline}"
    elif call.outcome == "cancelled":
        assert job.cancel_at is not None and call.ended_at >= job.cancel_at, where
    elif call.outcome == "over_capacity":
        assert scenario.policy.max_queue < len(scenario.jobs), where
    else:
        assert scenario.can_fail and call.outcome in ("no_worker", "worker_failed"), where
    if not scenario.can_fail:
        assert call.sequence.num_failed == 0, f"{where}: {call.sequence.last_failure}, and nothing went wrong"
        waited = call.ended_at - job.at
        assert waited <= scenario.patience, f"{where}: it waited {waited} ticks, {scenario.patience} are enough"


def check_whole(call: Call, where: str) -> None:
    """Every token is there (each was compared when it came), and the end says why it is one."""
    finished = call.finished
    assert finished is not None and len(call.tokens) == len(call.expected), where
    sampling = call.job.sampling
    is_stop = call.expected[-1] in sampling.stop_token_ids and len(call.expected) >= sampling.min_tokens
    assert finished.reason == ("stop" if is_stop else "length"), f"{where}: the reason is {finished.reason}"
    assert finished.stop_token == (call.expected[-1] if is_stop else None), f"{where}: the stop token is {finished.stop_token}"
    assert 0 <= finished.cached_tokens <= len(call.job.prompt), f"{where}: {finished.cached_tokens} cached tokens"


__all__ = ["Job", "Tally", "World", "check_answer", "check_nothing_held"]
