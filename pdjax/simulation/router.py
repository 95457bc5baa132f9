"""A simulated router: the real fleet, policy, merge and sequence, driven as `pdjax.router.router` and `pdjax.router.attempt` drive them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from pdjax.protocol import Event, Failed, SequenceRequest, Tokens
from pdjax.router.fleet import Dispatch, Fleet, Member
from pdjax.router.merge import Merge, Side
from pdjax.router.policy import Pair, PairPolicy
from pdjax.router.sequence import PairRequests, Sequence
from pdjax.simulation.process import Chance, Timeline
from pdjax.simulation.scenario import HEARTBEAT_TIMEOUT_TICKS, STALL_TIMEOUT_TICKS
from pdjax.simulation.trace import Trace
from pdjax.simulation.worker import Worker

SETTLE_TICKS = 25
"""How long a sequence that is over on decode waits for prefill's last word."""
ROOM_BITS = 62

BROKEN = Failed(kind="internal", message="the stream ended without a result", retriable=True)


class Surroundings(NamedTuple):
    """What the router lives in. `message`: longest delay of a message, either way."""

    timeline: Timeline
    chance: Chance
    trace: Trace
    message: int


class Half:
    """One worker's part of an attempt: a call that carries one request there and events back, both in order."""

    def __init__(self, around: Surroundings, worker: Worker, dispatch: Dispatch, fleet: Fleet):
        self.worker = worker
        self.dispatch = dispatch
        self.last_event_s = around.timeline.now
        self.is_open = True
        self._around = around
        self._fleet = fleet
        self._name = ""
        self._there_at = self._back_at = around.timeline.now
        self._hear: Callable[[Event], None] | None = None

    @property
    def member(self) -> Member:
        return self.dispatch.member

    def submit(self, request: SequenceRequest, hear: Callable[[Event], None]) -> None:
        """`hear` gets each event once it is here, until `cancel`."""
        self._hear = hear
        # As the worker's service does it: attempts at one request may overlap on a worker for a moment.
        attempt = msgspec.structs.replace(request, request_id=f"{request.request_id}@{request.room:x}")
        self._name = attempt.request_id
        self._there(self._submit, attempt)

    def cancel(self) -> None:
        """The call ends from this side, whatever has come of it."""
        self._hear = None
        self._fleet.release(self.dispatch)
        self._there(self._abort)

    def _there(self, action: Callable, *args: object) -> None:
        timeline = self._around.timeline
        self._there_at = max(timeline.now + self._around.chance.upto(self._around.message), self._there_at)
        timeline.at(self._there_at - timeline.now, action, *args)

    def _submit(self, request: SequenceRequest) -> None:
        if self.worker.is_dead and not self.worker.is_silent:
            self._back(None)
        self.worker.run(self.worker.submit, request, self._back)

    def _abort(self) -> None:
        self.worker.run(self.worker.abort, self._name)

    def _back(self, event: Event | None) -> None:
        timeline = self._around.timeline
        self._back_at = max(timeline.now + self._around.chance.upto(self._around.message), self._back_at)
        timeline.at(self._back_at - timeline.now, self._arrive, event or BROKEN)

    def _arrive(self, event: Event) -> None:
        if not isinstance(event, Tokens):
            self._fleet.release(self.dispatch)
        if self._hear is not None and self.is_open:
            self.is_open = isinstance(event, Tokens)
            self.last_event_s = self._around.timeline.now
            self._hear(event)


class Attempt:
    """One attempt at one sequence. `merge` says what has become of it."""

    def __init__(self, pair: Pair, requests: PairRequests, merge: Merge, halves: dict[Side, Half]):
        self.pair = pair
        self.requests = requests
        self.merge = merge
        self.halves = halves
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True
        for half in self.halves.values():
            half.cancel()


class Router:
    """Owns membership and rooms. `num_in_flight`: calls that have not ended."""

    def __init__(self, around: Surroundings, prefix: int):
        """`prefix` keeps rooms of different seeds apart."""
        self.around = around
        self.fleet = Fleet(around.timeline.clock, HEARTBEAT_TIMEOUT_TICKS, STALL_TIMEOUT_TICKS)
        self.policy = PairPolicy(self.fleet, 256)
        self.attempts: dict[Attempt, Callable[[], None]] = {}
        self._workers: dict[str, Worker] = {}
        self._links: dict[str, int] = {}
        self._next_room = (prefix * 1000) % (1 << ROOM_BITS)

    def join(self, worker: Worker) -> None:
        self._workers[worker.name] = worker
        try:
            member = self.fleet.join(worker.info)
        except ValueError:
            return  # has been replaced; a stopped one that wakes up may try
        self._links[worker.name] = member.link
        self.around.trace.note("router", "%s joins", worker.name)
        for watch in list(self.attempts.values()):
            watch()

    def heartbeat(self, worker: Worker) -> None:
        """A sign of life from `worker`; it joins anew where it is no member any more."""
        if not self.fleet.heartbeat(worker.name, worker.load()):
            self.join(worker)
            self.fleet.heartbeat(worker.name, worker.load())

    def leave(self, worker: Worker) -> None:
        """The worker shuts down in order."""
        worker.is_leaving = True
        self.fleet.leave(worker.name)
        self.fleet.prune()

    def lose(self, worker: Worker) -> None:
        """The membership stream broke."""
        if worker.name in self._links:
            self.fleet.lose(worker.name, self._links[worker.name])
            self.fleet.prune()

    def start(self, sequence: Sequence, pair: Pair) -> Attempt:
        """Dispatch to both workers at the same time; the caller submits."""
        self._next_room += 1
        requests = sequence.requests(pair, self._next_room)
        merge = Merge(len(sequence.tokens), sequence.sampling.max_tokens, has_prefill=pair.prefill is not None)
        halves = {}
        if pair.prefill is not None:
            halves[Side.PREFILL] = self._half(pair.prefill, pair.prefill_tokens)
        halves[Side.DECODE] = self._half(pair.decode, len(requests.decode.prompt))
        names = " and ".join(half.worker.name for half in halves.values())
        self.around.trace.note("router", "%s: room %x, %s", sequence.request_id, self._next_room, names)
        return Attempt(pair, requests, merge, halves)

    def close(self, attempt: Attempt) -> None:
        attempt.close()
        self.attempts.pop(attempt, None)
        self.fleet.prune()

    def _half(self, member: Member, tokens: int) -> Half:
        return Half(self.around, self._workers[member.instance_id], self.fleet.dispatch(member, tokens), self.fleet)
