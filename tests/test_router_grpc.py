"""The gRPC client against a real server on a free port: events come through, and every kind of loss is a retriable `Failed`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager

import grpc
import grpc.aio

from pdjax.protocol import Event, Failed, Finished, Peer, Sampling, SequenceRequest, TokenOut, Tokens
from pdjax.router.grpc_client import GrpcWorkerClient
from pdjax.rpc import SERVER_OPTIONS, WORKER_SERVICE, decoder, encode
from tests.test_router_fakes import worker_info

ROOM = (1 << 63) - 1
REQUEST = SequenceRequest(
    request_id="r", room=ROOM, prompt=[1, 2], sampling=Sampling(max_tokens=3), deadline_s=0.0, prefill=Peer("127.0.0.1:9", "p1")
)
TOKENS = Tokens([TokenOut(0, 5, -0.5, [(5, -0.5), (6, -1.0)])])
END = Finished(reason="stop", stop_token=5, cached_tokens=1)

Servicer = Callable[[SequenceRequest, grpc.aio.ServicerContext], AsyncGenerator[Event, None]]


@asynccontextmanager
async def worker(
    servicer: Servicer, serialize: Callable[[object], bytes] = encode
) -> AsyncIterator[tuple[grpc.aio.Server, GrpcWorkerClient]]:
    """A server with `servicer` behind both methods, and a client of it."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    handler = grpc.unary_stream_rpc_method_handler(servicer, request_deserializer=decoder(SequenceRequest), response_serializer=serialize)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(WORKER_SERVICE, {"Prefill": handler, "Decode": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    client = GrpcWorkerClient(worker_info("d1", address=f"127.0.0.1:{port}"))
    try:
        yield server, client
    finally:
        await client.close()
        await server.stop(None)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await scenario()

    asyncio.run(bounded())


def only_failure(events: list[Event]) -> Failed:
    (failed,) = events
    assert isinstance(failed, Failed) and failed.kind == "internal" and failed.retriable
    return failed


def test_events_come_through_unchanged_up_to_the_end() -> None:
    seen: list[SequenceRequest] = []

    async def servicer(request: SequenceRequest, context: grpc.aio.ServicerContext) -> AsyncGenerator[Event, None]:
        seen.append(request)
        yield TOKENS
        yield END

    async def scenario() -> None:
        async with worker(servicer) as (_, client):
            assert [event async for event in client.prefill(REQUEST)] == [TOKENS, END]
            assert [event async for event in client.decode(REQUEST)] == [TOKENS, END]
            assert seen == [REQUEST, REQUEST]

    run(scenario)


def test_an_address_where_nobody_listens_is_a_retriable_failure() -> None:
    async def scenario() -> None:
        client = GrpcWorkerClient(worker_info("d1", address="127.0.0.1:1"))
        failed = only_failure([event async for event in client.decode(REQUEST)])
        assert "127.0.0.1:1" in failed.message and "UNAVAILABLE" in failed.message
        await client.close()

    run(scenario)


def test_a_servicer_that_raises_and_one_that_just_ends_are_retriable_failures() -> None:
    async def raising(request: SequenceRequest, context: grpc.aio.ServicerContext) -> AsyncGenerator[Event, None]:
        await context.abort(grpc.StatusCode.INTERNAL, "boom")
        yield END

    async def ending(request: SequenceRequest, context: grpc.aio.ServicerContext) -> AsyncGenerator[Event, None]:
        return
        yield END

    async def scenario() -> None:
        async with worker(raising) as (_, client):
            assert "boom" in only_failure([event async for event in client.decode(REQUEST)]).message
        async with worker(ending) as (_, client):
            assert "without a result" in only_failure([event async for event in client.decode(REQUEST)]).message

    run(scenario)


def test_a_message_of_the_wrong_form_is_a_retriable_failure() -> None:
    async def servicer(request: SequenceRequest, context: grpc.aio.ServicerContext) -> AsyncGenerator[Event, None]:
        yield END

    async def scenario() -> None:
        async with worker(servicer, serialize=lambda event: b"\x81\xa4type\xa3lie") as (_, client):
            only_failure([event async for event in client.decode(REQUEST)])

    run(scenario)


def test_a_server_that_stops_under_a_call_and_a_client_that_closes_break_the_stream() -> None:
    async def servicer(request: SequenceRequest, context: grpc.aio.ServicerContext) -> AsyncGenerator[Event, None]:
        yield TOKENS
        await asyncio.Event().wait()

    async def scenario() -> None:
        async with worker(servicer) as (server, client):
            stream = client.decode(REQUEST)
            assert await anext(stream) == TOKENS
            await server.stop(None)
            only_failure([event async for event in stream])
        async with worker(servicer) as (_, client):
            stream = client.decode(REQUEST)
            assert await anext(stream) == TOKENS
            waiting = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
            await client.close()
            assert isinstance(await waiting, Failed)
            await stream.aclose()

    run(scenario)


def test_closing_the_iterator_cancels_the_workers_side_whether_it_waits_or_not() -> None:
    async def scenario() -> None:
        cancelled: asyncio.Queue[int] = asyncio.Queue()

        async def servicer(request: SequenceRequest, context: grpc.aio.ServicerContext) -> AsyncGenerator[Event, None]:
            try:
                yield TOKENS
                await asyncio.Event().wait()
            finally:
                cancelled.put_nowait(request.room)

        async with worker(servicer) as (_, client):
            async with aclosing(client.decode(REQUEST)) as stream:
                assert await anext(stream) == TOKENS
            assert await cancelled.get() == ROOM
            stream = client.decode(REQUEST)
            assert await anext(stream) == TOKENS
            waiting = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
            waiting.cancel()
            assert await asyncio.gather(waiting, return_exceptions=True) and waiting.cancelled()
            assert await cancelled.get() == ROOM

    run(scenario)
