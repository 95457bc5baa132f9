"""The receiving half of a control stream: from the frames of one server stream to verified arrays on the device.

How a chunk that a frame announces gets here is the business of a `Lander`: over the room's data connection (`tcp_bytes`), or from device to
device (`jax_receive`).
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Awaitable, Callable

import grpc
import grpc.aio
import msgspec

from pdjax import rpc
from pdjax.protocol import Accepted, Announce, ChunkHead, ChunkLast, ChunkOffer, ChunkPulled, KVFrame, Peer, Refused, SendFailed
from pdjax.transfer.base import ReceivedChunk
from pdjax.transfer.frames import PageForm
from pdjax.transfer.grpc_channels import ChannelCache
from pdjax.transfer.receiver import Intake, RoomReceiver
from pdjax.transfer.rooms import FailureKind, RoomFault
from pdjax.transfer.tcp_link import connect

log = logging.getLogger(__name__)

_TRAILING_S = 5.0  # for the end of a stream whose last frame has been read
_REASON_S = 1.0  # for the sender's word on why a chunk did not come
_decode_frame = rpc.decoder(KVFrame)


class RoomFrames:
    """Reads the frames of one room, and the bytes of its data connection if it has one, with the receiver's stall clock running while it
    waits."""

    def __init__(self, receiver: RoomReceiver, source: Peer, channel: grpc.aio.Channel, call: grpc.aio.UnaryStreamCall) -> None:
        self.receiver = receiver
        self.source = source
        self._channel = channel
        self._call = call
        self._data: socket.socket | None = None

    async def next(self) -> KVFrame:
        """Raises RoomFault where the stream ends or holds something else than a frame, AioRpcError where it breaks."""
        self.receiver.awaits_sender()
        message = await self._call.read()
        self.receiver.heard_sender()
        if message is grpc.aio.EOF:
            raise RoomFault(FailureKind.PROTOCOL, "the stream ended before its last frame")
        try:
            return _decode_frame(message)
        except msgspec.MsgspecError as error:
            raise RoomFault(FailureKind.PROTOCOL, f"frame of {len(message)} bytes is not a KVFrame: {error}") from error

    async def read_bytes(self, address: str, target: memoryview) -> int:
        """The number of bytes, at least 1, that were read into `target` from the data connection, which is made if there is none.

        Raises OSError where there can be none, or where it ends.
        """
        self.receiver.awaits_sender()
        if self._data is None:
            self._data = await connect(address, self.receiver.room)
        num_bytes = await asyncio.get_running_loop().sock_recv_into(self._data, target)
        self.receiver.heard_sender()
        if not num_bytes:
            raise ConnectionResetError("the sender has closed it")
        return num_bytes

    def close(self) -> None:
        """The room has ended."""
        self._call.cancel()
        if self._data is not None:
            self._data.close()

    async def trailing(self) -> None:
        """Let the stream end by itself: a cancellation could reach the sender before it knows that the last frame has left."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_TRAILING_S):
                await self._call.read()

    async def acknowledge(self, offer: ChunkOffer) -> None:
        """Tell the sender that an offered chunk is here. Raises AioRpcError where it cannot be told."""
        self.receiver.awaits_sender()
        pulled = ChunkPulled(self.receiver.room, offer.uuid)
        await self._channel.unary_unary(rpc.PULLED_KV, request_serializer=rpc.encode)(pulled)
        self.receiver.heard_sender()


