"""The metrics page: what workers report becomes series of the right kind, and dashboard and alerts name nothing that is not there."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from pdjax.observe.fleet_metrics import FleetCollector, WorkerReport
from pdjax.observe.http_metrics import HttpMetrics
from pdjax.observe.router_metrics import RouterStats
from pdjax.protocol import WorkerLoad
from pdjax.transfer.rooms import Counters, FailureKind
from pdjax.worker.decode import DecodeRole
from pdjax.worker.prefill import PrefillRole, no_early_sends
from pdjax.worker.role import Role
from tests.scheduler_harness import Cluster
from tests.test_schedulers import prompt_of

DASHBOARDS = Path(__file__).parent.parent / "dashboards"
PAGE_BYTES = 100


class IdleEngine:
    """What roles need of an engine that never runs."""

    def read(self, handle: object) -> object:
        raise AssertionError("nothing was launched")

    def compilations_after_warm_up(self) -> int:
        return 0


class IdleTransport:
    def __init__(self) -> None:
        self.counters = Counters()

    def open_rooms(self) -> int:
        return 0

    def close(self) -> None:
        pass


def reports(load: WorkerLoad, *more: WorkerLoad) -> CollectorRegistry:
    registry = CollectorRegistry()
    FleetCollector(registry, lambda: [WorkerReport("prefill", f"p:{i}", each) for i, each in enumerate((load, *more))])
    return registry


def test_a_figure_may_have_a_label_and_totals_are_counters():
    gauges = {"slots_held": 2.0, "queue_length{queue=waiting}": 3.0, "queue_length{queue=parked}": 1.0, "retries_total": 7.0}
    registry = reports(WorkerLoad(ready=True, waiting=4, gauges=gauges))
    labels = {"role": "prefill", "worker": "p:0"}
    assert registry.get_sample_value("pdjax_worker_slots_held", labels) == 2
    assert registry.get_sample_value("pdjax_worker_waiting", labels) == 4
    assert registry.get_sample_value("pdjax_worker_ready", labels) == 1
    assert registry.get_sample_value("pdjax_worker_queue_length", {**labels, "queue": "waiting"}) == 3
    assert registry.get_sample_value("pdjax_worker_queue_length", {**labels, "queue": "parked"}) == 1
    assert registry.get_sample_value("pdjax_worker_retries_total", labels) == 7
    page = generate_latest(registry).decode()
    assert "# TYPE pdjax_worker_retries_total counter" in page
    assert "# TYPE pdjax_worker_slots_held gauge" in page
    assert page.count("# TYPE pdjax_worker_queue_length ") == 1


def test_a_worker_can_neither_break_the_page_nor_inject_lines():
    gauges = {"ok": 1.0, "": 2.0, "Bad-Name": 3.0, "x{a=b": 4.0, "x{a=b}{c=d}": 5.0, "x\ny 1": 6.0, 'x{a="\n}': 7.0}
    page = generate_latest(reports(WorkerLoad(ready=True, gauges=gauges))).decode()
    families = {family.name for family in text_string_to_metric_families(page)}
    assert families == {f"pdjax_worker_{name}" for name in ("ready", "waiting", "running", "free_pages", "ok", "x")}


def test_workers_of_one_role_share_a_family():
    registry = reports(WorkerLoad(ready=True, gauges={"a": 1.0}), WorkerLoad(ready=False, gauges={"a": 2.0}))
    [family] = [family for family in registry.collect() if family.name == "pdjax_worker_a"]
    assert [(sample.labels["worker"], sample.value) for sample in family.samples] == [("p:0", 1.0), ("p:1", 2.0)]


# What real roles report


@pytest.fixture(scope="module")
def roles() -> Iterator[tuple[Cluster, dict[str, Role]]]:
    """Both roles after some requests: one parked, one cached and sent early, one forced to retract."""
    cluster = Cluster(record=True, retries=1, decode_pages=24, reserve=1, window=8, prefill_pages=64)
    cluster.submit(cluster.request("first", prompt_of(20), 2))
    cluster.run()
    cluster.decode.memory.cache.reset()
    cluster.submit(cluster.request("busy", prompt_of(40, 5), 30))  # fills three steps, under which the bootstrap of the next one ends
    cluster.submit(cluster.request("second", prompt_of(20), 30))
    cluster.submit(cluster.request("late", prompt_of(20, 7), 2), decode_delay=30)
    cluster.run()
    source, sink = IdleTransport(), IdleTransport()
    source.counters.failed(FailureKind.STALLED)
    wake = threading.Event().set
    made: dict[str, Role] = {
        "prefill": PrefillRole(IdleEngine(), cluster.prefill, source, wake, no_early_sends, PAGE_BYTES),  # type: ignore[arg-type]
        "decode": DecodeRole(IdleEngine(), cluster.decode, sink, wake),  # type: ignore[arg-type]
    }
    yield cluster, made
    for role in made.values():
        role.close()


def test_roles_report_queues_slots_stages_and_failures(roles):
    cluster, made = roles
    prefill, decode = made["prefill"].load().gauges, made["decode"].load().gauges
    assert {key for key in prefill if key.startswith("queue_length")} == {
        f"queue_length{{queue={name}}}" for name in ("bootstrap", "waiting", "parked", "outgoing", "delivering")
    }
    assert {key for key in decode if key.startswith("queue_length")} == {
        f"queue_length{{queue={name}}}" for name in ("prealloc", "retracted", "receiving", "computing", "running")
    }
    for gauges, scheduler in ((prefill, cluster.prefill), (decode, cluster.decode)):
        for kind, pool in (("slots", scheduler.slots), ("metadata_slots", scheduler.metadata)):
            assert gauges[f"{kind}_held"] + gauges[f"{kind}_free"] == pool.total
        pages = sum(gauges[f"pages_{kind}"] for kind in ("private", "cached", "free"))
        assert pages == scheduler.memory.pool.total
    assert prefill["kv_rooms_failed_total{kind=stalled}"] == 1 and prefill["kv_rooms_failed_total{kind=damaged}"] == 0
    assert prefill["stage_ends_total{stage=parked}"] >= 1
    assert prefill["stage_ends_total{stage=delivering}"] == 4
    assert decode["retractions_total"] == cluster.decode.num_retractions > 0
    assert decode["stage_seconds_total{stage=retracted}"] > 0


def test_pages_sent_early_are_counted_once_in_pages_and_bytes(roles):
    cluster, made = roles
    gauges = made["prefill"].load().gauges
    assert gauges["early_sent_pages_total"] == cluster.prefill.counts.early_sent_pages > 0
    assert gauges["early_sent_bytes_total"] == gauges["early_sent_pages_total"] * PAGE_BYTES
    handed_over = {when: gauges[f"kv_pages_handed_over_total{{when={when}}}"] for when in ("early", "chunk", "last", "held")}
    assert handed_over["early"] == gauges["early_sent_pages_total"]
    assert sum(handed_over.values()) == sum(room.num_sent_pages for room in cluster.link.rooms.values())


def test_a_report_survives_that_the_loop_moves_requests_meanwhile():
    """Heartbeats come from another thread than the one that moves requests between queues."""
    cluster = Cluster()
    outgoing: dict[str, object] = cluster.prefill._forwards._outgoing  # type: ignore[assignment]

    class Moving:
        @property
        def parked(self) -> None:
            outgoing["another"] = Moving()

    outgoing["one"] = Moving()
    assert cluster.prefill.queue_lengths()["parked"] == 0
    assert len(outgoing) == 2


# Dashboard and alerts


@pytest.fixture(scope="module")
def page(roles) -> dict[str, list[dict[str, str]]]:
    """A scrape of a router that has seen everything once: sample name to the labels of its samples."""
    registry = CollectorRegistry()
    HttpMetrics(registry).requests.labels("/v1/completions", "200").inc()
    stats = RouterStats(registry)
    stats.request_ended("ok", 0)
    stats.retried("transfer")
    stats.attempt_failed("transfer", "p:1")
    stats.watch_workers("prefill", "ready", lambda: 1)
    _, made = roles
    FleetCollector(registry, lambda: [WorkerReport(name, f"{name}:1", role.load()) for name, role in made.items()])
    seen: dict[str, list[dict[str, str]]] = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            seen.setdefault(sample.name, []).append(sample.labels)
    return seen


def dashboard_expressions() -> list[str]:
    panels = json.loads((DASHBOARDS / "pdjax.json").read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", [])]


def alerts() -> list[dict]:
    groups = yaml.safe_load((DASHBOARDS / "alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


EXPRESSIONS = [*dashboard_expressions(), *(rule["expr"] for rule in alerts())]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_series_that_an_expression_names_is_on_the_page(expression, page):
    selectors = re.findall(r"\b(pdjax_\w+)(?:\{([^}]*)\})?", expression)
    assert selectors, "an expression about nothing"
    for name, matchers in selectors:
        assert name in page, f"{name} is not on the metrics page"
        for label, operator, values in re.findall(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"', matchers):
            known = {labels.get(label) for labels in page[name]}
            assert known != {None}, f"{name} has no label {label}"
            for value in values.split("|") if operator in ("=", "=~") and name != "pdjax_router_workers" else []:
                assert value in known, f"{name} never has {label}={value!r}, but {known}"
    assert expression.count("(") == expression.count(")")


def test_grouping_labels_exist_on_what_is_grouped(page):
    for expression in EXPRESSIONS:
        for labels, name in re.findall(r"by \(([\w, ]+)\) \((?:rate\(|increase\()?(pdjax_\w+)", expression):
            for label in re.split(r",\s*", labels):
                assert all(label in sample for sample in page[name]), f"{name} has no label {label}"


def test_the_dashboard_asks_for_every_variable_that_it_uses_and_draws_something_in_every_panel():
    text = (DASHBOARDS / "pdjax.json").read_text()
    dashboard = json.loads(text)
    declared = {variable["name"] for variable in dashboard["templating"]["list"]}
    used = {name for name in re.findall(r"\$\{?(\w+)", text) if not name.startswith("__")}  # those are Grafana's own
    assert used == declared
    for panel in dashboard["panels"]:
        targets = panel.get("targets", [])
        assert bool(targets) == (panel["type"] != "row"), panel["title"]
        assert len({target["refId"] for target in targets}) == len(targets), panel["title"]
        assert all(target["datasource"] == panel["datasource"] for target in targets), panel["title"]
    [annotation] = dashboard["annotations"]["list"]
    [pattern] = re.findall(r'alertname=~"([^"]+)"', annotation["expr"])
    assert all(re.fullmatch(pattern, rule["alert"]) for rule in alerts())


def test_alerts_cover_what_the_techniques_can_do_wrong():
    names = {rule["alert"] for rule in alerts()}
    assert {"PdjaxRetryStorm", "PdjaxMetadataSlotsExhausted", "PdjaxWorkerLost", "PdjaxCompiledAfterWarmUp"} <= names
    for rule in alerts():
        assert rule["annotations"].keys() == {"summary", "description"} and rule["labels"]["severity"] in ("warning", "critical")


def test_every_panel_of_the_dashboard_has_a_place_of_its_own():
    panels = json.loads((DASHBOARDS / "pdjax.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells
