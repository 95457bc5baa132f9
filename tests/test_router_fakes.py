"""Fake workers with arithmetic that one can do by hand, for the router's tests, and a test that they do it.

The "model": the next token is the sum of all tokens before it, modulo 97. So an answer follows from the prompt alone, however often
and wherever it is continued.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from pdjax.config.schema import RouterConfig
from pdjax.observe.router_metrics import RouterStats
from pdjax.protocol import (
    Event,
    Failed,
    Finished,
    Layout,
    Peer,
    Sampling,
    SequenceRequest,
    TokenOut,
    Tokens,
    WorkerInfo,
    WorkerLoad,
)
from pdjax.router.client import WorkerClient
from pdjax.router.fleet import Fleet, Member
from pdjax.router.roster import Roster
from pdjax.router.router import Backoff, ModelIdentity, Router

LAYOUT = Layout(model_fingerprint="f", page_size=4, kv_dtype="float32", num_layers=2, num_kv_heads=1, head_dim=8)
CACHED_TOKENS = 3
READY = WorkerLoad(ready=True, free_pages=1000)
QUICK = Backoff(base_s=0.001, max_s=0.002)

Hang = type("Hang", (), {})
HANG = Hang()
Step = Event | asyncio.Event | Hang
Plan = Callable[[SequenceRequest], list[Step]]


def next_token(tokens: list[int]) -> int:
    return sum(tokens) % 97


def answer(prompt: list[int], max_tokens: int, stop: int | None = None) -> list[int]:
    """The whole answer: `max_tokens` tokens, or fewer where `stop` comes up."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens))
        if tokens[-1] == stop:
            break
    return tokens[len(prompt) :]


def lost() -> Failed:
    return Failed(kind="internal", message="connection lost", retriable=True)


def failed(kind: str, retriable: bool = True) -> Failed:
    return Failed(kind=kind, message=f"scripted {kind}", retriable=retriable)


def _end(token: int, index: int, sampling: Sampling) -> Finished | None:
    if token in sampling.stop_token_ids:
        return Finished(reason="stop", stop_token=token, cached_tokens=CACHED_TOKENS)
    if index + 1 == sampling.max_tokens:
        return Finished(reason="length", cached_tokens=CACHED_TOKENS)
    return None


def prefill_steps(request: SequenceRequest) -> list[Step]:
    """What a prefill worker without faults gives."""
    token = next_token(request.prompt)
    end = _end(token, request.num_prior, request.sampling) or Finished(reason="handed_off", cached_tokens=CACHED_TOKENS)
    return [Tokens([TokenOut(request.num_prior, token)]), end]


def decode_steps(request: SequenceRequest) -> list[Step]:
    """What a decode worker without faults gives, one token an event. After a first token that ends the answer it hears nothing."""
    tokens, index, steps = list(request.prompt), request.num_prior, []
    if request.prefill is not None:
        tokens.append(next_token(tokens))
        if _end(tokens[-1], index, request.sampling):
            return [HANG]
        index += 1
    while True:
        tokens.append(next_token(tokens))
        steps.append(Tokens([TokenOut(index, tokens[-1])]))
        if end := _end(tokens[-1], index, request.sampling):
            return [*steps, end]
        index += 1


