"""The command line of `python -m pdjax.bench growth`."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from pdjax.benchmarks import report

if TYPE_CHECKING:
    from pdjax.benchmarks.growth import GrowthSettings
    from pdjax.benchmarks.growth_report import PartReport

DESCRIPTION = """\
Measure how time and memory grow:

  scheduler   host time of a scheduler pass over the number of waiting requests, 10 to 10,000, for every kind of waiting
  radix       finding, leasing, publishing and evicting a prompt over the nodes of the prefix tree, to 1,000,000
  router      requests and streamed tokens per second of the router on one core, with workers that answer at once
  memory      resident memory of the router over 10,000 requests
  engine      TTFT over prompt length, ITL over context and batch, with the quickstart system
  start       from command to ready, with an empty compilation cache and with a full one

Prints tables as the parts get done and writes a picture a part and growth.md, tables with pictures, to the folder of --out. Nothing else
should run on the machine meanwhile.

Exit status: 0 when everything was measured, 1 when something failed, 2 on a bad command line. Goals that are missed are reported and do
not count."""

EPILOG = """\
examples:
  python -m pdjax.bench growth --json growth.json --out docs/growth
  python -m pdjax.bench growth --parts scheduler,radix"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "growth",
        help="how time and memory grow with requests, tokens and nodes",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--parts", metavar="PART,PART,..", help="which parts to run (default: all)")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="SECTION.FIELD=VALUE", help="for engine and start")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured to FILE")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write pictures and growth.md to FOLDER (needs pdjax[bench])")
    parser.set_defaults(prepare=prepare, run=run)


def prepare(args: argparse.Namespace) -> GrowthSettings:
    """Check everything that can be checked before anything is started. Raises ValueError."""
    from pdjax.benchmarks.growth import PARTS, GrowthSettings

    settings = GrowthSettings(PARTS if args.parts is None else tuple(args.parts.split(",")), tuple(args.overrides))
    if args.out is not None:
        report.check_plotting()
        if not args.out.parent.is_dir() or (args.out.exists() and not args.out.is_dir()):
            raise ValueError(f"cannot write to {args.out}: it must be a folder, or be made in one that exists")
    if args.json is not None:
        report.check_output_path(args.json)
    return settings


def run(args: argparse.Namespace, settings: GrowthSettings) -> int:
    from pdjax.benchmarks import growth, growth_report

    console, start_s = Console(stderr=True), time.monotonic()
    reports: list[PartReport] = []

    def on_part(part: PartReport) -> None:
        reports.append(part)
        growth_report.print_part(Console(), part)
        if args.out is not None:
            args.out.mkdir(exist_ok=True)
            growth_report.draw_part(args.out, part)

    measured = growth.run(settings, lambda step: console.print(f"{time.monotonic() - start_s:5.0f} s  {step}"), on_part)
    if args.out is not None:
        growth_report.write_markdown(args.out / "growth.md", reports)
    if args.json is not None:
        report.write_json(args.json, measured)
    return 1 if any(part.error is not None for part in reports) else 0
