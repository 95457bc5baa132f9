"""What workers report of themselves, on the router's metrics page."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from pdjax.protocol import WorkerLoad

FIGURE = re.compile(r"(?P<name>[a-z_][a-z0-9_]*)(?:\{(?P<label>[a-z_]+)=(?P<value>[^{}=]*)\})?")
COUNTER_SUFFIX = "_total"

Family = CounterMetricFamily | GaugeMetricFamily


class WorkerReport(NamedTuple):
    """The last heartbeat of the worker at `address`."""

    role: str
    address: str
    load: WorkerLoad


class FleetCollector(Collector):
    """Makes `pdjax_worker_NAME{role, worker}` of every figure in a heartbeat, at each scrape. A worker that is gone has no series.

    A figure may have one label of its own, `NAME{LABEL=VALUE}`. Names that end with `_total` are counters, all others gauges. Figures
    whose names are of neither form are left out: a worker must not be able to break the page.
    """

    def __init__(self, registry: CollectorRegistry, reports: Callable[[], Iterable[WorkerReport]]):
        self._reports = reports
        registry.register(self)

    def collect(self) -> Iterator[Family]:
        families: dict[tuple[str, str | None], Family] = {}
        for role, address, load in self._reports():
            figures = {
                "ready": float(load.ready),
                "waiting": load.waiting,
                "running": load.running,
                "free_pages": load.free_pages,
                **load.gauges,
            }
            for figure, value in figures.items():
                if (form := FIGURE.fullmatch(figure)) is not None:
                    name, label, label_value = form["name"], form["label"], form["value"]
                    if (name, label) not in families:
                        families[name, label] = _family(name, label)
                    own = () if label is None else (label_value,)
                    families[name, label].add_metric((role, address, *own), value)
        yield from families.values()


def _family(name: str, label: str | None) -> Family:
    labels = ("role", "worker") if label is None else ("role", "worker", label)
    make = CounterMetricFamily if name.endswith(COUNTER_SUFFIX) else GaugeMetricFamily
    return make(f"pdjax_worker_{name}", "as the worker reports it", labels=labels)
