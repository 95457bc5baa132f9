"""The timeline of a request to look at: as a picture by Matplotlib, and as a file for Perfetto."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pdjax.observe.timeline_trace import trace
from pdjax.observe.timeline_view import RequestView

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LABEL_SHARE = 0.05
"""Bars shorter than this part of the picture have no room for their names."""

ONLY_SEQUENCE = "sequence 0"
"""With this all tracks begin where a request is one sequence, and then it goes without saying."""


class TimelinePicture(NamedTuple):
    """One request. `view` has all the numbers: stages, paths to the first and the second token, pages on their way."""

    view: RequestView

    def plot(self, axes: Axes | None = None, end_ms: float | None = None) -> Axes:
        """Draw it, a row a track, up to `end_ms` (default: all). Without `axes` into a new figure of pyplot's, as notebooks show it.

        Needs Matplotlib.
        """
        drawn = trace(self.view)
        if axes is None:
            from matplotlib import pyplot

            num_rows = len(rows_of(drawn))
            _, axes = pyplot.subplots(figsize=(11, 1.2 + 0.27 * num_rows), layout="constrained")
        draw_trace(axes, drawn, end_ms)
        return axes

    def save_trace(self, path: str | Path) -> None:
        """Write a trace-event file, to be opened in ui.perfetto.dev or chrome://tracing."""
        Path(path).write_text(json.dumps(trace(self.view)) + "\n", encoding="utf-8")


def rows_of(drawn: dict[str, Any]) -> list[tuple[int, int]]:
    """Process and track of each row, from top to bottom."""
    return sorted({(each["pid"], each["tid"]) for each in _slices(drawn)})


def draw_trace(axes: Axes, drawn: dict[str, Any], end_ms: float | None = None) -> None:
    """Draw a trace of `pdjax.observe.timeline_trace`, up to `end_ms` (default: all). Things without a length are ticks."""
    rows = {key: row for row, key in enumerate(rows_of(drawn))}
    whole_ms = max(_end_ms(each) for each in _slices(drawn)) if end_ms is None else end_ms
    for each in _slices(drawn):
        key = (each["pid"], each["tid"])
        row, color, start_ms, stop_ms = rows[key], f"C{each['pid'] % 10}", each["ts"] / 1e3, min(_end_ms(each), whole_ms)
        if start_ms > whole_ms:
            continue
        if not each["dur"]:
            axes.plot(start_ms, row, marker="|", markersize=10, color=color)
            continue
        axes.barh(row, stop_ms - start_ms, left=start_ms, height=0.7, color=color, edgecolor="white", linewidth=0.5, alpha=0.8)
        if stop_ms - start_ms > LABEL_SHARE * whole_ms:
            axes.text((start_ms + stop_ms) / 2, row, each["name"], va="center", ha="center", fontsize=7, clip_on=True)
    axes.set_xlim(-0.01 * whole_ms, 1.01 * whole_ms)
    axes.set_yticks(list(rows.values()), _labels(drawn, list(rows)), fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("ms after the request was received")
    axes.grid(axis="x", alpha=0.3)


def _slices(drawn: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in drawn["traceEvents"] if event["ph"] == "X"]


def _end_ms(each: dict[str, Any]) -> float:
    return (each["ts"] + each["dur"]) / 1e3


def _labels(drawn: dict[str, Any], keys: list[tuple[int, int]]) -> list[str]:
    names = {(event["pid"], event["tid"], event["name"]): event["args"]["name"] for event in drawn["traceEvents"] if event["ph"] == "M"}
    tracks = [names[process, track, "thread_name"] for process, track in keys]
    if all(track.startswith(ONLY_SEQUENCE) for track in tracks):
        tracks = [track.removeprefix(ONLY_SEQUENCE).lstrip(": ") for track in tracks]
    return [" | ".join(filter(None, (names[key[0], 0, "process_name"], track))) for key, track in zip(keys, tracks, strict=True)]
