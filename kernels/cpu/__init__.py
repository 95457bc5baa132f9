"""Kernels for CPUs, compiled by numba and called by XLA through its foreign function interface. They need the extra `cpu`.

attention          `CpuAttention`, chosen by `pdjax.kernels.dispatch`
decode_attention   its kernel
product            a weight of narrow numbers times few columns
calls, numbers     what kernels are made of
"""

from __future__ import annotations

import functools
from importlib.util import find_spec


@functools.cache
def is_installed() -> bool:
    """Whether there is a compiler for these kernels. Without it decode runs in XLA, at about half the speed."""
    return find_spec("numba") is not None
