"""Several streams as one, and one rule for all of them: closing the whole closes every part, at once and in order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class _Ended(NamedTuple):
    """The last word of one stream: how it ended."""

    error: Exception | None


def merge(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Run `streams` concurrently and give their events, each with its stream's index, as they come.

    The first exception of any stream ends the whole. However the whole ends (exhausted, error, cancelled, `aclose`), every stream has
    been closed when it has.
    """
    return _only(streams[0]) if len(streams) == 1 else _interleaved(streams)


async def _only(stream: AsyncGenerator[T, None]) -> AsyncGenerator[tuple[int, T], None]:
    async with aclosing(stream):
        async for event in stream:
            yield 0, event


async def _interleaved(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    # One waiting event a stream: a reader that falls behind holds its streams back instead of filling memory.
    queue: asyncio.Queue[tuple[int, T] | _Ended] = asyncio.Queue(maxsize=len(streams))

    async def pump(index: int, stream: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(stream):
                async for event in stream:
                    await queue.put((index, event))
        except Exception as error:
            await queue.put(_Ended(error))
        else:
            await queue.put(_Ended(None))

    tasks = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if not isinstance(item, _Ended):
                yield item
                continue
            if item.error is not None:
                raise item.error
            running -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in streams:  # those whose task never got to start
            await stream.aclose()
