"""What workers report of themselves, on the router's metrics page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from pdjax.protocol import WorkerLoad


class WorkerReport(NamedTuple):
    """The last heartbeat of the worker at `address`."""

    role: str
    address: str
    load: WorkerLoad


class FleetCollector(Collector):
    """Makes `pdjax_worker_NAME{role, worker}` of every figure in a heartbeat, at each scrape. A worker that is gone has no series."""

    def __init__(self, registry: CollectorRegistry, reports: Callable[[], Iterable[WorkerReport]]):
        self._reports = reports
        registry.register(self)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        families: dict[str, GaugeMetricFamily] = {}
        for role, address, load in self._reports():
            figures = {"waiting": load.waiting, "running": load.running, "free_pages": load.free_pages, **load.gauges}
            for name, value in figures.items():
                if name not in families:
                    families[name] = GaugeMetricFamily(f"pdjax_worker_{name}", "as the worker reports it", labels=("role", "worker"))
                families[name].add_metric((role, address), value)
        yield from families.values()
