"""What `python -m pdjax.bench growth` found: curves, goals, and the tables and pictures made of them.

The JSON: `machine`, and `parts` by name, each with `charts` (title, labels of the axes, curves as lists of [x, y]), `goals`
(name, value, limit, is_upper_limit, is_met), `notes`, `raw`, whatever else the part measured, and `error`, null unless the part failed.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pdjax.benchmarks.ablation_report import Goal
from pdjax.benchmarks.report import SCHEMA_VERSION

Point = tuple[float, float]


class Curve(NamedTuple):
    """How something grows, in rising order of x."""

    label: str
    points: list[Point]


@dataclass(frozen=True)
class Chart:
    """Curves over one axis. `is_log`: both axes are logarithmic, and a line of slope 1 is drawn to compare with.

    `digits`: behind the point, in tables.
    """

    title: str
    x_label: str
    y_label: str
    curves: tuple[Curve, ...]
    is_log: bool = False
    digits: int = 1


@dataclass(frozen=True)
class PartReport:
    """One part of the benchmark. `notes`: sentences that stand under its tables. `error`: why the part came to nothing."""

    name: str
    charts: tuple[Chart, ...]
    goals: tuple[Goal, ...] = ()
    notes: tuple[str, ...] = ()
    raw: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


def growth_ratio(points: Sequence[Point], low: float, high: float) -> float | None:
    """How many times y(low) is y(high); None where one of the two was not measured or y(low) is 0."""
    values = dict(points)
    return values[high] / values[low] if values.get(low) and high in values else None


def build_growth(reports: Sequence[PartReport], settings: dict[str, Any]) -> dict[str, Any]:
    """The JSON object of a whole run."""
    return {
        "schema_version": SCHEMA_VERSION,
        "benchmark": "growth",
        "machine": {
            "cpu_cores": len(os.sched_getaffinity(0)),
            "platform": platform.platform(),
            "python": platform.python_version(),
        },
        "settings": settings,
        "parts": {report.name: _part_object(report) for report in reports},
    }


def _part_object(report: PartReport) -> dict[str, Any]:
    charts = [
        {
            "title": chart.title,
            "x": chart.x_label,
            "y": chart.y_label,
            "curves": {curve.label: [list(point) for point in curve.points] for curve in chart.curves},
        }
        for chart in report.charts
    ]
    goals = [{**goal._asdict(), "is_met": goal.is_met} for goal in report.goals]
    return {"charts": charts, "goals": goals, "notes": list(report.notes), "raw": report.raw, "error": report.error}


class Grid(NamedTuple):
    """A table before it is put into words of a terminal or of Markdown. The first column is the axis."""

    title: str
    columns: list[str]
    rows: list[list[str]]


def chart_grid(chart: Chart) -> Grid:
    """One row for each x of any curve, one column a curve; `-` where a curve has no such point."""
    places = sorted({x for curve in chart.curves for x, _ in curve.points})
    lookups = [dict(curve.points) for curve in chart.curves]
    rows = [[_number(x), *(_value(lookup.get(x), chart.digits) for lookup in lookups)] for x in places]
    return Grid(f"{chart.title} ({chart.y_label})", [chart.x_label, *(curve.label for curve in chart.curves)], rows)


def goal_grid(goals: Sequence[Goal]) -> Grid:
    rows = []
    for goal in goals:
        sign = "at most" if goal.is_upper_limit else "at least"
        rows.append([goal.name, _value(goal.value, 2), f"{sign} {goal.limit:g}", "met" if goal.is_met else "missed"])
    return Grid("goals", ["goal", "value", "limit", ""], rows)


def grids(report: PartReport) -> list[Grid]:
    """The tables of a part, in the order in which they are shown."""
    return [chart_grid(chart) for chart in report.charts] + ([goal_grid(report.goals)] if report.goals else [])


def _number(x: float) -> str:
    return f"{x:,.0f}" if x == int(x) else f"{x:g}"


def _value(y: float | None, digits: int) -> str:
    return "-" if y is None or math.isnan(y) else f"{y:,.{digits}f}"


def print_part(console: Console, report: PartReport) -> None:
    for grid in grids(report):
        table = Table(title=f"{report.name}: {escape(grid.title)}")
        for place, column in enumerate(grid.columns):
            table.add_column(escape(column), justify="right" if place or grid.title != "goals" else "left")
        for row in grid.rows:
            table.add_row(*(escape(cell) for cell in row))
        console.print(table)
    for note in report.notes:
        console.print(escape(note), soft_wrap=True)
    if report.error is not None:
        console.print(f"{report.name} failed: {escape(report.error)}", style="red", soft_wrap=True)


def write_markdown(path: Path, reports: Sequence[PartReport]) -> None:
    """The tables of all parts with their pictures, which stand beside `path`."""
    lines = ["# Growth", ""]
    for report in reports:
        lines += [f"## {report.name}", ""]
        lines += [f"![{report.name}]({report.name}.svg)", ""] if report.charts else [f"Failed: {report.error}", ""]
        for grid in grids(report):
            lines += [f"**{grid.title}**", "", _markdown_row(grid.columns), _markdown_row(["---:"] * len(grid.columns))]
            lines += [*map(_markdown_row, grid.rows), ""]
        lines += [line for note in report.notes for line in (note, "")]
    path.write_text("\n".join(lines), encoding="utf-8")


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def draw_part(folder: Path, report: PartReport) -> list[Path]:
    """One picture with all charts of a part side by side, as SVG and PNG in `folder`; none where it failed. Needs matplotlib."""
    if not report.charts:
        return []
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5 * len(report.charts), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes_row = figure.subplots(1, len(report.charts), squeeze=False)[0]
    for axes, chart in zip(axes_row, report.charts, strict=True):
        _draw_chart(axes, chart)
    paths = [folder / f"{report.name}.{kind}" for kind in ("svg", "png")]
    for path in paths:
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    return paths


def _draw_chart(axes: Any, chart: Chart) -> None:
    for curve in chart.curves:
        if curve.points:
            axes.plot(*zip(*curve.points, strict=True), marker="o", markersize=4, label=curve.label)
    axes.set_title(chart.title, fontsize="medium")
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    axes.grid(alpha=0.3)
    if chart.is_log:
        _draw_linear_growth(axes, chart)
        axes.set_xscale("log")
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    if axes.has_data():
        axes.legend(fontsize="small")


def _draw_linear_growth(axes: Any, chart: Chart) -> None:
    """A dotted line of slope 1 through the lowest first point."""
    starts = [curve.points[0] for curve in chart.curves if curve.points and curve.points[0][1] > 0]
    if not starts:
        return
    x, y = min(starts, key=lambda point: point[1])
    last = max(point[0] for curve in chart.curves for point in curve.points)
    axes.plot([x, last], [y, y * last / x], linestyle=":", color="gray", label="linear growth")
