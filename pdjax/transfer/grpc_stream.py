"""KV between processes, one gRPC server stream a room. How chunks move is one of two:

* as bytes over a TCP connection of the room, staged through host memory (`tcp_bytes`): works between any two machines;
* device to device, offered in the stream and pulled (`jax_send`, `jax_receive`).

The stream is announcement and control channel in one. Decode calls `FetchKV(Announce)` on prefill and reads:

    Accepted                       the room has a sender; repeated as a sign of life while there is nothing to send
    ChunkHead                      one chunk, whose bytes come on the data connection; or
    ChunkOffer                     one chunk to be pulled; decode calls `PulledKV(ChunkPulled)` when it has it
    ChunkLast                      the metadata row; the stream ends
    SendFailed                     at any place: prefill failed the room; the stream ends
    Refused                        instead of Accepted: these two workers can never work together

A first `SendFailed` turns away one room only (replaced worker, announced twice, no place to wait); another try may succeed.

Who owes what, and for how long:
* Receiver: from Accepted on it hears something every `stall_timeout_s`, or fails. The sender gives a sign of life at least four times
  in that time, however long prefill computes. While the receiver holds the link back because its engine has not taken chunks, no
  clock runs; a connection that breaks meanwhile is noticed with the next `take`.
* Sender: a frame or bytes that are not accepted, or an offer that is not taken, may mean a receiver that holds back on purpose, which is no
  fault. One that is stopped or unreachable is told apart by gRPC's own pings (`rpc.SERVER_OPTIONS`), which close the connection. Past
  both, what waits for `hold_timeout_s` fails the room. What gRPC has of a frame is let go when the stream ends.
* With bytes, the end of the stream is all the confirmation there is: the sender's SUCCESS means that the last byte has left under the
  receiver's flow control. A receiver that finds the last chunk damaged fails on its own side only, and says so to the router. With
  offers, SUCCESS means that every chunk was verified.
"""

from __future__ import annotations

import asyncio
import logging
import time

import grpc
import grpc.aio
import msgspec

from pdjax import rpc
from pdjax.errors import TransferError
from pdjax.protocol import Announce, Layout, Peer, Refused, SendFailed
from pdjax.transfer.base import KVReceiver, KVSender, KVSink, KVSource, TransferLimits, Wake
from pdjax.transfer.emulation import make_delay
from pdjax.transfer.grpc_channels import ChannelCache
from pdjax.transfer.grpc_receive import Lander, RoomFetch
from pdjax.transfer.grpc_send import Carriers, Failure, LoopOutlet, RoomStream, RoomWriter, Write
from pdjax.transfer.receiver import RoomReceiver, announcement
from pdjax.transfer.rooms import Clock, Counters, FailureKind
from pdjax.transfer.sender import RoomSender, SenderTable

log = logging.getLogger(__name__)

_CLOSE_S = 5.0
_CANCEL_S = 1.0


