"""Where the time of one request goes: sends it, fetches its timeline from the router, and writes a trace that Perfetto shows."""

from __future__ import annotations

import asyncio
import json
import random
import time
import urllib.parse
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pdjax.benchmarks.client import Endpoint, RequestFailed, Stream, get, measure, model_name, parse_url, stream_completion
from pdjax.benchmarks.serve import FIRST_TOKEN_ID
from pdjax.observe.timeline_picture import draw_trace, rows_of

TIMELINE_S = 10.0
"""How long the router may take to give a timeline."""


@dataclass(frozen=True)
class TimelineSettings:
    """What to send. Raises ValueError, naming value and limit, on settings that make no sense together.

    `cached` tokens of the prompt are computed beforehand by another request, which never reaches decode: they are cached on prefill only.
    """

    url: str
    prompt_tokens: int = 2048
    cached: int = 1600
    out_tokens: int = 16
    seed: int = 0
    vocab: int = 48000
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        parse_url(self.url)
        if self.prompt_tokens < 1:
            raise ValueError(f"prompt_tokens must be at least 1, got {self.prompt_tokens}")
        if not 0 <= self.cached < self.prompt_tokens:
            raise ValueError(f"cached must be at least 0 and below prompt_tokens {self.prompt_tokens}, got {self.cached}")
        if self.out_tokens < 2:
            raise ValueError(f"out_tokens must be at least 2, or nothing is handed over, got {self.out_tokens}")
        if self.vocab <= FIRST_TOKEN_ID:
            raise ValueError(f"vocab must be above {FIRST_TOKEN_ID}, got {self.vocab}")


class Observed(NamedTuple):
    """`timeline` and `trace` as the router gives them; `ttft_s` and `handoff_s` as this client saw them."""

    timeline: dict[str, Any]
    trace: dict[str, Any]
    ttft_s: float
    handoff_s: float


async def run(settings: TimelineSettings) -> Observed:
    """Warm the prefix, send the request, fetch its timeline. Raises RequestFailed."""
    endpoint = parse_url(settings.url)
    model = await model_name(endpoint, settings.timeout_s)
    rng = random.Random(f"timeline {settings.seed}")
    prompt = [rng.randrange(FIRST_TOKEN_ID, settings.vocab) for _ in range(settings.prompt_tokens)]
    if settings.cached:
        await _send(endpoint, model, prompt[: settings.cached], 1, settings.timeout_s)
    stream = await _send(endpoint, model, prompt, settings.out_tokens, settings.timeout_s)
    sample = measure(stream, settings.out_tokens)
    request_id = json.loads(stream.events[0].data).get("id", "")
    answer = await _timeline(endpoint, request_id)
    assert sample.handoff_s is not None, f"an answer of {settings.out_tokens} tokens has a second one"
    return Observed(answer["timeline"], answer["trace"], sample.ttft_s, sample.handoff_s)


async def _send(endpoint: Endpoint, model: str, prompt: list[int], out_tokens: int, timeout_s: float) -> Stream:
    request = {"model": model, "prompt": prompt, "max_tokens": out_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    stream = await stream_completion(endpoint, json.dumps(request).encode(), time.perf_counter, timeout_s)
    measure(stream, out_tokens)
    return stream


async def _timeline(endpoint: Endpoint, request_id: str) -> dict[str, Any]:
    path = f"/v1/requests/{urllib.parse.quote(request_id, safe='')}/timeline"
    status, body = await get(endpoint, path, TIMELINE_S)
    if status != 200:
        raise RequestFailed(f"HTTP {status} from {path}: this server keeps no timelines")
    return json.loads(body)


def write_trace(path: Path, observed: Observed) -> None:
    """The trace-event file: to be opened in ui.perfetto.dev or chrome://tracing."""
    path.write_text(json.dumps(observed.trace) + "\n", encoding="utf-8")


def print_timeline(console: Console, observed: Observed) -> None:
    """The two paths with their sums, then every stage of every worker."""
    for sequence in observed.timeline["sequences"]:
        seen = {"ttft_path": ("first token", observed.ttft_s), "handoff_path": ("first to second token", observed.handoff_s)}
        for key, (title, client_s) in seen.items():
            console.print(_path_table(title, sequence[key], client_s))
        for number, attempt in enumerate(sequence["attempts"]):
            for worker in attempt["workers"]:
                console.print(_stage_table(number, worker))


def _path_table(title: str, steps: list[dict[str, Any]], client_s: float) -> Table:
    table = Table(title=f"to the {title}" if title == "first token" else title)
    for column, justify in (("where", "left"), ("step", "left"), ("ms", "right"), ("share", "right")):
        table.add_column(column, justify=justify)
    total_s = sum(step["end_s"] - step["start_s"] for step in steps)
    for step in steps:
        took_s = step["end_s"] - step["start_s"]
        table.add_row(step["where"], step["name"], f"{1e3 * took_s:.1f}", f"{took_s / client_s:.1%}")
    table.add_section()
    table.add_row("", "sum of the stages", f"{1e3 * total_s:.1f}", f"{total_s / client_s:.1%}")
    table.add_row("client", "as seen here", f"{1e3 * client_s:.1f}", "100.0%")
    return table


def _stage_table(attempt: int, worker: dict[str, Any]) -> Table:
    shift = f", clock moved by {1e3 * worker['clock_shift_s']:.1f} ms" if worker["clock_shift_s"] else ""
    table = Table(title=f"{worker['side']} {escape(worker['address'])}, attempt {attempt + 1}: {worker['ended']}{shift}")
    for column, justify in (("track", "left"), ("stage", "left"), ("from, ms", "right"), ("ms", "right"), ("tokens, pages", "right")):
        table.add_column(column, justify=justify)
    for stage in sorted(worker["stages"], key=lambda stage: (stage["track"], stage["start_s"])):
        took_s = stage["end_s"] - stage["start_s"]
        count = str(stage["count"]) if stage["count"] else ""
        table.add_row(stage["track"] or "stages", stage["name"], f"{1e3 * stage['start_s']:.1f}", f"{1e3 * took_s:.1f}", count)
    return table


def plot_timeline(path: Path, observed: Observed) -> None:
    """Draw the trace as a PNG, one row a track. Needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 1.2 + 0.3 * len(rows_of(observed.trace))), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    draw_trace(figure.subplots(), observed.trace)
    canvas.print_png(path)


def observe(settings: TimelineSettings) -> Observed:
    """`run`, for callers without an event loop."""
    return asyncio.run(run(settings))
