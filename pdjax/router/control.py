"""Where workers register: one gRPC stream a worker, whose end is the notice of its death."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, AsyncIterator

import grpc
import grpc.aio

from pdjax.protocol import PROTOCOL_VERSION, MembershipMessage, RouterHello, WorkerInfo, WorkerLeaving, WorkerLoad
from pdjax.router.fleet import Member
from pdjax.router.roster import Roster
from pdjax.rpc import JOIN, ROUTER_SERVICE, SERVER_OPTIONS, decoder, encode

log = logging.getLogger(__name__)

STOP_GRACE_S = 0.2

SILENT_PERIODS = 10
"""Heartbeat timeouts after which a silent stream is cut. Until then a worker that was only stopped may speak on over it."""


class _Refuse(Exception):
    """The stream ends with a status that says why."""

    def __init__(self, code: grpc.StatusCode, message: str):
        super().__init__(message)
        self.code = code


class ControlServer:
    """Serves JOIN and keeps `roster` true. `instance_id` tells workers one router's life from the next."""

    def __init__(self, roster: Roster, host: str, port: int):
        self.instance_id = uuid.uuid4().hex
        self._roster = roster
        self._address = (host, port)
        self._server: grpc.aio.Server | None = None

    async def start(self) -> int:
        """Bind and serve; returns the port. Raises RuntimeError where the port is taken."""
        server = grpc.aio.server(options=SERVER_OPTIONS)
        handler = grpc.stream_stream_rpc_method_handler(
            self._join, request_deserializer=decoder(MembershipMessage), response_serializer=encode
        )
        method = JOIN.rpartition("/")[2]
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(ROUTER_SERVICE, {method: handler}),))
        host, port = self._address
        bound = server.add_insecure_port(f"{host}:{port}")
        await server.start()
        self._server = server
        return bound

    async def stop(self) -> None:
        """Break every membership stream; workers go on and look for the next router. Idempotent."""
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(STOP_GRACE_S)

    async def _join(
        self, messages: AsyncIterator[MembershipMessage], context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[RouterHello, None]:
        member: Member | None = None
        link = 0
        hello = RouterHello(instance_id=self.instance_id)
        try:
            member = self._take_in(await self._next(messages))
            link = member.link
            yield hello
            while True:
                message = await self._next(messages)
                is_leaving = self._take(member, message)
                yield hello
                if is_leaving:
                    return
        except StopAsyncIteration:
            return
        except _Refuse as refusal:
            log.warning("worker %s: %s", context.peer() if member is None else member.info.peer.address, refusal)
            await context.abort(refusal.code, str(refusal))
        finally:
            if member is not None:
                self._roster.lose(member.instance_id, link)

    async def _next(self, messages: AsyncIterator[MembershipMessage]) -> MembershipMessage:
        silence_s = SILENT_PERIODS * self._roster.fleet.heartbeat_timeout_s
        try:
            async with asyncio.timeout(silence_s):
                return await anext(messages)
        except TimeoutError:
            raise _Refuse(grpc.StatusCode.DEADLINE_EXCEEDED, f"nothing heard for {silence_s} s") from None

    def _take_in(self, message: MembershipMessage) -> Member:
        if not isinstance(message, WorkerInfo):
            raise _Refuse(grpc.StatusCode.INVALID_ARGUMENT, f"the first message must be WorkerInfo, got {type(message).__name__}")
        theirs = message.layout.protocol_version
        if theirs != PROTOCOL_VERSION:
            raise _Refuse(grpc.StatusCode.FAILED_PRECONDITION, f"protocol version {PROTOCOL_VERSION} here, {theirs} there")
        try:
            member = self._roster.join(message)
        except ValueError as error:
            raise _Refuse(grpc.StatusCode.FAILED_PRECONDITION, str(error)) from None
        log.info("%s worker joined: %s (%s)", message.role, message.peer.address, message.peer.instance_id)
        return member

    def _take(self, member: Member, message: MembershipMessage) -> bool:
        """Apply one message; True where it is the worker's last."""
        match message:
            case WorkerLoad():
                if not self._roster.heartbeat(member.instance_id, message):
                    raise _Refuse(grpc.StatusCode.FAILED_PRECONDITION, "not a member any more")
                return False
            case WorkerLeaving():
                log.info("%s worker leaves: %s", member.info.role, member.info.peer.address)
                self._roster.leave(member.instance_id)
                return True
            case _:
                raise _Refuse(grpc.StatusCode.INVALID_ARGUMENT, f"WorkerLoad or WorkerLeaving expected, got {type(message).__name__}")
