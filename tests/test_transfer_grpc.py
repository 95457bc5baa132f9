"""The gRPC transport against peers that misbehave: damaged and disordered streams, replaced workers, broken connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any, NamedTuple

import grpc
import grpc.aio
import jax
import msgspec
import numpy as np
import pytest
import xxhash

from pdjax import rpc
from pdjax.protocol import (
    Accepted,
    Announce,
    ChunkHead,
    ChunkLast,
    KVFrame,
    KVPoll,
    Layout,
    Peer,
    Refused,
    SendFailed,
)
from pdjax.transfer.base import TransferLimits
from pdjax.transfer.frames import PageForm
from pdjax.transfer.grpc_stream import GrpcSink, GrpcSource
from pdjax.transfer.tcp_bytes import ByteCarriers, ByteLander, Landing
from pdjax.transfer.tcp_link import DataListener
from tests.test_transfer_contract import LAYOUT, META, WAIT_S, GrpcRig, rows_of

PAGE_BYTES = PageForm.of(LAYOUT).num_bytes
ROWS = rows_of(2, 0).tobytes()


@pytest.fixture
def rig() -> Iterator[GrpcRig]:
    made = GrpcRig(TransferLimits(bootstrap_timeout_s=30.0, stall_timeout_s=10.0))
    yield made
    made.close()


class Host:
    """Servers in the rig's event loop."""

    def __init__(self, rig: GrpcRig) -> None:
        self._rig = rig
        self._servers: list[grpc.aio.Server] = []

    def start(self, handler: grpc.GenericRpcHandler, port: int = 0) -> int:
        return self._run(self._start(handler, port))

    def stop(self) -> None:
        while self._servers:
            self._run(self._servers.pop().stop(None))

    async def _start(self, handler: grpc.GenericRpcHandler, port: int) -> int:
        server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
        server.add_generic_rpc_handlers([handler])
        bound = server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        self._servers.append(server)
        return bound

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._rig.loop).result(WAIT_S)


@pytest.fixture
def host(rig: GrpcRig) -> Iterator[Host]:
    made = Host(rig)
    yield made
    made.stop()


class Data(NamedTuple):
    """Bytes on the data connection."""

    payload: bytes


Script = list[KVFrame | bytes | Data]


def scripted(messages: Script, listener: DataListener, then_hang: bool = False) -> grpc.GenericRpcHandler:
    """A prefill worker that answers every announcement with `messages`, well-formed or not. Heads without an address get the listener's."""

    async def serve(announce: Announce, context: grpc.aio.ServicerContext) -> None:
        connection = listener.expect(announce.room)
        try:
            for message in messages:
                if isinstance(message, Data):
                    await asyncio.get_running_loop().sock_sendall(await asyncio.shield(connection), message.payload)
                    continue
                if isinstance(message, ChunkHead) and not message.address:
                    message = msgspec.structs.replace(message, address=listener.address)
                await context.write(message if isinstance(message, bytes) else rpc.encode(message))
            if then_hang:
                await asyncio.Event().wait()
        finally:
            listener.forget(announce.room)

    method = grpc.unary_stream_rpc_method_handler(serve, request_deserializer=rpc.decoder(Announce))
    return grpc.method_handlers_generic_handler(rpc.WORKER_SERVICE, {"FetchKV": method})


@pytest.fixture
def listener(rig: GrpcRig) -> Iterator[DataListener]:
    made = DataListener("127.0.0.1")
    yield made
    made.close()


def head(first_page: int = 0, num_pages: int = 2, num_bytes: int = 2 * PAGE_BYTES, address: str = "") -> ChunkHead:
    return ChunkHead(first_page, num_pages, num_bytes, xxhash.xxh3_64_intdigest(ROWS), address)


def flipped(payload: bytes) -> bytes:
    return payload[:100] + bytes([payload[100] ^ 1]) + payload[101:]


OK = Accepted("p-1")
DATA = Data(ROWS)


