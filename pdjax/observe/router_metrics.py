"""What a router counts, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge


class RouterStats:
    """One a router, in a registry of the caller's. Labels take few values: reasons are the protocol's kinds, workers their addresses."""

    def __init__(self, registry: CollectorRegistry):
        self._requests = Counter("pdjax_router_requests", "Sequences that ended, by how", ["outcome"], registry=registry)
        self._retries = Counter("pdjax_router_retries", "Attempts after a first one, by their cause", ["reason"], registry=registry)
        self._failed = Counter("pdjax_router_failed_attempts", "Attempts that failed, by worker", ["worker", "reason"], registry=registry)
        self._in_flight = Gauge("pdjax_router_in_flight", "Sequences taken and not yet ended", registry=registry)
        self._workers = Gauge("pdjax_router_workers", "Workers by role and health", ["role", "health"], registry=registry)

    def request_began(self, in_flight: int) -> None:
        """A sequence was taken; `in_flight` are now under way."""
        self._in_flight.set(in_flight)

    def request_ended(self, outcome: str, in_flight: int) -> None:
        """A sequence ended, or was not even taken; `in_flight` remain."""
        self._requests.labels(outcome).inc()
        self._in_flight.set(in_flight)

    def attempt_failed(self, reason: str, worker: str) -> None:
        """An attempt failed on the worker at address `worker`."""
        self._failed.labels(worker, reason).inc()

    def retried(self, reason: str) -> None:
        """Another attempt follows one that failed for `reason`."""
        self._retries.labels(reason).inc()

    def watch_workers(self, role: str, health: str, count: Callable[[], int]) -> None:
        """Ask `count` at each scrape how many workers of `role` are in `health`."""
        self._workers.labels(role, health).set_function(count)
