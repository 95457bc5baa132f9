"""Time to first token over the length of the prompt, and inter-token latency over context and over batch, through the full path.

The quickstart system: router, prefill and decode worker, HTTP. Batches come as that many requests at once; only the time counts in which
all of them stream.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pdjax.benchmarks.client import Clock, Endpoint, Sample, measure, model_name, stream_completion
from pdjax.benchmarks.fleet import running_fleet, serve_part
from pdjax.benchmarks.growth_report import Chart, Curve, PartReport
from pdjax.benchmarks.load import PromptShape, make_prompts
from pdjax.benchmarks.report import quantile
from pdjax.benchmarks.serve import completion_request
from pdjax.config.load import load_config
from pdjax.config.schema import Config

LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8000)
REPEAT_TOKENS = 2048
"""A length is repeated until so many prompt tokens have been computed, at least once and at most MAX_REPEATS times."""
MAX_REPEATS = 3
CONTEXT_OUT = 16
BATCHES = (1, 2, 4, 8, 16, 32)
BATCH_PROMPT_TOKENS = 32
BATCH_OUT, LARGE_BATCH, LARGE_BATCH_OUT = 64, 16, 128
"""Answers of large batches are longer: the first request must still stream when the last one begins to."""
VOCAB = 48000
TIMEOUT_S = 600.0

Tell = Callable[[str], None]


class Timed(NamedTuple):
    """One answered request. `token_times_s`: when each event with a token arrived, on the client's clock."""

    sample: Sample
    token_times_s: list[float]


def num_repeats(prompt_tokens: int) -> int:
    return max(1, min(MAX_REPEATS, REPEAT_TOKENS // prompt_tokens))


def engine_config(overrides: tuple[str, ...]) -> Config:
    """The quickstart with room for the largest batch and the longest prompt."""
    batch = BATCHES[-1]
    return load_config(None, (f"engine.max_running={batch}", f"engine.decode_buckets={list(BATCHES)}", "log.level=warning", *overrides))


def run(tell: Tell, overrides: tuple[str, ...] = ()) -> PartReport:
    return asyncio.run(_run(tell, engine_config(overrides)))


async def _run(tell: Tell, config: Config) -> PartReport:
    tell("engine: starting the system")
    workers = [serve_part(role, role, config) for role in ("prefill", "decode")]
    async with running_fleet(serve_part("router", "router", config), workers) as fleet:
        client = _Client(fleet.endpoint, await model_name(fleet.endpoint, TIMEOUT_S))
        by_length = {}
        for length in LENGTHS:
            tell(f"engine: prompts of {length:,} tokens")
            by_length[length] = [await client.send(length, CONTEXT_OUT) for _ in range(num_repeats(length))]
        by_batch = {}
        for batch in BATCHES:
            tell(f"engine: batch of {batch}")
            out = LARGE_BATCH_OUT if batch >= LARGE_BATCH else BATCH_OUT
            by_batch[batch] = await asyncio.gather(*(client.send(BATCH_PROMPT_TOKENS, out) for _ in range(batch)))
        return build(by_length, by_batch)


class _Client:
    """Every prompt is a new one. Raises RequestFailed."""

    def __init__(self, endpoint: Endpoint, model: str, clock: Clock = time.perf_counter):
        self._endpoint = endpoint
        self._model = model
        self._clock = clock
        self._streams = itertools.count()

    async def send(self, prompt_tokens: int, out: int) -> Timed:
        prompt = next(make_prompts(PromptShape(prompt_tokens, 0, VOCAB), time.time_ns(), str(next(self._streams))))
        stream = await stream_completion(self._endpoint, completion_request(self._model, prompt, out), self._clock, TIMEOUT_S)
        sample = measure(stream, out)
        return Timed(sample, list(itertools.accumulate(sample.itl_s, initial=stream.start_s + sample.ttft_s)))


def gaps_of_all(batch: Sequence[Timed]) -> list[float]:
    """Gaps between tokens that begin and end while every request of the batch streams, behind its hand-off."""
    start_s = max(timed.token_times_s[1] for timed in batch)
    end_s = min(timed.token_times_s[-1] for timed in batch)
    return [
        after - before for timed in batch for before, after in itertools.pairwise(timed.token_times_s) if start_s <= before and after <= end_s
    ]


def build(by_length: dict[int, list[Timed]], by_batch: dict[int, Sequence[Timed]]) -> PartReport:
    ttft = [(float(length), 1e3 * quantile([each.sample.ttft_s for each in timed], 0.5)) for length, timed in by_length.items()]
    itl = [
        (float(length), 1e3 * quantile([gap_s for each in timed for gap_s in each.sample.steady_itl_s], 0.5))
        for length, timed in by_length.items()
    ]
    steps_s = {batch: quantile(gaps_s, 0.5) for batch, timed in by_batch.items() if (gaps_s := gaps_of_all(timed))}
    charts = (
        Chart("time to first token", "prompt, tokens", "ms", (Curve("TTFT", ttft),), is_log=True),
        Chart("inter-token latency over context", "context, tokens", "ms", (Curve("ITL", itl),)),
        Chart("inter-token latency over batch", "sequences", "ms", (Curve("ITL", [(float(n), 1e3 * s) for n, s in steps_s.items()]),)),
        Chart("decode throughput over batch", "sequences", "tok/s", (Curve("all", [(float(n), n / s) for n, s in steps_s.items()]),)),
    )
    notes = [f"Batches: prompts of {BATCH_PROMPT_TOKENS} tokens; the time counts in which all of them stream."]
    notes += [f"{batch} requests never streamed all at the same time." for batch in by_batch if batch not in steps_s]
    raw = {"repeats": {length: len(timed) for length, timed in by_length.items()}}
    return PartReport("engine", charts, notes=tuple(notes), raw=raw)
