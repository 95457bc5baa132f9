"""The sending half of a control stream: from the engine loop's items to the frames of one server stream.

How chunks leave is the business of a `Carrier`: over the room's data connection (`tcp_bytes`), or from device to device (`jax_send`).
"""

from __future__ import annotations

import abc
import asyncio
import collections
import concurrent.futures
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any, Generic, NamedTuple, TypeVar

import grpc

from pdjax.protocol import Accepted, Announce, ChunkLast, KVFrame, SendFailed
from pdjax.transfer.base import TransferLimits
from pdjax.transfer.sender import OutboundChunk, Outlet, RoomSender

_WORK_THREADS = 2  # one waits for the device while the other takes a checksum
_MAX_SIGN_OF_LIFE_S = 1.0


class Last(NamedTuple):
    metadata: bytes


class Failure(NamedTuple):
    message: str


Item = RoomSender | OutboundChunk | Last | Failure
Write = Callable[[KVFrame], Awaitable[None]]
T = TypeVar("T")
U = TypeVar("U")


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


class Preparation(NamedTuple, Generic[T]):
    """A chunk on its way through `Preparer`. Whoever has it calls `end` once, whatever became of it."""

    sender: RoomSender
    result: concurrent.futures.Future[T]

    def end(self, moved_bytes: int) -> None:
        """Let go of the chunk as soon as no thread holds it; `moved_bytes` of it are on the other side."""
        self.result.cancel()
        self.result.add_done_callback(lambda result: self._let_go(result, moved_bytes))

    def _let_go(self, result: concurrent.futures.Future[T], moved_bytes: int) -> None:
        if not result.cancelled() and result.exception() is None:
            self.sender.meter.moved(moved_bytes)
        self.sender.chunk_left()


class Preparer(Generic[T]):
    """Waits until chunks are computed and makes them ready to leave, in threads of its own: both take too long for an event loop."""

    def __init__(self, work: Callable[[OutboundChunk], T]) -> None:
        """`work` gets a chunk that has been computed; it may raise."""
        self._work = work
        self._pool = concurrent.futures.ThreadPoolExecutor(_WORK_THREADS, thread_name_prefix="kv-send-copy")

    def start(self, sender: RoomSender, chunk: OutboundChunk) -> Preparation[T]:
        return Preparation(sender, self._pool.submit(self._prepare, sender, chunk))

    def close(self) -> None:
        """Waits for the work that runs."""
        self._pool.shutdown(wait=True)

    def _prepare(self, sender: RoomSender, chunk: OutboundChunk) -> T:
        """Raises what the chunk's computation raised."""
        chunk.kv.block_until_ready()
        started_s = time.monotonic()
        sender.meter.began()
        try:
            result = self._work(chunk)
        except BaseException:
            sender.meter.dropped()
            raise
        sender.counters.copied(time.monotonic() - started_s)
        return result


class RoomWriter:
    """Writes to the stream of one accepted room."""

    def __init__(self, outlet: LoopOutlet, write: Write, instance_id: str, limits: TransferLimits) -> None:
        self.outlet = outlet
        self.hold_limit_s = limits.hold_timeout_s
        self._write = write
        self._accepted = Accepted(instance_id)
        self._sign_of_life_s = min(_MAX_SIGN_OF_LIFE_S, limits.stall_timeout_s / 4)

    async def frame(self, sender: RoomSender, frame: KVFrame) -> None:
        """Write what the link has to accept in time."""
        sender.link_owes(self.hold_limit_s)
        await self._write(frame)
        sender.link_paid()

    async def accept(self) -> None:
        await self._write(self._accepted)

    async def fail(self, message: str) -> None:
        await self._write(SendFailed(message))

    async def next_item(self) -> Item:
        """With a sign of life while there is none."""
        while (item := self.outlet.pop()) is None:
            if not await self.outlet.wait(self._sign_of_life_s):
                await self.accept()
        return item

    async def alive_until(self, awaited: asyncio.Future[U]) -> U | None:
        """Await what may take as long as prefill computes, with signs of life. None where the room fails before: `awaited` is cancelled."""
        failed = asyncio.ensure_future(self.outlet.until_failed())
        try:
            while not awaited.done():
                done, _ = await asyncio.wait({awaited, failed}, timeout=self._sign_of_life_s, return_when=asyncio.FIRST_COMPLETED)
                if failed in done:
                    return None
                if not done:
                    await self.accept()
            return awaited.result()
        finally:
            failed.cancel()
            awaited.cancel()

    async def silent_until(self, awaited: asyncio.Future[Any]) -> None:
        """Await what follows the last frame, or the room's failure. `awaited` is done then, or cancelled."""
        failed = asyncio.ensure_future(self.outlet.until_failed())
        try:
            await asyncio.wait({awaited, failed}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            failed.cancel()
            awaited.cancel()


class Carrier(abc.ABC):
    """Moves the chunks of one accepted room. Every method runs in the server's event loop."""

    @abc.abstractmethod
    async def carry(self, sender: RoomSender, chunk: OutboundChunk) -> None:
        """Move a chunk, or start to; what of it fits before the room fails. Owns the chunk. Raises what its computation raised."""

    @abc.abstractmethod
    async def settle(self, sender: RoomSender) -> None:
        """Return when every chunk has arrived as far as this side can know, or the room has failed."""

    @abc.abstractmethod
    def close(self) -> None:
        """Let go of what has not arrived. The room has ended."""


class Carriers(abc.ABC):
    """Makes the carriers of one source. `transport`: what both sides must agree on."""

    transport: str

    @abc.abstractmethod
    def open(self, announce: Announce, writer: RoomWriter) -> Carrier: ...

    @abc.abstractmethod
    def methods(self) -> dict[str, grpc.RpcMethodHandler]:
        """What the worker's gRPC service has to serve besides FetchKV, by name."""

    @abc.abstractmethod
    def close(self) -> None:
        """Stop every thread. Waits for those that run."""


class RoomStream:
    """Writes one accepted room to its stream."""

    def __init__(self, writer: RoomWriter, carrier: Carrier) -> None:
        self._writer = writer
        self._carrier = carrier

    async def run(self, sender: RoomSender) -> None:
        """From `Accepted` to the stream's last frame. Raises what the computation of a chunk raised; the room is open then."""
        try:
            await self._run(sender)
        finally:
            self._carrier.close()

    async def _run(self, sender: RoomSender) -> None:
        num_pages = 0
        await self._writer.accept()
        while True:
            item = await self._writer.next_item()
            if isinstance(item, OutboundChunk):
                num_pages += item.num_pages
                await self._send(sender, item)
            elif isinstance(item, Last):
                await self._writer.frame(sender, ChunkLast(num_pages, item.metadata))
                await self._carrier.settle(sender)
                if not sender.is_failed():
                    sender.delivered()
                    return
            else:
                assert isinstance(item, Failure), f"room {sender.room}: {item} after its sender"
                await self._writer.fail(item.message)
                return

    async def _send(self, sender: RoomSender, chunk: OutboundChunk) -> None:
        """Send a chunk, unless the room has failed: then a `Failure` waits in the outlet."""
        if sender.is_failed():
            sender.chunk_left()
        else:
            await self._carrier.carry(sender, chunk)