class GrpcSource(KVSource):
    """Prefill's end. `serve_fetch` runs in the event loop of the worker's gRPC server; the engine loop does everything else.

    That event loop must run until `close` has returned.
    """

    def __init__(
        self,
        layout: Layout,
        instance_id: str,
        carriers: Carriers,
        wake: Wake,
        limits: TransferLimits = TransferLimits(),
        clock: Clock = time.monotonic,
    ) -> None:
        self._instance_id = instance_id
        self._limits = limits
        self._table = SenderTable(layout, instance_id, limits, clock, wake)
        self._carriers = carriers

    @property
    def counters(self) -> Counters:
        return self._table.counters

    def create_sender(self, room: int) -> KVSender:
        return self._table.create(room)

    def take_changed(self) -> list[int]:
        return self._table.take_changed()

    def open_rooms(self) -> int:
        return self._table.open_rooms()

    def close(self) -> None:
        """Every stream that is open ends with `SendFailed`. Waits for copies that run, not for receivers."""
        self._table.close("the prefill worker is shutting down")
        self._carriers.close()

    def handler(self) -> grpc.GenericRpcHandler:
        """For `server.add_generic_rpc_handlers`: serves `rpc.FETCH_KV` and what the carriers need."""
        service, name = rpc.FETCH_KV.lstrip("/").split("/")
        method = grpc.unary_stream_rpc_method_handler(
            self.serve_fetch, request_deserializer=rpc.decoder(Announce), response_serializer=rpc.encode
        )
        return grpc.method_handlers_generic_handler(service, {name: method, **self._carriers.methods()})

    async def serve_fetch(self, announce: Announce, context: grpc.aio.ServicerContext) -> None:
        """Serve one room, writing to `context`. gRPC cancels it when the receiver goes away."""
        outlet = LoopOutlet(asyncio.get_running_loop())
        try:
            self._check_transport(announce)
            self._table.announce(announce, outlet)
        except TransferError as error:
            await context.write(SendFailed(str(error)) if error.retriable else Refused(str(error)))
            return
        try:
            await self._serve_admitted(announce, outlet, context.write)
        finally:
            outlet.close()

    def _check_transport(self, announce: Announce) -> None:
        if announce.transport != self._carriers.transport:
            self.counters.failed(FailureKind.REFUSED)
            both = f"transfer.kind {self._carriers.transport!r} here, {announce.transport!r} there"
            raise TransferError(
                f"prefill worker {self._instance_id!r} (here) and decode worker {announce.receiver.address} (there) do not fit: {both}",
                retriable=False,
            )

    async def _serve_admitted(self, announce: Announce, outlet: LoopOutlet, write: Write) -> None:
        room = announce.room
        try:
            sender = await self._await_sender(room, outlet, write)
            if sender is not None:
                writer = RoomWriter(outlet, write, self._instance_id, self._limits)
                await RoomStream(writer, self._carriers.open(announce, writer)).run(sender)
        except asyncio.CancelledError:
            self._table.withdraw(room, outlet, FailureKind.PEER_GONE, f"room {room}: the receiver went away")
            raise
        except (grpc.aio.BaseError, OSError) as error:  # something could not be written; gRPC cancels this call as soon as it knows why
            self._table.withdraw(room, outlet, FailureKind.PEER_GONE, f"room {room}: the receiver went away: {error}")
            await asyncio.sleep(_CANCEL_S)
        except Exception as error:  # one room's array is bad, or this module is: that room ends, the server goes on
            log.exception("sending room %d failed", room)
            self._table.withdraw(room, outlet, FailureKind.DEVICE, f"room {room}: {error}")
            await write(SendFailed(f"room {room}: {error}"))

    async def _await_sender(self, room: int, outlet: LoopOutlet, write: Write) -> RoomSender | None:
        """The room's sender; None where there is none in time or it has failed already, and the receiver was told."""
        try:
            async with asyncio.timeout(self._limits.bootstrap_timeout_s):
                item = await outlet.get()
        except TimeoutError:
            item = Failure(f"prefill was not asked to compute room {room} within {self._limits.bootstrap_timeout_s} s")
            self.counters.failed(FailureKind.BOOTSTRAP)
            self._table.withdraw(room, outlet, FailureKind.BOOTSTRAP, item.message)
        if isinstance(item, RoomSender):
            return item
        assert isinstance(item, Failure), f"room {room}: {item} before its sender"
        await write(SendFailed(item.message))
        return None


class GrpcSink(KVSink):
    """Decode's end. Frames are read in `loop`, which another thread runs until `close` has returned; the engine loop calls the methods.

    One chunk of a room being assembled counts as waiting in `take`: at most `max_chunks_in_flight` of both together.
    """

    def __init__(
        self,
        layout: Layout,
        peer: Peer,
        lander: Lander,
        loop: asyncio.AbstractEventLoop,
        wake: Wake,
        limits: TransferLimits = TransferLimits(),
        clock: Clock = time.monotonic,
    ) -> None:
        self._layout = layout
        self._peer = peer
        self._limits = limits
        self._clock = clock
        self._wake = wake
        self._loop = loop
        self.counters = Counters()
        self._channels = ChannelCache()
        self._lander = lander
        self._delay = make_delay(limits.emulation)
        self._fetches: dict[int, RoomFetch] = {}
        self._is_closed = False

    def open(self, room: int, source: Peer, decode_prefix_tokens: int) -> KVReceiver:
        """Raises ValueError where the room is open here, the prefix is no multiple of the page size, or the sink is closed."""
        if self._is_closed:
            raise ValueError(f"room {room}: the transport is closed")
        announce = announcement(room, source, decode_prefix_tokens, self._layout, self._peer)
        announce = msgspec.structs.replace(announce, transport=self._lander.transport)
        self._forget_ended()
        if room in self._fetches:
            raise ValueError(f"room {room} is taken: it has a receiver already")
        receiver = RoomReceiver(room, self._limits, self._clock, self._wake, self.counters)
        max_chunks = self._limits.max_chunks_in_flight
        fetch = RoomFetch(receiver, announce, source, self._channels, self._lander, max_chunks, self._delay)
        receiver.attach(fetch)
        self._fetches[room] = fetch
        fetch.start(self._loop)
        return receiver

    def open_rooms(self) -> int:
        # Asked for by heartbeats, in another thread than the engine loop, which alone changes the table.
        return sum(not fetch.holds_nothing() for fetch in list(self._fetches.values()))

    def close(self) -> None:
        """Every stream that is open is cancelled.

        Not to be called from the event loop, which it waits for; TimeoutError where that has stopped.
        """
        self._is_closed = True
        for fetch in self._fetches.values():
            fetch.receiver.end(FailureKind.CLOSED, "the decode worker is shutting down")
            fetch.receiver.abort()
        deadline_s = time.monotonic() + _CLOSE_S
        for fetch in self._fetches.values():
            fetch.wait_over(max(0.0, deadline_s - time.monotonic()))
        self._lander.close()
        asyncio.run_coroutine_threadsafe(self._channels.close(), self._loop).result(_CLOSE_S)
        self._forget_ended()

    def _forget_ended(self) -> None:
        self._fetches = {room: fetch for room, fetch in self._fetches.items() if not fetch.holds_nothing()}
