"""Keeps the files and batches of a router: takes new ones, has every open batch worked on, goes on with all of them after a restart."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any, BinaryIO

from pdjax.api.errors import InvalidField, NotFound
from pdjax.batches.folder import Folder, result_ids
from pdjax.batches.objects import Batch, BatchError, File, Page
from pdjax.batches.requests import CreateBatch
from pdjax.batches.run import BatchRun, Desk
from pdjax.batches.store import Store, Window
from pdjax.batches.upload import Upload
from pdjax.config.schema import BatchesConfig
from pdjax.errors import NoWorker, OverCapacity
from pdjax.jobs.backend import Answers

COMPLETION_WINDOW_S = 24 * 3600
PAUSE_AFTER_TROUBLE_S = 10.0
FULL_RETRY_AFTER_S = 60.0

logger = logging.getLogger(__name__)


class Keeper:
    """Owns the folder, the store and every batch that has not ended. For one event loop.

    Methods raise NotFound and other kinds of BadRequest, OverCapacity, and OSError or sqlite3.Error where the disk fails.
    """

    def __init__(self, desk: Desk):
        """Use `open`."""
        self._desk = desk
        self._runs: dict[str, BatchRun] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        # The tasks above, and those whose batch was cancelled until they have ended.
        self._working: set[asyncio.Task[None]] = set()
        self._is_stopping = False
        # Held while a file is given to a batch, or removed: no batch gets a file that goes away.
        self._inputs = asyncio.Lock()

    @classmethod
    async def open(cls, config: BatchesConfig, directory: Path, answers: Answers) -> Keeper:
        """Go on with everything that is there. Raises OSError or ValueError where the folder cannot be used."""
        folder = Folder.open(directory)
        store = None
        try:
            store = Store(folder.database)
            places, seats = asyncio.Semaphore(config.max_in_progress), asyncio.Semaphore(config.max_in_flight)
            keeper = cls(Desk(folder, store, answers, config, places, seats, asyncio.Lock()))
            await keeper._begin()
        except BaseException as error:
            if store is not None:
                store.close()
            folder.close()
            if isinstance(error, sqlite3.Error):
                raise OSError(f"batches.directory {directory}: {error}") from error
            raise
        return keeper

    async def _begin(self) -> None:
        open_batches = await self._desk.store.open_batches()
        results = {file_id for batch in open_batches for file_id in result_ids(batch)}
        self._desk.folder.remove_files_but(await self._desk.store.file_ids() | results)
        for batch in open_batches:
            self._launch(BatchRun(self._desk, batch))

    async def stop(self) -> None:
        """Stop all work where it is; what has been answered is on the disk."""
        self._is_stopping = True
        await _stopped(self._working)
        await asyncio.to_thread(self._desk.store.close)
        self._desk.folder.close()

    async def add_file(self, receive: Callable[[BinaryIO], Awaitable[Upload]]) -> File:
        """`receive` writes what comes. Raises what it raises."""
        file_id = f"file-{uuid.uuid4().hex}"
        path = self._desk.folder.upload(file_id)
        try:
            with path.open("wb") as target:
                upload = await receive(target)
            await self._check_room(upload.num_bytes)
            await asyncio.to_thread(self._desk.folder.keep, file_id)
        finally:
            path.unlink(missing_ok=True)
        file = File(id=file_id, bytes=upload.num_bytes, created_at=int(time.time()), filename=upload.filename, purpose="batch")
        await self._desk.store.add_file(file)
        return file

    async def _check_room(self, num_bytes: int) -> None:
        limit = self._desk.config.max_stored_bytes
        if await self._desk.store.stored_bytes() + num_bytes > limit:
            what = f"the server keeps at most {limit} bytes of files (batches.max_stored_bytes)"
            raise InvalidField(f"{what}; delete some", "file", "storage_full")

    async def files(self, window: Window, purpose: str | None) -> Page:
        return await self._desk.store.files(window, purpose)

    async def file(self, file_id: str, param: str = "file_id") -> File:
        file = await self._desk.store.file(file_id)
        if file is None:
            raise NotFound(f"there is no file {file_id[:100]!r}", param, "file_not_found")
        return file

    async def content(self, file_id: str) -> Path:
        """Where the file's bytes are."""
        return self._desk.folder.file((await self.file(file_id)).id)

    async def remove_file(self, file_id: str) -> None:
        async with self._inputs:
            file = await self.file(file_id)
            for each in self._runs.values():
                if each.batch.input_file_id == file_id:
                    raise InvalidField(f"{file_id} is the input of {each.batch.id}, which has not ended", "file_id", "file_in_use")
            await self._desk.store.remove_file(file.id)
            await asyncio.to_thread(self._desk.folder.file(file.id).unlink, missing_ok=True)

    async def add_batch(self, wanted: CreateBatch) -> Batch:
        async with self._inputs:
            self._check_open()
            file = await self.file(wanted.input_file_id, "input_file_id")
            if file.purpose != "batch":
                raise InvalidField(f"{file.id} is of purpose {file.purpose!r}, not 'batch'", "input_file_id", "invalid_value")
            created_at = int(time.time())
            batch = Batch(
                id=f"batch_{uuid.uuid4().hex}",
                endpoint=wanted.endpoint,
                input_file_id=file.id,
                status="validating",
                created_at=created_at,
                expires_at=created_at + COMPLETION_WINDOW_S,
                metadata=wanted.metadata,
            )
            await self._desk.store.add_batch(batch)
            self._launch(BatchRun(self._desk, batch))
        return batch

    def _check_open(self) -> None:
        if self._is_stopping:
            raise NoWorker("the server is shutting down")
        if len(self._runs) >= (limit := self._desk.config.max_open):
            raise OverCapacity(f"{len(self._runs)} batches have not ended, the limit is {limit}", FULL_RETRY_AFTER_S)

    async def batches(self, window: Window) -> Page:
        page = await self._desk.store.batches(window)
        return Page(data=[self._latest(batch) for batch in page.data], first_id=page.first_id, last_id=page.last_id, has_more=page.has_more)

    async def batch(self, batch_id: str) -> Batch:
        batch = await self._desk.store.batch(batch_id)
        if batch is None:
            raise NotFound(f"there is no batch {batch_id[:100]!r}", "batch_id", "batch_not_found")
        return self._latest(batch)

    def _latest(self, batch: Batch) -> Batch:
        """What the disk says of an open batch is behind."""
        run = self._runs.get(batch.id)
        return batch if run is None or batch.has_ended else run.batch

    async def cancel(self, batch_id: str) -> Batch:
        """A batch that is cancelled already stays so."""
        batch, run = await self.batch(batch_id), self._runs.get(batch_id)
        if batch.status in ("cancelling", "cancelled"):
            return batch
        if run is None or not run.can_be_cancelled or self._is_stopping:
            raise InvalidField(f"{batch_id} is {batch.status} and cannot be cancelled any more", "batch_id", "invalid_status")
        run.cancel()
        self._start(batch_id, self._go_again(run, self._tasks[batch_id]))
        batch = run.batch
        await run.save()
        return batch

    def _launch(self, run: BatchRun) -> None:
        self._runs[run.batch.id] = run
        self._start(run.batch.id, self._carry_out(run))

    def _start(self, batch_id: str, work: Coroutine[Any, Any, None]) -> None:
        task = self._tasks[batch_id] = asyncio.create_task(work)
        self._working.add(task)
        task.add_done_callback(self._working.discard)

    async def _go_again(self, run: BatchRun, before: asyncio.Task[None]) -> None:
        await _stopped([before])
        await self._carry_out(run)

    async def _carry_out(self, run: BatchRun) -> None:
        """Until it has ended. A disk that fails is waited for; anything else unexpected ends the batch."""
        batch_id = run.batch.id
        while not run.is_over:
            try:
                await run.go()
            except Exception as error:
                logger.exception("%s was broken off", batch_id)
                if not isinstance(error, OSError | sqlite3.Error) or isinstance(error, FileNotFoundError):
                    run.fail([BatchError(code="internal_error", message=f"the server failed at this batch: {type(error).__name__}")])
                await asyncio.sleep(PAUSE_AFTER_TROUBLE_S)
        del self._runs[batch_id], self._tasks[batch_id]


async def _stopped(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancel them; they have ended when this returns."""
    ending = list(tasks)
    for task in ending:
        if not task.cancelling():  # a second order would cut off what the first has it put in order
            task.cancel()
    if ending:
        await asyncio.wait(ending)
