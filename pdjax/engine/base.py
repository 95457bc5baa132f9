"""What a worker asks of its engine, whether that runs on the chips of this process or of several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import jax
import numpy as np

from pdjax.engine.batch import DecodeSeq, PrefillSeq, StepOutput
from pdjax.engine.engine import StepHandle


class StepEngine(Protocol):
    """Called from the worker's engine loop only, but for `read`, in which another thread may wait, and `put`, which any thread may call.
    Programs run in the order in which they were launched. See `Engine` for each method."""

    def launch_prefill(self, seqs: Sequence[PrefillSeq]) -> StepHandle: ...

    def launch_decode(self, seqs: Sequence[DecodeSeq]) -> StepHandle: ...

    def read(self, handle: StepHandle) -> StepOutput: ...

    def set_history(self, slot: int, prompt: list[int], output: list[int]) -> None: ...

    def gather(self, pages: list[int]) -> jax.Array: ...

    def install(self, pages: list[int], kv: jax.Array | np.ndarray) -> None: ...

    def put(self, kv: np.ndarray) -> jax.Array | np.ndarray: ...

    def compilations_after_warm_up(self) -> int: ...

    def kv_scales_digest(self) -> str: ...
