"""`python -m pdjax.batch CONFIG.yaml`: answers a file of requests, and goes on where it was when it is started again."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from pdjax.config.load import ConfigError, find_file
from pdjax.errors import PdjaxError
from pdjax.jobs import report
from pdjax.jobs.config import load_job
from pdjax.jobs.job import Work, make_backend, read_work, run_rows, write_tables
from pdjax.jobs.ledger import Ledger, look_back
from pdjax.jobs.report import Tally
from pdjax.observe.logging import configure_logging
from pdjax.observe.progress import Board, TerminalProgress, make_board

DESCRIPTION = """\
Answer every request of a file, by an engine in this process or by a running router, and write the results to another file.
A job that was stopped or killed goes on when the same command is given again. docs/batch.md has the fields of CONFIG.yaml."""

EPILOG = """\
examples:
  python -m pdjax.batch configs/batch/prompts.yaml --dry-run   check everything, say what would be done
  python -m pdjax.batch configs/batch/prompts.yaml

Exit status: 0 every row is answered, 1 some rows failed or the job could not go on, 2 bad configuration or command line, 130 Ctrl-C."""

ALL_OK, NOT_ALL_OK, BAD_CONFIG = 0, 1, 2
STOPPED_BY = 128
"""Plus the number of the signal: what shells report of a process that a signal has ended."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    args = _parser().parse_args(argv)
    try:
        if args.json is not None and not args.json.parent.is_dir():
            raise ConfigError([f"--json {args.json}: there is no such folder"])
        work = read_work(load_job(find_file(args.config)))
        if args.dry_run:
            past = look_back(work.job.paths, work.identity)
            report.print_plan(Console(), work.job, work.source, past, work.order(past))
            return ALL_OK
        ledger = Ledger.open(work.job.paths, work.identity)
    except (ConfigError, OSError) as error:
        for problem in str(error).splitlines():
            print(f"error: {problem}", file=sys.stderr)
        return BAD_CONFIG
    with ledger:
        return _run(work, ledger, args.json)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pdjax.batch", description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", metavar="CONFIG.yaml", help="at least `input:` and `output:`")
    parser.add_argument("--dry-run", action="store_true", help="check configuration, input and earlier results, print the plan, and exit")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the summary there")
    return parser


def _run(work: Work, ledger: Ledger, json_file: Path | None) -> int:
    board = make_board(sys.stderr)
    configure_logging("warning" if work.job.engine is None else work.job.engine.log.level, board)
    tally = Tally(board, work.source.num_rows, ledger.past.counts)
    with board:
        status = _answer_rows(work, ledger, tally, board)
    summary = tally.summary()
    try:
        if not summary.num_left:
            write_tables(work, ledger)
        if json_file is not None:
            _write_json(json_file, summary.as_json())
    except OSError as error:
        board.log(f"error: {error}")
        status = status or NOT_ALL_OK
    report.print_summary(Console(), summary, work.job)
    if summary.num_left:
        board.log(f"{summary.num_left} rows are left; the same command goes on with them")
    return status or (NOT_ALL_OK if summary.whole.num_failed else ALL_OK)


def _answer_rows(work: Work, ledger: Ledger, tally: Tally, board: Board) -> int:
    """The exit status as far as the rows themselves do not decide it."""
    if len(ledger.past.done) == work.source.num_rows:
        return ALL_OK
    try:
        with asyncio.Runner() as runner:
            backend = make_backend(work.job, runner.get_loop(), TerminalProgress("engine", board))
            runner.run(run_rows(work, ledger, backend, tally))
    except KeyboardInterrupt:
        return STOPPED_BY + signal.SIGINT
    except asyncio.CancelledError:
        return STOPPED_BY + signal.SIGTERM
    except (PdjaxError, OSError, ValueError) as error:
        board.log(f"error: {error}")
        return NOT_ALL_OK
    return ALL_OK


def _write_json(path: Path, summary: dict[str, Any]) -> None:
    path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
