"""One batch, from wherever it is to its end: a job (`pdjax.jobs`) over the system behind this router.

Each step leaves on the disk what the next one needs. So a batch that was broken off goes on by doing `go` again, after a restart as well as
after a client has cancelled it: then what is left to do is less.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple, ParamSpec, TypeVar

import msgspec

from pdjax.batches.folder import Folder
from pdjax.batches.objects import CANCELLABLE, Batch, BatchError, BatchErrors
from pdjax.batches.store import Store
from pdjax.config.load import ConfigError
from pdjax.config.schema import BatchesConfig
from pdjax.jobs.backend import Answers, JobStopped, Reply, answer_patiently
from pdjax.jobs.ledger import Identity, Ledger
from pdjax.jobs.order import Agenda, by_prefix
from pdjax.jobs.outcomes import Counts, ResultLine, counts_of, result_of_unasked
from pdjax.jobs.rows import Input, Row, read_requests
from pdjax.jobs.runner import Runner

MAX_ERRORS_TOLD = 100
EXPIRED = "batch_expired", "This request could not be executed before the completion window expired."

P = ParamSpec("P")
T = TypeVar("T")
_replaced = msgspec.structs.replace


class Desk(NamedTuple):
    """What all batches of a router share. `places`: for batches in progress; `seats`: for rows in flight, first come, first served.
    `reading`: held by the one batch beside those in progress that may hold an input in memory.
    """

    folder: Folder
    store: Store
    answers: Answers
    config: BatchesConfig
    places: asyncio.Semaphore
    seats: asyncio.Semaphore
    reading: asyncio.Lock


class BatchRun:
    """For one event loop. Its status changes at once, before anything that waits; what is on the disk follows."""

    def __init__(self, desk: Desk, batch: Batch):
        self._desk = desk
        self._batch = batch
        self._num_rows = batch.request_counts.total
        self._counts: Counts | None = None
        self.is_over = False
        """The batch has ended, and the disk says so."""

    @property
    def batch(self) -> Batch:
        """As it is now, counts included."""
        return self._batch if self._counts is None else self._batch.with_counts(self._num_rows, self._counts)

    @property
    def can_be_cancelled(self) -> bool:
        return self._batch.status in CANCELLABLE

    async def save(self) -> None:
        await self._desk.store.save_batch(self.batch)

    def cancel(self) -> None:
        """From the next `go` on: no more rows. Whoever calls this has `go` stopped, and calls it again."""
        assert self.can_be_cancelled, f"{self._batch.id} is {self._batch.status}"
        self._batch = _replaced(self._batch, status="cancelling", cancelling_at=_now())

    async def go(self) -> None:
        """Until the batch has ended. Cancelling it leaves everything for another `go`, as does an error: OSError or sqlite3.Error where
        the disk is full or gone, ConfigError where something has changed the files."""
        if self._batch.status == "validating":
            await self._validate()
        if self._batch.status == "in_progress":
            async with self._desk.places:
                await self._answer_rows()
        elif self._batch.status == "cancelling" and self._batch.finalizing_at is None:
            await self._stop_short()
        await self._publish()

    def fail(self, errors: Sequence[BatchError]) -> None:
        """The next `go` ends it, with what has been answered so far."""
        told = BatchErrors(data=list(errors[:MAX_ERRORS_TOLD]))
        self._batch = _replaced(self._batch, status="failed", failed_at=_now(), errors=told)

    async def _read(self) -> Input:
        return await _to_its_end(read_requests, self._desk.folder.file(self._batch.input_file_id), self._batch.endpoint)

    async def _validate(self) -> None:
        async with self._desk.reading:
            source = await self._read()
        if errors := _mistakes(source, self._desk.config.max_rows):
            self.fail(errors)
            return
        self._num_rows, self._counts = source.num_rows, Counts()
        self._batch = _replaced(self._batch, status="in_progress", in_progress_at=_now())
        await self.save()

    async def _answer_rows(self) -> None:
        source = await self._read()
        async with self._ledger(source) as ledger:
            left = {row.line: row for row in source.rows if row.line not in ledger.past.done}
            agenda = await _to_its_end(lambda: Agenda(by_prefix(list(left.values()))))

            def on_results(results: list[ResultLine]) -> None:
                self._count(results)
                for result in results:
                    del left[result.line]

            try:
                async with asyncio.timeout(self._time_left_s()):
                    await Runner(agenda, self._answer, ledger, self._desk.config.max_in_flight, on_results).run()
            except (TimeoutError, JobStopped):
                unasked = [result_of_unasked(row, *EXPIRED) for row in left.values()]
                await _to_its_end(ledger.commit, unasked)
                self._count(unasked)
                self._batch = _replaced(self._batch, expired_at=_now())
        self._batch = _replaced(self._batch, status="finalizing", finalizing_at=_now())
        await self.save()

    async def _stop_short(self) -> None:
        """What has been answered stays. Opening the ledger cuts off a line that was not written to its end."""
        async with self._desk.reading, self._ledger(await self._read()):
            self._batch = _replaced(self._batch, finalizing_at=_now())
        await self.save()

    async def _publish(self) -> None:
        output, errors = await _to_its_end(self._desk.folder.publish, self._batch, _now())
        batch = _replaced(self.batch, output_file_id=output and output.id, error_file_id=errors and errors.id)
        if batch.has_ended:
            ended = batch
        elif batch.status == "cancelling":
            ended = _replaced(batch, status="cancelled", cancelled_at=_now())
        elif batch.expired_at is not None:
            ended = _replaced(batch, status="expired")
        else:
            ended = _replaced(batch, status="completed", completed_at=_now())
        await self._desk.store.save_batch(ended, [file for file in (output, errors) if file is not None])
        self._batch, self._counts, self.is_over = ended, None, True
        await _to_its_end(self._desk.folder.remove_job, ended)

    @asynccontextmanager
    async def _ledger(self, source: Input) -> AsyncIterator[Ledger]:
        """Open in a thread; given back whatever happens. Sets the counts to those of earlier runs."""
        paths = await _to_its_end(self._desk.folder.job, self._batch)
        opening = asyncio.ensure_future(asyncio.to_thread(Ledger.open, paths, Identity(source.fingerprint, {})))
        try:
            ledger = await asyncio.shield(opening)
        except asyncio.CancelledError:
            with suppress(OSError, ConfigError):
                (await opening).close()
            raise
        with ledger:
            self._num_rows, self._counts = source.num_rows, ledger.past.counts
            yield ledger

    async def _answer(self, row: Row, on_prefilled: Callable[[], None]) -> Reply:
        """A system that takes no requests is waited for as long as the completion window is open."""
        async with self._desk.seats:
            return await answer_patiently(self._desk.answers, row.url, row.body, on_prefilled, self._time_left_s())

    def _count(self, results: Sequence[ResultLine]) -> None:
        assert self._counts is not None, f"{self._batch.id} has results, but was not opened"
        for result in results:
            self._counts = self._counts.plus(counts_of(result))

    def _time_left_s(self) -> float:
        return max(0.0, self._batch.expires_at - time.time())


def _mistakes(source: Input, max_rows: int) -> list[BatchError]:
    """Why a batch cannot be done, as OpenAI finds it: one bad line is enough."""
    if not source.num_rows:
        return [BatchError(code="empty_file", message="the input file has no requests", param="input_file_id")]
    if source.num_rows > max_rows:
        return [BatchError(code="too_many_requests", message=f"{source.num_rows} requests; a batch has at most {max_rows}")]
    return [BatchError(code=row.code, message=row.message, line=row.line) for row in source.bad_rows]


async def _to_its_end(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """In a thread, which has ended when this has, also where it was cancelled."""
    working = asyncio.ensure_future(asyncio.to_thread(work, *args, **kwargs))
    try:
        return await asyncio.shield(working)
    finally:
        await asyncio.wait([working])


def _now() -> int:
    return int(time.time())
