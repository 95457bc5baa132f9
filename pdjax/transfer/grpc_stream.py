"""KV over gRPC, staged through host memory: works between any two machines.

One server stream a room is announcement, control and data channel in one. Decode calls `FetchKV(Announce)` on prefill and reads:

    Accepted                       the room has a sender; repeated as a sign of life while there is nothing to send
    ChunkHead, ChunkData ...       one chunk, in frames of KV_FRAME_BYTES
    ChunkLast                      the metadata row; the stream ends
    SendFailed                     at any place: prefill failed the room; the stream ends
    Refused                        instead of Accepted: these two workers can never work together

A first `SendFailed` turns away one room only (replaced worker, announced twice, no place to wait); another try may succeed.

Who owes what, and for how long:
* Receiver: from Accepted on it hears something every `stall_timeout_s`, or fails. The sender gives a sign of life at least four times in that
  time, however long prefill computes. While the receiver holds the link back because its engine has not taken chunks, no clock runs.
* Sender: a frame that is not accepted may mean a receiver that holds back on purpose, which is no fault. One that is stopped or unreachable
  is told apart by gRPC's own pings (`SERVER_OPTIONS`), which close the connection. Past both, a frame that waits for `bootstrap_timeout_s`
  fails the room. What gRPC has of that frame is let go when the stream ends.
* The end of the stream is all the confirmation there is: the sender's SUCCESS means that the last frame has left under the receiver's flow control. A
  receiver that finds the last chunk damaged fails on its own side only, and says so to the router.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypeVar

import grpc
import grpc.aio

from pdjax import rpc
from pdjax.errors import TransferError
from pdjax.protocol import Accepted, Announce, ChunkLast, KVFrame, Layout, Refused, SendFailed
from pdjax.transfer.base import KVSender, KVSource, TransferLimits, Wake
from pdjax.transfer.frames import HostChunk, PageForm, data_frames, to_host
from pdjax.transfer.rooms import Clock, Counters, FailureKind
from pdjax.transfer.sender import OutboundChunk, Outlet, RoomSender, SenderTable

log = logging.getLogger(__name__)

SERVER_OPTIONS = [
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.max_pings_without_data", 0),
]
"""For the server that `FetchKV` is mounted in: a receiver that answers no ping for 10 s loses its connection."""

_COPY_THREADS = 2  # one waits for the device while the other takes a checksum
_MAX_SIGN_OF_LIFE_S = 1.0
_T = TypeVar("_T")


class _Last(NamedTuple):
    metadata: bytes


class _Failure(NamedTuple):
    message: str


_Item = RoomSender | OutboundChunk | _Last | _Failure
_Write = Callable[[KVFrame], Awaitable[None]]


class _LoopOutlet(Outlet):
    """Carries one room's items from the engine loop into the server's event loop.

    Bounded by the sender's bound on chunks in flight, plus the sender itself, one last and one failure.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._items: collections.deque[_Item] = collections.deque()
        self._arrived = asyncio.Event()
        self._is_closed = False

    def accepted(self, sender: RoomSender) -> None:
        self._put(sender)

    def chunk(self, chunk: OutboundChunk) -> bool:
        return self._put(chunk)

    def last(self, metadata: bytes) -> None:
        self._put(_Last(metadata))

    def failed(self, message: str) -> None:
        self._put(_Failure(message))

    async def get(self) -> _Item:
        """The next item. Only in the server's loop."""
        while True:
            self._arrived.clear()
            with self._lock:
                if self._items:
                    return self._items.popleft()
            await self._arrived.wait()

    def close(self) -> int:
        """Take no more; gives the number of chunks that were dropped."""
        with self._lock:
            self._is_closed = True
            dropped = sum(isinstance(item, OutboundChunk) for item in self._items)
            self._items.clear()
        return dropped

    def _put(self, item: _Item) -> bool:
        with self._lock:
            if self._is_closed:
                return False
            self._items.append(item)
            self._loop.call_soon_threadsafe(self._arrived.set)
            return True


