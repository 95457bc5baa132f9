"""From the outcomes of a comparison to its numbers: latencies, goodput, who wins where, and a picture with the crossover.

The JSON of `python -m pdjax.bench compare`:

  model, machine, settings, workload (what the scaled trace asks for)
  designs     by label: cores_a_worker, and `loads`: load, offered_per_s, requests, completed, errors, error_messages, ttft_s and itl_s
              (statistics over requests, and over gaps between tokens), mean_itl_s (over requests, of each one's mean gap),
              attained (share of all requests within both targets), goodput_per_s, cached_tokens, samples
  winners     for each load: offered_per_s, the label, its goodput_per_s and that of every design; several labels where they tie
  crossovers  between two designs: offered_per_s where their goodputs cross, and who is ahead below and above
  losses      where a disaggregated design has less goodput, or a longer median TTFT or ITL, than the best of the others
"""

from __future__ import annotations

import itertools
import os
import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pdjax.benchmarks.client import Sample
from pdjax.benchmarks.compare_plan import ComparePlan, CompareSettings
from pdjax.benchmarks.load import Outcome
from pdjax.benchmarks.report import SCHEMA_VERSION, summarize

TIE = 0.02
"""Goodputs that differ by less than this share of the higher one count as equal."""


class LoadRun(NamedTuple):
    """One design at one load. Outcomes in the order of the trace."""

    load: float
    offered_per_s: float
    outcomes: list[Outcome]


def mean_itl_s(sample: Sample) -> float:
    """The mean gap between two tokens of one answer, hand-off included; 0 where there was one token."""
    return sum(sample.itl_s) / len(sample.itl_s) if sample.itl_s else 0.0


def attained_share(outcomes: Sequence[Outcome], ttft_target_s: float, itl_target_s: float) -> float:
    """The share of all requests, failed ones among them, whose TTFT and mean ITL are within the targets."""
    good = sum(
        outcome.sample is not None and outcome.sample.ttft_s <= ttft_target_s and mean_itl_s(outcome.sample) <= itl_target_s
        for outcome in outcomes
    )
    return good / len(outcomes)


def load_report(settings: CompareSettings, run: LoadRun) -> dict[str, Any]:
    """The JSON object of one design at one load. Statistics are None where nothing was measured."""
    samples = [outcome.sample for outcome in run.outcomes if outcome.sample is not None]
    errors = Counter(outcome.error for outcome in run.outcomes if outcome.error is not None)
    attained = attained_share(run.outcomes, settings.ttft_target_s, settings.itl_target_s)
    return {
        "load": run.load,
        "offered_per_s": run.offered_per_s,
        "requests": len(run.outcomes),
        "completed": len(samples),
        "errors": errors.total(),
        "error_messages": dict(errors),
        "ttft_s": summarize([sample.ttft_s for sample in samples]),
        "itl_s": summarize([gap_s for sample in samples for gap_s in sample.itl_s]),
        "mean_itl_s": summarize([mean_itl_s(sample) for sample in samples if sample.itl_s]),
        "attained": attained,
        "goodput_per_s": attained * run.offered_per_s,
        "cached_tokens": summarize([sample.cached_tokens for sample in samples if sample.cached_tokens is not None]),
        "samples": [None if outcome.sample is None else outcome.sample._asdict() for outcome in run.outcomes],
    }


def build_comparison(plan: ComparePlan, model: str, runs: dict[str, list[LoadRun]]) -> dict[str, Any]:
    settings = plan.settings
    designs = {
        design.label: {
            "is_disaggregated": design.is_disaggregated,
            "workers": design.num_workers,
            "cores_a_worker": plan.cores_a_worker(design),
            "loads": [load_report(settings, run) for run in runs[design.label]],
        }
        for design in plan.designs
    }
    return {
        "schema_version": SCHEMA_VERSION,
        "benchmark": "compare",
        "model": model,
        "machine": {"cpu_cores": len(os.sched_getaffinity(0)), "platform": platform.platform(), "python": platform.python_version()},
        "settings": {**asdict(settings), "trace": settings.trace.name},
        "workload": workload(plan),
        "designs": designs,
        "winners": winners(designs),
        "crossovers": crossovers(designs),
        "losses": losses(designs),
    }


