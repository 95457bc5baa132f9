"""`python -m pdjax.simulate`: run schedulers and router policy under a virtual clock, seed by seed, with everything going wrong."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from pdjax.simulation.runner import Failure, Report, run_seed, run_seeds

DESCRIPTION = """\
Run the real prefill and decode schedulers, their slot and page owners, radix trees and rooms, and the router's fleet, policy and merge,
in one thread a seed under a virtual clock. A seed chooses the cluster, the requests, every delay, and what goes wrong: lost, late, repeated
and damaged messages, clients that leave, deadlines, workers that stop, die and are replaced. docs/simulation.md says what is checked.

Exit status: 0 when every seed holds, 1 when one does not, 2 on a bad command line."""

EPILOG = """\
examples:
  python -m pdjax.simulate --seeds 0:100000
  python -m pdjax.simulate --trace 4711        # what happens in one seed, event by event"""

MAX_SHOWN = 10
"""Failing seeds that are told in full."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m pdjax.simulate", description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--seeds", type=parse_seeds, metavar="A:B", help="run seeds A to B - 1")
    what.add_argument("--trace", type=int, metavar="SEED", help="run one seed and print its events")
    num_cpus = os.cpu_count() or 1
    parser.add_argument("--jobs", type=int, default=num_cpus, metavar="N", help="processes that share the seeds (default: %(default)s)")
    args = parser.parse_args(argv)
    if args.jobs < 1:
        parser.error(f"--jobs must be at least 1, got {args.jobs}")
    if args.trace is not None:
        return trace(args.trace)
    return check(args.seeds, args.jobs)


def parse_seeds(text: str) -> range:
    """`A:B` as a range that holds at least one seed."""
    first, _, end = text.partition(":")
    if not (first.isdecimal() and end.isdecimal() and int(first) < int(end)):
        raise argparse.ArgumentTypeError(f"A:B with 0 <= A < B expected, got {text!r}")
    return range(int(first), int(end))


def trace(seed: int) -> int:
    result = run_seed(seed, is_traced=True)
    if isinstance(result, Failure):
        print_failure(result)
        return 1
    print(f"seed {seed} holds: {result.num_events} events, requests: {counts(result.outcomes)}; faults: {counts(result.faults)}")
    return 0


def check(seeds: range, num_jobs: int) -> int:
    started_s = time.monotonic()
    total = Report()
    console = Console(stderr=True)
    columns = (TextColumn("seeds"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("seeds", total=len(seeds))
        for report in run_seeds(seeds, num_jobs):
            for failure in report.failures[: max(0, MAX_SHOWN - len(total.failures))]:
                print_failure(failure)
            total.merge(report)
            progress.update(task, completed=total.num_seeds)
    print(f"faults: {counts(total.faults)}")
    print(f"reached: {counts(total.reached)}; longest wait {total.longest_wait:.0%} of its bound")
    print(summary(total, time.monotonic() - started_s))
    return 1 if total.failures else 0


def summary(total: Report, seconds: float) -> str:
    verdict = f"{len(total.failures)} DO NOT HOLD" if total.failures else "all hold"
    requests = f"{sum(total.outcomes.values())} requests ({counts(total.outcomes)})"
    happened = f"{total.num_events} events, {sum(total.faults.values())} faults"
    return f"{total.num_seeds} seeds, {verdict}: {requests}, {happened}, {seconds:.1f} s"


def counts(counter: Counter[str]) -> str:
    """Most common first."""
    return ", ".join(f"{name} {count}" for name, count in counter.most_common() if count) or "none"


def print_failure(failure: Failure) -> None:
    print(f"seed {failure.seed} does not hold: {failure.message}\n  noticed at {failure.place}")
    print(f"  replay: python -m pdjax.simulate --trace {failure.seed}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
