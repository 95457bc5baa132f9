"""A request's timeline as a trace that Perfetto and Chrome show (ui.perfetto.dev, chrome://tracing): JSON in the trace-event format.

The router, each worker and the way of the KV are processes of the trace. Where things of one track overlap they are spread over lanes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from pdjax.observe.timeline_view import AttemptView, RequestView, SequenceView, StageView, WorkerView

Event = dict[str, Any]

TRACKS = ("", "bootstrap", "chunks", "transfer", "sends", "receives", "retries")
"""Of a worker, from top to bottom; "" are the stages proper."""

MAX_LANES = 1000
"""More than a worker tells spans, so more can never overlap."""


class Slice(NamedTuple):
    """One bar. `process` and `track` by name; `args` are shown on a click."""

    process: str
    track: str
    name: str
    start_s: float
    end_s: float
    args: dict[str, Any]


class Run(NamedTuple):
    """Pages on their way from prefill to decode. `first` counts from the first page that was sent; `send`: how they were handed over."""

    first: int
    count: int
    send: StageView
    start_s: float
    end_s: float


SENDS = {
    "early_send": "sent before a step",
    "send": "sent behind a chunk",
    "last_send": "sent behind the last chunk",
    "held_send": "sent when bootstrap ended",
}


def trace(view: RequestView) -> dict[str, Any]:
    """The object that is written to a trace file. Times are microseconds after the request was received."""
    slices = [each for i, sequence in enumerate(view.sequences) for each in _sequence_slices(i, sequence)]
    return {
        "displayTimeUnit": "ms",
        "otherData": {"request_id": view.request_id, "received_s": str(view.received_s)},
        "traceEvents": list(_events(slices)),
    }


def page_runs(prefill: WorkerView, decode: WorkerView) -> list[Run]:
    """What moved, run by run as decode took it in. A run starts when the last of its pages was handed over, but what was handed over
    behind the last chunk not before that was computed."""
    sends = [stage for stage in prefill.stages if stage.track == "sends"]
    computed_s = max((stage.end_s for stage in prefill.stages if stage.track == "chunks"), default=0.0)
    runs: list[Run] = []
    first, covered, sent = 0, 0, -1
    for receipt in (stage for stage in decode.stages if stage.track == "receives"):
        while covered < first + receipt.count and sent + 1 < len(sends):
            sent += 1
            covered += sends[sent].count
        if sent < 0:
            break
        start_s = max(sends[sent].start_s, computed_s) if sends[sent].name == "last_send" else sends[sent].start_s
        runs.append(Run(first, receipt.count, sends[sent], start_s, max(start_s, receipt.end_s)))
        first += receipt.count
    return runs


def _sequence_slices(index: int, sequence: SequenceView) -> Iterator[Slice]:
    label = f"sequence {index}"
    for path in (sequence.ttft_path, sequence.handoff_path):
        for step in path:
            if step.where == "router":
                yield Slice("router", label, step.name, step.start_s, step.end_s, {})
    if sequence.ttft_s is not None:
        yield Slice("router", f"{label} as the client sees it", "to first token", 0.0, sequence.ttft_s, {})
        if sequence.handoff_s is not None:
            second_s = sequence.ttft_s + sequence.handoff_s
            yield Slice("router", f"{label} as the client sees it", "first to second token", sequence.ttft_s, second_s, {})
            if sequence.end_s is not None:
                yield Slice("router", f"{label} as the client sees it", "further tokens", second_s, sequence.end_s, {})
    for number, attempt in enumerate(sequence.attempts):
        suffix = label if len(sequence.attempts) == 1 else f"{label}, attempt {number + 1}"
        yield from _worker_slices(attempt.workers[0], suffix)
        if len(attempt.workers) > 1:
            yield from _transfer_slices(attempt, suffix)
            yield from _worker_slices(attempt.workers[1], suffix)


def _worker_slices(worker: WorkerView, label: str) -> Iterator[Slice]:
    for name in TRACKS:
        for stage in worker.stages:
            if stage.track == name:
                track = f"{label}: {name or 'stages'}"
                yield Slice(f"{worker.side} {worker.address}", track, stage.name, stage.start_s, stage.end_s, _args(stage))


def _args(stage: StageView) -> dict[str, Any]:
    unit = {"chunks": "tokens", "sends": "pages", "receives": "pages", "retries": "retries"}.get(stage.track)
    return {unit: stage.count} if unit else {}


def _transfer_slices(attempt: AttemptView, label: str) -> Iterator[Slice]:
    for run in page_runs(*attempt.workers):
        name = f"pages {run.first}..{run.first + run.count}"
        yield Slice("KV transfer", f"{label}: {SENDS[run.send.name]}", name, run.start_s, run.end_s, {"pages": run.count})


def _events(slices: list[Slice]) -> Iterator[Event]:
    """Processes and tracks are numbered, and so shown, in the order of `slices`; viewers want the events in the order of their start."""
    processes = {name: i + 1 for i, name in enumerate(dict.fromkeys(each.process for each in slices))}
    tracks = {key: (i + 1) * MAX_LANES for i, key in enumerate(dict.fromkeys((each.process, each.track) for each in slices))}
    for name, process in processes.items():
        yield _name("process_name", process, 0, name)
    free_at: dict[tuple[str, str], list[float]] = {key: [] for key in tracks}
    for each in sorted(slices, key=lambda each: each.start_s):
        key = (each.process, each.track)
        process, num_lanes = processes[each.process], len(free_at[key])
        thread = tracks[key] + _lane(free_at[key], each)
        if len(free_at[key]) > num_lanes:
            yield _name("thread_name", process, thread, each.track if not num_lanes else f"{each.track} ({num_lanes + 1})")
        yield {
            "name": each.name,
            "ph": "X",
            "ts": each.start_s * 1e6,
            "dur": (each.end_s - each.start_s) * 1e6,
            "pid": process,
            "tid": thread,
            "args": each.args,
        }


def _lane(free_at: list[float], each: Slice) -> int:
    """The first lane that is free when the slice starts; `free_at` per lane. Slices come in order of their start."""
    for lane, end_s in enumerate(free_at):
        if end_s <= each.start_s:
            free_at[lane] = each.end_s
            return lane
    free_at.append(each.end_s)
    assert len(free_at) <= MAX_LANES, f"{len(free_at)} of {each.track} overlap"
    return len(free_at) - 1


def _name(kind: str, process: int, thread: int, name: str) -> Event:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
