"""What the HTTP surface counts and measures, for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
ITL_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0)


class HttpMetrics:
    """One set a process, in `registry`. Times are in seconds, from the arrival of the request's headers. Safe from any thread."""

    def __init__(self, registry: CollectorRegistry):
        self.requests = Counter("pdjax_http_requests", "HTTP requests answered", ["route", "status"], registry=registry)
        self.in_flight = Gauge("pdjax_http_requests_in_flight", "HTTP requests being answered", registry=registry)
        self.ttft = Histogram(
            "pdjax_time_to_first_token_seconds", "arrival to first token of a sequence", buckets=TTFT_BUCKETS_S, registry=registry
        )
        self.itl = Histogram(
            "pdjax_inter_token_latency_seconds", "time between tokens of a sequence", buckets=ITL_BUCKETS_S, registry=registry
        )
        self.handoff = Histogram(
            "pdjax_handoff_seconds", "first to second token of a sequence", buckets=ITL_BUCKETS_S, registry=registry
        )
        self.prompt_tokens = Counter("pdjax_prompt_tokens", "prompt tokens of finished sequences", registry=registry)
        self.cached_tokens = Counter("pdjax_cached_prompt_tokens", "of these, taken from a prefix cache", registry=registry)
        self.generated_tokens = Counter("pdjax_generated_tokens", "output tokens", registry=registry)
