"""Chunks as bytes over a TCP connection beside the control stream, staged through host memory: works between any two machines.

Bytes go from the gathered array's own host buffer into the socket, and out of it into the buffer that becomes the received array: each side
copies once, in the kernel. The same bytes as messages of the gRPC stream cost three times the processor time.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections.abc import Callable
from typing import NamedTuple

import grpc
import jax
import numpy as np

from pdjax.protocol import Announce, ChunkHead, KVFrame, Layout
from pdjax.transfer.base import Emulation, ReceivedChunk
from pdjax.transfer.emulation import Link, make_link
from pdjax.transfer.frames import ChunkBuffer, HostChunk, PageForm, to_host
from pdjax.transfer.grpc_receive import Lander, RoomFrames, reason, unexpected
from pdjax.transfer.grpc_send import Carrier, Carriers, Preparer, RoomWriter
from pdjax.transfer.rooms import FailureKind, RoomFault
from pdjax.transfer.sender import OutboundChunk, RoomSender
from pdjax.transfer.tcp_link import DataListener

TRANSPORT = "tcp"
_PART_BYTES = 1 << 20
"""What is handed to the socket at a time."""


class ByteCarriers(Carriers):
    """Sends chunks as `ChunkHead`, followed by their bytes on the room's data connection."""

    transport = TRANSPORT

    def __init__(self, layout: Layout, listener: DataListener, emulation: Emulation = Emulation()) -> None:
        """Owns the listener."""
        page = PageForm.of(layout)
        self._listener = listener
        self._link = make_link(emulation)
        self._preparer = Preparer(lambda chunk: to_host(chunk, page, listener.address))

    def open(self, announce: Announce, writer: RoomWriter) -> Carrier:
        return _ByteCarrier(announce.room, self._listener, self._preparer, self._link, writer)

    def methods(self) -> dict[str, grpc.RpcMethodHandler]:
        return {}

    def close(self) -> None:
        self._listener.close()
        self._link.close()
        self._preparer.close()


class _ByteCarrier(Carrier):
    """A chunk has arrived when the last of its bytes has left: the end of the stream is all the confirmation there is."""

    def __init__(self, room: int, listener: DataListener, preparer: Preparer[HostChunk], link: Link, writer: RoomWriter) -> None:
        self._room = room
        self._listener = listener
        self._preparer = preparer
        self._link = link
        self._writer = writer
        self._connection = listener.expect(room)

    async def carry(self, sender: RoomSender, chunk: OutboundChunk) -> None:
        preparation = self._preparer.start(sender, chunk)
        moved_bytes = 0
        try:
            host_chunk = await self._writer.alive_until(asyncio.wrap_future(preparation.result))
            if host_chunk is not None and await self._send(sender, host_chunk):
                moved_bytes = host_chunk.payload.nbytes
                sender.counters.sent(moved_bytes)
        finally:
            preparation.end(moved_bytes)

    async def settle(self, sender: RoomSender) -> None:
        pass

    def close(self) -> None:
        self._listener.forget(self._room)

    async def _send(self, sender: RoomSender, host_chunk: HostChunk) -> bool:
        """False where the room fails before the last byte. Raises OSError where the connection breaks: the receiver has gone."""
        await self._writer.frame(sender, host_chunk.head)
        sending = asyncio.ensure_future(self._pour(sender, host_chunk.payload))
        try:
            await self._writer.silent_until(sending)
        finally:
            await asyncio.wait({sending})  # the socket may be closed only when nothing waits for it
        return not sending.cancelled() and sending.result()

    async def _pour(self, sender: RoomSender, payload: memoryview) -> bool:
        """The receiver takes the bytes in time, or the room fails."""
        loop = asyncio.get_running_loop()
        sender.link_owes(self._writer.hold_limit_s)
        # Not cancelled with this task: the listener still has to close it.
        connection = await asyncio.shield(self._connection)
        sender.link_paid()
        for start in range(0, payload.nbytes, _PART_BYTES):
            part = payload[start : start + _PART_BYTES]
            await self._link.carry(part.nbytes)
            if sender.is_failed():
                return False
            sender.link_owes(self._writer.hold_limit_s)
            await loop.sock_sendall(connection, part)
            sender.link_paid()
        return True


class Landing(NamedTuple):
    """What the receiver's engine wants a chunk to become.

    `to_device`: host array `[n, layers, page_size, 2 * kv_heads, head_dim]` -> the same on the device; called in the transport's
    thread, may keep the host array. `page_buckets`: the values of n, rising; a chunk is padded with zeros to the next one, and none is
    larger than the last.
    """

    to_device: Callable[[np.ndarray], jax.Array]
    page_buckets: tuple[int, ...]


class ByteLander(Lander):
    """Reads chunks from the data connection, verifies them and brings them to the device, the latter two in a thread of its own, in order."""

    transport = TRANSPORT

    def __init__(self, layout: Layout, landing: Landing) -> None:
        self._page = PageForm.of(layout)
        self._landing = landing
        self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="kv-receive-copy")

    async def land(self, opening: KVFrame, frames: RoomFrames) -> ReceivedChunk:
        if not isinstance(opening, ChunkHead):
            raise unexpected(opening, "from a worker that sends bytes")
        buffer = ChunkBuffer(opening, self._page, self._landing.page_buckets)
        try:
            while not buffer.is_full:
                buffer.filled(await frames.read_bytes(opening.address, buffer.rest))
        except OSError as error:
            fault = RoomFault(FailureKind.PEER_GONE, f"the data connection to {opening.address} broke: {error}")
            raise await reason(frames, fault) from error
        return await asyncio.wrap_future(self._pool.submit(self._to_device, buffer, frames))

    def close(self) -> None:
        """Waits for the copy that runs."""
        self._pool.shutdown(wait=True)

    def _to_device(self, buffer: ChunkBuffer, frames: RoomFrames) -> ReceivedChunk:
        started_s = time.monotonic()
        buffer.verify()
        try:
            # Wait here: an array whose copy failed reports ready too, and only waiting for it raises.
            kv = jax.block_until_ready(self._landing.to_device(buffer.rows_host))
        except Exception as error:  # whatever the device reports ends this room only
            raise RoomFault(FailureKind.DEVICE, f"copying a chunk to the device failed: {error}") from error
        assert kv.shape == buffer.rows_host.shape, f"to_device made {kv.shape} of {buffer.rows_host.shape}"
        frames.receiver.counters.copied(time.monotonic() - started_s)
        return ReceivedChunk(buffer.head.first_page, buffer.head.num_pages, kv)
