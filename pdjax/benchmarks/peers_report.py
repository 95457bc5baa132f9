"""The page with the tables, and its picture, from the JSON of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pdjax.benchmarks.peers_goals import (
    LENGTHS,
    PDJAX,
    ROWS,
    Comparison,
    Goal,
    Row,
    Share,
    compare,
    median_of,
    shares,
    unmeasured_goals,
)

BUSY = 1.0
"""A load average before the first measurement from which on the page warns its reader."""

_INTRO = """\
# pdjax beside what one would run instead

Written by `scripts/bench_peers`; do not edit it by hand. The command sets up the other servers, runs all engines in turn on the same machine
and measures them with one client. The model is SmolLM2-135M-Instruct: float32 in pdjax and vLLM, the 4-bit file (Q4_1) in llama.cpp.
pdjax runs as the quickstart does: HTTP, router, one prefill worker, one decode worker.
Absolute figures differ from machine to machine; the ratios are what this page is about.
"""

_METHOD = """\
## How it was measured

* One engine at a time, one request at a time (but for the 8 clients), greedy, end of sequence ignored. Before its first figure, an engine
  must give the model's known answer to one question, and gets one request of each length.
* Prompts are random words of one token each. They are sent as token ids, and as text to llama.cpp's server, which takes no ids. No two prompts
  share a prefix, but in the row with a cached one: there, another request has computed the prefix.
* TTFT runs from before the connection is opened to the first token. ITL is the median gap between tokens behind the second one.
* The row "second token" adds the gap behind the first token. pdjax sends the first token from prefill and moves the KV meanwhile, so its
  hand-off shows there; a pair of vLLM servers shows its own in TTFT.
* "First token out minus prefill's own time": of pdjax, TTFT less the forward on the prefill worker, from the request's timeline; so HTTP,
  router, queues and wire count. Of the vLLM pair, TTFT less the time until prefill has answered the client, which plays the proxy; so its
  HTTP and queues do not count.
* 8 clients: a closed loop, {client_requests} requests a client and repeat. Only pdjax and vLLM's single server get them: llama.cpp's server
  answers one request at a time.
* vLLM's servers have 2 GB for KV each. One server runs as it comes, and so leaves one core to its other processes; the goals are set against
  that. "All cores" is the same with threads on every core and with the OpenMP library that vLLM advises. The servers of the pair share all
  cores and wait passively: with spinning OpenMP threads they are many times slower.
"""

_FOURBIT = """\
llama.cpp decodes from 4-bit weights and reads about a sixth of the bytes that float32 takes. A decode step of one sequence is bound by memory
bandwidth, so a float32 engine that reads as fast takes longer.
"""

_FLOORS = """\
## Against the machine

