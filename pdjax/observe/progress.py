"""What a process tells about its start: loading, compiling, ready. Shown on a terminal, or sent to the supervisor as JSON lines."""

from __future__ import annotations

import abc
import os
import threading
from types import TracebackType
from typing import TextIO

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

MAX_EVENT_BYTES = 4096
"""Longest event on a progress pipe, newline included: PIPE_BUF on Linux, so that events of several threads never mix."""


class Progress(abc.ABC):
    """One process's account of its start, in this order: stages, then one `ready` or `failed`. Any thread may call; nothing raises
    because nobody listens."""

    @abc.abstractmethod
    def stage(self, name: str, total: int) -> None:
        """A new stage begins, of `total` equal steps; the one before is complete. `total` 0: length unknown."""

    @abc.abstractmethod
    def advance(self, done: int, total: int, detail: str = "") -> None:
        """`done` of `total` steps of the current stage are complete; `detail` says what is being done now."""

    @abc.abstractmethod
    def ready(self, **facts: str) -> None:
        """Everything is up. A worker tells its `address`; a router its `url` (HTTP) and `control` (HOST:PORT that workers join at)."""

    @abc.abstractmethod
    def failed(self, message: str) -> None:
        """The process gives up and is about to exit; `message` is one line for the user."""


class NullProgress(Progress):
    """Tells nobody."""

    def stage(self, name: str, total: int) -> None:
        pass

    def advance(self, done: int, total: int, detail: str = "") -> None:
        pass

    def ready(self, **facts: str) -> None:
        pass

    def failed(self, message: str) -> None:
        pass


class Stage(msgspec.Struct, frozen=True, tag="stage"):
    name: str
    total: int


class Advance(msgspec.Struct, frozen=True, tag="advance"):
    done: int
    total: int
    detail: str


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    facts: dict[str, str]


class GaveUp(msgspec.Struct, frozen=True, tag="failed"):
    message: str


ProgressEvent = Stage | Advance | Ready | GaveUp

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(ProgressEvent)


class PipeProgress(Progress):
    """Writes one JSON line per event to an inherited pipe. The descriptor belongs to this object from here on; the reader must
    keep reading, since a full pipe holds the writer back."""

    def __init__(self, fd: int):
        os.set_inheritable(fd, False)
        self._fd: int | None = fd

    def stage(self, name: str, total: int) -> None:
        self._send(Stage(name, total))

    def advance(self, done: int, total: int, detail: str = "") -> None:
        self._send(Advance(done, total, detail[:200]))

    def ready(self, **facts: str) -> None:
        self._send(Ready(facts))

    def failed(self, message: str) -> None:
        self._send(GaveUp(message[:500]))

    def _send(self, event: ProgressEvent) -> None:
        line = _encoder.encode(event) + b"\n"
        assert len(line) <= MAX_EVENT_BYTES, f"a progress event of {len(line)} bytes, at most {MAX_EVENT_BYTES} are written at once"
        if self._fd is None:
            return
        try:
            os.write(self._fd, line)
        except OSError:  # the reader is gone; whether that ends this process is not decided here
            self._fd = None


def replay(line: bytes, progress: Progress) -> ProgressEvent:
    """Repeat one line of a progress pipe on `progress`, and give the event. Raises msgspec.DecodeError on anything else."""
    event = _decoder.decode(line)
    match event:
        case Stage(name, total):
            progress.stage(name, total)
        case Advance(done, total, detail):
            progress.advance(done, total, detail)
        case Ready(facts):
            progress.ready(**facts)
        case GaveUp(message):
            progress.failed(message)
    return event


