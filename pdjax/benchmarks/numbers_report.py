"""The table and the picture of `python -m pdjax.bench numbers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

COLUMNS = ("variant", "mean", "max", "perplexity", "same best", "same answers", "weights", "KV a token")


def rows(report: dict[str, Any]) -> list[tuple[str, ...]]:
    """A row a variant, the base first, under `COLUMNS`."""
    return [
        (
            result["variant"],
            f"{result['mean_change']:.4f}",
            f"{result['max_change']:.3f}",
            f"{result['perplexity']:.3f}",
            f"{result['same_best']}/{result['places']}",
            f"{result['same_answer']}/{result['answer_tokens']}",
            f"{result['weight_bytes'] / 1e6:.0f} MB",
            f"{result['kv_bytes_per_token'] / 1e3:.1f} KB",
        )
        for result in report["results"]
    ]


def print_numbers(console: Console, report: dict[str, Any]) -> None:
    settings = report["settings"]
    title = f"{escape(report['model'])}, {settings['tokens']} tokens of {escape(settings['text'])}, {report['platform']}"
    table = Table(title=f"{title}; changes of log probabilities against {settings['model_dtype']}")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "variant" else "right", no_wrap=True)
    for row in rows(report):
        table.add_row(*map(escape, row))
    console.print(table)


def plot_numbers(path: Path, report: dict[str, Any]) -> None:
    """Draw the changes of every variant, from the smallest to the largest, as a PNG. Needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots()
    figure.suptitle(f"{report['model']}: how far log probabilities of a text of {report['settings']['tokens']} tokens move")
    for result in report["results"][1:]:
        changes = sorted(result["changes"])
        shares = [100 * (index + 1) / len(changes) for index in range(len(changes))]
        axes.plot(changes, shares, label=f"{result['variant']}, mean {result['mean_change']:.4f}")
    axes.set_xscale("log")
    axes.set_xlabel("change of a token's log probability, nats")
    axes.set_ylabel("% of the tokens that move less")
    axes.set_ylim(0, 100)
    axes.grid(alpha=0.3)
    if axes.has_data():
        axes.legend()
    canvas.print_png(path)
