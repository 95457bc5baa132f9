"""The connections between the hosts of one worker: what host 0 does to its engine, the others are told to do to theirs, in the same order.

Frames are a msgpack message, and raw bytes behind it where it carries KV. Nothing is unpickled.
"""

from __future__ import annotations

import collections
import contextlib
import queue
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import numpy as np

from pdjax.engine.batch import DecodeSeq, PrefillSeq
from pdjax.errors import PdjaxError

SILENCE_S = 15.0
"""After which the other end counts as gone. Each end says something every `ALIVE_S`."""
ALIVE_S = 2.0

STUCK_S = 60.0
"""How long a host may take no frame off its queue. Host 0 has two steps in flight at most, so queues are short unless something hangs."""

MAX_WAITING = 256
"""Frames that wait to be sent, or to be applied."""
MAX_WAITING_BYTES = 256 << 20
"""Bytes that wait to be sent; one frame beyond that is taken when nothing else waits."""

_MAX_MESSAGE_BYTES = 64 << 20
_MAX_PAYLOAD_BYTES = 4 << 30
_HEAD = struct.Struct("!IQ")


class HostLost(PdjaxError):
    """Another host of this worker is gone, and with it the worker."""


class _Message(msgspec.Struct, frozen=True, tag=True):
    """One frame without its bytes."""


class Hello(_Message, frozen=True):
    """First of all, from each other host. `settings`: what must be the same on all hosts, by name."""

    host_index: int
    settings: dict[str, str]


class Welcome(_Message, frozen=True):
    """Every host has come; `address` is where `jax.distributed` meets."""

    address: str


class GaveUp(_Message, frozen=True):
    """Host 0 does not take this host, or either end has failed. The connection ends."""

    reason: str


class Ready(_Message, frozen=True):
    """The host has loaded and compiled."""


class Alive(_Message, frozen=True):
    """Nothing else was there to say."""


class Stop(_Message, frozen=True):
    """The worker ends in order."""


class LaunchPrefill(_Message, frozen=True):
    seqs: list[PrefillSeq]


class LaunchDecode(_Message, frozen=True):
    seqs: list[DecodeSeq]


class SetHistory(_Message, frozen=True):
    slot: int
    prompt: list[int]
    output: list[int]


class Gather(_Message, frozen=True):
    pages: list[int]


class Install(_Message, frozen=True):
    """The frame's bytes are the pages, an array of this form."""

    pages: list[int]
    shape: tuple[int, int, int, int, int]
    dtype: str


Message = Hello | Welcome | GaveUp | Ready | Alive | Stop | LaunchPrefill | LaunchDecode | SetHistory | Gather | Install


class Frame(NamedTuple):
    message: Message
    payload: np.ndarray  # uint8[n], empty where the message carries nothing


def _encode_other(value: Any) -> Any:
    if isinstance(value, range):
        return (value.start, value.stop)
    raise NotImplementedError(f"{type(value)} has no place in a message")


def _decode_other(kind: type, value: Any) -> Any:
    if kind is range and isinstance(value, list) and len(value) == 2 and all(isinstance(number, int) for number in value):
        return range(*value)
    raise NotImplementedError(f"{kind} has no place in a message")


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_other)
_decoder = msgspec.msgpack.Decoder(Message, dec_hook=_decode_other)


def send_frame(connection: socket.socket, message: Message, payload: memoryview | None = None) -> None:
    """Blocks up to the socket's timeout. Raises OSError."""
    _send(connection, _encoder.encode(message), payload)


def receive_frame(connection: socket.socket) -> Frame:
    """Blocks; each piece of the frame comes within the socket's timeout. Raises OSError, or ValueError where it is no frame."""
    message_bytes, payload_bytes = _HEAD.unpack(_receive(connection, _HEAD.size))
    if message_bytes > _MAX_MESSAGE_BYTES or payload_bytes > _MAX_PAYLOAD_BYTES:
        raise ValueError(f"a frame of {message_bytes} and {payload_bytes} bytes")
    message = _decoder.decode(_receive(connection, message_bytes))
    return Frame(message, _receive(connection, payload_bytes))


def _send(connection: socket.socket, message: bytes, payload: memoryview | None) -> None:
    connection.sendall(_HEAD.pack(len(message), 0 if payload is None else payload.nbytes) + message)
    if payload is not None:
        connection.sendall(payload)


def _receive(connection: socket.socket, num_bytes: int) -> np.ndarray:
    """uint8[num_bytes]"""
    data = np.empty(num_bytes, np.uint8)
    view, filled = memoryview(data), 0
    while filled < num_bytes:
        number = connection.recv_into(view[filled:])
        if not number:
            raise ConnectionError("it closed the connection")
        filled += number
    return data


