"""KV between disjoint devices of one process by `jax.device_put`: device to device (ICI on TPU), no host copy.

Whole arrays move, padding rows included: cutting them off would compile a program for every number of pages.
"""

from __future__ import annotations

import jax
from jax.sharding import Sharding

from pdjax.transfer.in_process import Mover


class DevicePutMover(Mover):
    """Copies to `decode_sharding`. `jax.device_put` only starts the copy."""

    def __init__(self, decode_sharding: Sharding) -> None:
        self._decode_sharding = decode_sharding

    def start(self, kv: jax.Array) -> jax.Array:
        return jax.device_put(kv, self._decode_sharding)

    def wait(self, moved: jax.Array) -> None:
        # An array whose computation failed reports `is_ready` too; only waiting for it raises.
        jax.block_until_ready(moved)
