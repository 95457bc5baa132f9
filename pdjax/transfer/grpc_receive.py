"""The receiving half of the gRPC transport: from the frames of one server stream to verified arrays on the device."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import grpc
import grpc.aio
import jax
import msgspec
import numpy as np

from pdjax import rpc
from pdjax.protocol import Accepted, Announce, ChunkHead, ChunkLast, Peer, Refused, SendFailed
from pdjax.transfer.base import ReceivedChunk
from pdjax.transfer.frames import ArrivingFrame, ChunkBuffer, PageForm
from pdjax.transfer.grpc_channels import ChannelCache
from pdjax.transfer.receiver import Intake, RoomReceiver
from pdjax.transfer.rooms import Counters, FailureKind, RoomFault

log = logging.getLogger(__name__)

_TRAILING_S = 5.0  # for the end of a stream whose last frame has been read
_decode_frame = rpc.decoder(ArrivingFrame)


class Landing(NamedTuple):
    """What the receiver's engine wants a chunk to become.

    `to_device`: host array `[n, layers, page_size, 2 * kv_heads, head_dim]` -> the same on the device; called in the transport's
    thread, may keep the host array. `page_buckets`: the values of n, rising; a chunk is padded with zeros to the next one, and none is
    larger than the last.
    """

    to_device: Callable[[np.ndarray], jax.Array]
    page_buckets: tuple[int, ...]


class Lander:
    """Verifies chunks and brings them to the device, in a thread of its own, in the order they came."""

    def __init__(self, page: PageForm, landing: Landing, counters: Counters) -> None:
        self.page = page
        self._landing = landing
        self._counters = counters
        self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="kv-receive-copy")

    def buffer(self, head: ChunkHead) -> ChunkBuffer:
        return ChunkBuffer(head, self.page, self._landing.page_buckets)

    async def land(self, buffer: ChunkBuffer) -> ReceivedChunk:
        """Raises RoomFault where the chunk is damaged or the device fails."""
        return await asyncio.wrap_future(self._pool.submit(self._land, buffer))

    def close(self) -> None:
        """Waits for the copy that runs."""
        self._pool.shutdown(wait=True)

    def _land(self, buffer: ChunkBuffer) -> ReceivedChunk:
        started_s = time.monotonic()
        buffer.verify()
        try:
            # Wait here: an array whose copy failed reports ready too, and only waiting for it raises.
            kv = jax.block_until_ready(self._landing.to_device(buffer.rows_host))
        except Exception as error:  # whatever the device reports ends this room only
            raise RoomFault(FailureKind.DEVICE, f"copying a chunk to the device failed: {error}") from error
        assert kv.shape == buffer.rows_host.shape, f"to_device made {kv.shape} of {buffer.rows_host.shape}"
        self._counters.copied(time.monotonic() - started_s)
        return ReceivedChunk(buffer.head.first_page, buffer.head.num_pages, kv)


class RoomFetch(Intake):
    """Reads one room's stream. `freed`, `ended` and `start` may be called from any thread; the rest runs in the event loop."""

    def __init__(
        self,
        receiver: RoomReceiver,
        announce: Announce,
        source: Peer,
        channels: ChannelCache,
        lander: Lander,
        max_chunks: int,
    ) -> None:
        self.receiver = receiver
        self._announce = announce
        self._source = source
        self._channels = channels
        self._lander = lander
        self._places = asyncio.Semaphore(max_chunks)
        self._next_page = announce.decode_prefix_tokens // announce.layout.page_size
        self._first_page = self._next_page
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._over = threading.Event()

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        loop.call_soon_threadsafe(self._start)

    def freed(self, num_chunks: int) -> None:
        for _ in range(num_chunks):
            self._call(self._places.release)

    def ended(self, message: str) -> None:
        self._call(self._cancel)

    def holds_nothing(self) -> bool:
        return self._over.is_set() and self.receiver.holds_nothing()

    def wait_over(self, timeout_s: float) -> None:
        """Until the stream has been let go, at most `timeout_s`. Not from the event loop."""
        if not self._over.wait(timeout_s):
            log.error("room %d: its stream did not end within %s s", self.receiver.room, timeout_s)

    def _call(self, function: Callable[[], None]) -> None:
        if self._loop is not None and not self._over.is_set():  # nothing is left to tell a stream that is over
            self._loop.call_soon_threadsafe(function)

    def _start(self) -> None:
        self._task = asyncio.ensure_future(self._run())
        self._task.add_done_callback(lambda _: self._over.set())

    def _cancel(self) -> None:
        assert self._task is not None, "calls into the loop keep their order: _start came first"
        self._task.cancel()

    async def _run(self) -> None:
        where = f"room {self.receiver.room} from prefill worker {self._source.address}"
        try:
            async with self._channels.lease(self._source) as channel:
                call = channel.unary_stream(rpc.FETCH_KV, request_serializer=rpc.encode)(self._announce)
                try:
                    await self._read(call)
                finally:
                    call.cancel()
        except RoomFault as fault:
            self.receiver.end(fault.kind, f"{where}: {fault}")
        except grpc.aio.AioRpcError as error:
            self.receiver.end(FailureKind.PEER_GONE, f"{where}: {error.code().name}: {error.details()}")
        except Exception as error:  # a fault of this module ends the room, not the loop
            log.exception("%s failed", where)
            self.receiver.end(FailureKind.INTERNAL, f"{where}: {error}")

    async def _read(self, call: grpc.aio.UnaryStreamCall) -> None:
        self._check_answer(await self._next_frame(call))
        self.receiver.accepted()
        while True:
            frame = await self._next_frame(call)
            if isinstance(frame, ChunkHead):
                await self._read_chunk(call, frame)
            elif isinstance(frame, ChunkLast):
                await self._finish(call, frame)
                return
            elif isinstance(frame, Accepted):
                self._check_answer(frame)
            else:
                raise _unexpected(frame, "between chunks")

    def _check_answer(self, frame: ArrivingFrame) -> None:
        if isinstance(frame, Refused):
            raise RoomFault(FailureKind.REFUSED, f"refused: {frame.message}")
        if not isinstance(frame, Accepted):
            raise _unexpected(frame, "as the answer to the announcement")
        if frame.instance_id != self._source.instance_id:
            raise RoomFault(
                FailureKind.REJECTED, f"worker was replaced: {self._source.instance_id!r} was asked, {frame.instance_id!r} answered"
            )

    async def _read_chunk(self, call: grpc.aio.UnaryStreamCall, head: ChunkHead) -> None:
        if head.first_page != self._next_page:
            raise RoomFault(FailureKind.PROTOCOL, f"chunk starts at page {head.first_page}, page {self._next_page} was next")
        await self._places.acquire()  # holds the link back, and no clock runs, until the engine has taken a chunk
        buffer = self._lander.buffer(head)
        while not buffer.is_full:
            frame = await self._next_frame(call)
            if isinstance(frame, (Accepted, Refused, ChunkHead, ChunkLast, SendFailed)):
                raise _unexpected(frame, "inside a chunk")
            buffer.write(frame.payload)
        chunk = await self._lander.land(buffer)
        self._next_page += head.num_pages
        self.receiver.deliver(chunk)
        self.receiver.counters.received(head.num_bytes)

    async def _finish(self, call: grpc.aio.UnaryStreamCall, last: ChunkLast) -> None:
        num_pages = self._next_page - self._first_page
        if last.num_pages != num_pages:
            raise RoomFault(FailureKind.PROTOCOL, f"{num_pages} pages have come, {last.num_pages} were sent")
        self.receiver.complete(last.metadata)
        # Let the stream end by itself: a cancellation now could reach the sender before it knows that the last frame has left.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_TRAILING_S):
                await call.read()

    async def _next_frame(self, call: grpc.aio.UnaryStreamCall) -> ArrivingFrame:
        self.receiver.awaits_sender()
        message = await call.read()
        self.receiver.heard_sender()
        if message is grpc.aio.EOF:
            raise RoomFault(FailureKind.PROTOCOL, "the stream ended before its last frame")
        try:
            return _decode_frame(message)
        except msgspec.MsgspecError as error:
            raise RoomFault(FailureKind.PROTOCOL, f"frame of {len(message)} bytes is not a KVFrame: {error}") from error


def _unexpected(frame: ArrivingFrame, where: str) -> RoomFault:
    if isinstance(frame, SendFailed):
        return RoomFault(FailureKind.PEER_FAILED, frame.message)
    return RoomFault(FailureKind.PROTOCOL, f"unexpected {type(frame).__name__} {where}")
