"""The state of files and batches in SQLite: what a router that starts again finds."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import msgspec

from pdjax.api.errors import InvalidField
from pdjax.batches.objects import Batch, File, Page

VERSION = 1
TABLES = """
CREATE TABLE IF NOT EXISTS files (
    place INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT UNIQUE NOT NULL,
    purpose TEXT NOT NULL,
    num_bytes INTEGER NOT NULL,
    object BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS batches (
    place INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT UNIQUE NOT NULL,
    is_open INTEGER NOT NULL,
    object BLOB NOT NULL
);
"""
"""`object` is the JSON that clients get; the other columns are what is searched by. `place` is the order of creation."""

T = TypeVar("T")
_encode = msgspec.json.Encoder().encode
_file = msgspec.json.Decoder(File).decode
_batch = msgspec.json.Decoder(Batch).decode


class Window(NamedTuple):
    """Which part of a list: at most `limit` from behind the object `after` on."""

    after: str | None
    limit: int
    order: Literal["asc", "desc"] = "desc"


class Store:
    """Coroutines for one event loop. Their work is done by one thread, in the order in which they were called, and is on the disk when they
    end; cancelling one does not undo it. As many wait as there are callers, which are bounded. They raise sqlite3.Error.
    """

    def __init__(self, path: Path):
        """Raises ValueError for what is no database of this version, sqlite3.Error where it cannot be opened."""
        self._thread = ThreadPoolExecutor(1, "pdjax-batches")
        self._database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        try:
            self._prepare(path)
        except BaseException:
            self.close()
            raise

    def _prepare(self, path: Path) -> None:
        try:
            [(version,)] = self._database.execute("PRAGMA user_version")
        except sqlite3.DatabaseError as error:
            raise ValueError(f"{path} cannot be used: {error}") from None
        if version not in (0, VERSION):
            raise ValueError(f"{path} is of version {version}, this program knows {VERSION}")
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.execute("PRAGMA synchronous = FULL")
        self._database.executescript(TABLES)
        self._database.execute(f"PRAGMA user_version = {VERSION}")

    def close(self) -> None:
        """After what was called has been done. Idempotent."""
        self._thread.shutdown()
        self._database.close()

    async def add_file(self, file: File) -> None:
        await self._do(lambda: self._insert_files([file]))

    async def file(self, file_id: str) -> File | None:
        found = await self._do(lambda: self._database.execute("SELECT object FROM files WHERE id = ?", (file_id,)).fetchone())
        return None if found is None else _file(found[0])

    async def files(self, window: Window, purpose: str | None) -> Page:
        """Raises BadRequest where `after` is no file."""
        where, values = ("TRUE", ()) if purpose is None else ("purpose = ?", (purpose,))
        return _page([_file(row) for row in await self._do(lambda: self._window("files", window, where, values))], window.limit)

    async def stored_bytes(self) -> int:
        [total] = await self._do(lambda: self._database.execute("SELECT COALESCE(SUM(num_bytes), 0) FROM files").fetchone())
        return total

    async def file_ids(self) -> set[str]:
        return {file_id for (file_id,) in await self._do(lambda: self._database.execute("SELECT id FROM files").fetchall())}

    async def remove_file(self, file_id: str) -> None:
        await self._do(lambda: self._database.execute("DELETE FROM files WHERE id = ?", (file_id,)))

    async def add_batch(self, batch: Batch) -> None:
        await self._do(lambda: self._database.execute("INSERT INTO batches (id, is_open, object) VALUES (?, ?, ?)", _batch_values(batch)))

    async def save_batch(self, batch: Batch, new_files: Sequence[File] = ()) -> None:
        """Together with files that come into being, all or nothing."""
        await self._do(lambda: self._save_batch(batch, new_files))

    async def batch(self, batch_id: str) -> Batch | None:
        found = await self._do(lambda: self._database.execute("SELECT object FROM batches WHERE id = ?", (batch_id,)).fetchone())
        return None if found is None else _batch(found[0])

    async def batches(self, window: Window) -> Page:
        """Raises BadRequest where `after` is no batch."""
        return _page([_batch(row) for row in await self._do(lambda: self._window("batches", window, "TRUE", ()))], window.limit)

    async def open_batches(self) -> list[Batch]:
        """Those that have not ended, oldest first."""
        rows = await self._do(lambda: self._database.execute("SELECT object FROM batches WHERE is_open ORDER BY place").fetchall())
        return [_batch(row) for (row,) in rows]

    async def _do(self, work: Callable[[], T]) -> T:
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._thread, work))

    def _insert_files(self, files: Sequence[File]) -> None:
        values = [(file.id, file.purpose, file.bytes, _encode(file)) for file in files]
        self._database.executemany("INSERT OR REPLACE INTO files (id, purpose, num_bytes, object) VALUES (?, ?, ?, ?)", values)

    def _save_batch(self, batch: Batch, new_files: Sequence[File]) -> None:
        with self._database:
            self._database.execute("BEGIN")
            self._insert_files(new_files)
            batch_id, is_open, data = _batch_values(batch)
            self._database.execute("UPDATE batches SET is_open = ?, object = ? WHERE id = ?", (is_open, data, batch_id))

    def _window(self, table: Literal["files", "batches"], window: Window, where: str, values: tuple[str, ...]) -> list[bytes]:
        """One more than the limit where there are more."""
        sign, direction = ("<", "DESC") if window.order == "desc" else (">", "ASC")
        if window.after is not None:
            place = self._database.execute(f"SELECT place FROM {table} WHERE id = ?", (window.after,)).fetchone()
            if place is None:
                raise InvalidField(f"after: there is no {window.after[:100]!r}", "after", "invalid_value")
            where, values = f"{where} AND place {sign} ?", (*values, place[0])
        query = f"SELECT object FROM {table} WHERE {where} ORDER BY place {direction} LIMIT ?"
        return [row for (row,) in self._database.execute(query, (*values, window.limit + 1))]


def _batch_values(batch: Batch) -> tuple[str, bool, bytes]:
    return batch.id, not batch.has_ended, _encode(batch)


def _page(found: Sequence[File] | Sequence[Batch], limit: int) -> Page:
    shown = list(found[:limit])
    ids = [each.id for each in shown]
    return Page(data=shown, first_id=ids[0] if ids else None, last_id=ids[-1] if ids else None, has_more=len(found) > limit)
