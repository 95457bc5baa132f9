"""What a job tells: the plan before it begins, progress while it runs, a summary at its end."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pdjax.jobs.config import JobConfig
from pdjax.jobs.ledger import Past
from pdjax.jobs.order import Placed
from pdjax.jobs.outcomes import Counts, ResultLine, counts_of
from pdjax.jobs.rows import Input
from pdjax.observe.progress import Board

SCHEMA_VERSION = 1
"""Raised whenever a key of the JSON summary changes its meaning or goes away; new keys do not count."""

NAME = "batch"
"""Under which progress is shown."""


class Summary(NamedTuple):
    """`past`: what earlier runs had done; `now`: this run, whose last result came after `seconds`, the loading of an engine not counted."""

    num_rows: int
    past: Counts
    now: Counts
    seconds: float

    @property
    def whole(self) -> Counts:
        return self.past.plus(self.now)

    @property
    def num_left(self) -> int:
        return self.num_rows - self.whole.num_rows

    @property
    def tokens_per_s(self) -> float | None:
        return self.now.num_tokens / self.seconds if self.seconds else None

    @property
    def s_per_1000_tokens(self) -> float | None:
        """What a token costs, in time: of the prompt or of the answer, cached or not."""
        return 1000 * self.seconds / self.now.num_tokens if self.now.num_tokens else None

    def as_json(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "rows": {"total": self.num_rows, "ok": self.whole.num_ok, "failed": self.whole.num_failed, "left": self.num_left},
            "rows_before_this_run": self.past.num_rows,
            "whole_job": _tokens_json(self.whole),
            "this_run": {
                **_tokens_json(self.now),
                "seconds": self.seconds,
                "tokens_per_s": self.tokens_per_s,
                "s_per_1000_tokens": self.s_per_1000_tokens,
            },
        }


def _tokens_json(counts: Counts) -> dict[str, Any]:
    return {
        "prompt_tokens": counts.prompt_tokens,
        "cached_prompt_tokens": counts.cached_tokens,
        "cached_share": counts.cached_share,
        "output_tokens": counts.output_tokens,
    }


class Tally:
    """Counts results while they come, and shows how far the job is."""

    def __init__(self, board: Board, num_rows: int, past: Counts, clock: Callable[[], float] = time.monotonic):
        self._board = board
        self._num_rows = num_rows
        self._past = past
        self._now = Counts()
        self._clock = clock
        self._started_s = self._last_s = clock()

    def begin(self) -> None:
        """The clock runs from here."""
        self._started_s = self._last_s = self._clock()
        self._board.stage(NAME, "rows", self._num_rows)
        self._show()

    def add(self, results: Sequence[ResultLine]) -> None:
        for result in results:
            self._now = self._now.plus(counts_of(result))
        self._last_s = self._clock()
        self._show()

    def summary(self) -> Summary:
        return Summary(self._num_rows, self._past, self._now, self._last_s - self._started_s)

    def _show(self) -> None:
        summary = self.summary()
        self._board.advance(NAME, summary.whole.num_rows, self._num_rows, progress_line(summary))


def progress_line(summary: Summary) -> str:
    """Rate, time left at that rate, share of prompt tokens from the cache, failures; of this run."""
    if not summary.now.num_rows or not summary.seconds:
        return ""
    rate = summary.now.num_rows / summary.seconds
    parts = [f"{rate:.3g} rows/s", f"{summary.tokens_per_s:,.0f} tokens/s", f"{_clock_time(summary.num_left / rate)} left"]
    if summary.now.cached_share is not None:
        parts.append(f"{summary.now.cached_share:.0%} cached")
    if summary.whole.num_failed:
        parts.append(f"{summary.whole.num_failed} failed")
    return ", ".join(parts)


def print_summary(console: Console, summary: Summary, job: JobConfig) -> None:
    whole, now = summary.whole, summary.now
    table = Table(title="batch job", show_header=False, title_justify="left")
    table.add_column(style="dim")
    table.add_column(justify="right")
    table.add_row("rows", f"{whole.num_rows:,} of {summary.num_rows:,}")
    if summary.past.num_rows:
        table.add_row("of these done before", f"{summary.past.num_rows:,}")
    table.add_row("failed", f"{whole.num_failed:,}")
    table.add_row("prompt tokens", f"{whole.prompt_tokens:,}")
    table.add_row("from the prefix cache", _or_dash(whole.cached_share, ".1%"))
    table.add_row("output tokens", f"{whole.output_tokens:,}")
    table.add_row("this run, seconds", f"{summary.seconds:,.1f}")
    table.add_row("this run, tokens/s", _or_dash(summary.tokens_per_s, ",.0f"))
    table.add_row("this run, output tokens/s", _or_dash(now.output_tokens / summary.seconds if summary.seconds else None, ",.1f"))
    table.add_row("this run, seconds per 1,000 tokens", _or_dash(summary.s_per_1000_tokens, ",.2f"))
    table.add_row("results", escape(str(job.paths.output)))
    if whole.num_failed:
        table.add_row("errors", escape(str(job.paths.errors)))
    console.print(table)


def print_plan(console: Console, job: JobConfig, source: Input, past: Past, order: Sequence[Placed]) -> None:
    """What a run would do."""
    batch = job.batch
    followers = [placed for placed in order if placed.leader is not None]
    num_chars = sum(len(placed.row.key) for placed in order)
    shared = sum(placed.shared_chars for placed in followers)
    urls = Counter(placed.row.url for placed in order)
    table = Table(title="plan", show_header=False, title_justify="left")
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    table.add_row("input", escape(f"{job.paths.input}: {source.num_rows:,} rows, {len(source.bad_rows):,} of them malformed"))
    table.add_row("done before", f"{len(past.done):,}")
    table.add_row("to do", ", ".join(f"{count:,} x {url}" for url, count in sorted(urls.items())) or "nothing")
    table.add_row("order", "random" if batch.shuffle else "by prompt, shared beginnings once")
    table.add_row("of these wait for a shared beginning", f"{len(followers):,}")
    table.add_row("shared part of the prompts", f"{shared / num_chars:.0%} of the characters" if num_chars else "-")
    table.add_row("in flight", f"{batch.max_in_flight:,} rows{' an engine' if batch.cluster else ''}")
    table.add_row("answered by", escape(_answered_by(job)))
    table.add_row("results", escape(str(job.paths.output)))
    table.add_row("errors", escape(str(job.paths.errors)))
    console.print(table)


def _answered_by(job: JobConfig) -> str:
    if job.engine is None:
        return job.batch.url or ""
    where = "an engine in this process" if job.batch.cluster is None else "engines on the nodes of a Ray cluster"
    return f"{where}, {job.engine.model.source}"


def _clock_time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
