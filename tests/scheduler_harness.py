"""Both schedulers, a link and the simulation's engine (`pdjax.simulation.engine`, whose arithmetic can be done by hand), in one thread
under a clock that the test owns: for tests that set up one case and look inside. `pdjax.simulation` runs whole clusters.

Steps run when they are launched, but their results come back only `depth - 1` steps later, as with a real device.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field

from pdjax.protocol import KVPoll, Peer, PromptToken, Sampling, SequenceRequest, TokenOut
from pdjax.scheduler.bootstrap import BootstrapQueue
from pdjax.scheduler.decode import DecodeLimits, DecodeScheduler
from pdjax.scheduler.faults import NO_FAULTS
from pdjax.scheduler.graces import Backoff
from pdjax.scheduler.memory import KVMemory
from pdjax.scheduler.metadata import MetadataSlots
from pdjax.scheduler.pages import PagePool
from pdjax.scheduler.prefill import PrefillLimits, PrefillScheduler
from pdjax.scheduler.prompt_logprobs import NO_LOGPROBS, LogprobCursor
from pdjax.scheduler.radix import RadixCache
from pdjax.scheduler.slots import SlotPool
from pdjax.scheduler.timeline import NO_RECORDER, ClockRecorder
from pdjax.simulation import arithmetic
from pdjax.simulation.arithmetic import next_token
from pdjax.simulation.engine import Engine

BOOTSTRAP_TIMEOUT = 300
PEER = Peer("prefill:1", "p1")

__all__ = ["Cluster", "expected_answer", "next_token"]


def expected_answer(prompt: list[int], max_tokens: int, stop: tuple[int, ...] = ()) -> list[int]:
    return arithmetic.expected_answer(prompt, Sampling(max_tokens=max_tokens, stop_token_ids=tuple(stop)))


def prompt_logprob(prefix: list[int]) -> float:
    """What the harness says of the last token of `prefix`: every other prefix has another number."""
    return -float(arithmetic.extend(arithmetic.START, prefix))


class FakeRows:
    """The scored rows of a step, as `StepRows`: row i is that of `prefixes[i]`, the tokens up to the scored one."""

    def __init__(self, parts):
        self.prefixes = [part.seq.answer.tokens[: row + 2] for part in parts for row in part.rows]

    def __len__(self):
        return len(self.prefixes)

    def read(self, index, position, token, num_top):
        return PromptToken(position, token, prompt_logprob(self.prefixes[index]), [(position, -1.0)] * num_top)


@dataclass
class Chunk:
    first_page: int
    num_pages: int
    kv: object


@dataclass
class Room:
    """Both ends of one transfer. `delay`: link ticks until what was handed over can be taken."""

    link: FakeLink
    room: int
    prefix_tokens: int | None = None
    state: KVPoll = KVPoll.BOOTSTRAPPING
    receiver_state: KVPoll = KVPoll.BOOTSTRAPPING
    message: str | None = None
    in_flight: deque = field(default_factory=deque)
    row: bytes | None = None
    num_sent_pages: int = 0
    opened: int = 0

    def fail_both(self, message):
        if self.state != KVPoll.SUCCESS:
            self.state = KVPoll.FAILED
        if self.receiver_state != KVPoll.SUCCESS:
            self.receiver_state = KVPoll.FAILED
        self.message = self.message or message


class Sender:
    def __init__(self, room: Room):
        self.r = room

    def poll(self):
        if self.r.state == KVPoll.BOOTSTRAPPING and self.r.link.now > self.r.opened + BOOTSTRAP_TIMEOUT:
            self.r.fail_both("bootstrap timed out")
        return self.r.state

    @property
    def decode_prefix_tokens(self):
        return self.r.prefix_tokens

    def can_send(self):
        return KVPoll.WAITING_FOR_INPUT <= self.r.state < KVPoll.SUCCESS and len(self.r.in_flight) < self.r.link.window

    def send(self, first_page, num_pages, kv):
        assert self.can_send()
        self.r.state = KVPoll.TRANSFERRING
        self.r.num_sent_pages += num_pages
        self.r.in_flight.append((self.r.link.now + self.r.link.delay(), Chunk(first_page, num_pages, kv)))

    def finish(self, metadata):
        assert self.r.row is None, "finished twice"
        self.r.row = metadata

    def fail(self, message):
        self.r.fail_both(message)

    def failure(self):
        return self.r.message if self.r.state == KVPoll.FAILED else None


class Receiver:
    def __init__(self, room: Room):
        self.r = room

    def poll(self):
        if self.r.receiver_state == KVPoll.TRANSFERRING and self.r.row is not None and not self.r.in_flight:
            self.r.receiver_state = self.r.state = KVPoll.SUCCESS
        return self.r.receiver_state

    def take(self):
        taken = []
        while self.r.receiver_state != KVPoll.FAILED and self.r.in_flight and self.r.in_flight[0][0] <= self.r.link.now:
            taken.append(self.r.in_flight.popleft()[1])
        return taken

    def metadata(self):
        assert self.r.receiver_state == KVPoll.SUCCESS
        return self.r.row

    def abort(self):
        self.r.fail_both("the receiver went away")

    def failure(self):
        return self.r.message if self.r.receiver_state == KVPoll.FAILED else None

    def is_refused(self):
        return False


class FakeLink:
    def __init__(self, seed=0, max_delay=0, window=2):
        self.rng = random.Random(seed)
        self.max_delay, self.window, self.now = max_delay, window, 0
        self.rooms: dict[int, Room] = {}
        self.has_sender: set[int] = set()

    def delay(self):
        return self.rng.randint(0, self.max_delay)

    def _room(self, room) -> Room:
        return self.rooms.setdefault(room, Room(self, room, opened=self.now))

    def create_sender(self, room):
        if room in self.has_sender:
            raise ValueError(f"room {room} is taken")
        self.has_sender.add(room)
        self._meet(self._room(room))
        return Sender(self._room(room))

    def take_changed(self):
        """Every room, however often: the queue may not rely on being told once."""
        return list(self.rooms)

    def open(self, room, source, decode_prefix_tokens):
        entry = self._room(room)
        entry.prefix_tokens = decode_prefix_tokens
        self._meet(entry)
        return Receiver(entry)

    def _meet(self, entry):
        if entry.room in self.has_sender and entry.prefix_tokens is not None and entry.state == KVPoll.BOOTSTRAPPING:
            entry.state, entry.receiver_state = KVPoll.WAITING_FOR_INPUT, KVPoll.TRANSFERRING


class Side:
    """One worker: a scheduler, an engine, and steps whose results are still out."""

    def __init__(self, depth):
        self.depth = depth
        self.in_flight: deque = deque()

    def launch(self, kind, parts, tokens):
        self.in_flight.append((kind, parts, tokens))

    def due(self, is_idle):
        while self.in_flight and (len(self.in_flight) >= self.depth or is_idle):
            yield self.in_flight.popleft()


class Cluster:
    """One prefill and one decode worker. `tokens` and `ends` collect, per request, tokens by index and how it ended on each side;
    `prompts` the log probabilities of its prompt, `num_scored` the rows that steps computed for them."""

    def __init__(
        self,
        *,
        page_size=4,
        prefill_pages=64,
        decode_pages=64,
        slots=8,
        metadata=8,
        step_tokens=16,
        window=2,
        max_delay=0,
        seed=0,
        reserve=4,
        retries=0,
        grace=0.0,
        backoff=Backoff(),
        max_held=64,
        drop_on_miss=False,
        faults=NO_FAULTS,
        early_send=True,
        record=False,
    ):
        self.now = 0.0
        recorders = [ClockRecorder(lambda: self.now) if record else NO_RECORDER for _ in range(2)]
        self.link = FakeLink(seed, max_delay, window)
        self.prefill_engine = Engine(prefill_pages, page_size)
        self.decode_engine = Engine(decode_pages, page_size)
        self.p, self.d = Side(2), Side(2)
        prefill_memory, decode_memory = (_memory(pages, page_size) for pages in (prefill_pages, decode_pages))
        prefill_metadata = MetadataSlots(metadata)
        self.prefill = PrefillScheduler(
            prefill_memory,
            SlotPool(slots, "request"),
            prefill_metadata,
            BootstrapQueue(self.link, prefill_metadata, page_size, retries, faults, recorders[0], grace, backoff),
            PrefillLimits(step_tokens, 4, 3, 1000, 10_000, drop_on_miss, max_held),
            recorders[0],
        )
        limits = DecodeLimits(step_tokens, 4, 1000, 10_000, reserve)
        self.decode = DecodeScheduler(decode_memory, SlotPool(slots, "request"), MetadataSlots(metadata), self.link, limits, recorders[1])
        self.tokens: dict[str, dict[int, int]] = {}
        self.ends: dict[tuple[str, str], object] = {}
        self.prompts: dict[str, list[PromptToken]] = {}
        self.num_scored: Counter[str] = Counter()
        self.turn_is_prefill = True
        self.early_send = early_send
        self.num_forwards: Counter[str] = Counter()  # whole prompts computed on prefill
        self.late: list = []  # (tick, request): decode hears of a request only then

    def request(self, name, prompt, max_tokens=8, *, room=None, stop=(), num_prior=0, deadline_s=1e9, local=False, sampling=None):
        return SequenceRequest(
            request_id=name,
            room=len(self.link.rooms) + 1000 if room is None else room,
            prompt=list(prompt),
            num_prior=num_prior,
            sampling=sampling or Sampling(max_tokens=max_tokens, stop_token_ids=tuple(stop)),
            deadline_s=deadline_s,
            prefill=None if local else PEER,
        )

    def submit(self, request, decode_delay=0):
        """`decode_delay`: ticks until decode hears of the request, and so the least that bootstrap takes."""
        self.tokens.setdefault(request.request_id, {})
        if request.prefill is not None:
            self.link._room(request.room)
            self.prefill.submit(request)
        self.late.append((self.now + decode_delay, request))
        self._submit_late()

    def _submit_late(self):
        for entry in [entry for entry in self.late if entry[0] <= self.now]:
            self.late.remove(entry)
            self.decode.submit(entry[1])

    def tick(self):
        self.now += 1.0
        self.link.now += 1
        self._submit_late()
        self._turn_prefill()
        self._turn_decode()
        self.prefill.check()
        self.decode.check()
        self._collect()

    def run(self, limit=2000):
        for _ in range(limit):
            self.tick()
            held = sum(scheduler.num_waiting + scheduler.num_running for scheduler in (self.prefill, self.decode))
            if not held and not self.late and not self.p.in_flight and not self.d.in_flight:
                return
        raise AssertionError(f"still busy after {limit} ticks")

    def answer(self, name) -> list[int]:
        tokens = self.tokens[name]
        assert sorted(tokens) == list(range(len(tokens))), f"{name} has tokens {sorted(tokens)}"
        return [tokens[index] for index in range(len(tokens))]

    def assert_nothing_held(self):
        for scheduler in (self.prefill, self.decode):
            scheduler.check()
            assert scheduler.slots.num_held == scheduler.metadata.num_held == 0
            assert scheduler.memory.num_private == 0
            assert scheduler.memory.cache.num_evictable_pages == scheduler.memory.cache.num_pages
            assert scheduler.next_deadline_s() is None
        assert self.prefill._sending.holding.num_pages == 0

    def _turn_prefill(self):
        scheduler, engine = self.prefill, self.prefill_engine
        launched = False
        scheduler.advance(self.now)
        self._send()
        if parts := scheduler.next_step():
            if self.early_send:
                self._send_all(scheduler.maybe_send_cached_prefix_chunk(parts))
            self.num_forwards.update(part.seq.answer.request_id for part in parts if part.is_last)
            self.p.launch("prefill", parts, engine.prefill(parts))
            launched = True
            self._send()
        for _, done, tokens in self.p.due(not launched):
            logprobs = self._scored(done)
            for part, token in zip(done, tokens, strict=True):
                scheduler.settle(part, TokenOut(part.seq.answer.index_at(part.end), token) if part.is_last else None, logprobs)
        scheduler.finish_sends()

    def _scored(self, parts) -> LogprobCursor:
        for part in parts:
            self.num_scored[part.seq.answer.request_id] += len(part.rows)
        return LogprobCursor(FakeRows(parts))

    def _send(self):
        self._send_all(self.prefill.sends())

    def _send_all(self, orders):
        for order in orders:
            order.sender.send(order.first_page, len(order.pages), self.prefill_engine.gather(order.pages))

    def _turn_decode(self):
        scheduler, engine = self.decode, self.decode_engine
        for order in scheduler.installs():
            engine.install(order.pages, order.kv)
        scheduler.advance(self.now)
        launched = False
        self.turn_is_prefill = not self.turn_is_prefill
        if self.turn_is_prefill and (parts := scheduler.next_prefill()):
            self.d.launch("prefill", parts, engine.prefill(parts))
            launched = True
        elif parts := scheduler.next_decode():
            self.d.launch("decode", parts, engine.decode(parts))
            launched = True
        for kind, done, tokens in self.d.due(not launched):
            logprobs = self._scored(done) if kind == "prefill" else NO_LOGPROBS
            for part, token in zip(done, tokens, strict=True):
                if kind == "decode":
                    scheduler.settle_decode(part, TokenOut(part.index, token))
                else:
                    scheduler.settle_prefill(part, TokenOut(part.seq.answer.index_at(part.end), token) if part.is_last else None, logprobs)

    def _collect(self):
        for side, scheduler in (("prefill", self.prefill), ("decode", self.decode)):
            for name, event in scheduler.take_outcomes():
                if event.__class__.__name__ == "Tokens":
                    self.prompts.setdefault(name, []).extend(event.prompt)
                    assert not (event.prompt and self.tokens[name]), f"{name} tells of its prompt behind its first token"
                    for token in event.tokens:
                        assert self.tokens[name].setdefault(token.index, token.token) == token.token, f"{name} token {token.index}"
                else:
                    assert (name, side) not in self.ends, f"{name} ended twice on {side}"
                    self.ends[name, side] = event
                    if side == "prefill" and event.__class__.__name__ == "Finished" and event.reason != "handed_off":
                        self.decode.abort(name)


def _memory(pages, page_size) -> KVMemory:
    pool = PagePool(pages)
    return KVMemory(pool, RadixCache(pool, page_size), page_size)
