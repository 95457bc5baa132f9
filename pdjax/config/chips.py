"""Accelerators that a configuration can name, and how much memory programs get on one chip."""

from __future__ import annotations

from typing import Literal, NamedTuple

_TPU_SHARE = 0.95
"""The runtime keeps about a twentieth for itself and for what it loads."""

_GPU_SHARE = 0.75
"""What JAX takes of a GPU at start, unless the environment variable XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise."""


_TPU_LANES = 128


class ChipMemory(NamedTuple):
    """`memory_gib`: on the chip. `share`: of it, what programs get. `lanes`: a row of an array takes a multiple of so many numbers."""

    memory_gib: float
    share: float
    lanes: int = 1

    @property
    def usable_bytes(self) -> int:
        return int(self.memory_gib * self.share * 2**30)


ChipName = Literal["v4", "v5e", "v5p", "v6e", "a100-40gb", "a100-80gb", "h100", "h200"]

CHIPS: dict[ChipName, ChipMemory] = {
    "v4": ChipMemory(32, _TPU_SHARE, _TPU_LANES),
    "v5e": ChipMemory(16, _TPU_SHARE, _TPU_LANES),
    "v5p": ChipMemory(95, _TPU_SHARE, _TPU_LANES),
    "v6e": ChipMemory(32, _TPU_SHARE, _TPU_LANES),
    "a100-40gb": ChipMemory(39.4, _GPU_SHARE),
    "a100-80gb": ChipMemory(79.1, _GPU_SHARE),
    "h100": ChipMemory(79.1, _GPU_SHARE),
    "h200": ChipMemory(139.8, _GPU_SHARE),
}