In the same run, before the engines, this machine reached {gflop:.0f} GFLOP/s in a float32 matrix product and read {gbytes:.1f} GB/s. The floor
of prefill is its arithmetic (0.212 GFLOP a token, and causal attention) at that rate; the floor of a decode step is its bytes (540 MB
of weights, and 46 KB of KV a token of context) at that bandwidth.
"""


def page(run: dict[str, Any], picture: str | None) -> str:
    """The whole page in Markdown. `picture`: name of the image beside it."""
    comparisons = compare(run)
    parts = [_INTRO, _about(run)]
    if picture is not None:
        parts.append(f"![TTFT and ITL of all engines]({picture})\n")
    parts += [_figure_table(run), _ratio_table(run, comparisons), _verdict(comparisons, unmeasured_goals(run)), _slower(run, comparisons)]
    parts += [_share_table(run, shares(run)), _METHOD.format(client_requests=run["settings"]["client_requests"]), _versions(run)]
    return "\n".join(part for part in parts if part)


def _about(run: dict[str, Any]) -> str:
    machine, repeats = run["machine"], run["settings"]["repeats"]
    flags = ", ".join(machine["vector_flags"]) or "none of AVX2 and AVX-512"
    lines = [
        f"Machine: {machine['cores']} cores ({machine['cpu']}; {flags}), {machine['memory_gib']:.0f} GiB of memory. "
        f"Medians of {repeats}, in brackets the least and the greatest.",
        f"Commands, the first on {_date(run)}: {', '.join(f'`{call}`' for call in run['calls'])}.",
    ]
    if machine["load_average"] > BUSY:
        lines.append(f"\n**The machine was busy: a load average of {machine['load_average']:.1f} before the first measurement.**")
    failed = {key: entry["error"] for key, entry in run["engines"].items() if entry.get("error")}
    lines += [f"\n**{run['engines'][key]['title']} failed: {error.splitlines()[0]}**" for key, error in failed.items()]
    return "\n".join(lines) + "\n"


def _date(run: dict[str, Any]) -> str:
    return min((entry["measured_at"].split()[0] for entry in run["engines"].values()), default="a day without measurement")


def _figure_table(run: dict[str, Any]) -> str:
    engines = list(run["engines"])
    lines = ["## Figures\n", _table_row("ms, if nothing else is said", *(run["engines"][key]["title"] for key in engines))]
    lines.append(_table_row("---", *("---:" for _ in engines)))
    for row in ROWS:
        cells = [_figure(row, run["engines"][key].get("rows", {}).get(row.key)) for key in engines]
        if any(cells):
            lines.append(_table_row(row.label, *cells))
    starts = [f"{entry['ready_s']:.0f} s" if entry["ready_s"] is not None else "" for entry in run["engines"].values()]
    lines.append(_table_row("start to ready", *starts))
    return "\n".join(lines) + "\n"


def _ratio_table(run: dict[str, Any], comparisons: Sequence[Comparison]) -> str:
    peers = [key for key in run["engines"] if key != PDJAX]
    if not comparisons:
        return ""
    cells = {(each.row.key, each.peer): _ratio(each) for each in comparisons}
    lines = ["## Ratios, pdjax over the other\n", "In brackets the goal, where there is one.\n"]
    lines.append(_table_row("", *(run["engines"][key]["title"] for key in peers)))
    lines.append(_table_row("---", *("---" for _ in peers)))
    for row in ROWS:
        if any((row.key, peer) in cells for peer in peers):
            lines.append(_table_row(row.label, *(cells.get((row.key, peer), "") for peer in peers)))
    return "\n".join(lines) + "\n"


def _verdict(comparisons: Sequence[Comparison], unmeasured: Sequence[Goal]) -> str:
    judged = [each for each in comparisons if each.is_met is not None]
    missed = [each for each in judged if not each.is_met]
    if not judged:
        return ""
    lines = [f"{len(judged) - len(missed)} of {len(judged)} goals are met." + (" Missed:" if missed else "")]
    if missed:
        lines.append("")
    for each in missed:
        assert each.goal is not None, f"missed without a goal: {each}"
        off = f"{abs(each.ratio / each.goal - 1):.0%} {'below' if each.row.is_rate else 'above'} {each.goal:g}"
        lines.append(f"* {each.row.label}, against {each.peer}: {each.ratio:.2f}, {off}")
    if unmeasured:
        lines.append(f"\nNot measured here: {len(unmeasured)} further goals.")
    return "\n".join(lines) + "\n"


def _slower(run: dict[str, Any], comparisons: Sequence[Comparison]) -> str:
    slower = [each for each in comparisons if each.is_slower]
    if not comparisons:
        return ""
    lines = ["## Where pdjax is slower\n"]
    if not slower:
        lines.append("In no row.")
    for each in slower:
        own, other = median_of(run, PDJAX, each.row.key), median_of(run, each.peer, each.row.key)
        assert own is not None and other is not None, f"compared without figures: {each}"
        title = run["engines"][each.peer]["title"]
        lines.append(f"* {each.row.label}: {_shown(each.row, own)} against {_shown(each.row, other)} ({title}), {each.ratio:.2f} times as much")
    if any(each.peer == "llamacpp" and each.row.key.startswith("itl_") for each in slower):
        lines.append(f"\n{_FOURBIT.rstrip()}")
    return "\n".join(lines) + "\n"


def _share_table(run: dict[str, Any], rows: Sequence[Share]) -> str:
    if not rows:
        return ""
    ceilings = run["ceilings"]
    gbytes = max(ceilings["read_sum_gb_per_s"]["best"], ceilings["read_matvec_gb_per_s"]["best"])
    lines = [_FLOORS.format(gflop=ceilings["matmul_gflop_per_s"]["best"], gbytes=gbytes)]
    lines += [_table_row("pdjax, ms", "floor", "measured", "share", "goal"), _table_row("---", "---:", "---:", "---:", "---")]
    for each in rows:
        goal = "" if each.goal is None else f"at least {each.goal:.0%}: {_met(each.share >= each.goal)}"
        lines.append(_table_row(each.label, _milliseconds(each.floor_s), _milliseconds(each.measured_s), f"{each.share:.0%}", goal))
    return "\n".join(lines) + "\n"


def _versions(run: dict[str, Any]) -> str:
    versions = ", ".join(f"pdjax {text}" if name == PDJAX else text for name, text in run["versions"].items())
    lines = ["## Versions and commands\n", f"{versions}.\n", "```"]
    for entry in run["engines"].values():
        lines += entry.get("commands", [])
    return "\n".join([*lines, "```"]) + "\n"


def _table_row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _figure(row: Row, stats: dict[str, Any] | None) -> str:
    if stats is None:
        return ""
    return f"{_number(row, stats['median'])} ({_number(row, stats['min'])}-{_number(row, stats['max'])})"


def _ratio(each: Comparison) -> str:
    if each.goal is None:
        return f"{each.ratio:.2f}"
    return f"**{each.ratio:.2f}** ({'at least' if each.row.is_rate else 'at most'} {each.goal:g}: {_met(bool(each.is_met))})"


def _met(is_met: bool) -> str:
    return "met" if is_met else "missed"


def _shown(row: Row, value: float) -> str:
    return f"{_number(row, value)} {'tok/s' if row.is_rate else 'ms'}"


def _number(row: Row, value: float) -> str:
    return f"{value:.1f}" if row.is_rate else _milliseconds(value)


def _milliseconds(seconds: float) -> str:
    """Three digits or more, with thousands apart."""
    milliseconds = 1e3 * seconds
    return f"{milliseconds:,.0f}" if milliseconds >= 100 else f"{milliseconds:.1f}"


def draw(run: dict[str, Any], path: Path) -> None:
    """TTFT over prompt length on the left, ITL over context on the right, a bar an engine, as SVG. Needs matplotlib."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    # Text stays text, so that the file is small; without date and with fixed ids, equal figures give equal files.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "pdjax"}):
        figure = Figure(figsize=(10, 4), layout="constrained")
        canvas = FigureCanvasSVG(figure)
        left, right = figure.subplots(1, 2)
        _bars(left, run, "ttft", "TTFT, ms", "prompt, tokens")
        _bars(right, run, "itl", "ITL, ms", "context, tokens")
        if left.has_data():
            left.set_yscale("log")
            left.legend(fontsize=8)
        canvas.print_svg(path, metadata={"Date": None})


def _bars(axes: Any, run: dict[str, Any], row: str, label: str, below: str) -> None:
    """Medians as bars with least and greatest as whiskers; a length that an engine lacks is left out."""
    engines = [key for key, entry in run["engines"].items() if entry.get("rows")]
    width = 0.8 / max(1, len(engines))
    for place, key in enumerate(engines):
        rows = run["engines"][key]["rows"]
        found = [(at, rows[f"{row}_{length}"]) for at, length in enumerate(LENGTHS) if f"{row}_{length}" in rows]
        if not found:
            continue
        medians = [1e3 * stats["median"] for _, stats in found]
        below_median = [1e3 * (stats["median"] - stats["min"]) for _, stats in found]
        above_median = [1e3 * (stats["max"] - stats["median"]) for _, stats in found]
        lefts = [at + (place - (len(engines) - 1) / 2) * width for at, _ in found]
        axes.bar(lefts, medians, width, yerr=[below_median, above_median], capsize=2, label=run["engines"][key]["title"])
    axes.set_xticks(range(len(LENGTHS)), [f"{length:,}" for length in LENGTHS])
    axes.set_xlabel(below)
    axes.set_ylabel(label)
    axes.grid(axis="y", alpha=0.3)
