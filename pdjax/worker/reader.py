"""Waits for steps in flight, so that the engine loop never blocks on the device."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from pdjax.engine.batch import StepOutput
from pdjax.engine.engine import StepHandle
from pdjax.scheduler.chunks import PrefillPart
from pdjax.scheduler.decode_states import DecodePart
from pdjax.transfer.base import Wake


class PrefillStep(NamedTuple):
    parts: list[PrefillPart]


class DecodeStep(NamedTuple):
    parts: list[DecodePart]


Step = PrefillStep | DecodeStep


class StepReader:
    """A thread that reads the results of launched steps in order and wakes the loop for each.

    An exception of the device comes out of `take` in the engine loop. The loop bounds the number of steps in flight.
    """

    def __init__(self, read: Callable[[StepHandle], StepOutput], wake: Wake, name: str):
        self._read = read
        self._wake = wake
        self._launched: queue.SimpleQueue[tuple[Step, StepHandle] | None] = queue.SimpleQueue()
        self._finished: deque[tuple[Step, StepOutput | Exception]] = deque()
        self.num_in_flight = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, step: Step, handle: StepHandle) -> None:
        self.num_in_flight += 1
        self._launched.put((step, handle))

    def take(self) -> list[tuple[Step, StepOutput]]:
        """Steps that have finished since the last call. Raises what the device raised."""
        finished = []
        while self._finished:
            step, output = self._finished.popleft()
            self.num_in_flight -= 1
            if isinstance(output, Exception):
                raise output
            finished.append((step, output))
        return finished

    def close(self) -> None:
        self._launched.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (entry := self._launched.get()) is not None:
            step, handle = entry
            try:
                self._finished.append((step, self._read(handle)))
            except Exception as error:  # handed to the engine loop, which ends the worker in order
                self._finished.append((step, error))
            self._wake()
