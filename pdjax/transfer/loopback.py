"""No link: what arrives is zeros of the size that was sent. For benchmarks of everything but the link, and for warm-up."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Sharding

from pdjax.transfer.in_process import Mover


class LoopbackMover(Mover):
    """Gives out one array of zeros for each chunk shape, again and again: the receiver must not donate it."""

    def __init__(self, decode_sharding: Sharding) -> None:
        self._decode_sharding = decode_sharding
        self._zeros: dict[tuple[tuple[int, ...], np.dtype], jax.Array] = {}

    def start(self, kv: jax.Array) -> jax.Array:
        key = (kv.shape, kv.dtype)
        if key not in self._zeros:
            self._zeros[key] = jax.device_put(np.zeros(kv.shape, kv.dtype), self._decode_sharding)
        return self._zeros[key]

    def wait(self, moved: jax.Array) -> None:
        """Nothing is on its way."""
