"""The gRPC surface of a worker: sequences in, events out."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import msgspec

from pdjax import rpc
from pdjax.protocol import Event, SequenceRequest
from pdjax.worker.loop import EngineLoop


async def sequence_events(loop: EngineLoop, request: SequenceRequest) -> AsyncIterator[Event]:
    """Submit `request` and give its events; closing the iterator aborts it.

    Two attempts at one request may overlap on a worker for a moment, so inside it each goes by a name of its own.
    """
    attempt = msgspec.structs.replace(request, request_id=f"{request.request_id}@{request.room:x}")
    stream = loop.submit(attempt)
    try:
        async for event in stream:
            yield event
    finally:
        loop.abort(attempt.request_id)


def sequence_handler(method: str, loop: EngineLoop) -> grpc.GenericRpcHandler:
    """Serve `method` (rpc.PREFILL or rpc.DECODE). A client that goes away cancels the call, and with it the sequence."""

    async def serve(request: SequenceRequest, context: grpc.aio.ServicerContext) -> AsyncIterator[Event]:
        events = sequence_events(loop, request)
        try:
            async for event in events:
                yield event
        finally:
            await events.aclose()

    service, name = method.lstrip("/").split("/")
    handler = grpc.unary_stream_rpc_method_handler(
        serve, request_deserializer=rpc.decoder(SequenceRequest), response_serializer=rpc.encode
    )
    return grpc.method_handlers_generic_handler(service, {name: handler})
