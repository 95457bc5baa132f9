"""The sending half of the gRPC transport: from the engine loop's chunks to the frames of one server stream."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import threading
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from pdjax.protocol import Accepted, ChunkLast, KVFrame, SendFailed
from pdjax.transfer.base import TransferLimits
from pdjax.transfer.frames import HostChunk, PageForm, data_frames, to_host
from pdjax.transfer.rooms import Counters
from pdjax.transfer.sender import OutboundChunk, Outlet, RoomSender

_COPY_THREADS = 2  # one waits for the device while the other takes a checksum
_MAX_SIGN_OF_LIFE_S = 1.0


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
        self._failed = asyncio.Event()
        self._is_closed = False

    def accepted(self, sender: RoomSender) -> None:
        self._sender = sender
        self._put(sender)

    def chunk(self, chunk: OutboundChunk) -> bool:
        return self._put(chunk)

    def last(self, metadata: bytes) -> None:
        self._put(Last(metadata))

    def failed(self, message: str) -> None:
        if self._put(Failure(message)):
            self._loop.call_soon_threadsafe(self._failed.set)

    async def until_failed(self) -> None:
        """Only in the server's loop."""
        await self._failed.wait()

    async def get(self) -> Item:
        """The next item. Only in the server's loop; safe to cancel."""
        while (item := self.pop()) is None:
            await self._arrived.wait()
        return item

    async def wait(self, timeout_s: float) -> bool:
        """Whether something came within `timeout_s`. Only in the server's loop."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._arrived.wait()
        except TimeoutError:
            return False
        return True

    def pop(self) -> Item | None:
        """Only in the server's loop, where `_arrived` is set after the item that it speaks of lies here."""
        with self._lock:
            if self._items:
                return self._items.popleft()
            self._arrived.clear()
            return None

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
            item = await self._next_item()
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
        if sender.is_failed():
            sender.chunk_left()
            return
        copy = self._copier.start(chunk)
        try:
            host_chunk = await self._alive_until(asyncio.wrap_future(copy))
            if host_chunk is None:
                return
            await self._send_frame(sender, host_chunk.head)
            for frame in data_frames(host_chunk.payload):
                if sender.is_failed():
                    return
                await self._send_frame(sender, frame)
            sender.counters.sent(host_chunk.payload.nbytes)
        finally:
            copy.cancel()
            copy.add_done_callback(lambda _: sender.chunk_left())  # a copy that runs still holds the array

    async def _send_frame(self, sender: RoomSender, frame: KVFrame) -> None:
        sender.link_owes(self._hold_limit_s)
        await self._write(frame)
        sender.link_paid()

    async def _next_item(self) -> Item:
        while (item := self._outlet.pop()) is None:
            if not await self._outlet.wait(self._sign_of_life_s):
                await self._write(self._accepted)
        return item

    async def _alive_until(self, copy: asyncio.Future[HostChunk]) -> HostChunk | None:
        """Await `copy`, which may wait for prefill to compute; None where the room fails before."""
        failed = asyncio.ensure_future(self._outlet.until_failed())
        try:
            while not copy.done():
                done, _ = await asyncio.wait({copy, failed}, timeout=self._sign_of_life_s, return_when=asyncio.FIRST_COMPLETED)
                if failed in done:
                    copy.cancel()
                    return None
                if not done:
                    await self._write(self._accepted)
            return copy.result()
        finally:
            failed.cancel()
