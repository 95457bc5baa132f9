"""A live system for benchmarks: a router, one prefill and one decode worker, each a child process with a configuration of its own.

`python -m pdjax.serve --role all` gives one configuration to all. A benchmark that wants, say, a prefix cache on prefill and none on
decode starts the processes one by one.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator
from typing import NamedTuple

from pdjax.benchmarks.client import Endpoint, RequestFailed, get
from pdjax.benchmarks.fleet import GET_S, running_fleet, serve_part
from pdjax.config.schema import Config


class Roles(NamedTuple):
    """The configuration of each process. All ports are free ones, and workers find the router by themselves."""

    router: Config
    prefill: Config
    decode: Config


@contextlib.asynccontextmanager
async def running_system(roles: Roles) -> AsyncIterator[Endpoint]:
    """The router's endpoint, once it would serve a request. Raises SystemFailed. No process is left on leaving."""
    workers = [serve_part("prefill", "prefill", roles.prefill), serve_part("decode", "decode", roles.decode)]
    async with running_fleet(serve_part("router", "router", roles.router), workers) as fleet:
        yield fleet.endpoint


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
