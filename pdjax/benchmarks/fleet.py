"""A live system of any number of workers, each a child process that may be bound to cores of its own.

The router comes first; workers find it by its control address.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import NamedTuple

from pdjax.benchmarks.client import Endpoint, RequestFailed, get, parse_url
from pdjax.children import Child, ChildDied, ChildSpec, start_child
from pdjax.config.schema import Config
from pdjax.errors import PdjaxError
from pdjax.observe.progress import NullProgress

START_SILENCE_S = 600.0
READY_S = 60.0
READY_INTERVAL_S = 0.05
STOP_S = 10.0
GET_S = 10.0

Cores = frozenset[int] | None
"""CPU numbers that a process may use; None: all that this one may."""


class SystemFailed(PdjaxError):
    """A system for a benchmark did not start; the message says which part, and its last words."""


class Part(NamedTuple):
    """One process. `command` follows `python -m`; `config` goes to it as one line of JSON."""

    name: str
    command: tuple[str, ...]
    config: Config
    cores: Cores = None


class Fleet(NamedTuple):
    """A system that would serve a request now. `pids` by the names of the parts. `start_s`: how long the start took."""

    endpoint: Endpoint
    pids: dict[str, int]
    start_s: float


def serve_part(name: str, role: str, config: Config, cores: Cores = None) -> Part:
    """A router or a worker as `pdjax.serve` starts it. `role`: router, prefill or decode."""
    return Part(name, ("pdjax.serve", "--role", role), config, cores)


def share_cores(num_workers: int, cores: Sequence[int]) -> list[Cores]:
    """The same number of cores for each of `num_workers`, no core for two; None for all where there are fewer cores than workers."""
    each = len(cores) // num_workers
    if each == 0:
        return [None] * num_workers
    return [frozenset(cores[place * each : (place + 1) * each]) for place in range(num_workers)]


def available_cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


@contextlib.asynccontextmanager
async def running_fleet(router: Part, workers: Sequence[Part], num_joining: int | None = None) -> AsyncIterator[Fleet]:
    """Raises SystemFailed. No process is left on leaving.

    `num_joining`: workers that the router must know before the system counts as started; a process may be several.
    """
    children: list[Child] = []
    try:
        yield await _start(router, workers, len(workers) if num_joining is None else num_joining, children)
    finally:
        await asyncio.shield(_stop(children))


async def _start(router: Part, workers: Sequence[Part], num_joining: int, children: list[Child]) -> Fleet:
    """Appends what it starts to `children`, also where it fails."""
    start_s = time.monotonic()
    try:
        first = await _start_child(router, _on_free_ports(router.config), children)
        facts = await first.until_ready(START_SILENCE_S)
        for worker in workers:
            await _start_child(worker, _joined(_on_free_ports(worker.config), facts["control"]), children)
        for child in children[1:]:
            await child.until_ready(START_SILENCE_S)
    except ChildDied as death:
        raise SystemFailed(str(death)) from None
    endpoint = parse_url(facts["url"])
    await _until_serving(endpoint, num_joining)
    return Fleet(endpoint, {child.name: child.pid for child in children}, time.monotonic() - start_s)


async def _start_child(part: Part, config: Config, children: list[Child]) -> Child:
    spec = ChildSpec(part.name, (sys.executable, "-m", *part.command), config.model_dump_json().encode())
    with _bound_to(part.cores):
        # A child keeps its last lines itself, for the case that it dies; nothing else of its output matters here.
        child = await start_child(spec, NullProgress(), lambda line: None)
    children.append(child)
    return child


@contextlib.contextmanager
def _bound_to(cores: Cores) -> Iterator[None]:
    """Bind the calling thread, from which a process that it starts inherits the binding before its first instruction."""
    if cores is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _on_free_ports(config: Config) -> Config:
    return config.model_copy(
        update={
            "server": config.server.model_copy(update={"port": 0}),
            "router": config.router.model_copy(update={"control_port": 0}),
            "worker": config.worker.model_copy(update={"port": 0}),
        }
    )


def _joined(config: Config, control: str) -> Config:
    return config.model_copy(update={"worker": config.worker.model_copy(update={"router": control})})


async def _until_serving(endpoint: Endpoint, num_workers: int) -> None:
    """The router learns of ready workers by their heartbeats."""
    try:
        async with asyncio.timeout(READY_S):
            while await _num_ready(endpoint) < num_workers:
                await asyncio.sleep(READY_INTERVAL_S)
    except TimeoutError:
        raise SystemFailed(f"the workers are ready, but the router does not see all {num_workers} after {READY_S:g} s") from None


async def _num_ready(endpoint: Endpoint) -> int:
    """Workers that the router would give work to; 0 while it would not serve a request."""
    try:
        status, _ = await get(endpoint, "/ready", GET_S)
        _, page = await get(endpoint, "/metrics", GET_S)
    except RequestFailed:
        return 0
    return count_ready(page.decode()) if status == 200 else 0


def count_ready(page: str) -> int:
    """Workers of health `ready` on a router's metrics page."""
    lines = [line for line in page.splitlines() if line.startswith("pdjax_router_workers{") and 'health="ready"' in line]
    return sum(int(float(line.rpartition(" ")[2])) for line in lines)


async def _stop(children: list[Child]) -> None:
    for child in children:
        child.send(signal.SIGTERM)
    exits = [child.exited for child in children]
    if exits:
        await asyncio.wait(exits, timeout=STOP_S)
    for child in children:
        child.send(signal.SIGKILL)
    await asyncio.gather(*exits, return_exceptions=True)