def workload(plan: ComparePlan) -> dict[str, Any]:
    """What every design is asked for. `shared_tokens`: the share of prompt tokens that an earlier prompt began with."""
    replayed = plan.replay(1.0)
    prompts = [len(request.prompt) for request in replayed]
    return {
        "requests": len(replayed),
        "prompt_tokens": summarize(prompts),
        "output_tokens": summarize([request.output_tokens for request in replayed]),
        "shared_tokens": sum(_shared(replayed[place].prompt, [each.prompt for each in replayed[:place]]) for place in range(len(replayed)))
        / sum(prompts),
    }


def _shared(prompt: list[int], earlier: Sequence[list[int]]) -> int:
    """Tokens with which `prompt` and one of `earlier` begin alike, at best."""
    return max((_common(prompt, each) for each in earlier), default=0)


def _common(one: list[int], other: list[int]) -> int:
    for place, (mine, theirs) in enumerate(zip(one, other, strict=False)):
        if mine != theirs:
            return place
    return min(len(one), len(other))


Designs = dict[str, dict[str, Any]]


def winners(designs: Designs) -> list[dict[str, Any]]:
    """Who has the highest goodput at each load; all that are within TIE of it."""
    found = []
    for rows in zip(*(design["loads"] for design in designs.values()), strict=True):
        goodputs = {label: row["goodput_per_s"] for label, row in zip(designs, rows, strict=True)}
        best = max(goodputs.values())
        labels = [label for label, goodput in goodputs.items() if goodput >= best * (1 - TIE)] if best else []
        found.append({"load": rows[0]["load"], "offered_per_s": rows[0]["offered_per_s"], "labels": labels, "goodput_per_s": goodputs})
    return found


def crossovers(designs: Designs) -> list[dict[str, Any]]:
    """Where the goodputs of two designs cross, with straight lines between loads; a stretch of equal goodputs is crossed at its end."""
    found = []
    for one, other in itertools.combinations(designs, 2):
        points = [
            (row["offered_per_s"], row["goodput_per_s"] - against["goodput_per_s"])
            for row, against in zip(designs[one]["loads"], designs[other]["loads"], strict=True)
        ]
        apart = [point for point in points if point[1] != 0]
        for (low_s, low), (high_s, high) in itertools.pairwise(apart):
            if (low > 0) != (high > 0):
                at_s = low_s + (high_s - low_s) * abs(low) / (abs(low) + abs(high))
                below, above = (one, other) if low > 0 else (other, one)
                found.append({"offered_per_s": at_s, "below": below, "above": above})
    return found


METRICS = (("goodput_per_s", "goodput", "requests/s", False), ("ttft_s", "median TTFT", "s", True), ("itl_s", "median ITL", "s", True))


def losses(designs: Designs) -> list[dict[str, Any]]:
    """Every load at which a disaggregated design is worse by a metric than the best unified one, by more than TIE."""
    unified = [design for design in designs.values() if not design["is_disaggregated"]]
    found = []
    for label, design in designs.items():
        if not design["is_disaggregated"] or not unified:
            continue
        for place, row in enumerate(design["loads"]):
            for key, name, unit, is_lower_better in METRICS:
                value = _middle(row[key])
                rivals = [rival for each in unified if (rival := _middle(each["loads"][place][key])) is not None]
                if value is None or not rivals:
                    continue
                best = min(rivals) if is_lower_better else max(rivals)
                if value > best * (1 + TIE) if is_lower_better else value < best * (1 - TIE):
                    where = {"label": label, "load": row["load"], "offered_per_s": row["offered_per_s"]}
                    found.append({**where, "metric": name, "unit": unit, "value": value, "best_unified": best})
    return found


def _middle(value: float | dict[str, float] | None) -> float | None:
    return value["median"] if isinstance(value, dict) else value


def num_errors(report: dict[str, Any]) -> int:
    """Requests that were not answered in full."""
    return sum(row["errors"] for design in report["designs"].values() for row in design["loads"])


def verdict(report: dict[str, Any]) -> list[str]:
    """Plain sentences: who wins at which load, where that changes, and where disaggregation loses."""
    lines = []
    for winner in report["winners"]:
        shown = ", ".join(f"{label} {goodput:.2f}" for label, goodput in winner["goodput_per_s"].items())
        lines.append(f"At {winner['offered_per_s']:.2f} requests/s: {_who_wins(winner['labels'])} (goodput {shown}).")
    for crossing in report["crossovers"]:
        lines.append(f"Crossover at {crossing['offered_per_s']:.2f} requests/s: {crossing['below']} below, {crossing['above']} above.")
    if not report["crossovers"]:
        lines.append("No crossover within these loads.")
    for loss in report["losses"]:
        lines.append(
            f"{loss['label']} loses at {loss['offered_per_s']:.2f} requests/s: {loss['metric']} {loss['value']:.3g} {loss['unit']} against "
            f"{loss['best_unified']:.3g}."
        )
    return lines


