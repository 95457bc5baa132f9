"""A live system for benchmarks: a router, one prefill and one decode worker, each a child process with a configuration of its own.

`python -m pdjax.serve --role all` gives one configuration to all. A benchmark that wants, say, a prefix cache on prefill and none on
decode starts the processes one by one.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import sys
from collections.abc import AsyncIterator
from typing import NamedTuple

from pdjax.benchmarks.client import Endpoint, RequestFailed, get, parse_url
from pdjax.children import Child, ChildDied, ChildSpec, start_child
from pdjax.config.schema import Config
from pdjax.errors import PdjaxError
from pdjax.observe.progress import NullProgress

START_SILENCE_S = 600.0
READY_S = 60.0
READY_INTERVAL_S = 0.2
STOP_S = 10.0
GET_S = 10.0


class SystemFailed(PdjaxError):
    """A system for a benchmark did not start; the message says which part, and its last words."""


class Roles(NamedTuple):
    """The configuration of each process. All ports are free ones, and workers find the router by themselves."""

    router: Config
    prefill: Config
    decode: Config


@contextlib.asynccontextmanager
async def running_system(roles: Roles) -> AsyncIterator[Endpoint]:
    """The router's endpoint, once it would serve a request. Raises SystemFailed. No process is left on leaving."""
    children: list[Child] = []
    try:
        yield await _start(roles, children)
    finally:
        await asyncio.shield(_stop(children))


async def worker_figures(endpoint: Endpoint) -> dict[str, float]:
    """What the workers have counted so far, from the router's metrics page. Raises RequestFailed."""
    status, body = await get(endpoint, "/metrics", GET_S)
    if status != 200:
        raise RequestFailed(f"HTTP {status} from /metrics")
    return parse_worker_figures(body.decode())


def parse_worker_figures(page: str) -> dict[str, float]:
    """Counters of the workers: `pdjax_worker_NAME_total{role="ROLE",...} VALUE` becomes `ROLE.NAME`, with the values of labels other than
    the worker's behind it. Workers of one role are added up."""
    figures: dict[str, float] = {}
    for name, labels, value in _WORKER_COUNTER.findall(page):
        pairs = dict(_LABEL.findall(labels))
        role = pairs.pop("role", "worker")
        pairs.pop("worker", None)
        key = ".".join([role, name, *pairs.values()])
        figures[key] = figures.get(key, 0.0) + float(value)
    return figures


_WORKER_COUNTER = re.compile(r"^pdjax_worker_(\w+)_total\{([^}]*)\} (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


async def _start(roles: Roles, children: list[Child]) -> Endpoint:
    """Appends what it starts to `children`, also where it fails."""
    try:
        router = await _start_child("router", _on_free_ports(roles.router), children)
        facts = await router.until_ready(START_SILENCE_S)
        for role, config in (("prefill", roles.prefill), ("decode", roles.decode)):
            await _start_child(role, _joined(_on_free_ports(config), facts["control"]), children)
        for worker in children[1:]:
            await worker.until_ready(START_SILENCE_S)
    except ChildDied as death:
        raise SystemFailed(str(death)) from None
    endpoint = parse_url(facts["url"])
    await _until_serving(endpoint)
    return endpoint


async def _start_child(role: str, config: Config, children: list[Child]) -> Child:
    command = (sys.executable, "-m", "pdjax.serve", "--role", role)
    # A child keeps its last lines itself, for the case that it dies; nothing else of its output matters here.
    child = await start_child(ChildSpec(role, command, config.model_dump_json().encode()), NullProgress(), lambda line: None)
    children.append(child)
    return child


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


async def _until_serving(endpoint: Endpoint) -> None:
    """The router learns of ready workers by their heartbeats."""
    try:
        async with asyncio.timeout(READY_S):
            while not await _is_serving(endpoint):
                await asyncio.sleep(READY_INTERVAL_S)
    except TimeoutError:
        raise SystemFailed(f"the workers are ready, but the router does not see them after {READY_S:g} s") from None


async def _is_serving(endpoint: Endpoint) -> bool:
    try:
        status, _ = await get(endpoint, "/ready", GET_S)
    except RequestFailed:
        return False
    return status == 200


async def _stop(children: list[Child]) -> None:
    for child in children:
        child.send(signal.SIGTERM)
    exits = [child.exited for child in children]
    if exits:
        await asyncio.wait(exits, timeout=STOP_S)
    for child in children:
        child.send(signal.SIGKILL)
    await asyncio.gather(*exits, return_exceptions=True)
