"""Compiled programs: ahead of time, counted, and kept on disk between runs."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
"""JAX reports it for every program that it compiles or fetches from the persistent cache, in the thread that asked for it."""

Report = Callable[[int, int, str], None]
"""Progress: (programs done, programs in all, name of the one at work)."""


class Programs(enum.Flag):
    """Groups of programs that a worker needs compiled before it is ready. Samplers come with PREFILL and DECODE."""

    PREFILL = enum.auto()
    DECODE = enum.auto()
    GATHER = enum.auto()
    INSTALL = enum.auto()


ALL_PROGRAMS = ~Programs(0)
PREFILL_WORKER = Programs.PREFILL | Programs.GATHER
DECODE_WORKER = Programs.PREFILL | Programs.DECODE | Programs.GATHER | Programs.INSTALL
"""A decode worker also computes prompts, when no prefill worker can."""


class ProgramKey(NamedTuple):
    """`size`: the bucket that the program is compiled for."""

    name: str
    size: int

    def __str__(self) -> str:
        return f"{self.name}[{self.size}]"


class CompileCounter:
    """Counts the compilations that happen inside `attributed()`, of whatever program, in the thread that entered it."""

    def __init__(self) -> None:
        self.count = 0

    @contextmanager
    def attributed(self) -> Iterator[None]:
        _listen_once()
        outer, _current.counter = _current.counter, self
        try:
            yield
        finally:
            _current.counter = outer


class _Current(threading.local):
    counter: CompileCounter | None = None


_current = _Current()
_listen_lock = threading.Lock()
_is_listening = False


def _listen_once() -> None:
    """JAX's listeners cannot be removed one by one, so there is one for the process."""
    global _is_listening
    with _listen_lock:
        if not _is_listening:
            jax.monitoring.register_event_duration_secs_listener(_on_event)
            _is_listening = True


def _on_event(event: str, duration_s: float, **_: Any) -> None:
    if event == _COMPILE_EVENT and _current.counter is not None:
        _current.counter.count += 1


class ProgramTable:
    """Programs by key: described at construction, compiled on warm-up, or at first use if that comes sooner."""

    def __init__(self, lowered: dict[ProgramKey, Callable[[], jax.stages.Lowered]]):
        """`lowered`: for each key what traces the program with its argument shapes."""
        self._lowered = lowered
        self._compiled: dict[ProgramKey, jax.stages.Compiled] = {}

    def __getitem__(self, key: ProgramKey) -> jax.stages.Compiled:
        if key not in self._compiled:
            self._compiled[key] = self._lowered[key]().compile()
        return self._compiled[key]

    def compiled(self) -> dict[ProgramKey, jax.stages.Compiled]:
        return dict(self._compiled)

    def compile_all(self, keys: list[ProgramKey], report: Report) -> None:
        for done, key in enumerate(keys):
            report(done, len(keys), str(key))
            self[key]
        report(len(keys), len(keys), "")


def enable_compile_cache(folder: str) -> None:
    """Keep every compiled program in `folder` (`~` is expanded), for all engines of the process. Call it before the first compilation."""
    path = Path(folder).expanduser()
    path.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
