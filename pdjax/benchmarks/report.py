"""What all benchmarks share: statistics, tables, JSON files and pictures."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

SCHEMA_VERSION = 1
"""Raised whenever a key of a JSON report changes its meaning or goes away; new keys do not count."""

LATENCIES = {"ttft_s": "TTFT", "itl_s": "ITL", "handoff_s": "hand-off", "e2e_s": "end to end"}


def quantile(values: Sequence[float], q: float) -> float:
    """The q-quantile, 0 <= q <= 1, of at least one value, interpolated linearly between neighbours."""
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    below, above = ordered[math.floor(place)], ordered[math.ceil(place)]
    return below + (above - below) * (place - math.floor(place))


def summarize(values: Sequence[float]) -> dict[str, float] | None:
    """Count, mean, extremes and quantiles; None where there are no values."""
    if not values:
        return None
    return {
        "count": len(values),
        "mean": sum(values) / len(values),
        "min": min(values),
        "median": quantile(values, 0.5),
        "p90": quantile(values, 0.9),
        "p99": quantile(values, 0.99),
        "max": max(values),
    }


def check_output_path(path: Path) -> None:
    """Raises ValueError where a file could not be written there, before a long measurement is lost over it."""
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"cannot write {path}: its folder must exist and it must not be a folder itself")


def check_plotting() -> None:
    """Raises ValueError, saying what to install, where pictures cannot be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib, which is not installed: pip install 'pdjax[bench]'")


def write_json(path: Path, report: dict[str, Any]) -> None:
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def print_serve(console: Console, report: dict[str, Any]) -> None:
    """Two tables (latencies in milliseconds, throughput) and every kind of error with its count."""
    settings = report["settings"]
    console.print(
        f"{escape(report['model'])} at {escape(settings['url'])}: {settings['out']} output tokens, concurrency {settings['concurrency']}, "
        f"{settings['requests']} requests a length, {settings['shared_prefix']} shared prompt tokens, seed {settings['seed']}",
        soft_wrap=True,
    )
    console.print(_latency_table(report["results"]))
    console.print(_throughput_table(report["results"]))
    for result in report["results"]:
        for message, count in result["error_messages"].items():
            console.print(f"{result['prompt_tokens']} prompt tokens: {count} x {escape(message)}", style="red", soft_wrap=True)


def _latency_table(results: list[dict[str, Any]]) -> Table:
    table = Table(title="latency, ms")
    for column in ("prompt", "", "median", "p90", "p99"):
        table.add_column(column, justify="left" if not column else "right")
    for result in results:
        for key, label in LATENCIES.items():
            stats = result[key]
            cells = ["-"] * 3 if stats is None else [f"{1e3 * stats[name]:.1f}" for name in ("median", "p90", "p99")]
            table.add_row(str(result["prompt_tokens"]), label, *cells)
        table.add_section()
    return table


def _throughput_table(results: list[dict[str, Any]]) -> Table:
    table = Table(title="throughput")
    for column in ("prompt", "completed", "errors", "input tok/s", "output tok/s", "cached tokens"):
        table.add_column(column, justify="right")
    for result in results:
        rates, cached = result["tokens_per_s"], result["cached_tokens"]
        table.add_row(
            str(result["prompt_tokens"]),
            str(result["completed"]),
            str(result["errors"]),
            f"{rates['input']:.0f}",
            f"{rates['output']:.1f}",
            "-" if cached is None else f"{cached['median']:.0f}",
        )
    return table


def print_ceilings(console: Console, report: dict[str, Any]) -> None:
    """Measured ceilings and the floors that follow from them."""
    device = report["device"]
    table = Table(title=f"{escape(device['kind'])}, float32, {device['cpu_cores']} CPU cores")
    for column in ("ceiling", "best", "median", "unit"):
        table.add_column(column, justify="left" if column in ("ceiling", "unit") else "right")
    size, megabytes = report["settings"]["matmul_size"], report["settings"]["read_bytes"] / 1e6
    rows = {
        "matmul_gflop_per_s": (f"matrix product {size}^3", "GFLOP/s"),
        "read_sum_gb_per_s": (f"sum of {megabytes:.0f} MB", "GB/s"),
        "read_matvec_gb_per_s": (f"matrix-vector product, {megabytes:.0f} MB", "GB/s"),
    }
    for key, (label, unit) in rows.items():
        table.add_row(label, f"{report[key]['best']:.1f}", f"{report[key]['median']:.1f}", unit)
    console.print(table)
    floors = report["floors"]
    for key, label in (("prefill_512_tokens_s", "512 tokens at 0.212 GFLOP each"), ("read_540_mb_s", "reading 540 MB once")):
        floor_ms = 1e3 * floors[key]
        console.print(f"{label}: {floor_ms:.1f} ms at the best rate, {floor_ms / 0.6:.1f} ms at 60 % of it", soft_wrap=True)


def plot_serve(path: Path, report: dict[str, Any]) -> None:
    """Draw latency over prompt length as a PNG: TTFT left, inter-token latency and hand-off right. Needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    settings = report["settings"]
    figure.suptitle(f"{report['model']}, {settings['out']} output tokens, concurrency {settings['concurrency']}")
    for axes, keys in ((left, ("ttft_s",)), (right, ("itl_s", "handoff_s"))):
        for key in keys:
            _plot_latency(axes, report["results"], key)
        axes.set_xlabel("prompt, tokens")
        axes.set_ylabel("ms")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        if axes.has_data():
            axes.legend()
    canvas.print_png(path)


def _plot_latency(axes: Any, results: list[dict[str, Any]], key: str) -> None:
    """Median as a line, median to p90 as a band."""
    measured = sorted((r["prompt_tokens"], 1e3 * r[key]["median"], 1e3 * r[key]["p90"]) for r in results if r[key] is not None)
    if not measured:
        return
    lengths, medians, p90s = zip(*measured, strict=True)
    (line,) = axes.plot(lengths, medians, marker="o", label=f"{LATENCIES[key]}, median to p90")
    axes.fill_between(lengths, medians, p90s, color=line.get_color(), alpha=0.2)