def test_the_script_itself_is_right(rig: GrpcRig, host: Host, listener: DataListener) -> None:
    """Without this, every case below could fail for a reason of its own making."""
    port = host.start(scripted([OK, OK, head(), DATA, OK, head(first_page=2), DATA, ChunkLast(4, META)], listener))
    receiver = rig.sink.open(1, Peer(f"127.0.0.1:{port}", "p-1"), 0)
    chunks = rig.drain(receiver)
    assert [(chunk.first_page, chunk.num_pages) for chunk in chunks] == [(0, 2), (2, 2)]
    assert receiver.poll() is KVPoll.SUCCESS, receiver.failure()
    assert np.asarray(chunks[0].kv)[:2].tobytes() == ROWS


@pytest.mark.parametrize(
    ("messages", "kind", "text"),
    [
        ([OK, head(), Data(flipped(ROWS)), ChunkLast(2, META)], "damaged", "pages 0 to 1 arrived damaged"),
        ([OK, head(), Data(ROWS + b"x" + ROWS), head(first_page=2)], "damaged", "pages 2 to 3 arrived damaged"),
        ([OK, head(first_page=1), DATA], "protocol", "chunk starts at page 1, page 0 was next"),
        ([OK, head(), DATA, head(), DATA], "protocol", "chunk starts at page 0, page 2 was next"),
        ([OK, head(num_pages=3), DATA], "protocol", f"chunk of 3 pages announces {2 * PAGE_BYTES} bytes"),
        ([OK, head(num_pages=17, num_bytes=17 * PAGE_BYTES)], "protocol", "chunk of 17 pages, 1 to 16 are taken"),
        ([OK, head(), DATA, ChunkLast(3, META)], "protocol", "2 pages have come, 3 were sent"),
        ([OK, ChunkLast(1, META)], "protocol", "0 pages have come, 1 were sent"),
        ([OK, head(), Data(ROWS[:50])], "protocol", "the stream ended before its last frame"),
        ([OK, head()], "protocol", "the stream ended before its last frame"),
        ([OK], "protocol", "the stream ended before its last frame"),
        ([], "protocol", "the stream ended before its last frame"),
        ([head()], "protocol", "unexpected ChunkHead as the answer"),
        ([OK, Refused("late")], "protocol", "unexpected Refused between chunks"),
        ([b"\xc1 not msgpack"], "protocol", "frame of 13 bytes is not a KVFrame"),
        ([OK, msgspec.msgpack.encode({"type": "head", "first_page": "one"})], "protocol", "is not a KVFrame"),
        ([Accepted("p-2")], "rejected", "worker was replaced: 'p-1' was asked, 'p-2' answered"),
        ([OK, Accepted("p-2")], "rejected", "worker was replaced"),
        ([OK, head(), SendFailed("evicted")], "peer_failed", "evicted"),
        ([OK, head(), Data(ROWS[:50]), SendFailed("evicted")], "peer_failed", "evicted"),
        ([SendFailed("no place")], "peer_failed", "no place"),
        ([Refused("page_size 4 here, 8 there")], "refused", "page_size 4 here, 8 there"),
    ],
)
def test_a_stream_that_breaks_the_protocol_fails_its_room_with_a_clear_text_and_is_counted(
    rig: GrpcRig, host: Host, listener: DataListener, messages: Script, kind: str, text: str
) -> None:
    port = host.start(scripted(messages, listener))
    receiver = rig.sink.open(1, Peer(f"127.0.0.1:{port}", "p-1"), 0)
    rig.until(lambda: receiver.poll() is KVPoll.FAILED)
    assert text in str(receiver.failure()) and f"room 1 from prefill worker 127.0.0.1:{port}" in str(receiver.failure())
    assert receiver.take() == []
    assert receiver.is_refused() is (kind == "refused")
    assert rig.counts()[1].failures == {kind: 1}
    rig.assert_nothing_open()


def test_a_method_that_the_other_side_does_not_have_fails_the_room(rig: GrpcRig, host: Host) -> None:
    port = host.start(grpc.method_handlers_generic_handler("other.Service", {}))
    receiver = rig.sink.open(1, Peer(f"127.0.0.1:{port}", "p-1"), 0)
    rig.until(lambda: receiver.poll() is KVPoll.FAILED)
    assert "UNIMPLEMENTED" in str(receiver.failure())