class Lander(abc.ABC):
    """Brings chunks to the device. `transport`: what both sides must agree on."""

    transport: str

    @abc.abstractmethod
    async def land(self, opening: ChunkHead | ChunkOffer, frames: RoomFrames) -> ReceivedChunk:
        """The verified chunk that `opening` announces. Raises RoomFault where it is damaged, does not come, or the device fails."""

    @abc.abstractmethod
    def close(self) -> None:
        """Stop every thread. Waits for those that run."""


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
        before: Callable[[], Awaitable[None]],
    ) -> None:
        """`before` is awaited before the room is announced."""
        self.receiver = receiver
        self._before = before
        self._announce = announce
        self._source = source
        self._channels = channels
        self._lander = lander
        self._places = asyncio.Semaphore(max_chunks)
        self._next_page = self._first_page
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._over = threading.Event()

    @property
    def _first_page(self) -> int:
        return self._announce.decode_prefix_tokens // self._announce.layout.page_size

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
            await self._before()
            async with self._channels.lease(self._source) as channel:
                call = channel.unary_stream(rpc.FETCH_KV, request_serializer=rpc.encode)(self._announce)
                frames = RoomFrames(self.receiver, self._source, channel, call)
                try:
                    await self._read(frames)
                finally:
                    frames.close()
        except RoomFault as fault:
            self.receiver.end(fault.kind, f"{where}: {fault}")
        except grpc.aio.AioRpcError as error:
            self.receiver.end(FailureKind.PEER_GONE, f"{where}: {error.code().name}: {error.details()}")
        except Exception as error:  # a fault of this module ends the room, not the loop
            log.exception("%s failed", where)
            self.receiver.end(FailureKind.INTERNAL, f"{where}: {error}")

    async def _read(self, frames: RoomFrames) -> None:
        self._check_answer(await frames.next())
        self.receiver.accepted()
        while True:
            frame = await frames.next()
            if isinstance(frame, ChunkHead | ChunkOffer):
                await self._read_chunk(frames, frame)
            elif isinstance(frame, ChunkLast):
                self._finish(frame)
                await frames.trailing()
                return
            elif isinstance(frame, Accepted):
                self._check_answer(frame)
            else:
                raise unexpected(frame, "between chunks")

    def _check_answer(self, frame: KVFrame) -> None:
        if isinstance(frame, Refused):
            raise RoomFault(FailureKind.REFUSED, f"refused: {frame.message}")
        if not isinstance(frame, Accepted):
            raise unexpected(frame, "as the answer to the announcement")
        if frame.instance_id != self._source.instance_id:
            raise RoomFault(
                FailureKind.REJECTED, f"worker was replaced: {self._source.instance_id!r} was asked, {frame.instance_id!r} answered"
            )

    async def _read_chunk(self, frames: RoomFrames, opening: ChunkHead | ChunkOffer) -> None:
        if opening.first_page != self._next_page:
            raise RoomFault(FailureKind.PROTOCOL, f"chunk starts at page {opening.first_page}, page {self._next_page} was next")
        await self._places.acquire()  # holds the link back, and no clock runs, until the engine has taken a chunk
        self.receiver.meter.began()
        num_bytes = 0
        try:
            chunk = await self._lander.land(opening, frames)
            num_bytes = opening.num_pages * PageForm.of(self._announce.layout).num_bytes
        finally:
            self.receiver.meter.moved(num_bytes)
        self._next_page += opening.num_pages
        self.receiver.deliver(chunk)
        self.receiver.counters.received(num_bytes)
        if isinstance(opening, ChunkOffer):
            await frames.acknowledge(opening)

    def _finish(self, last: ChunkLast) -> None:
        num_pages = self._next_page - self._first_page
        if last.num_pages != num_pages:
            raise RoomFault(FailureKind.PROTOCOL, f"{num_pages} pages have come, {last.num_pages} were sent")
        self.receiver.complete(last.metadata)


def unexpected(frame: KVFrame, where: str) -> RoomFault:
    """The fault of a frame that does not belong where it came."""
    if isinstance(frame, SendFailed):
        return RoomFault(FailureKind.PEER_FAILED, frame.message)
    return RoomFault(FailureKind.PROTOCOL, f"unexpected {type(frame).__name__} {where}")


async def reason(frames: RoomFrames, fault: RoomFault) -> Exception:
    """What ended the room. Where a chunk does not come, the sender knows why: it says so in the stream, or its connection breaks."""
    try:
        async with asyncio.timeout(_REASON_S):
            while not isinstance(frame := await frames.next(), SendFailed):
                pass
    except TimeoutError:
        return fault
    except (RoomFault, grpc.aio.AioRpcError) as reason:
        return reason
    return unexpected(frame, "after a chunk that did not come")
