"""KV between chips of one TPU slice by a program of our own: `pdjax.kernels.ici_push`.

A chunk's parts lie on the prefill chips, one each. Both ends run one program, so decode chips bring arguments too: arrays that nobody
reads, made once.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from pdjax.kernels.ici_push import CHIP, END, push, push_mesh, why_no_push
from pdjax.transfer.device_put import DevicePutMover
from pdjax.transfer.in_process import Mover

log = logging.getLogger(__name__)


def mover_between(prefill: Sharding, decode: Sharding, page: tuple[int, ...]) -> Mover:
    """The best way for chunks [n, *page] that lie as `prefill` says to where `decode` says. Logs which, and why."""
    pairs = paired(prefill, decode, page)
    reason = "their chunks are split differently" if pairs is None else why_no_push(*zip(*pairs, strict=True))
    if pairs is None or reason is not None:
        log.info("KV moves by device_put: %s", reason)
        return DevicePutMover(decode)
    log.info("KV moves by remote DMA between the chips of one slice")
    return PushMover(pairs, decode)


def paired(prefill: Sharding, decode: Sharding, page: tuple[int, ...]) -> list[tuple[jax.Device, jax.Device]] | None:
    """Each decode device with a prefill device that holds what it needs, each once; None where they are split differently."""
    sources, targets = _holders(prefill, page), _holders(decode, page)
    if [part for part, _, _ in sources] != [part for part, _, _ in targets]:
        return None
    return [(source, target) for (_, _, source), (_, _, target) in zip(sources, targets, strict=True)]


def _holders(sharding: Sharding, page: tuple[int, ...]) -> list[tuple[list[tuple[int, int]], int, jax.Device]]:
    """(part of a page, id, device) in order. A part is a range of each axis."""
    places = sharding.devices_indices_map((1, *page))
    return sorted(
        ([index.indices(size)[:2] for index, size in zip(indices, (1, *page), strict=True)], device.id, device)
        for device, indices in places.items()
    )


class PushMover(Mover):
    """Launches one program on all chips of both ends. Any thread may call; pushes are launched one at a time, in one order on every chip.

    Compiles at the first chunk of each form. `interpret`: what the TPU interpreter takes, on any device.
    """

    def __init__(self, pairs: Sequence[tuple[jax.Device, jax.Device]], decode: Sharding, interpret: Any = False) -> None:
        """`pairs`: from `paired`; `decode`: how chunks lie on the decode devices."""
        self._sources, self._targets = zip(*pairs, strict=True)
        self._decode = decode
        self._mesh = push_mesh(self._sources, self._targets)
        self._sharding = NamedSharding(self._mesh, PartitionSpec((END, CHIP)))
        self._idle: dict[tuple[tuple[int, ...], np.dtype], list[jax.Array]] = {}  # by form of a part: what decode chips bring
        self._launching = threading.Lock()
        self._push = jax.jit(functools.partial(push, mesh=self._mesh, interpret=interpret))

    def start(self, kv: jax.Array) -> jax.Array:
        parts = {shard.device: shard.data for shard in kv.addressable_shards}
        sent = [parts[source] for source in self._sources]
        rows = 2 * len(sent) * len(kv)
        with self._launching:
            arrays = [*sent, *self._idle_like(sent[0])]
            chunks = jax.make_array_from_single_device_arrays((rows, *sent[0].shape[1:]), self._sharding, arrays)
            arrived = {shard.device: shard.data for shard in self._push(chunks).addressable_shards}
        return jax.make_array_from_single_device_arrays(kv.shape, self._decode, [arrived[target] for target in self._targets])

    def wait(self, moved: jax.Array) -> None:
        jax.block_until_ready(moved)

    def _idle_like(self, part: jax.Array) -> list[jax.Array]:
        form = (part.shape, part.dtype)
        if form not in self._idle:
            self._idle[form] = [jax.device_put(np.zeros(part.shape, part.dtype), target) for target in self._targets]
        return self._idle[form]
