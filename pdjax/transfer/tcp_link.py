"""The data connections of `tcp`: one TCP connection a room, from decode to prefill, on which nothing but the bytes of chunks flows.

A connection opens with 16 bytes from decode: a magic number and the room. Rooms are random 63-bit numbers that only the two workers and their
router know, so a stranger's connection gets nothing. The connection lives at most as long as the room's control stream, which tells of
every failure; here a failure is an OSError.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
from typing import Any

log = logging.getLogger(__name__)

_GREETING = struct.Struct("!8sQ")
_MAGIC = b"pdjaxkv1"
_GREETING_S = 5.0
_MAX_GREETING = 64
"""Connections that have not said yet which room they are for; more wait in the backlog."""
_CLOSE_S = 5.0


class DataListener:
    """Prefill's end: accepts connections and hands each to the room that it names. Used in the server's event loop, but for making and
    closing it."""

    def __init__(self, host: str, told_host: str | None = None) -> None:
        """Listens at a free port of `host`, which receivers know as `told_host`. Raises OSError where that is not possible."""
        family, _, _, _, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
        self._socket = socket.create_server(address[:2], family=family)
        self._socket.setblocking(False)
        self.address = f"{told_host or host}:{self._socket.getsockname()[1]}"
        self._expected: dict[int, asyncio.Future[socket.socket]] = {}
        self._greeting = asyncio.Semaphore(_MAX_GREETING)
        self._greeters: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._accepting: asyncio.Task[None] | None = None

    def expect(self, room: int) -> asyncio.Future[socket.socket]:
        """The room's connection, once it has come. Whoever asks owns it, and calls `forget`."""
        if self._accepting is None:
            self._loop = asyncio.get_running_loop()
            self._accepting = asyncio.ensure_future(self._accept())
        assert room not in self._expected, f"room {room} is expected twice"
        self._expected[room] = self._loop_future()
        return self._expected[room]

    def forget(self, room: int) -> None:
        """The room has ended: its connection is closed, or will not be taken."""
        future = self._expected.pop(room)
        if future.done() and not future.cancelled():
            future.result().close()
        future.cancel()

    def close(self) -> None:
        """Accept no more. Waits for the event loop, which must be running if it was ever used; not to be called from it."""
        if self._loop is not None:
            asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(_CLOSE_S)
        self._socket.close()

    def _loop_future(self) -> asyncio.Future[socket.socket]:
        assert self._loop is not None, "no event loop before the first room"
        return self._loop.create_future()

    async def _stop(self) -> None:
        assert self._accepting is not None, "an event loop without a task in it"
        tasks = [self._accepting, *self._greeters]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._greeting.acquire()
            try:
                connection, _ = await loop.sock_accept(self._socket)
            except OSError as error:  # too many open files, say: those that wait may be taken later
                log.warning("a data connection could not be accepted: %s", error)
                self._greeting.release()
                await asyncio.sleep(0.1)
                continue
            greeter = asyncio.ensure_future(self._greet(connection))
            self._greeters.add(greeter)
            greeter.add_done_callback(self._greeted)

    def _greeted(self, greeter: asyncio.Task[None]) -> None:
        self._greeters.discard(greeter)
        self._greeting.release()

    async def _greet(self, connection: socket.socket) -> None:
        """Hand the connection to its room; close it where it names none that waits for one."""
        with contextlib.ExitStack() as undo:
            undo.callback(connection.close)
            room = await _read_greeting(connection)
            future = self._expected.get(room) if room is not None else None
            if future is None or future.done():
                log.warning("a data connection that belongs to no room was closed")
                return
            undo.pop_all()
            future.set_result(connection)


async def connect(address: str, room: int) -> socket.socket:
    """Decode's end of the room's connection to `address` (host:port). Raises OSError."""
    loop = asyncio.get_running_loop()
    family, kind, protocol, _, target = await _resolved(address)
    with contextlib.ExitStack() as undo:
        connection = socket.socket(family, kind, protocol)
        undo.callback(connection.close)
        connection.setblocking(False)
        await loop.sock_connect(connection, target)
        await loop.sock_sendall(connection, _GREETING.pack(_MAGIC, room))
        undo.pop_all()
        return connection


_Resolved = tuple[socket.AddressFamily, socket.SocketKind, int, str, Any]


async def _resolved(address: str) -> _Resolved:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise OSError(f"{address!r} is no host:port")
    host = host.strip("[]")
    try:
        return socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0]
    except socket.gaierror:  # a name: asking for it takes a thread
        return (await asyncio.get_running_loop().getaddrinfo(host, int(port), type=socket.SOCK_STREAM))[0]


async def _read_greeting(connection: socket.socket) -> int | None:
    """The room that a new connection names; None where it says something else, or nothing in time."""
    connection.setblocking(False)
    loop, greeting = asyncio.get_running_loop(), bytearray()
    try:
        async with asyncio.timeout(_GREETING_S):
            while len(greeting) < _GREETING.size:
                part = await loop.sock_recv(connection, _GREETING.size - len(greeting))
                if not part:
                    return None
                greeting += part
    except (OSError, TimeoutError):
        return None
    magic, room = _GREETING.unpack(greeting)
    return room if magic == _MAGIC else None
