"""From the requests of an ablation to its numbers: medians, ratios with confidence intervals, goals, tables, a picture.

The JSON of `python -m pdjax.bench ablation`:

  experiment, model, machine, settings
  emulation            of each round: forward_s, announce_delay_s and gbytes_per_s, null where not emulated
  modes                of the main comparison, by name (`off`, `on`; `n0`, `n3`): ttft_s, handoff_s, itl_s (behind the hand-off) and
                       tokens_per_s as medians (tokens_per_s under load: all output tokens over all of the time), ttft_mean_s,
                       requests, completed, errors, error_messages
  ratio_ttft, ratio_handoff, ratio_itl, ratio_tokens_per_s, ratio_ttft_mean
                       the second mode over the first; null where one of them measured nothing
  ci95                 of the same ratios: [low, high], by resampling requests; null where there are fewer than 4 pairs
  hidden_share         in turns: how much was won of what could be won at best: `ttft` of the shorter one of delay and forward, `handoff`
                       of the time that the cached part takes on the link, which a forward hides; null where not emulated
  comparisons          by name (`emulated`, `control`; `n1`, `n3`) the same keys, and of each mode: `samples`, and `figures`,
                       what the workers counted meanwhile (`prefill.early_sent_pages`, `prefill.optimistic_retries`, ...)
  goals                name, value, limit, is_upper_limit, is_met
"""

from __future__ import annotations

import os
import platform
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pdjax.benchmarks.ablation_plan import CONTROL, EMULATED, AblationSettings, Emulation
from pdjax.benchmarks.client import Sample
from pdjax.benchmarks.load import Block, Outcome
from pdjax.benchmarks.report import SCHEMA_VERSION, quantile

RESAMPLES = 1000
MIN_PAIRS = 4

UNCHANGED = 0.02
"""What a technique may cost where it wins nothing."""


@dataclass
class ModeRun:
    """One mode under one condition, over all rounds. `duration_s` and `block_tokens_per_s`: of load in blocks; None and empty in turns."""

    name: str
    outcomes: list[Outcome] = field(default_factory=list)
    duration_s: float | None = None
    block_tokens_per_s: list[float] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)

    def add(self, block: Block) -> None:
        self.outcomes += block.outcomes
        self.duration_s = (self.duration_s or 0.0) + block.duration_s
        self.block_tokens_per_s.append(_output_tokens(_samples(block.outcomes)) / block.duration_s)


class Comparison(NamedTuple):
    """A mode and what it is compared with."""

    base: ModeRun
    other: ModeRun


class Goal(NamedTuple):
    """`value` must be at most (`is_upper_limit`) or at least `limit`; it is None where nothing was measured, which misses the goal."""

    name: str
    value: float | None
    limit: float
    is_upper_limit: bool = True

    @property
    def is_met(self) -> bool:
        if self.value is None:
            return False
        return self.value <= self.limit if self.is_upper_limit else self.value >= self.limit


class Metric(NamedTuple):
    """A number of a mode and how it is worked out of samples, of which there is at least one. `unit` scales it for the table."""

    key: str
    ratio_key: str
    label: str
    of: Callable[[Sequence[Sample]], float | None]
    scale: float = 1e3


def _median(values: Sequence[float]) -> float | None:
    return quantile(values, 0.5) if values else None


METRICS = (
    Metric("ttft_s", "ratio_ttft", "TTFT, ms", lambda samples: _median([each.ttft_s for each in samples])),
    Metric("ttft_mean_s", "ratio_ttft_mean", "mean TTFT, ms", lambda samples: sum(each.ttft_s for each in samples) / len(samples)),
    Metric("handoff_s", "ratio_handoff", "hand-off, ms", lambda samples: _median([each.handoff_s for each in samples if each.itl_s])),
    Metric("itl_s", "ratio_itl", "ITL, ms", lambda samples: _median([gap_s for each in samples for gap_s in each.steady_itl_s])),
    Metric("tokens_per_s", "ratio_tokens_per_s", "tok/s", lambda samples: _median([each.output_tokens / each.e2e_s for each in samples]), 1.0),
)