class Board(abc.ABC):
    """A place on which several processes' progress and log lines appear together. A context manager: open inside; any thread may call."""

    @abc.abstractmethod
    def stage(self, who: str, name: str, total: int) -> None: ...

    @abc.abstractmethod
    def advance(self, who: str, done: int, total: int, detail: str) -> None: ...

    @abc.abstractmethod
    def finish(self, who: str, remark: str) -> None:
        """`who` makes no further progress; `remark` says how it ended."""

    @abc.abstractmethod
    def log(self, line: str) -> None:
        """Show a line, without disturbing what else is shown."""

    def open(self) -> None:
        """Begin to show."""
        return None

    def close(self) -> None:
        """What moves disappears; `log` goes on working. Idempotent."""
        return None

    def __enter__(self) -> Board:
        self.open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class LineBoard(Board):
    """Plain lines, for files, pipes and CI: the start of each stage and each quarter of it."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._stages: dict[str, str] = {}
        self._quarters: dict[str, int] = {}
        self._lock = threading.Lock()

    def stage(self, who: str, name: str, total: int) -> None:
        with self._lock:
            self._stages[who], self._quarters[who] = name, 0
            self._write(f"{who}: {name}")

    def advance(self, who: str, done: int, total: int, detail: str) -> None:
        quarter = 4 * done // total if total else 0
        with self._lock:
            if quarter <= self._quarters.get(who, 0):
                return
            self._quarters[who] = quarter
            self._write(f"{who}: {self._stages.get(who, '')} {done}/{total} {detail}".rstrip())

    def finish(self, who: str, remark: str) -> None:
        self.log(f"{who}: {remark}")

    def log(self, line: str) -> None:
        with self._lock:
            self._write(line)

    def _write(self, line: str) -> None:
        try:
            self._stream.write(line + "\n")
            self._stream.flush()
        except (BrokenPipeError, ValueError):  # nobody reads any more; progress must not end a server
            return


class BarBoard(Board):
    """One bar for each process, at the bottom of a terminal; log lines scroll by above. The bars vanish at the end."""

    def __init__(self, console: Console):
        self._bars = Bars(
            TextColumn("{task.description:<12}"),
            TextColumn("{task.fields[stage]:<10}"),
            BarColumn(bar_width=32),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("[dim]{task.fields[detail]}"),
            console=console,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._tasks: dict[str, TaskID] = {}

    def stage(self, who: str, name: str, total: int) -> None:
        self._bars.reset(self._task(who), total=total or None, stage=name, detail="")

    def advance(self, who: str, done: int, total: int, detail: str) -> None:
        self._bars.update(self._task(who), completed=done, total=total or None, detail=detail)

    def finish(self, who: str, remark: str) -> None:
        self._bars.update(self._task(who), stage=remark, detail="", completed=1, total=1)

    def log(self, line: str) -> None:
        self._bars.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _task(self, who: str) -> TaskID:
        if who not in self._tasks:
            self._tasks[who] = self._bars.add_task(who, total=None, stage="starting", detail="")
        return self._tasks[who]

    def open(self) -> None:
        self._bars.start()

    def close(self) -> None:
        self._bars.stop()


def make_board(stream: TextIO) -> Board:
    """Bars where `stream` is a terminal, plain lines otherwise."""
    return BarBoard(Console(file=stream)) if stream.isatty() else LineBoard(stream)


class TerminalProgress(Progress):
    """One process's progress on a board, under the name `who`. Whoever made the board opens and closes it."""

    def __init__(self, who: str, board: Board):
        self._who = who
        self._board = board

    def stage(self, name: str, total: int) -> None:
        self._board.stage(self._who, name, total)

    def advance(self, done: int, total: int, detail: str = "") -> None:
        self._board.advance(self._who, done, total, detail)

    def ready(self, **facts: str) -> None:
        self._board.finish(self._who, "ready")

    def failed(self, message: str) -> None:
        self._board.finish(self._who, "failed")
        self._board.log(f"{self._who}: {message}")


class ForegroundProgress(Progress):
    """The progress of a process that was started by hand: shown on a board of its own until it is ready, then told on `out`."""

    def __init__(self, who: str, board: Board, out: TextIO):
        self._terminal = TerminalProgress(who, board)
        self._who = who
        self._board = board
        self._out = out

    def stage(self, name: str, total: int) -> None:
        self._terminal.stage(name, total)

    def advance(self, done: int, total: int, detail: str = "") -> None:
        self._terminal.advance(done, total, detail)

    def ready(self, **facts: str) -> None:
        self._board.close()
        told = ", ".join(f"{name} {value}" for name, value in facts.items())
        print(f"{self._who} ready: {told}", file=self._out, flush=True)

    def failed(self, message: str) -> None:
        self._board.close()
        self._board.log(f"error: {message}")
