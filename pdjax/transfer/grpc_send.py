"""The sending half of the gRPC transport: from the engine loop's chunks to the frames of one server stream."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import threading
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypeVar

from pdjax.protocol import Accepted, ChunkLast, KVFrame, SendFailed
from pdjax.transfer.base import TransferLimits
from pdjax.transfer.frames import HostChunk, PageForm, data_frames, to_host
from pdjax.transfer.rooms import Counters
from pdjax.transfer.sender import OutboundChunk, Outlet, RoomSender

_COPY_THREADS = 2  # one waits for the device while the other takes a checksum
_MAX_SIGN_OF_LIFE_S = 1.0
_T = TypeVar("_T")


class Last(NamedTuple):
    metadata: bytes


class Failure(NamedTuple):
    message: str


Item = RoomSender | OutboundChunk | Last | Failure
Write = Callable[[KVFrame], Awaitable[None]]


class LoopOutlet(Outlet):
    """Carries one room's items from the engine loop into the server's event loop.

    Bounded by the sender's bound on chunks in flight, plus the sender itself, one last and one failure.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._sender: RoomSender | None = None
        self._items: collections.deque[Item] = collections.deque()
        self._arrived = asyncio.Event()
        self._is_closed = False

    def accepted(self, sender: RoomSender) -> None:
        self._sender = sender
        self._put(sender)

    def chunk(self, chunk: OutboundChunk) -> bool:
        return self._put(chunk)

    def last(self, metadata: bytes) -> None:
        self._put(Last(metadata))

    def failed(self, message: str) -> None:
        self._put(Failure(message))

    async def get(self) -> Item:
        """The next item. Only in the server's loop; safe to cancel."""
        while True:
            self._arrived.clear()
            with self._lock:
                if self._items:
                    return self._items.popleft()
            await self._arrived.wait()

    def close(self) -> None:
        """Take no more, and let go of the chunks that still wait here."""
        with self._lock:
            self._is_closed = True
            dropped = sum(isinstance(item, OutboundChunk) for item in self._items)
            self._items.clear()
        for _ in range(dropped):
            assert self._sender is not None, "a chunk came before its sender"
            self._sender.chunk_left()

    def _put(self, item: Item) -> bool:
        with self._lock:
            if self._is_closed:
                return False
            self._items.append(item)
            self._loop.call_soon_threadsafe(self._arrived.set)
            return True


class HostCopier:
    """Copies chunks to the host and takes checksums, in threads of its own: both take too long for an event loop."""

    def __init__(self, page: PageForm, counters: Counters) -> None:
        self._page = page
        self._counters = counters
        self._pool = concurrent.futures.ThreadPoolExecutor(_COPY_THREADS, thread_name_prefix="kv-send-copy")

    def start(self, chunk: OutboundChunk) -> concurrent.futures.Future[HostChunk]:
        return self._pool.submit(self._copy, chunk)

    def close(self) -> None:
        """Waits for the copies that run."""
        self._pool.shutdown(wait=True)

    def _copy(self, chunk: OutboundChunk) -> HostChunk:
        chunk.kv.block_until_ready()
        started_s = time.monotonic()
        host_chunk = to_host(chunk, self._page)
        self._counters.copied(time.monotonic() - started_s)
        return host_chunk


class RoomStream:
    """Writes one accepted room to its stream."""

    def __init__(self, outlet: LoopOutlet, write: Write, copier: HostCopier, instance_id: str, limits: TransferLimits) -> None:
        self._outlet = outlet
        self._write = write
        self._copier = copier
        self._accepted = Accepted(instance_id)
        self._hold_limit_s = limits.bootstrap_timeout_s
        self._sign_of_life_s = min(_MAX_SIGN_OF_LIFE_S, limits.stall_timeout_s / 4)

    async def run(self, sender: RoomSender) -> None:
        """From `Accepted` to the stream's last frame. Raises what the copy of a chunk raised; the room is open then."""
        num_pages = 0
        await self._write(self._accepted)
        while True:
            item = await self._alive_until(asyncio.ensure_future(self._outlet.get()))
            if isinstance(item, OutboundChunk):
                await self._send_chunk(sender, item)
                num_pages += item.num_pages
            elif isinstance(item, Last):
                await self._send_frame(sender, ChunkLast(num_pages, item.metadata))
                sender.delivered()
                return
            else:
                assert isinstance(item, Failure), f"room {sender.room}: {item} after its sender"
                await self._write(SendFailed(item.message))
                return

    async def _send_chunk(self, sender: RoomSender, chunk: OutboundChunk) -> None:
        """Send a chunk, or what of it fits before the room fails: then a `Failure` waits in the outlet."""
        try:
            if sender.is_failed():
                return
            host_chunk = await self._alive_until(asyncio.wrap_future(self._copier.start(chunk)))
            await self._send_frame(sender, host_chunk.head)
            for frame in data_frames(host_chunk.payload):
                if sender.is_failed():
                    return
                await self._send_frame(sender, frame)
            sender.counters.sent(host_chunk.payload.nbytes)
        finally:
            sender.chunk_left()

    async def _send_frame(self, sender: RoomSender, frame: KVFrame) -> None:
        sender.link_owes(self._hold_limit_s)
        await self._write(frame)
        sender.link_paid()

    async def _alive_until(self, task: asyncio.Future[_T]) -> _T:
        """Await `task`; every so often tell the receiver that this worker lives."""
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=self._sign_of_life_s)
                if not task.done():
                    await self._write(self._accepted)
        finally:
            task.cancel()
        return task.result()
