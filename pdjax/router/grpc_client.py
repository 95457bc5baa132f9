"""A worker in another process, over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import grpc
import grpc.aio

from pdjax.protocol import Event, Failed, SequenceRequest, Tokens, WorkerInfo
from pdjax.router.client import WorkerClient
from pdjax.rpc import CHANNEL_OPTIONS, DECODE, PREFILL, decoder, encode

KEEPALIVE_OPTIONS = [
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
]
"""Finds a connection whose other end is unreachable, where nothing else does: heartbeats notice a dead worker earlier. Sequences may
wait in silence, so pings need no data in between; worker servers allow that (`pdjax.rpc.SERVER_OPTIONS`)."""


class GrpcWorkerClient(WorkerClient):
    """One channel a worker. Nothing is sent before the first step of a call's iterator."""

    def __init__(self, info: WorkerInfo):
        self.info = info
        self._channel = grpc.aio.insecure_channel(info.peer.address, options=CHANNEL_OPTIONS + KEEPALIVE_OPTIONS)
        decode_event = decoder(Event)
        self._prefill = self._channel.unary_stream(PREFILL, request_serializer=encode, response_deserializer=decode_event)
        self._decode = self._channel.unary_stream(DECODE, request_serializer=encode, response_deserializer=decode_event)

    def prefill(self, request: SequenceRequest) -> AsyncGenerator[Event, None]:
        return self._events(self._prefill, request)

    def decode(self, request: SequenceRequest) -> AsyncGenerator[Event, None]:
        return self._events(self._decode, request)

    async def close(self) -> None:
        """Ends calls still under way with a retriable `Failed`."""
        await self._channel.close()

    async def _events(self, method: grpc.aio.UnaryStreamMultiCallable, request: SequenceRequest) -> AsyncGenerator[Event, None]:
        call = method(request)
        try:
            async for event in call:
                if event is None:  # gRPC's word for a message that did not decode
                    yield self._lost("sent a message of the wrong form")
                    return
                yield event
                if not isinstance(event, Tokens):
                    return
            yield self._lost("ended the stream without a result")
        except grpc.aio.AioRpcError as error:
            yield self._lost(f"{error.code().name}: {error.details()}")
        except asyncio.CancelledError:
            # gRPC also raises this where the channel was closed under the call; only then it is not ours.
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            yield self._lost("the connection was closed")
        finally:
            call.cancel()

    def _lost(self, what: str) -> Failed:
        return Failed(kind="internal", message=f"worker {self.info.peer.address}: {what}", retriable=True)
