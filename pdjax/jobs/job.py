"""One job from its checked configuration to its end: what is left to do, in which order, by whom."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import NamedTuple

from pdjax.benchmarks.client import parse_url
from pdjax.config.load import ConfigError
from pdjax.jobs.backend import Reply, RowBackend, answer_patiently
from pdjax.jobs.config import PARQUET, JobConfig
from pdjax.jobs.ledger import Identity, Ledger, Past
from pdjax.jobs.order import Agenda, Placed, at_random, by_prefix
from pdjax.jobs.outcomes import result_of_bad
from pdjax.jobs.remote import RouterBackend
from pdjax.jobs.report import Tally
from pdjax.jobs.rows import Input, Row, read_jsonl
from pdjax.jobs.runner import Runner
from pdjax.observe.progress import Progress


class Work(NamedTuple):
    """A job and its input."""

    job: JobConfig
    source: Input

    @property
    def identity(self) -> Identity:
        return Identity(self.source.fingerprint, self.job.batch.request)

    def order(self, past: Past) -> list[Placed]:
        """The rows that are left, in the order in which they are worked on."""
        left = [row for row in self.source.rows if row.line not in past.done]
        return at_random(left, self.source.fingerprint) if self.job.batch.shuffle else by_prefix(left)


def read_work(job: JobConfig) -> Work:
    """Raises ConfigError where the input cannot be read, or has no rows."""
    try:
        if job.paths.input.suffix == PARQUET:
            from pdjax.jobs.parquet import read_parquet

            source = read_parquet(job.paths.input, job.batch.request)
        else:
            source = read_jsonl(job.paths.input, job.batch.request)
    except OSError as error:
        raise ConfigError([f"{job.paths.input}: cannot be read: {error.strerror or error}"]) from None
    if not source.num_rows:
        raise ConfigError([f"{job.paths.input} has no rows"])
    return Work(job, source)


def make_backend(job: JobConfig, loop: asyncio.AbstractEventLoop, progress: Progress) -> RowBackend:
    """Blocks while an engine is loaded. Raises ValueError where it cannot be."""
    if job.engine is None:
        assert job.batch.url is not None, "without an engine there is a router"
        return RouterBackend(parse_url(job.batch.url), job.batch.timeout_s)
    if job.batch.cluster == "ray":
        from pdjax.jobs import ray_cluster  # brings in Ray

        return ray_cluster.connect(job.batch.ray, job.engine, job.batch.timeout_s, job.batch.max_in_flight, progress)
    from pdjax.jobs.local import LocalBackend  # brings in JAX, which a router at work elsewhere does without

    backend = LocalBackend.load(job.engine, job.batch.timeout_s, loop, progress)
    progress.ready()
    return backend


async def run_rows(work: Work, ledger: Ledger, backend: RowBackend, tally: Tally) -> None:
    """Do what is left. SIGTERM cancels it, as Ctrl-C does. Raises what `RowBackend.start` and `Runner.run` raise."""
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        model = await backend.start()
        tally.begin()
        bad = [result_of_bad(row) for row in work.source.bad_rows if row.line not in ledger.past.done]
        ledger.commit(bad)
        tally.add(bad)
        patience_s = work.job.batch.patience_s

        async def answer(row: Row, on_prefilled: Callable[[], None]) -> Reply:
            return await answer_patiently(backend, row.url, row.body_for(model), on_prefilled, patience_s)

        await Runner(Agenda(work.order(ledger.past)), answer, ledger, work.job.rows_in_flight, tally.add).run()
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
        await backend.close()


def write_tables(work: Work, ledger: Ledger) -> None:
    """Write Parquet where the job asks for it, of everything that is done. Raises OSError."""
    paths = work.job.paths
    for path, results in zip((paths.output, paths.errors), ledger.results(), strict=True):
        if path.suffix == PARQUET:
            from pdjax.jobs.parquet import write_parquet

            write_parquet(path, results)
