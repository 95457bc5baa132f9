"""No link: what arrives is zeros of the size that was sent. For benchmarks of everything but the link, and for warm-up."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np

from pdjax.transfer.in_process import Mover


class LoopbackMover(Mover):
    """Gives out one array of zeros a shape, again and again: the receiver must not donate it. As many shapes as the engine has chunk sizes.

    `to_decode` brings a host array to the decode worker's device.
    """

    def __init__(self, to_decode: Callable[[np.ndarray], jax.Array]) -> None:
        self._to_decode = to_decode
        self._zeros: dict[tuple[tuple[int, ...], np.dtype], jax.Array] = {}

    def start(self, kv: jax.Array) -> jax.Array:
        key = (kv.shape, kv.dtype)
        if key not in self._zeros:
            self._zeros[key] = self._to_decode(np.zeros(kv.shape, kv.dtype))
        return self._zeros[key]

    def wait(self, moved: jax.Array) -> None:
        """Nothing is on its way."""