class GrpcSource(KVSource):
    """Prefill's end. `serve_fetch` runs in the event loop of the worker's gRPC server; the engine loop does everything else.

    Close it while that event loop still runs.
    """

    def __init__(
        self,
        layout: Layout,
        instance_id: str,
        wake: Wake,
        limits: TransferLimits = TransferLimits(),
        clock: Clock = time.monotonic,
    ) -> None:
        self._layout = layout
        self._page = PageForm.of(layout)
        self._instance_id = instance_id
        self._limits = limits
        self._table = SenderTable(layout.page_size, limits, clock, wake)
        self._copy_pool = concurrent.futures.ThreadPoolExecutor(_COPY_THREADS, thread_name_prefix="kv-send-copy")
        self._sign_of_life_s = min(_MAX_SIGN_OF_LIFE_S, limits.stall_timeout_s / 4)

    @property
    def counters(self) -> Counters:
        return self._table.counters

    def create_sender(self, room: int) -> KVSender:
        return self._table.create(room)

    def open_rooms(self) -> int:
        return self._table.open_rooms()

    def close(self) -> None:
        self._table.close("the prefill worker is shutting down")
        self._copy_pool.shutdown(wait=True)

    async def serve_fetch(self, announce: Announce, context: grpc.aio.ServicerContext) -> None:
        """Serve one room; the handler of FETCH_KV, in the style that writes to `context`. Cancelled when the receiver goes away."""
        refusal = self._refusal(announce)
        if refusal is not None:
            self.counters.failed(FailureKind.REFUSED)
            await context.write(Refused(refusal))
            return
        outlet = _LoopOutlet(asyncio.get_running_loop())
        try:
            self._admit(announce, outlet)
        except TransferError as error:
            self.counters.failed(FailureKind.REJECTED)
            await context.write(SendFailed(str(error)))
            return
        await self._serve_admitted(announce.room, outlet, context.write)

    def _refusal(self, announce: Announce) -> str | None:
        mismatch = self._layout.mismatch(announce.layout)
        if mismatch is not None:
            return f"layouts differ: {mismatch} (here: prefill {self._instance_id}, there: decode {announce.receiver.address})"
        prefix, page_size = announce.decode_prefix_tokens, self._layout.page_size
        if prefix < 0 or prefix % page_size:
            return f"decode_prefix_tokens {prefix} is not a multiple of the page size {page_size}"
        return None

    def _admit(self, announce: Announce, outlet: Outlet) -> None:
        if announce.sender_instance_id != self._instance_id:
            raise TransferError(f"worker was replaced: {announce.sender_instance_id!r} was announced to, this is {self._instance_id!r}")
        self._table.announce(announce.room, announce.decode_prefix_tokens, outlet)

    async def _serve_admitted(self, room: int, outlet: _LoopOutlet, write: _Write) -> None:
        sender: RoomSender | None = None
        try:
            sender = await self._await_sender(room, outlet, write)
            if sender is not None:
                await _RoomStream(self, sender, outlet, write).run()
        except (asyncio.CancelledError, grpc.aio.BaseError):
            self._table.withdraw(room, FailureKind.PEER_GONE, f"room {room}: the receiver went away")
            raise
        except Exception as error:
            log.exception("sending room %d failed", room)
            self._table.withdraw(room, FailureKind.INTERNAL, f"room {room}: {error}")
            await write(SendFailed(f"room {room}: {error}"))
        finally:
            dropped = outlet.close()
            for _ in range(dropped if sender is not None else 0):
                sender.chunk_left()

    async def _await_sender(self, room: int, outlet: _LoopOutlet, write: _Write) -> RoomSender | None:
        """The room's sender; None where there is none in time or it has failed already, and the receiver was told."""
        try:
            async with asyncio.timeout(self._limits.bootstrap_timeout_s):
                item = await outlet.get()
        except TimeoutError:
            message = f"prefill was not asked to compute room {room} within {self._limits.bootstrap_timeout_s} s"
            self.counters.failed(FailureKind.BOOTSTRAP)
            self._table.withdraw(room, FailureKind.BOOTSTRAP, message)
            item = _Failure(message)
        if isinstance(item, RoomSender):
            return item
        assert isinstance(item, _Failure), f"room {room}: {item} before its sender"
        await write(SendFailed(item.message))
        return None
