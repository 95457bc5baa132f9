"""Sizes of the Triton kernel by chip, bytes of an operand and head dimension; found by compiling, not by timing.

Each entry is the largest tile that `scripts/kernel_report` saw compile without a spilled register, at 32 query heads over 8 KV heads:
more matrix rows read each key less often, more keys a block pay less for a trip of the loop, and where both left a choice the one
whose asynchronous matrix products ptxas does not serialize. What is fastest on a chip nobody has measured yet.
"""

from __future__ import annotations

import enum
import functools
import logging

import jax.numpy as jnp

from pdjax.kernels.gpu.triton_attention import MIN_MATRIX_ROWS, Tuning, operand_dtype

log = logging.getLogger(__name__)


class Chip(enum.Enum):
    """Generations that differ in what kernels can use. Consumer chips of a generation have its instructions and less shared memory."""

    SM_80 = "sm_80"
    SM_90 = "sm_90"
    SM_100 = "sm_100"

    @property
    def converts_fp8(self) -> bool:
        """Whether it has an instruction that widens float8_e4m3fn."""
        return self is not Chip.SM_80


_BY_CAPABILITY = {"8.0": Chip.SM_80, "9.0": Chip.SM_90, "10.0": Chip.SM_100}

_PREFILL = {
    (Chip.SM_80, 2, 64): Tuning(128, 64, 8, 3),
    (Chip.SM_80, 2, 80): Tuning(128, 32, 8, 3),
    (Chip.SM_80, 2, 96): Tuning(128, 32, 8, 3),
    (Chip.SM_80, 2, 128): Tuning(128, 32, 8, 3),
    (Chip.SM_80, 2, 256): Tuning(64, 32, 8, 2),
    (Chip.SM_80, 4, 64): Tuning(32, 32, 4, 2),
    (Chip.SM_80, 4, 80): Tuning(32, 16, 4, 2),
    (Chip.SM_80, 4, 96): Tuning(32, 16, 4, 2),
    (Chip.SM_80, 4, 128): Tuning(32, 32, 8, 2),
    (Chip.SM_80, 4, 256): Tuning(16, 32, 8, 2),
    (Chip.SM_90, 2, 64): Tuning(128, 128, 8, 2),
    (Chip.SM_90, 2, 80): Tuning(128, 64, 8, 3),
    (Chip.SM_90, 2, 96): Tuning(128, 64, 8, 3),
    (Chip.SM_90, 2, 128): Tuning(128, 128, 8, 2),
    (Chip.SM_90, 2, 256): Tuning(128, 32, 8, 2),
    (Chip.SM_90, 4, 64): Tuning(64, 32, 4, 2),
    (Chip.SM_90, 4, 80): Tuning(64, 32, 4, 2),
    (Chip.SM_90, 4, 96): Tuning(64, 32, 4, 2),
    (Chip.SM_90, 4, 128): Tuning(32, 32, 8, 2),
    (Chip.SM_90, 4, 256): Tuning(16, 32, 8, 2),
    (Chip.SM_100, 2, 64): Tuning(128, 64, 8, 3),
    (Chip.SM_100, 2, 80): Tuning(128, 64, 8, 3),
    (Chip.SM_100, 2, 96): Tuning(128, 64, 8, 3),
    (Chip.SM_100, 2, 128): Tuning(128, 64, 8, 3),
    (Chip.SM_100, 2, 256): Tuning(128, 32, 8, 2),
    (Chip.SM_100, 4, 64): Tuning(64, 32, 4, 2),
    (Chip.SM_100, 4, 80): Tuning(64, 32, 8, 2),
    (Chip.SM_100, 4, 96): Tuning(64, 32, 8, 2),
    (Chip.SM_100, 4, 128): Tuning(32, 32, 8, 2),
    (Chip.SM_100, 4, 256): Tuning(16, 32, 8, 2),
}
_DECODE = {
    # One tile row fills 16 matrix rows at most groups: the generations do not differ.
    (2, 64): Tuning(16, 64, 4, 3),
    (2, 80): Tuning(16, 32, 4, 3),
    (2, 96): Tuning(16, 64, 4, 3),
    (2, 128): Tuning(16, 64, 4, 3),
    (2, 256): Tuning(16, 32, 4, 3),
    (4, 64): Tuning(16, 32, 4, 2),
    (4, 80): Tuning(16, 16, 4, 2),
    (4, 96): Tuning(16, 32, 4, 2),
    (4, 128): Tuning(16, 32, 4, 2),
    (4, 256): Tuning(16, 16, 8, 2),
}
_WINDOWED = {
    # A window brings a third loop and more masks; where the sizes above spill with it, or with it and a soft cap:
    (Chip.SM_80, 2, 128): Tuning(128, 32, 8, 2),
    (Chip.SM_90, 2, 128): Tuning(128, 64, 8, 3),
    (Chip.SM_100, 2, 64): Tuning(128, 32, 8, 3),
}
_QUANTIZED = {
    # Widening one-byte entries takes registers too:
    (Chip.SM_90, 2, 64): Tuning(128, 64, 8, 2),
    (Chip.SM_90, 2, 128): Tuning(128, 64, 8, 2),
    (Chip.SM_100, 2, 96): Tuning(128, 32, 8, 3),
}
_MAX_QUANTIZED_DECODE_KEYS = 32
_HEAD_DIMS = (64, 80, 96, 128, 256)
MAX_HEAD_DIM = _HEAD_DIMS[-1]