def build_report(
    settings: AblationSettings, model: str, emulations: Sequence[Emulation], comparisons: dict[str, Comparison]
) -> dict[str, Any]:
    """The JSON object that this module describes. The last comparison of a storm is the main one, `emulated` otherwise."""
    reports = {name: _compare(comparison) for name, comparison in comparisons.items()}
    main = reports[EMULATED if EMULATED in reports else list(reports)[-1]]
    if settings.load == "turns" and emulations:
        main["hidden_share"] = hidden_share(settings.cached_share, emulations, *main["modes"].values())
    return {
        "schema_version": SCHEMA_VERSION,
        "benchmark": "ablation",
        "experiment": settings.experiment,
        "model": model,
        "machine": _machine(),
        "settings": asdict(settings),
        "emulation": [emulation._asdict() for emulation in emulations],
        **main,
        "modes": {name: _without_details(mode) for name, mode in main["modes"].items()},
        "comparisons": reports,
        "goals": [{**goal._asdict(), "is_met": goal.is_met} for goal in goals_of(settings, reports)],
    }


def goals_of(settings: AblationSettings, reports: dict[str, dict[str, Any]]) -> list[Goal]:
    """What the experiment is meant to show. A technique must not cost anything where it has nothing to win."""
    if settings.experiment == "retry-storm":
        return [_no_less(f"tokens/s with {name}", report["ratio_tokens_per_s"]) for name, report in reports.items()]
    emulated, control = reports[EMULATED], reports[CONTROL]
    goals = []
    if settings.load == "poisson":
        # The control only calibrates there: too few requests for two per cent.
        is_optimistic = settings.experiment != "early-send"
        return [Goal("emulated: mean TTFT, on / off", emulated["ratio_ttft_mean"], 1 / 1.9)] if is_optimistic else []
    if settings.experiment == "optimistic":
        goals.append(Goal("emulated: TTFT, on / off", emulated["ratio_ttft"], 0.5))
        goals.append(_no_more("emulated: ITL, on / off", emulated["ratio_itl"]))
        goals.append(_no_less("emulated: tokens/s, on / off", emulated["ratio_tokens_per_s"]))
    elif settings.experiment == "early-send":
        goals.append(Goal("emulated: hand-off, on / off", emulated["ratio_handoff"], 0.3))
    return [
        *goals,
        _no_more("control: TTFT, on / off", control["ratio_ttft"]),
        _no_more("control: hand-off, on / off", control["ratio_handoff"]),
        _no_more("control: ITL, on / off", control["ratio_itl"]),
        _no_less("control: tokens/s, on / off", control["ratio_tokens_per_s"]),
    ]


def _no_more(name: str, ratio: float | None) -> Goal:
    return Goal(name, ratio, 1 + UNCHANGED)


def _no_less(name: str, ratio: float | None) -> Goal:
    return Goal(name, ratio, 1 - UNCHANGED, is_upper_limit=False)


def _compare(comparison: Comparison) -> dict[str, Any]:
    base, other = _mode_report(comparison.base), _mode_report(comparison.other)
    pairs = [
        (one.sample, two.sample)
        for one, two in zip(comparison.base.outcomes, comparison.other.outcomes, strict=False)
        if one.sample is not None and two.sample is not None
    ]
    intervals = {metric.ratio_key: interval(pairs, metric.of) for metric in METRICS}
    if comparison.base.duration_s is not None:
        intervals["ratio_tokens_per_s"] = None  # under load tokens per second belong to a block, not to a request
    return {
        "modes": {comparison.base.name: base, comparison.other.name: other},
        **{metric.ratio_key: _ratio(other[metric.key], base[metric.key]) for metric in METRICS},
        "ci95": intervals,
        "hidden_share": {"ttft": None, "handoff": None},
    }