@pytest.mark.parametrize("messages", [[OK], [OK, head()], [OK, head(), Data(ROWS[:50])]])
def test_a_silent_sender_fails_the_room_after_the_stall_timeout(
    rig: GrpcRig, host: Host, listener: DataListener, messages: Script
) -> None:
    port = host.start(scripted(messages, listener, then_hang=True))
    receiver = rig.sink.open(1, Peer(f"127.0.0.1:{port}", "p-1"), 0)
    rig.until(lambda: receiver.poll() is KVPoll.TRANSFERRING)
    rig.clock.now_s += 9.9
    assert receiver.poll() is KVPoll.TRANSFERRING
    rig.until(lambda: _expires(rig, receiver))
    assert "no sign of life from the sender for 10.0 s" in str(receiver.failure())
    rig.assert_nothing_open()


def _expires(rig: GrpcRig, receiver: Any) -> bool:
    """A frame may be read after the first turn of the clock and start it again: turn it until the room has ended."""
    rig.clock.now_s += 10.1
    return receiver.poll() is KVPoll.FAILED


@pytest.mark.parametrize(
    ("address", "text"),
    [("127.0.0.1:1", "the data connection to 127.0.0.1:1 broke"), ("nowhere", "'nowhere' is no host:port"), ("[::1]:", "is no host:port")],
)
def test_a_data_connection_that_cannot_be_made_fails_its_room(
    rig: GrpcRig, host: Host, listener: DataListener, address: str, text: str
) -> None:
    port = host.start(scripted([OK, head(address=address)], listener, then_hang=True))
    receiver = rig.sink.open(1, Peer(f"127.0.0.1:{port}", "p-1"), 0)
    rig.until(lambda: receiver.poll() is KVPoll.FAILED)
    assert text in str(receiver.failure())
    assert rig.counts()[1].failures == {"peer_gone": 1}
    rig.assert_nothing_open()


@pytest.mark.parametrize("greeting", [b"", b"pdjaxkv1" + bytes(8), b"GET / HTTP/1.1\r\n\r\n", b"pdjaxkv1" + (77).to_bytes(8, "big")])
def test_a_stranger_on_the_data_port_is_turned_away_and_disturbs_nobody(
    rig: GrpcRig, caplog: pytest.LogCaptureFixture, greeting: bytes
) -> None:
    sender, receiver = rig.pair()
    with socket.create_connection(("127.0.0.1", int(rig.listener.address.rpartition(":")[2])), timeout=WAIT_S) as stranger:
        stranger.sendall(greeting)
        # Where more than a greeting lies there unread, the connection is reset instead of closed.
        with contextlib.suppress(OSError):
            stranger.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
        rig.send(sender, 0, rows_of(2, 0))
        sender.finish(META)
        assert len(rig.drain(receiver)) == 1
    assert receiver.poll() is KVPoll.SUCCESS, receiver.failure()
    assert "belongs to no room" in caplog.text


def test_a_large_chunk_arrives_whole(rig: GrpcRig) -> None:
    layout = Layout(model_fingerprint="big", page_size=16, kv_dtype="bfloat16", num_layers=30, num_kv_heads=3, head_dim=64)
    page = PageForm.of(layout)
    source = GrpcSource(layout, "p-big", ByteCarriers(layout, DataListener("127.0.0.1")), rig.wake)
    host = Host(rig)
    port = host.start(source.handler())
    sink = GrpcSink(layout, rig.sink_peer, ByteLander(layout, Landing(jax.device_put, (32,))), rig.loop, rig.wake)
    bits = np.random.default_rng(5).integers(0, 256, 32 * page.num_bytes, np.uint8)
    assert bits.nbytes > 5 << 20 and bits.nbytes % (1 << 20), "more than a socket's buffers hold"
    rows = bits.view(page.dtype).reshape(32, *page.shape)
    sender, receiver = source.create_sender(1), sink.open(1, Peer(f"127.0.0.1:{port}", "p-big"), 0)
    rig.until(sender.can_send)
    sender.send(0, 32, jax.device_put(rows))
    sender.finish(META)
    (chunk,) = rig.drain(receiver)
    assert np.asarray(chunk.kv).view(np.uint8).tobytes() == bits.tobytes()
    sink.close()
    source.close()
    host.stop()


