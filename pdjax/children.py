"""One child process, from both ends.

The supervisor holds three pipes to each child. Into standard input it writes one line, the resolved configuration, and then keeps the
pipe open: its end is the sign that the supervisor is gone, however it went. From the progress pipe it reads JSON lines. Standard output
and standard error arrive together as log lines. A child leads a process group of its own, so Ctrl-C in a terminal reaches the supervisor
only, which then stops the children in order.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

import msgspec

from pdjax.observe.progress import GaveUp, Progress, Ready, replay

TAIL_LINES = 30
MAX_LINE_BYTES = 1 << 16
ORPHAN_GRACE_S = 5.0
"""What a child that lost its supervisor gets for an ordered stop."""

Log = Callable[[str], None]


class ChildSpec(NamedTuple):
    """What to start: `command` is completed by `--child FD`, the number of the progress pipe; `config_line` is the line for stdin."""

    name: str
    command: tuple[str, ...]
    config_line: bytes


class ChildDied(Exception):
    """A child ended on its own, or gave no sign of life for too long; the message is for the user."""


class Child:
    """A running child. Made by `start_child`; it lives until `exited` is done, after which all its output has been seen."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, progress_pipe: asyncio.StreamReader, progress: Progress, log: Log):
        self.name = name
        self.pid = process.pid
        self.ready: asyncio.Future[dict[str, str]] = asyncio.get_running_loop().create_future()
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._process = process
        self._progress = progress
        self._log = log
        self._gave_up: str | None = None
        self._last_sign_s = time.monotonic()
        self._readers = [asyncio.create_task(self._read_output()), asyncio.create_task(self._read_progress(progress_pipe))]
        self.exited: asyncio.Task[int] = asyncio.create_task(self._wait())

    async def until_ready(self, silence_s: float) -> dict[str, str]:
        """The facts of the child's `ready`. Raises ChildDied where it ends first, or tells nothing for `silence_s`."""
        while not self.ready.done():
            left_s = self._last_sign_s + silence_s - time.monotonic()
            if left_s <= 0:
                raise ChildDied(f"{self.name} told nothing for {silence_s:.0f} s while starting")
            await asyncio.wait({self.ready, self.exited}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if self.exited.done():
                raise ChildDied(self.epitaph())
        return self.ready.result()

    def how_it_ended(self) -> str:
        """One line. Only once `exited` is done."""
        status = self.exited.result()
        return f"{self.name} was killed by {signal.Signals(-status).name}" if status < 0 else f"{self.name} ended with exit status {status}"

    def epitaph(self) -> str:
        """How the child ended, and why: what it said when it gave up, or else its last lines. Only once `exited` is done."""
        words = [self._gave_up] if self._gave_up is not None else self.tail
        return "\n".join([self.how_it_ended(), *(f"  {line}" for line in words)])

    def send(self, number: signal.Signals) -> None:
        """Signal the child's whole process group; no effect once it has exited."""
        if not self.exited.done():
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:
                return

    async def _wait(self) -> int:
        status = await self._process.wait()
        # A grandchild may hold the pipes open for ever; what the child itself wrote is there by now.
        _, late = await asyncio.wait(self._readers, timeout=1.0)
        for reader in late:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        assert self._process.stdin is not None, "children are started with a pipe for stdin"
        self._process.stdin.close()
        return status

    async def _read_output(self) -> None:
        assert self._process.stdout is not None, "children are started with a pipe for stdout"
        async for line in _lines(self._process.stdout):
            text = line.decode(errors="replace")
            self.tail.append(text)
            self._log(f"[{self.name}] {text}")

    async def _read_progress(self, pipe: asyncio.StreamReader) -> None:
        async for line in _lines(pipe):
            self._last_sign_s = time.monotonic()
            try:
                event = replay(line, self._progress)
            except msgspec.DecodeError:
                self._log(f"[{self.name}] unreadable progress: {line[:200]!r}")
                continue
            if isinstance(event, GaveUp):
                self._gave_up = event.message
            elif isinstance(event, Ready) and not self.ready.done():
                self.ready.set_result(event.facts)


async def start_child(spec: ChildSpec, progress: Progress, log: Log) -> Child:
    """Start `spec`; its progress is repeated on `progress`, its output goes to `log` by lines. Raises OSError where it cannot start."""
    read_fd, write_fd = os.pipe()
    pipe = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(pipe), os.fdopen(read_fd, "rb", buffering=0)
    )
    try:
        process = await asyncio.create_subprocess_exec(
            *spec.command,
            "--child",
            str(write_fd),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            pass_fds=(write_fd,),
            process_group=0,
        )
    except BaseException:
        transport.close()
        raise
    finally:
        os.close(write_fd)
    assert process.stdin is not None, "children are started with a pipe for stdin"
    process.stdin.write(spec.config_line + b"\n")
    child = Child(spec.name, process, pipe, progress, log)
    child.exited.add_done_callback(lambda _: transport.close())
    return child


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Lines without their ends; longer ones than MAX_LINE_BYTES come in pieces."""
    rest = b""
    while block := await stream.read(MAX_LINE_BYTES):
        *whole, rest = (rest + block).split(b"\n")
        for line in whole:
            yield line
        if len(rest) > MAX_LINE_BYTES:
            yield rest
            rest = b""
    if rest:
        yield rest


def adopt_parent() -> bytes:
    """For the child: the configuration line; from here on the end of stdin stops this process, first in order, then at once.

    Call once, early, before anything else may read stdin. Raises EOFError where there is no line.
    """
    line = sys.stdin.buffer.raw.readline()
    if not line.endswith(b"\n"):
        raise EOFError("standard input ended before the configuration was there")
    threading.Thread(target=_stop_when_orphaned, name="parent-watch", daemon=True).start()
    return line


def _stop_when_orphaned() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(ORPHAN_GRACE_S)
    os._exit(1)