def hidden_share(cached_share: float, emulations: Sequence[Emulation], off: dict[str, Any], on: dict[str, Any]) -> dict[str, float | None]:
    """How much of a wait lay under compute, 1 being all that can. A late announcement and a forward side by side take as long as the longer
    one: the time to first token can lose the shorter one, which is half of it at best."""
    delay_s = _median([each.announce_delay_s for each in emulations if each.announce_delay_s is not None])
    forward_s = _median([each.forward_s for each in emulations if each.forward_s is not None and each.gbytes_per_s is not None])
    ttft_s, handoff_s = off["ttft_s"], off["handoff_s"]
    is_measured = None not in (ttft_s, on["ttft_s"], handoff_s, on["handoff_s"])
    return {
        "ttft": _ratio(ttft_s - on["ttft_s"], min(delay_s, ttft_s - delay_s)) if is_measured and delay_s is not None else None,
        "handoff": _ratio(handoff_s - on["handoff_s"], cached_share * forward_s) if is_measured and forward_s is not None else None,
    }


def interval(pairs: Sequence[tuple[Sample, Sample]], of: Callable[[Sequence[Sample]], float | None]) -> list[float] | None:
    """The middle 95 % of the ratio `of(second) / of(first)` over resampled pairs, the same ones each time; None for too few pairs."""
    if len(pairs) < MIN_PAIRS:
        return None
    rng = random.Random(0)
    ratios = []
    for _ in range(RESAMPLES):
        base, other = zip(*rng.choices(pairs, k=len(pairs)), strict=True)
        if (ratio := _ratio(of(other), of(base))) is not None:
            ratios.append(ratio)
    return [quantile(ratios, 0.025), quantile(ratios, 0.975)] if ratios else None


def _mode_report(run: ModeRun) -> dict[str, Any]:
    samples = _samples(run.outcomes)
    errors = Counter(outcome.error for outcome in run.outcomes if outcome.error is not None)
    values = {metric.key: metric.of(samples) if samples else None for metric in METRICS}
    if run.duration_s is not None:
        values["tokens_per_s"] = _output_tokens(samples) / run.duration_s
    return {
        **values,
        "requests": len(run.outcomes),
        "completed": len(samples),
        "errors": errors.total(),
        "error_messages": dict(errors),
        "duration_s": run.duration_s,
        "block_tokens_per_s": run.block_tokens_per_s,
        "figures": run.figures,
        "samples": [None if outcome.sample is None else outcome.sample._asdict() for outcome in run.outcomes],
    }


def _without_details(mode: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in mode.items() if key not in ("samples", "figures")}


def num_errors(report: dict[str, Any]) -> int:
    """Requests that were not answered in full, under any condition."""
    return sum(mode["errors"] for comparison in report["comparisons"].values() for mode in comparison["modes"].values())


def _samples(outcomes: Sequence[Outcome]) -> list[Sample]:
    return [outcome.sample for outcome in outcomes if outcome.sample is not None]


def _output_tokens(samples: Sequence[Sample]) -> int:
    return sum(sample.output_tokens for sample in samples)


def _ratio(other: float | None, base: float | None) -> float | None:
    return other / base if other is not None and base else None


def _machine() -> dict[str, Any]:
    return {
        "cpu_cores": len(os.sched_getaffinity(0)),
        "platform": platform.platform(),
        "processor": platform.machine(),
        "python": platform.python_version(),
    }


def print_ablation(console: Console, report: dict[str, Any]) -> None:
    """A table for each comparison, the goals, and every kind of error with its count."""
    settings = report["settings"]
    console.print(
        f"{report['experiment']}, {escape(report['model'])}: {settings['prompt_tokens']} prompt tokens, {settings['cached_share']:.0%} cached "
        f"on prefill, {settings['out']} output tokens, {settings['requests']} requests a mode and round, rounds {settings['rounds']}, "
        f"seed {settings['seed']}, {report['machine']['cpu_cores']} CPU cores",
        soft_wrap=True,
    )
    for emulation in report["emulation"]:
        console.print(_emulation_in_words(emulation))
    for name, comparison in report["comparisons"].items():
        console.print(_comparison_table(name, comparison))
    console.print(_goal_table(report["goals"]))
    for name, comparison in report["comparisons"].items():
        for mode, numbers in comparison["modes"].items():
            for message, count in numbers["error_messages"].items():
                console.print(f"{name}, {mode}: {count} x {escape(message)}", style="red", soft_wrap=True)


