"""Which JAX devices an engine runs on."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import jax


def devices_in(spans: Sequence[range]) -> list[list[jax.Device]]:
    """JAX's devices of each span of indices. On a CPU as many virtual ones are made as are asked for, if JAX has not been used before.

    Raises ValueError where there are not so many, or where two spans overlap without being the same.
    """
    for one, other in ((one, other) for i, one in enumerate(spans) for other in spans[:i]):
        if one != other and set(one) & set(other):
            raise ValueError(f"devices {list(other)} and {list(one)} overlap: two engines share all their devices or none")
    needed = max(span.stop for span in spans)
    with contextlib.suppress(RuntimeError):
        if needed > jax.config.jax_num_cpu_devices:
            jax.config.update("jax_num_cpu_devices", needed)
    devices = jax.devices()
    if needed > len(devices):
        raise ValueError(f"device {needed - 1} was asked for, JAX has {len(devices)}: {devices}")
    return [[devices[index] for index in span] for span in spans]