@dataclass
class FakeWorker(WorkerClient):
    """Plays `plans`, one a call, then behaves without faults. A `close` breaks its streams, as that of a real connection does."""

    info: WorkerInfo
    plans: deque[Plan] = field(default_factory=deque)
    calls: list[SequenceRequest] = field(default_factory=list)
    open_streams: int = 0

    def __post_init__(self) -> None:
        self.closed = asyncio.Event()
        self.called = asyncio.Event()

    def prefill(self, request: SequenceRequest) -> AsyncGenerator[Event, None]:
        assert self.info.role == "prefill" and request.prefill is None
        return self._play(request, self.plans.popleft() if self.plans else prefill_steps)

    def decode(self, request: SequenceRequest) -> AsyncGenerator[Event, None]:
        assert self.info.role == "decode"
        return self._play(request, self.plans.popleft() if self.plans else decode_steps)

    async def close(self) -> None:
        self.closed.set()

    async def _play(self, request: SequenceRequest, plan: Plan) -> AsyncGenerator[Event, None]:
        self.calls.append(request)
        self.called.set()
        self.open_streams += 1
        try:
            for step in plan(request):
                await asyncio.sleep(0)
                if self.closed.is_set() or not await self._passes(step):
                    yield lost()
                    return
                if not isinstance(step, asyncio.Event):
                    yield step
        finally:
            self.open_streams -= 1

    async def _passes(self, step: Step) -> bool:
        """Wait at a gate, or for ever at HANG; False where the connection closed meanwhile."""
        if not isinstance(step, asyncio.Event | Hang):
            return True
        gate = step if isinstance(step, asyncio.Event) else asyncio.Event()
        waits = [asyncio.ensure_future(event.wait()) for event in (gate, self.closed)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return not self.closed.is_set()


def worker_info(name: str, address: str | None = None, **changes: object) -> WorkerInfo:
    """A worker whose role follows from its name: p... or d..."""
    values: dict = dict(
        role="prefill" if name.startswith("p") else "decode",
        peer=Peer(address or f"{name}:1", name),
        layout=LAYOUT,
        model_name="sum",
        max_context_tokens=1000,
        max_prompt_tokens=900,
        max_running=8,
    )
    return WorkerInfo(**{**values, **changes})


class Rig:
    """A router with fake workers, inside a running event loop. `heartbeat_timeout_s` also bounds the wait for a worker to come."""

    def __init__(self, names: str, heartbeat_timeout_s: float = 60.0, **config: object):
        self.workers: dict[str, FakeWorker] = {}
        self.registry = CollectorRegistry()
        self.fleet = Fleet(time.monotonic, heartbeat_timeout_s, stall_timeout_s=60.0)
        self.roster = Roster(self.fleet, lambda info: self.workers[info.peer.instance_id])
        settings = RouterConfig(heartbeat_timeout_s=heartbeat_timeout_s, **config)
        self.router = Router(settings, ModelIdentity("sum", 97, (0,)), self.roster, RouterStats(self.registry), backoff=QUICK)
        for name in names.split():
            self.add(name)

    def add(self, name: str, *plans: Plan, **changes: object) -> Member:
        self.workers[name] = FakeWorker(worker_info(name, **changes), deque(plans))
        member = self.roster.join(self.workers[name].info)
        self.roster.heartbeat(name, READY)
        return member

    def plan(self, name: str, *plans: Plan) -> FakeWorker:
        self.workers[name].plans.extend(plans)
        return self.workers[name]

    def generate(
        self, prompt: list[int], max_tokens: int = 5, stop: int | None = None, in_s: float = 60.0
    ) -> AsyncGenerator[TokenOut | Finished, None]:
        sampling = Sampling(max_tokens=max_tokens, stop_token_ids=() if stop is None else (stop,))
        return self.router.generate("r", prompt, sampling, time.time() + in_s)

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0

    def assert_nothing_held(self) -> None:
        assert self.router.num_in_flight == 0
        assert self.fleet.num_outstanding == 0
        assert {name: worker.open_streams for name, worker in self.workers.items() if worker.open_streams} == {}
        for member in self.fleet.members():
            assert (member.outstanding_sequences, member.outstanding_tokens) == (0, 0), member


async def collect(parts: AsyncIterator[TokenOut | Finished]) -> tuple[list[int], Finished]:
    """The tokens of a whole answer and its end; checks that indices run from 0 without gaps."""
    tokens: list[int] = []
    finished: list[Finished] = []
    async for part in parts:
        assert not finished, f"{part} came after the end"
        if isinstance(part, Finished):
            finished.append(part)
        else:
            assert part.index == len(tokens), (part, tokens)
            tokens.append(part.token)
    return tokens, finished[0]


async def collect_rest(parts: AsyncIterator[TokenOut | Finished]) -> list[int]:
    """The tokens still to come."""
    return [part.token async for part in parts if isinstance(part, TokenOut)]


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    """Run a scenario with a bound, so that a hang is a failure."""

    async def bounded() -> None:
        async with asyncio.timeout(20):
            await scenario()

    asyncio.run(bounded())


def cut(steps: Plan, count: int, end: Step | None = None) -> Plan:
    """A plan: the first `count` steps of `steps`, then `end` (default: the connection breaks)."""
    return lambda request: steps(request)[:count] + [lost() if end is None else end]


def test_the_fake_workers_compute_what_one_can_compute_by_hand() -> None:
    # 5 + 6 = 11; 5 + 6 + 11 = 22; 44; 88; 176 - 97 = 79
    assert answer([5, 6], 5) == [11, 22, 44, 88, 79]
    assert answer([5, 6], 5, stop=44) == [11, 22, 44]
    sampling = Sampling(max_tokens=3)
    request = SequenceRequest(request_id="r", room=1, prompt=[5, 6], sampling=sampling, deadline_s=0.0, prefill=Peer("p", "p"))
    assert prefill_steps(request) == [Tokens([TokenOut(0, 11)]), Finished(reason="handed_off", cached_tokens=3)]
    assert decode_steps(request) == [Tokens([TokenOut(1, 22)]), Tokens([TokenOut(2, 44)]), Finished(reason="length", cached_tokens=3)]
