"""The command line of `python -m pdjax.bench compare`."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from pdjax.benchmarks import report

if TYPE_CHECKING:
    from pdjax.benchmarks.compare_plan import CompareSettings

DESCRIPTION = """\
Replay the same trace on the same cores against several designs, one after the other, at several loads, and say which design wins where.

  unified:N   N workers that compute prompts and answer, behind a router
  MpNd        M prefill and N decode workers: 1p1d, 2p1d, ...

A design may carry settings of its own: unified:2+scheduler.max_step_tokens=128. The cores are divided evenly among the workers of each
design, and each worker is bound to its share; router and clients, which all designs have alike, are not bound.

The trace has one JSON object a line: timestamp (ms), input_length, output_length, hash_ids (one for each 512 tokens; equal ids are equal
tokens). Lengths shrink by --scale-lengths, equal blocks become equal tokens of synthetic prompts, and times stretch by --scale-time.
Requests are sent at their times whether or not others have been answered. Goodput counts requests whose TTFT and mean ITL are within the
targets.

Exit status: 0 when every request was answered in full, 1 when one was not, 2 on a bad command line."""

EPILOG = """\
examples:
  python -m pdjax.bench compare --json compare.json --plot compare.svg
  python -m pdjax.bench compare --designs unified:2,unified:2+scheduler.max_step_tokens=128,1p1d --loads 0.5,1,1.5,2 --max-requests 60"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Options that are not given are left out of `args`: `CompareSettings` has the defaults."""
    parser = commands.add_parser(
        "compare",
        help="designs with and without disaggregation: the same cores, the same trace",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--designs", type=_words, metavar="DESIGN,..", help="what to compare (default: unified:2,1p1d)")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="the trace (default: 200 requests of the Mooncake project)")
    parser.add_argument("--scale-lengths", type=float, metavar="X", help="factor on prompt lengths (default: 0.02)")
    parser.add_argument("--scale-outputs", type=float, metavar="X", help="factor on answer lengths (default: 0.05)")
    parser.add_argument("--scale-time", type=float, metavar="X", help="factor on arrival times; above 1 is slower (default: 4)")
    parser.add_argument("--max-requests", type=int, metavar="N", help="requests of the trace that are replayed (default: 20)")
    parser.add_argument("--loads", type=_numbers, metavar="X,X,..", help="factors on the rate of the scaled trace (default: 0.5,1,2)")
    parser.add_argument("--ttft-target-s", type=float, metavar="S", help="longest good time to first token (default: 4)")
    parser.add_argument("--itl-target-s", type=float, metavar="S", help="longest good mean time between two tokens (default: 0.15)")
    parser.add_argument("--seed", type=int, metavar="N", help="seed of the prompts' tokens (default: 0)")
    parser.add_argument("--timeout", type=float, dest="timeout_s", metavar="S", help="after which a request has failed (default: 600)")
    parser.add_argument("--set", action="append", dest="overrides", metavar="SECTION.FIELD=VALUE", help="one field for all processes")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write everything measured to FILE")
    parser.add_argument("--plot", type=Path, default=None, metavar="FILE", help="draw goodput and latency, as .png or .svg")
    parser.set_defaults(prepare=prepare, run=run)


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(word) for word in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"loads look like 0.5,1,2, got {text!r}") from None


def prepare(args: argparse.Namespace) -> CompareSettings:
    """Check everything that can be checked before anything is started. Raises ValueError."""
    from pdjax.benchmarks.compare_plan import ComparePlan, CompareSettings

    given = {key: value for key, value in vars(args).items() if key in CompareSettings.__dataclass_fields__}
    given["overrides"] = tuple(given.get("overrides", ()))
    try:
        settings = CompareSettings(**given)
        ComparePlan(settings)
    except OSError as error:
        raise ValueError(f"{error.filename}: {error.strerror}") from None
    if args.plot is not None:
        report.check_plotting()
        if args.plot.suffix not in (".png", ".svg"):
            raise ValueError(f"--plot must end with .png or .svg, got {args.plot}")
        report.check_output_path(args.plot)
    if args.json is not None:
        report.check_output_path(args.json)
    return settings


def run(args: argparse.Namespace, settings: CompareSettings) -> int:
    from pdjax.benchmarks import compare, compare_report

    console, start_s, ended = Console(stderr=True), time.monotonic(), itertools.count(1)
    total = compare.total_requests(settings)

    def on_request() -> None:
        if (count := next(ended)) % 10 == 0:
            console.print(f"{time.monotonic() - start_s:5.0f} s  {count} of {total} requests")

    watch = compare.Watch(lambda step: console.print(f"{time.monotonic() - start_s:5.0f} s  {step}"), on_request)
    measured = asyncio.run(compare.run(settings, watch))
    compare_report.print_comparison(Console(), measured)
    if args.json is not None:
        report.write_json(args.json, measured)
    if args.plot is not None:
        compare_report.plot_comparison(args.plot, measured)
    return 1 if compare_report.num_errors(measured) else 0