def _emulation_in_words(emulation: dict[str, float | None]) -> str:
    delay_s, rate = emulation["announce_delay_s"], emulation["gbytes_per_s"]
    words = [f"announcements {delay_s:.3f} s late"] if delay_s is not None else []
    words += [f"a link of {1e3 * rate:.1f} MB/s"] if rate is not None else []
    return "emulated: " + ", ".join(words)


def _comparison_table(name: str, comparison: dict[str, Any]) -> Table:
    (base_name, base), (other_name, other) = comparison["modes"].items()
    table = Table(title=name)
    for column in ("", base_name, other_name, "ratio", "95 %"):
        table.add_column(column, justify="right" if column else "left")
    for metric in METRICS:
        bounds = comparison["ci95"][metric.ratio_key]
        table.add_row(
            metric.label,
            _shown(base[metric.key], metric.scale, 1),
            _shown(other[metric.key], metric.scale, 1),
            _shown(comparison[metric.ratio_key], 1.0, 3),
            "-" if bounds is None else f"{bounds[0]:.3f} .. {bounds[1]:.3f}",
        )
    for waits, label in (("ttft", "of the delay hidden"), ("handoff", "of the transfer hidden")):
        if (share := comparison["hidden_share"][waits]) is not None:
            table.add_row(label, "", f"{share:.0%}", "", "")
    table.add_section()
    table.add_row("answered", *(f"{mode['completed']} of {mode['requests']}" for mode in (base, other)))
    for figure in ("prefill.early_sent_pages", "prefill.optimistic_retries"):
        if figure in other["figures"]:
            table.add_row(figure, *(f"{mode['figures'].get(figure, 0):.0f}" for mode in (base, other)))
    return table


def _goal_table(goals: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="goals")
    for column in ("goal", "value", "limit", ""):
        table.add_column(column, justify="right" if column in ("value", "limit") else "left")
    for goal in goals:
        sign = "<=" if goal["is_upper_limit"] else ">="
        table.add_row(goal["name"], _shown(goal["value"], 1.0, 3), f"{sign} {goal['limit']:.3f}", "met" if goal["is_met"] else "missed")
    return table


def _shown(value: float | None, scale: float, digits: int) -> str:
    return "-" if value is None else f"{scale * value:.{digits}f}"


def plot_ablation(path: Path, report: dict[str, Any]) -> None:
    """Draw each metric as a PNG: medians as bars, requests as dots, one pair of bars a comparison. Needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    metrics = [metric for metric in METRICS if metric.key != "ttft_mean_s"]
    figure = Figure(figsize=(3 * len(metrics), 3.6), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    figure.suptitle(f"{report['experiment']}, {report['model']}, {report['settings']['prompt_tokens']} prompt tokens")
    for axes, metric in zip(figure.subplots(1, len(metrics)), metrics, strict=True):
        labels = []
        for place, (name, comparison) in enumerate(report["comparisons"].items()):
            labels += _plot_comparison(axes, metric, name, comparison, 2.5 * place)
        axes.set_xticks([x for x, _ in labels], [label for _, label in labels], fontsize="x-small")
        axes.set_title(metric.label, fontsize="medium")
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", alpha=0.3)
    canvas.print_png(path)


def _plot_comparison(axes: Any, metric: Metric, name: str, comparison: dict[str, Any], left: float) -> list[tuple[float, str]]:
    """Two bars from `left` on; their places and labels."""
    labels = []
    for offset, (mode, numbers) in enumerate(comparison["modes"].items()):
        x = left + offset
        axes.bar(x, metric.scale * (numbers[metric.key] or 0.0), width=0.8, color=("tab:gray", "tab:blue")[offset])
        dots = [metric.of([Sample(**sample)]) for sample in numbers["samples"] if sample is not None]
        if numbers["duration_s"] is None or metric.key != "tokens_per_s":
            heights = [metric.scale * dot for dot in dots if dot is not None]
            axes.scatter([x] * len(heights), heights, s=6, color="black", alpha=0.4, zorder=3)
        labels.append((x, f"{mode}\n{name}"))
    return labels