def test_an_array_that_cannot_be_copied_to_the_device_fails_its_room_only(rig: GrpcRig) -> None:
    def full(_: np.ndarray) -> jax.Array:
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    sink = GrpcSink(LAYOUT, rig.sink_peer, ByteLander(LAYOUT, Landing(full, (4,))), rig.loop, rig.wake)
    sender, receiver = rig.source.create_sender(1), sink.open(1, rig.source_peer, 0)
    rig.send(sender, 0, rows_of(1, 0))
    rig.until(lambda: receiver.poll() is KVPoll.FAILED and sender.poll() is KVPoll.FAILED)
    assert "RESOURCE_EXHAUSTED" in str(receiver.failure())
    assert sink.counters.snapshot().failures == {"device": 1}
    sink.close()


# -- announcements --


def announce(room: int = 1, decode_prefix_tokens: int = 0) -> Announce:
    return Announce(
        room=room, decode_prefix_tokens=decode_prefix_tokens, layout=LAYOUT, sender_instance_id="p-1", receiver=Peer("decode:1", "d-1")
    )


def ask(rig: GrpcRig, message: bytes) -> bytes:
    """The first message that the source answers to an announcement made by hand."""

    async def call() -> bytes:
        async with grpc.aio.insecure_channel(rig.source_peer.address, options=rpc.CHANNEL_OPTIONS) as channel:
            answer = await channel.unary_stream(rpc.FETCH_KV)(message).read()
            assert isinstance(answer, bytes)
            return answer

    return asyncio.run_coroutine_threadsafe(call(), rig.loop).result(WAIT_S)


@pytest.mark.parametrize("prefix_tokens", [-4, 6, 1])
def test_a_source_refuses_a_prefix_that_is_no_multiple_of_the_page_size(rig: GrpcRig, prefix_tokens: int) -> None:
    answer = rpc.decoder(KVFrame)(ask(rig, rpc.encode(announce(decode_prefix_tokens=prefix_tokens))))
    assert answer == Refused(f"decode_prefix_tokens {prefix_tokens} is no multiple of the page size 4")
    assert rig.source.open_rooms() == 0