def _who_wins(labels: Sequence[str]) -> str:
    if not labels:
        return "no design answers anything within the targets"
    return f"{labels[0]} wins" if len(labels) == 1 else f"{' and '.join(labels)} tie"


def print_comparison(console: Console, report: dict[str, Any]) -> None:
    """One table, the verdict, and every kind of error with its count."""
    settings, load = report["settings"], report["workload"]
    console.print(
        f"{escape(report['model'])}, {settings['trace']}: {load['requests']} requests a load, prompts of "
        f"{load['prompt_tokens']['mean']:.0f} tokens on average ({load['shared_tokens']:.0%} shared with earlier ones), "
        f"answers of {load['output_tokens']['mean']:.0f}; targets TTFT "
        f"{settings['ttft_target_s']:g} s and mean ITL {settings['itl_target_s']:g} s; {report['machine']['cpu_cores']} CPU cores",
        soft_wrap=True,
    )
    for label, design in report["designs"].items():
        if design["cores_a_worker"] == 0:
            console.print(f"{escape(label)}: more workers than cores, so none is bound", style="yellow")
    console.print(_table(report["designs"]))
    for line in verdict(report):
        console.print(escape(line), soft_wrap=True)
    for label, design in report["designs"].items():
        for row in design["loads"]:
            for message, count in row["error_messages"].items():
                console.print(f"{escape(label)}, load {row['load']:g}: {count} x {escape(message)}", style="red", soft_wrap=True)


def _table(designs: Designs) -> Table:
    table = Table(title="latency in ms")
    for column in ("design", "req/s", "TTFT p50", "p90", "p99", "ITL p50", "p90", "p99", "good", "goodput"):
        table.add_column(column, justify="right" if column != "design" else "left", no_wrap=column == "design", overflow="fold")
    for label, design in designs.items():
        for row in design["loads"]:
            cells = [cell for key in ("ttft_s", "itl_s") for cell in _quantiles_ms(row[key])]
            table.add_row(escape(label), f"{row['offered_per_s']:.2f}", *cells, f"{row['attained']:.0%}", f"{row['goodput_per_s']:.2f}")
        table.add_section()
    return table


def _quantiles_ms(stats: dict[str, float] | None) -> list[str]:
    return ["-"] * 3 if stats is None else [f"{1e3 * stats[name]:.0f}" for name in ("median", "p90", "p99")]


def plot_comparison(path: Path, report: dict[str, Any]) -> None:
    """Goodput, median TTFT and median ITL over the offered rate, one line a design, crossovers marked. PNG or SVG, by the name of `path`.
    Needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    settings = report["settings"]
    figure.suptitle(
        f"{report['model']}, {settings['trace']}: goodput within TTFT {settings['ttft_target_s']:g} s "
        f"and mean ITL {settings['itl_target_s']:g} s",
        fontsize="medium",
    )
    panels = (("goodput_per_s", "goodput, requests/s", 1.0), ("ttft_s", "median TTFT, s", 1.0), ("itl_s", "median ITL, ms", 1e3))
    for axes, (key, label, scale) in zip(figure.subplots(1, 3), panels, strict=True):
        for name, design in report["designs"].items():
            rows = [row for row in design["loads"] if _middle(row[key]) is not None]
            axes.plot([row["offered_per_s"] for row in rows], [scale * (_middle(row[key]) or 0.0) for row in rows], marker="o", label=name)
        axes.set_xlabel("offered, requests/s")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
        axes.grid(alpha=0.3)
        if key == "goodput_per_s":
            _mark_crossovers(axes, report)
        axes.legend(fontsize="small")
    figure.savefig(path)


def _mark_crossovers(axes: Any, report: dict[str, Any]) -> None:
    """And the line on which every request is within the targets."""
    most = max(winner["offered_per_s"] for winner in report["winners"])
    axes.plot([0, most], [0, most], linestyle=":", color="gray", label="all within targets")
    for crossing in report["crossovers"]:
        axes.axvline(crossing["offered_per_s"], linestyle="--", color="black", linewidth=1)
        axes.annotate(f"crossover {crossing['offered_per_s']:.2f}/s", (crossing["offered_per_s"], 0), rotation=90, fontsize="x-small")
