"""The endpoints that only look: health, readiness, models, metrics."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fake_backend import MODEL, Served, serve


@pytest.fixture
def served() -> Iterator[Served]:
    with serve() as served:
        yield served
        served.backend.wait_until_open(0)


def test_a_ready_server_says_so_and_names_its_model(served):
    assert served.http.get("/health").json() == {"status": "ok"}
    assert served.http.get("/ready").json() == {"status": "ready"}
    assert [model.id for model in served.client().models.list()] == [MODEL]
    assert served.client().models.retrieve(MODEL).id == MODEL


def test_a_server_without_workers_is_alive_but_not_ready(served):
    served.backend.ready = False
    assert served.http.get("/health").status_code == 200
    for method, path in (("GET", "/ready"), ("GET", "/v1/models"), ("GET", f"/v1/models/{MODEL}")):
        response = served.http.request(method, path)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "no_worker")
        assert int(response.headers["retry-after"]) >= 1
    assert served.http.post("/v1/completions", json={"model": MODEL, "prompt": "A"}).status_code == 503


def test_an_unknown_model_is_a_404_whatever_its_name(served):
    for name in ("other", "a/b", "%F0%9F%98%80"):
        response = served.http.get(f"/v1/models/{name}")
        assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


def value(served: Served, name: str, **labels: str) -> float | None:
    return served.registry.get_sample_value(name, labels)


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_and_their_times_are_counted(served, stream):
    served.backend.cached_tokens = 1
    answer = served.client().completions.create(model=MODEL, prompt=["AB", "C"], n=2, stream=stream)
    if stream:
        list(answer)
    served.backend.wait_until_open(0)
    assert value(served, "pdjax_time_to_first_token_seconds_count") == 4
    assert value(served, "pdjax_inter_token_latency_seconds_count") == 4 * 6
    assert value(served, "pdjax_generated_tokens_total") == 4 * 7
    assert value(served, "pdjax_prompt_tokens_total") == 2 * 2 + 2 * 1
    assert value(served, "pdjax_cached_prompt_tokens_total") == 4


def test_requests_are_counted_by_declared_route_and_status(served):
    served.http.post("/v1/completions", json={"model": MODEL, "prompt": "A"})
    served.http.post("/v1/completions", json={"model": "other", "prompt": "A"})
    served.http.get("/v1/models/whatever")
    served.http.get("/made/up")
    served.backend.fail_at = 0
    served.http.post("/v1/completions", json={"model": MODEL, "prompt": "A"})
    counted = {
        (sample.labels["route"], sample.labels["status"]): sample.value
        for metric in served.registry.collect()
        for sample in metric.samples
        if sample.name == "pdjax_http_requests_total"
    }
    assert counted == {
        ("/v1/completions", "200"): 1,
        ("/v1/completions", "404"): 1,
        ("/v1/completions", "500"): 1,
        ("/v1/models/{model_id:path}", "404"): 1,
        ("unmatched", "404"): 1,
    }


def test_metrics_are_given_in_prometheus_form(served):
    response = served.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    assert "pdjax_http_requests_in_flight 1.0" in response.text
    assert value(served, "pdjax_http_requests_in_flight") == 0