class _Outgoing(NamedTuple):
    message: bytes
    payload: memoryview | None

    @property
    def num_bytes(self) -> int:
        return len(self.message) + (0 if self.payload is None else self.payload.nbytes)


_ALIVE = _Outgoing(_encoder.encode(Alive()), None)


class HostLink:
    """One end of a connection between host 0 and another host. Owns the socket and two threads, both daemons.

    `on_lost` is called once, from a thread of the link, with a line for the user, where the other end goes without having been told to,
    says nothing for `silence_s`, or does not keep up. Whatever the engine does then may wait for ever, so it ends the process.
    """

    def __init__(self, connection: socket.socket, name: str, on_lost: Callable[[str], None], silence_s: float = SILENCE_S):
        connection.settimeout(silence_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.name = name
        self._connection = connection
        self._on_lost = on_lost
        self._alive_s = silence_s * ALIVE_S / SILENCE_S
        self._changed = threading.Condition()
        self._outgoing: collections.deque[_Outgoing] = collections.deque()
        self._outgoing_bytes = 0
        self._received: queue.Queue[Frame] = queue.Queue(MAX_WAITING)
        self._is_over = False
        self._reader = threading.Thread(target=self._read, name=f"{name}-reader", daemon=True)
        self._writer = threading.Thread(target=self._write, name=f"{name}-writer", daemon=True)
        self._reader.start()
        self._writer.start()

    def send(self, message: Message, payload: memoryview | None = None) -> None:
        """Queue a frame; `payload` is read later and must not change. Any thread; waits only where the other end does not keep up.

        Raises HostLost.
        """
        frame = _Outgoing(_encoder.encode(message), payload)
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_over or self._has_room(frame), STUCK_S):
                self._lose(f"it has not taken a command for {STUCK_S:g} s")
            if self._is_over:
                raise HostLost(f"{self.name} is gone")
            self._outgoing.append(frame)
            self._outgoing_bytes += frame.num_bytes
            self._changed.notify_all()

    def receive(self, timeout_s: float | None = None) -> Frame:
        """The next frame, in order. Raises queue.Empty after `timeout_s`; None: waits as long as the other end lives."""
        return self._received.get(timeout=timeout_s)

    def stop(self, timeout_s: float) -> bool:
        """Tell the other end that all is over; whether it has closed the connection within `timeout_s`. It is not missed any more."""
        self.send(Stop())
        self._end()
        self._reader.join(timeout_s)
        return not self._reader.is_alive()

    def give_up(self, reason: str, timeout_s: float = 2.0) -> None:
        """Say why this end goes, as far as that is possible within `timeout_s`."""
        with self._changed:
            if self._is_over:
                return
            self._outgoing.append(_Outgoing(_encoder.encode(GaveUp(reason)), None))
            self._is_over = True
            self._changed.notify_all()
        self._writer.join(timeout_s)

    def close(self) -> None:
        """Close the connection and wait for the threads. Idempotent; not for a thread of the link."""
        self._end()
        with contextlib.suppress(OSError):  # the other end was faster
            self._connection.shutdown(socket.SHUT_RDWR)
        self._reader.join()
        self._writer.join()
        self._connection.close()

    def _end(self) -> None:
        """From here on nobody is missed; what waits to be sent still is."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _has_room(self, frame: _Outgoing) -> bool:
        if not self._outgoing:
            return True
        return len(self._outgoing) < MAX_WAITING and self._outgoing_bytes + frame.num_bytes <= MAX_WAITING_BYTES

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._outgoing or self._is_over, self._alive_s)
                if not self._outgoing and self._is_over:
                    return
                frame = self._outgoing[0] if self._outgoing else _ALIVE
            try:
                _send(self._connection, *frame)
            except OSError as error:
                self._lose(f"nothing can be sent to it: {error}")
                return
            with self._changed:
                if frame is not _ALIVE and self._outgoing:
                    self._outgoing.popleft()
                    self._outgoing_bytes -= frame.num_bytes
                    self._changed.notify_all()

    def _read(self) -> None:
        try:
            while True:
                frame = receive_frame(self._connection)
                if isinstance(frame.message, GaveUp):
                    self._lose(frame.message.reason)
                    return
                if not isinstance(frame.message, Alive):
                    self._received.put(frame, timeout=STUCK_S)
                if isinstance(frame.message, Stop):
                    self._end()
                    return
        except TimeoutError:
            self._lose(f"it said nothing for {self._connection.gettimeout():g} s")
        except (OSError, ValueError) as error:
            self._lose(str(error))
        except queue.Full:
            self._lose(f"this host has applied none of its commands for {STUCK_S:g} s")

    def _lose(self, reason: str) -> None:
        with self._changed:
            if self._is_over:
                return
            self._is_over = True
            self._outgoing.clear()
            self._changed.notify_all()
        self._on_lost(f"{self.name} is gone: {reason}")