_PROGRAMS_TO_FILL = 256
"""Blocks of threads that keep a large GPU (108 to 148 multiprocessors) busy."""
_MAX_SPLITS = 32
_MIN_BLOCKS_A_SPLIT = 4


@functools.cache
def chip_of(compute_capability: str) -> Chip:
    """The entry of the table for a device's `compute_capability`, such as "9.0"; the nearest older one, and a line in the log, else."""
    known = _BY_CAPABILITY.get(compute_capability)
    if known is not None:
        return known
    major = int(compute_capability.split(".")[0])
    # 8.6, 8.9 and 12.x have 99 KiB of shared memory a block, and no wgmma or tcgen05: sizes for 8.0 fit.
    chip = Chip.SM_100 if major == 10 else Chip.SM_80
    log.warning("no attention tuning for compute capability %s: that of %s is used", compute_capability, chip.value)
    return chip


def prefill_tuning(chip: Chip, queries: jnp.dtype, pool: jnp.dtype, head_dim: int, has_window: bool = False) -> Tuning:
    """Sizes for prefill with queries and pool of these dtypes; the smallest where more than one table has some.

    `matrix_rows` does not depend on `has_window`: layers with and without a window share the tiles of a step.
    """
    key = (chip, operand_dtype(queries, pool).itemsize, _listed(head_dim))
    fitting = [_PREFILL[key]]
    if has_window:
        fitting.append(_WINDOWED.get(key, _PREFILL[key]))
    if jnp.dtype(pool).itemsize == 1:
        fitting.append(_QUANTIZED.get(key, _PREFILL[key]))
    return min(fitting, key=lambda tuning: (tuning.matrix_rows * tuning.block_keys, tuning.num_stages))


def decode_tuning(queries: jnp.dtype, pool: jnp.dtype, head_dim: int, group: int) -> Tuning:
    """Sizes for decode: as few matrix rows as hold the `group` query heads of a KV head."""
    tuning = _DECODE[operand_dtype(queries, pool).itemsize, _listed(head_dim)]
    block_keys = tuning.block_keys if jnp.dtype(pool).itemsize > 1 else min(tuning.block_keys, _MAX_QUANTIZED_DECODE_KEYS)
    return tuning._replace(matrix_rows=max(MIN_MATRIX_ROWS, 1 << (group - 1).bit_length()), block_keys=block_keys)


def num_splits(num_programs: int, max_keys: int, block_keys: int) -> int:
    """Into how many runs a sequence's keys are cut: enough to keep the GPU busy, each of some blocks at the longest context.

    Args:
        num_programs: blocks of threads without a cut.
        max_keys: positions that a page table holds.
    """
    longest = max(1, max_keys // (block_keys * _MIN_BLOCKS_A_SPLIT))
    wanted = -(-_PROGRAMS_TO_FILL // num_programs)
    return min(wanted, longest, _MAX_SPLITS)


@functools.cache
def _listed(head_dim: int) -> int:
    """The smallest head dimension of the table that is not less."""
    listed = next(size for size in _HEAD_DIMS if size >= head_dim)
    if listed != head_dim:
        log.warning("no attention tuning for head_dim %d: that of %d is used", head_dim, listed)
    return listed
