"""One worker over several processes, each with chips of its own: host 0 leads, the others follow.

All of them run the same programs in the same order, which is all that JAX asks for. Host 0 alone schedules, serves and moves KV; its engine
is a `LeaderEngine`, which passes each call on before it makes it. What a follower's chips have computed nobody reads there: the results of
steps, and gathered pages, are whole on the chips of host 0 as well.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from pdjax.engine.base import StepEngine
from pdjax.engine.batch import DecodeSeq, PrefillSeq, StepOutput
from pdjax.engine.engine import StepHandle
from pdjax.observe.progress import Progress
from pdjax.worker.hosts_link import (
    Frame,
    Gather,
    HostLink,
    HostLost,
    Install,
    LaunchDecode,
    LaunchPrefill,
    Message,
    Ready,
    SetHistory,
    Stop,
)

logger = logging.getLogger(__name__)

START_S = 3600.0
"""Longest time between the meeting of all hosts and the last one's `Ready`: large models take long to load and to compile."""

STOP_S = 10.0

MAX_UNREAD_STEPS = 64
"""Steps that a follower has launched and not seen finished. Host 0 has two in flight; a follower's chips may lag behind a little."""


class LeaderEngine(StepEngine):
    """Host 0's engine together with those of the other hosts. Passes calls on first, so that all chips start at the same time."""

    def __init__(self, engine: StepEngine, links: Sequence[HostLink]):
        self._engine = engine
        self._links = links

    def await_hosts(self) -> None:
        """Wait until every other host is ready. Raises HostLost where one takes too long."""
        for link in self._links:
            try:
                frame = link.receive(START_S)
            except queue.Empty:
                raise HostLost(f"{link.name} was not ready after {START_S:g} s") from None
            if not isinstance(frame.message, Ready):
                raise HostLost(f"{link.name} sent {frame.message} before it was ready")

    def stop_hosts(self) -> None:
        """The other hosts end in order, too; those that do not are logged. The engine is used no more."""
        for link in self._links:
            if not link.stop(STOP_S):
                logger.warning("%s did not stop within %g s", link.name, STOP_S)

    def launch_prefill(self, seqs: Sequence[PrefillSeq]) -> StepHandle:
        self._tell(LaunchPrefill(list(seqs)))
        return self._engine.launch_prefill(seqs)

    def launch_decode(self, seqs: Sequence[DecodeSeq]) -> StepHandle:
        self._tell(LaunchDecode(list(seqs)))
        return self._engine.launch_decode(seqs)

    def read(self, handle: StepHandle) -> StepOutput:
        return self._engine.read(handle)

    def set_history(self, slot: int, prompt: list[int], output: list[int]) -> None:
        self._tell(SetHistory(slot, prompt, output))
        self._engine.set_history(slot, prompt, output)

    def gather(self, pages: list[int]) -> jax.Array:
        self._tell(Gather(pages))
        return self._engine.gather(pages)

    def install(self, pages: list[int], kv: jax.Array | np.ndarray) -> None:
        rows = np.ascontiguousarray(np.asarray(kv)[: len(pages)])
        payload = memoryview(rows.reshape(-1).view(np.uint8))
        self._tell(Install(pages, rows.shape, str(rows.dtype)), payload)
        self._engine.install(pages, rows)

    def put(self, kv: np.ndarray) -> np.ndarray:
        """A received chunk stays on the host until it is installed: only then do all hosts know of it."""
        return kv

    def compilations_after_warm_up(self) -> int:
        return self._engine.compilations_after_warm_up()

    def kv_scales_digest(self) -> str:
        return self._engine.kv_scales_digest()

    def _tell(self, message: Message, payload: memoryview | None = None) -> None:
        for link in self._links:
            link.send(message, payload)


def follow(engine: StepEngine, link: HostLink, end: Callable[[str], None]) -> None:
    """Do what host 0 does, until it stops in order. `end` is called, from another thread, where a step fails on this host's chips."""
    steps = _Steps(engine.read, lambda error: end(f"a step failed on this host: {error!r}"))
    link.send(Ready())
    while not isinstance((frame := link.receive()).message, Stop):
        _apply(engine, frame, steps)
    steps.close()


def _apply(engine: StepEngine, frame: Frame, steps: _Steps) -> None:
    match frame.message:
        case LaunchPrefill(seqs):
            steps.put(engine.launch_prefill(seqs))
        case LaunchDecode(seqs):
            steps.put(engine.launch_decode(seqs))
        case SetHistory(slot, prompt, output):
            engine.set_history(slot, prompt, output)
        case Gather(pages):
            engine.gather(pages)
        case Install(pages, shape, dtype):
            engine.install(pages, frame.payload.view(jnp.dtype(dtype)).reshape(shape))
        case other:
            raise HostLost(f"host 0 sent {type(other).__name__}, which is no command")


class _Steps:
    """A thread that waits for a follower's steps, so that their errors do not go unseen."""

    def __init__(self, read: Callable[[StepHandle], StepOutput], failed: Callable[[Exception], None]):
        self._read = read
        self._failed = failed
        self._handles: queue.Queue[StepHandle | None] = queue.Queue(MAX_UNREAD_STEPS)
        self._thread = threading.Thread(target=self._run, name="follower-steps", daemon=True)
        self._thread.start()

    def put(self, handle: StepHandle) -> None:
        self._handles.put(handle)

    def close(self) -> None:
        """Host 0 has read every step: those here are done, or about to be."""
        self._handles.put(None)
        self._thread.join(STOP_S)

    def _run(self) -> None:
        while (handle := self._handles.get()) is not None:
            try:
                self._read(handle)
            except Exception as error:  # whatever the device reports
                self._failed(error)
                return


@contextlib.contextmanager
def telling_failures(links: Sequence[HostLink]) -> Iterator[None]:
    """Whatever is raised inside is told to the other hosts before it goes on."""
    try:
        yield
    except BaseException as error:
        for link in links:
            link.give_up(str(error) or repr(error))
        raise


def end_now(progress: Progress) -> Callable[[str], None]:
    """What ends this process when another host is gone.

    Its chips may wait for ever for those of the other host, and every thread for them, so nothing is stopped in order. Connections to
    others break, which tells them at once.
    """

    def end(message: str) -> None:
        progress.failed(message)
        logging.shutdown()
        os._exit(1)

    return end
