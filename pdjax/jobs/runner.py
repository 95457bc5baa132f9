"""Keeps rows in flight: starts the next when one has ended, lets followers go when their prompt's beginning is there, commits results."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple, Protocol

from pdjax.jobs.backend import Reply
from pdjax.jobs.ledger import Ledger
from pdjax.jobs.order import Agenda
from pdjax.jobs.outcomes import ResultLine, result_of
from pdjax.jobs.rows import Row


class Answer(Protocol):
    """Answers one row; raises JobStopped where the job cannot go on. `on_prefilled`: see `RowBackend.answer`."""

    async def __call__(self, row: Row, on_prefilled: Callable[[], None]) -> Reply: ...


class _Prefilled(NamedTuple):
    place: int


class _Ended(NamedTuple):
    place: int
    result: ResultLine


class _Broken(NamedTuple):
    """`error` ends the job."""

    error: Exception


_News = _Prefilled | _Ended | _Broken


class Runner:
    """One run over an agenda. `on_results` is told of results that are on the disk."""

    def __init__(self, agenda: Agenda, answer: Answer, ledger: Ledger, max_in_flight: int, on_results: Callable[[list[ResultLine]], None]):
        self._agenda = agenda
        self._answer = answer
        self._ledger = ledger
        self._max_in_flight = max_in_flight
        self._on_results = on_results
        self._in_flight: set[asyncio.Task[None]] = set()
        # Never full: a row in flight has at most two pieces of news, and its place is given away only after the last was read.
        self._news: asyncio.Queue[_News] = asyncio.Queue(2 * max_in_flight)
        self._num_open = 0
        self._unwritten: list[ResultLine] = []

    async def run(self) -> None:
        """Until every row is done. Raises JobStopped, and OSError where results cannot be written.

        Whatever ends it, also a cancellation: rows in flight are stopped, and every result that was there is on the disk.
        """
        try:
            while True:
                self._start_rows()
                await self._write()
                if not self._num_open:
                    break
                await self._take_news()
            assert self._agenda.is_empty, "rows wait for others that have ended"
        finally:
            await self._stop_rows()

    def _start_rows(self) -> None:
        while self._num_open < self._max_in_flight and (taken := self._agenda.take()) is not None:
            task = asyncio.create_task(self._work(*taken))
            self._in_flight.add(task)
            task.add_done_callback(self._in_flight.discard)
            self._num_open += 1

    async def _work(self, place: int, row: Row) -> None:
        told = False

        def on_prefilled() -> None:
            nonlocal told
            if not told:
                told = True
                self._news.put_nowait(_Prefilled(place))

        try:
            reply = await self._answer(row, on_prefilled)
            told = True
            self._news.put_nowait(_Ended(place, result_of(row, reply)))
        except Exception as error:
            self._news.put_nowait(_Broken(error))

    async def _take_news(self) -> None:
        """Wait for some, and take all there is: results that came meanwhile are written together. Raises what ends the job."""
        pending = [await self._news.get()]
        while not self._news.empty():
            pending.append(self._news.get_nowait())
        broken = [self._take(news) for news in pending]
        for error in broken:
            if error is not None:
                raise error

    def _take(self, news: _News) -> Exception | None:
        match news:
            case _Prefilled(place):
                self._agenda.release(place)
            case _Ended(place, result):
                self._agenda.release(place)
                self._unwritten.append(result)
                self._num_open -= 1
            case _Broken(error):
                return error
        return None

    async def _write(self) -> None:
        """In a thread, so that a slow disk holds up no answers. When this has ended the thread has too, also where it was cancelled."""
        if not self._unwritten:
            return
        results, self._unwritten = self._unwritten, []
        writing = asyncio.ensure_future(asyncio.to_thread(self._ledger.commit, results))
        try:
            await asyncio.shield(writing)
        finally:
            await writing
            self._on_results(results)

    async def _stop_rows(self) -> None:
        rows = list(self._in_flight)
        for row in rows:
            row.cancel()
        await asyncio.gather(*rows, return_exceptions=True)
        while not self._news.empty():
            self._take(self._news.get_nowait())
        await self._write()