def test_a_garbled_announcement_is_an_error_of_its_call_and_the_source_goes_on(rig: GrpcRig, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(grpc.aio.AioRpcError):
        ask(rig, b"\xc1 not msgpack")
    assert rig.source.open_rooms() == 0
    sender, receiver = rig.pair()
    sender.finish(META)
    rig.drain(receiver)
    assert receiver.poll() is KVPoll.SUCCESS


def test_an_announcement_that_nobody_claims_is_turned_away_in_time(rig: GrpcRig, host: Host) -> None:
    source = GrpcSource(LAYOUT, "p-1", ByteCarriers(LAYOUT, DataListener("127.0.0.1")), rig.wake, TransferLimits(bootstrap_timeout_s=0.2))
    port = host.start(source.handler())
    receiver = rig.sink.open(1, Peer(f"127.0.0.1:{port}", "p-1"), 0)
    rig.until(lambda: receiver.poll() is KVPoll.FAILED)
    assert "was not asked to compute room 1 within 0.2 s" in str(receiver.failure()) and not receiver.is_refused()
    assert source.open_rooms() == 0
    assert source.create_sender(1).poll() is KVPoll.FAILED, "the receiver has given up: computing would be in vain"
    source.close()


# -- held back --


def held_back(rig: GrpcRig) -> tuple[Any, Any]:
    """A room whose receiver takes nothing, with a chunk so large that the connection holds them back."""
    sender, receiver = rig.pair()
    rows = np.zeros((16, *PageForm.of(LAYOUT).shape), np.float32)
    num_sent, looks_held = 0, 0

    def is_held() -> bool:
        nonlocal num_sent, looks_held
        looks_held = looks_held + 1 if not sender.can_send() else 0
        while sender.can_send():
            sender.send(16 * num_sent, 16, jax.device_put(rows))
            num_sent += 1
        return looks_held >= 20

    rig.until(is_held)
    return sender, receiver


def test_a_receiver_that_holds_back_on_purpose_outlives_the_stall_timeout_but_not_the_longer_one(rig: GrpcRig) -> None:
    sender, receiver = held_back(rig)
    rig.clock.now_s += 29.0  # the stall timeout is 10 s
    assert sender.poll() is KVPoll.TRANSFERRING and receiver.poll() is KVPoll.TRANSFERRING
    rig.clock.now_s += 1.1
    assert receiver.poll() is KVPoll.TRANSFERRING, "nobody owes the receiver anything"
    assert sender.poll() is KVPoll.FAILED and "accepted for 30.0 s" in str(sender.failure())
    rig.drain(receiver)
    assert receiver.poll() is KVPoll.FAILED and "accepted for 30.0 s" in str(receiver.failure())
    rig.assert_nothing_open()


def test_a_held_back_room_lets_other_rooms_of_its_connection_pass(rig: GrpcRig) -> None:
    held_back(rig)
    sender, receiver = rig.pair(room=2)
    rows = rows_of(16, 3)
    rig.send(sender, 0, rows)
    sender.finish(META)
    (chunk,) = rig.drain(receiver)
    np.testing.assert_array_equal(np.asarray(chunk.kv), rows)


def test_a_held_back_receiver_notices_a_broken_connection_once_it_takes(rig: GrpcRig) -> None:
    sender, receiver = held_back(rig)
    rig.stop_server()
    rig.until(lambda: sender.poll() is KVPoll.FAILED)
    assert "went away" in str(sender.failure())
    rig.drain(receiver)
    assert receiver.poll() is KVPoll.FAILED and rig.counts()[1].failures == {"peer_gone": 1}
    rig.assert_nothing_open()


# -- replaced workers and broken connections --


def test_a_worker_that_replaces_another_at_its_address_is_reached_by_a_new_channel(rig: GrpcRig, host: Host) -> None:
    first = GrpcSource(LAYOUT, "first", ByteCarriers(LAYOUT, DataListener("127.0.0.1")), rig.wake)
    port = host.start(first.handler())
    lost = rig.sink.open(1, Peer(f"127.0.0.1:{port}", "first"), 0)
    first.create_sender(1)
    rig.until(lambda: lost.poll() is KVPoll.TRANSFERRING)
    host.stop()
    first.close()
    second = GrpcSource(LAYOUT, "second", ByteCarriers(LAYOUT, DataListener("127.0.0.1")), rig.wake)
    assert host.start(second.handler(), port) == port
    sender, receiver = second.create_sender(2), rig.sink.open(2, Peer(f"127.0.0.1:{port}", "second"), 0)
    rig.send(sender, 0, rows_of(1, 0))
    sender.finish(META)
    assert len(rig.drain(receiver)) == 1
    rig.until(lambda: lost.poll() is KVPoll.FAILED)
    stale = rig.sink.open(3, Peer(f"127.0.0.1:{port}", "first"), 0)
    rig.until(lambda: stale.poll() is KVPoll.FAILED)
    assert "worker was replaced: 'first' was meant, 'second' is here" in str(stale.failure())
    rig.assert_nothing_open()
    second.close()


def test_after_a_broken_connection_the_next_room_gets_a_fresh_one(rig: GrpcRig, host: Host) -> None:
    source = GrpcSource(LAYOUT, "p-9", ByteCarriers(LAYOUT, DataListener("127.0.0.1")), rig.wake)
    port = host.start(source.handler())
    peer = Peer(f"127.0.0.1:{port}", "p-9")
    sender, receiver = source.create_sender(1), rig.sink.open(1, peer, 0)
    rig.until(lambda: receiver.poll() is KVPoll.TRANSFERRING)
    host.stop()
    rig.until(lambda: receiver.poll() is KVPoll.FAILED and sender.poll() is KVPoll.FAILED)
    assert "the receiver went away" in str(sender.failure())
    refused = rig.sink.open(2, peer, 0)
    rig.until(lambda: refused.poll() is KVPoll.FAILED)
    assert "UNAVAILABLE" in str(refused.failure())
    host.start(source.handler(), port)
    sender, receiver = source.create_sender(3), rig.sink.open(3, peer, 0)
    rig.until(lambda: receiver.poll() is not KVPoll.BOOTSTRAPPING)
    sender.finish(META)
    rig.drain(receiver)
    assert receiver.poll() is KVPoll.SUCCESS, receiver.failure()
    source.close()
