"""Where files and the results of batches lie on the disk.

    lock                      held by the router that uses the folder
    state.db                  files and batches, by `pdjax.batches.store`
    files/FILE_ID             whole files, what clients sent and results of batches that have ended
    uploads/FILE_ID           a file that is being received
    batches/BATCH_ID/         the journals of a batch that has not ended (`pdjax.jobs.ledger`)

Methods block on the disk; they may be called from any thread.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import BinaryIO

from pdjax.batches.objects import Batch, File
from pdjax.jobs.config import Paths


class Folder:
    """Holds the folder's lock until `close`."""

    def __init__(self, path: Path, lock: BinaryIO):
        """Use `open`."""
        self._path = path
        self._lock = lock

    @classmethod
    def open(cls, path: Path) -> Folder:
        """Make what is missing, and forget what was being received. Raises OSError, and ValueError where another router uses the folder."""
        for name in ("files", "batches", "uploads"):
            (path / name).mkdir(parents=True, exist_ok=True)
        lock = (path / "lock").open("ab")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise ValueError(f"batches.directory: another router uses {path}") from None
        for upload in (path / "uploads").iterdir():
            upload.unlink()
        return cls(path, lock)

    def close(self) -> None:
        self._lock.close()

    @property
    def database(self) -> Path:
        return self._path / "state.db"

    def file(self, file_id: str) -> Path:
        """`file_id` has to be known: it names a file without further checks."""
        return self._path / "files" / file_id

    def upload(self, file_id: str) -> Path:
        """Where a file lies while it is being received."""
        return self._path / "uploads" / file_id

    def keep(self, file_id: str) -> None:
        """Its upload is whole: make it a file, on the disk when this returns."""
        _sync(self.upload(file_id))
        self.upload(file_id).replace(self.file(file_id))
        _sync(self._path / "files")

    def remove_files_but(self, kept: Collection[str]) -> None:
        """Files that nobody knows of: their router died before it had noted them down."""
        for path in (self._path / "files").iterdir():
            if path.name not in kept:
                path.unlink()

    def job(self, batch: Batch) -> Paths:
        """Where the job of a batch reads and writes; its folder is made."""
        folder = self._path / "batches" / batch.id
        folder.mkdir(exist_ok=True)
        output, errors = folder / "output.jsonl", folder / "errors.jsonl"
        return Paths(self.file(batch.input_file_id), output, errors, output, errors)

    def publish(self, batch: Batch, created_at: int) -> list[File | None]:
        """Make files of the two journals, None where they hold nothing; output first. The job has ended. Can be done again after it was
        broken off anywhere."""
        paths = self.job(batch)
        return [
            self._publish(journal, file_id, f"{batch.id}_{word}.jsonl", created_at)
            for journal, file_id, word in zip(
                (paths.output_journal, paths.errors_journal), result_ids(batch), ("output", "error"), strict=True
            )
        ]

    def _publish(self, journal: Path, file_id: str, filename: str, created_at: int) -> File | None:
        target = self.file(file_id)
        if journal.exists() and journal.stat().st_size:
            journal.replace(target)
            _sync(target.parent)
        if not target.exists():
            return None
        return File(id=file_id, bytes=target.stat().st_size, created_at=created_at, filename=filename, purpose="batch_output")

    def remove_job(self, batch: Batch) -> None:
        shutil.rmtree(self._path / "batches" / batch.id, ignore_errors=True)


def result_ids(batch: Batch) -> tuple[str, str]:
    """Ids of the output and of the file of errors. They follow from the batch's, so that publishing twice makes no second file."""
    stem = batch.id.replace("batch_", "file-", 1)
    return f"{stem}-output", f"{stem}-errors"


def _sync(path: Path) -> None:
    """What a file holds, or which names a folder has, is on the disk when this returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
