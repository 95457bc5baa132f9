"""Which JAX devices engines run on.

The devices of a worker process form a grid of two axes: "data", its ranks, each of which computes sequences of its own; and "model", the
devices of a rank, which share every layer (`pdjax.engine.mesh`).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence

import jax

logger = logging.getLogger(__name__)


def spans_of_ranks(first: int, number: int, width: int) -> list[range]:
    """Which devices each of `number` ranks of `width` has, side by side from index `first` on."""
    return [range(first + rank * width, first + (rank + 1) * width) for rank in range(number)]


def devices_of_ranks(number: int, width: int) -> list[list[jax.Device]]:
    """The devices of a worker process, [data, model]. Raises ValueError where JAX has fewer; logs that it has more."""
    needed = number * width
    _make_cpu_devices(needed)
    devices = jax.devices()
    if needed > len(devices):
        raise ValueError(f"data_parallel {number} with tensor_parallel {width} takes {needed} devices, JAX has {len(devices)}: {devices}")
    if needed < len(devices) and devices[0].platform != "cpu":
        logger.warning(
            "data_parallel %d with tensor_parallel %d leaves %d of %d devices idle", number, width, len(devices) - needed, len(devices)
        )
    return [[devices[index] for index in span] for span in spans_of_ranks(0, number, width)]


def devices_in(spans: Sequence[range]) -> list[list[jax.Device]]:
    """JAX's devices of each span of indices. On a CPU as many virtual ones are made as are asked for, if JAX has not been used before.

    Raises ValueError where there are not so many, or where two spans overlap without being the same.
    """
    for one, other in ((one, other) for i, one in enumerate(spans) for other in spans[:i]):
        if one != other and set(one) & set(other):
            raise ValueError(f"devices {list(other)} and {list(one)} overlap: two engines share all their devices or none")
    needed = max(span.stop for span in spans)
    _make_cpu_devices(needed)
    devices = jax.devices()
    if needed > len(devices):
        raise ValueError(f"device {needed - 1} was asked for, JAX has {len(devices)}: {devices}")
    return [[devices[index] for index in span] for span in spans]


def _make_cpu_devices(needed: int) -> None:
    with contextlib.suppress(RuntimeError):
        if needed > jax.config.jax_num_cpu_devices:
            jax.config.update("jax_num_cpu_devices", needed)
