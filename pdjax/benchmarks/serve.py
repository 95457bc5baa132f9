"""Latency and throughput of any OpenAI-compatible server, as its clients see them.

A closed loop: `concurrency` clients, each sending its next request when the last one has ended, with random token-id prompts of one
length, greedy sampling and end-of-sequence ignored, so that every request costs the same on every server.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from pdjax.benchmarks.client import Clock, Endpoint, RequestFailed, Sample, measure, model_name, parse_url, stream_completion
from pdjax.benchmarks.report import SCHEMA_VERSION, summarize

FIRST_TOKEN_ID = 100
"""Ids below are left out of prompts: control tokens live there in most vocabularies."""

OnRequest = Callable[[int], None]


@dataclass(frozen=True)
class ServeSettings:
    """What to send. Raises ValueError, naming value and limit, on settings that make no sense together."""

    url: str
    lens: tuple[int, ...] = (128, 512)
    out: int = 32
    concurrency: int = 1
    requests: int = 8
    shared_prefix: int = 0
    seed: int = 0
    vocab: int = 48000
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        parse_url(self.url)
        if not self.lens or min(self.lens) < 1:
            raise ValueError(f"prompt lengths must be at least 1 token each, got {list(self.lens)}")
        if len(set(self.lens)) < len(self.lens):
            raise ValueError(f"prompt lengths must differ, or the second run finds its prompts cached, got {list(self.lens)}")
        for name in ("out", "concurrency", "requests"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.requests < self.concurrency:
            raise ValueError(f"requests must be at least concurrency {self.concurrency}, got {self.requests}")
        if self.shared_prefix < 0:
            raise ValueError(f"shared_prefix must be at least 0, got {self.shared_prefix}")
        if self.vocab <= FIRST_TOKEN_ID:
            raise ValueError(f"vocab must be above {FIRST_TOKEN_ID}, got {self.vocab}")
        if self.timeout_s <= 0:
            raise ValueError(f"timeout must be above 0 s, got {self.timeout_s}")


class Measured(NamedTuple):
    """All measured requests of one prompt length.

    `errors` counts failures by message. `duration_s`: first request sent to last one ended.
    """

    prompt_tokens: int
    samples: list[Sample]
    errors: Counter[str]
    duration_s: float


def make_prompts(settings: ServeSettings, prompt_tokens: int) -> Iterator[list[int]]:
    """Endless random prompts of `prompt_tokens` tokens that start with the same `shared_prefix` tokens and always differ in the last.

    The shared tokens are the same for every length of a run, and so for every run with the same seed.
    """
    shared = random.Random(f"shared {settings.seed}")
    prefix = [shared.randrange(FIRST_TOKEN_ID, settings.vocab) for _ in range(min(settings.shared_prefix, prompt_tokens - 1))]
    rest = random.Random(f"rest {settings.seed} {prompt_tokens}")
    while True:
        yield prefix + [rest.randrange(FIRST_TOKEN_ID, settings.vocab) for _ in range(prompt_tokens - len(prefix))]


async def run(settings: ServeSettings, on_request: OnRequest, clock: Clock = time.perf_counter) -> dict[str, Any]:
    """Measure every length in turn and report. `on_request(prompt_tokens)` is called after each request, warm-up included.

    Raises RequestFailed where the server does not even name its model; failures of single requests are counted and reported.
    """
    endpoint = parse_url(settings.url)
    model = await model_name(endpoint, settings.timeout_s)
    results = []
    for prompt_tokens in settings.lens:
        results.append(report_length(settings, await _run_length(settings, endpoint, model, prompt_tokens, on_request, clock)))
    return {
        "schema_version": SCHEMA_VERSION,
        "benchmark": "serve",
        "model": model,
        "settings": asdict(settings),
        "results": results,
    }


async def _run_length(
    settings: ServeSettings, endpoint: Endpoint, model: str, prompt_tokens: int, on_request: OnRequest, clock: Clock
) -> Measured:
    prompts = make_prompts(settings, prompt_tokens)
    warm_up, *requests = [completion_request(model, next(prompts), settings.out) for _ in range(settings.requests + 1)]
    samples: list[Sample] = []
    errors: Counter[str] = Counter()

    async def send(request: bytes, into: list[Sample], failures: Counter[str]) -> None:
        try:
            stream = await stream_completion(endpoint, request, clock, settings.timeout_s)
            into.append(measure(stream, settings.out))
        except RequestFailed as failure:
            failures[str(failure)] += 1
        on_request(prompt_tokens)

    async def client(pending: Iterator[bytes]) -> None:
        for request in pending:
            await send(request, samples, errors)

    await send(warm_up, [], Counter())  # what is wrong with it is wrong with the measured ones too
    pending = iter(requests)
    start_s = clock()
    async with asyncio.TaskGroup() as clients:
        for _ in range(settings.concurrency):
            clients.create_task(client(pending))
    return Measured(prompt_tokens, samples, errors, clock() - start_s)


def completion_request(model: str, prompt: list[int], out: int) -> bytes:
    """The body of a greedy, streamed request for exactly `out` tokens."""
    return json.dumps(
        {
            "model": model,
            "prompt": prompt,
            "max_tokens": out,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()


def report_length(settings: ServeSettings, measured: Measured) -> dict[str, Any]:
    """The JSON object of one prompt length. Statistics are None where nothing was measured."""
    samples = measured.samples
    cached = [sample.cached_tokens for sample in samples if sample.cached_tokens is not None]
    return {
        "prompt_tokens": measured.prompt_tokens,
        "shared_prefix_tokens": min(settings.shared_prefix, measured.prompt_tokens - 1),
        "output_tokens": settings.out,
        "concurrency": settings.concurrency,
        "requests": settings.requests,
        "completed": len(samples),
        "errors": measured.errors.total(),
        "error_messages": dict(measured.errors),
        "duration_s": measured.duration_s,
        "ttft_s": summarize([sample.ttft_s for sample in samples]),
        "itl_s": summarize([gap_s for sample in samples for gap_s in sample.itl_s]),
        "handoff_s": summarize([sample.handoff_s for sample in samples if sample.handoff_s is not None]),
        "e2e_s": summarize([sample.e2e_s for sample in samples]),
        "tokens_per_s": {
            "input": len(samples) * measured.prompt_tokens / measured.duration_s,
            "output": sum(sample.output_tokens for sample in samples) / measured.duration_s,
        },
        "cached_tokens": summarize(cached),
        "samples": [sample._asdict() for sample in samples],
    }
