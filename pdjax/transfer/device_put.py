"""KV between disjoint devices of one process by `jax.device_put`: device to device (ICI on TPU), no host copy.

Whole arrays move, padding rows included: cutting them off would compile a program for every number of pages.
"""

from __future__ import annotations

from collections.abc import Callable

import jax

from pdjax.protocol import Layout, Peer
from pdjax.transfer.base import TransferLimits, Wake
from pdjax.transfer.in_process import InProcessSink, InProcessSource, Mover, Registry


class DevicePutMover(Mover):
    """`to_decode` is `jax.device_put` to the decode worker's sharding: it only starts the copy."""

    def __init__(self, to_decode: Callable[[jax.Array], jax.Array]) -> None:
        self._to_decode = to_decode

    def start(self, kv: jax.Array) -> jax.Array:
        return self._to_decode(kv)

    def wait(self, moved: jax.Array) -> None:
        # An array whose computation failed reports `is_ready` too; only waiting for it raises.
        jax.block_until_ready(moved)


class DevicePutLink:
    """Both ends for one prefill and one decode worker. More workers share a `Registry` of their own."""

    def __init__(
        self,
        layout: Layout,
        prefill: Peer,
        decode: Peer,
        to_decode: Callable[[jax.Array], jax.Array],
        limits: TransferLimits = TransferLimits(),
    ) -> None:
        self._registry = Registry()
        self._layout = layout
        self._prefill = prefill
        self._decode = decode
        self._mover = DevicePutMover(to_decode)
        self._limits = limits

    def source(self, wake: Wake) -> InProcessSource:
        """Prefill's end; once."""
        return InProcessSource(self._registry, self._layout, self._prefill, wake, self._limits)

    def sink(self, wake: Wake) -> InProcessSink:
        """Decode's end; once."""
        return InProcessSink(self._registry, self._layout, self._decode, self._mover, wake, self._limits)
