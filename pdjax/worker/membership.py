"""A worker's side of membership: join a router, send signs of life, and find it again when it dies or is replaced."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

import grpc
import grpc.aio

from pdjax.protocol import MembershipMessage, RouterHello, WorkerInfo, WorkerLeaving, WorkerLoad
from pdjax.rpc import CHANNEL_OPTIONS, JOIN, decoder, encode

log = logging.getLogger(__name__)

MIN_BACKOFF_S = 0.1
MAX_BACKOFF_S = 1.0
ANSWER_TIMEOUT_S = 3.0
"""How long a router may take to answer a message before the worker looks for it anew."""
LEAVE_TIMEOUT_S = 1.0
"""How long a worker that shuts down waits for the router to take note."""


class RouterLink:
    """Keeps one worker registered, from `start` to `leave`. For one event loop.

    `load` is called on the loop for each heartbeat and must not block. A router that is not there yet, or not any more, is tried
    again for ever, at most every MAX_BACKOFF_S.
    """

    def __init__(self, router_address: str, info: WorkerInfo, load: Callable[[], WorkerLoad], interval_s: float):
        self._address = router_address
        self._info = info
        self._load = load
        self._interval_s = interval_s
        self._leaving = asyncio.Event()
        self._joined = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._router_id: str | None = None

    @property
    def is_joined(self) -> bool:
        """Whether a router has taken this worker in and still answers."""
        return self._joined.is_set()

    def start(self) -> None:
        """Begin to look for the router. Once."""
        assert self._task is None, "the link has been started already"
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def wait_joined(self) -> None:
        """Return once a router has taken this worker in."""
        await self._joined.wait()

    async def leave(self) -> None:
        """Tell the router, where there is one, that no new work shall come; then stop. Idempotent, and bounded in time."""
        self._leaving.set()
        if self._task is None:
            return
        await asyncio.wait([self._task], timeout=LEAVE_TIMEOUT_S)
        if not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        backoff_s = MIN_BACKOFF_S
        while not self._leaving.is_set():
            try:
                await self._membership()
            except (grpc.aio.AioRpcError, TimeoutError, ConnectionError) as error:
                reason = f"{error.code().name}: {error.details()}" if isinstance(error, grpc.aio.AioRpcError) else repr(error)
                log.log(logging.WARNING if self.is_joined else logging.DEBUG, "router %s: %s", self._address, reason)
            except Exception:  # A fault here must not take a working worker out of service for good.
                log.exception("membership at router %s", self._address)
            backoff_s = MIN_BACKOFF_S if self.is_joined else min(backoff_s * 2, MAX_BACKOFF_S)
            self._joined.clear()
            await self._wait_leaving(backoff_s * random.uniform(0.5, 1.0))

    async def _membership(self) -> None:
        """One membership, from joining until this worker leaves (returns) or the link breaks (raises)."""
        async with grpc.aio.insecure_channel(self._address, options=CHANNEL_OPTIONS) as channel:
            method = channel.stream_stream(JOIN, request_serializer=encode, response_deserializer=decoder(RouterHello))
            call = method()
            try:
                hello = await self._say(call, self._info)
                self._note_router(hello)
                while not self._leaving.is_set():
                    await self._say(call, self._load())
                    self._joined.set()
                    await self._wait_leaving(self._interval_s)
                await self._say(call, WorkerLeaving())
            finally:
                call.cancel()

    async def _say(self, call: grpc.aio.StreamStreamCall, message: MembershipMessage) -> RouterHello:
        """Send one message and take the router's answer. Raises AioRpcError, ConnectionError or TimeoutError where none comes."""
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await call.write(message)
                answer = await call.read()
        except asyncio.InvalidStateError:
            answer = grpc.aio.EOF
        if isinstance(answer, RouterHello):
            return answer
        if call.done() and await call.code() is not grpc.StatusCode.OK:
            raise ConnectionError(f"{(await call.code()).name}: {await call.details()}")
        raise ConnectionError("the router ended the membership")

    def _note_router(self, hello: RouterHello) -> None:
        if hello.instance_id != self._router_id:
            log.info("joined router %s (%s)", self._address, hello.instance_id)
        self._router_id = hello.instance_id

    async def _wait_leaving(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._leaving.wait()
        except TimeoutError:
            pass
