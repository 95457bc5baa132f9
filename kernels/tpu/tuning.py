"""Block sizes of the TPU kernels, by chip, head_dim and dtype of the pool. `docs/kernels.md` has the figures of every entry."""

from __future__ import annotations

import logging
from typing import NamedTuple

import jax.numpy as jnp

_logger = logging.getLogger(__name__)


class PrefillTuning(NamedTuple):
    tile_rows: int = 128  # token rows of a tile
    block_tokens: int = 512  # positions of a block
    vmem_limit_bytes: int = 100 << 20


class DecodeTuning(NamedTuple):
    block_tokens: int = 512
    vmem_limit_bytes: int = 48 << 20


class Tunings(NamedTuple):
    prefill: PrefillTuning = PrefillTuning()
    decode: DecodeTuning = DecodeTuning()


class _Entry(NamedTuple):
    tile_queries: int  # query rows of a tile, all heads of a chip together
    block_tokens: int
    decode_block_tokens: int


_MIN_TILE_ROWS, _MAX_TILE_ROWS = 128, 512
"""Tiles are whole registers of rows, 128 lanes."""
_DEFAULT = _Entry(4096, 512, 512)
_VMEM_LIMITS = {"v5e": 100 << 20, "v5p": 56 << 20, "v6e": 100 << 20, "7x": 56 << 20}

_WIDE_HEADS = _Entry(4096, 256, 512)  # blocks of 512 spill
_DTYPES = ("float32", "bfloat16", "int8", "float8_e4m3fn")

_ENTRIES: dict[tuple[str, int, str], _Entry] = {
    (chip, head_dim, dtype): entry
    for chip in _VMEM_LIMITS
    for head_dim, entry in ((64, _DEFAULT), (128, _DEFAULT), (256, _WIDE_HEADS))
    for dtype in _DTYPES
} | {(chip, 64, "float32"): _Entry(4096, 256, 512) for chip in ("v6e", "7x")}  # blocks of 512 take more VMEM than the kernel asks for
"""By chip, head_dim (64 stands for all below 128) and dtype of the pool."""


def tunings_for(chip: str, head_dim: int, dtype: jnp.dtype, num_heads: int) -> Tunings:
    """Block sizes for `num_heads` query heads a chip on `chip` ("v6e", ...; `str` of `pltpu.get_tpu_info().chip_version`).

    A pool of which the table knows nothing gets the default, with a warning that names the key.
    """
    key = (chip, 64 if head_dim < 128 else head_dim, jnp.dtype(dtype).name)
    if key not in _ENTRIES:
        _logger.warning("no tuning for (chip, head_dim, dtype) = %s; default block sizes %s", key, _DEFAULT)
    entry = _ENTRIES.get(key, _DEFAULT)
    limit = _VMEM_LIMITS.get(chip, min(_VMEM_LIMITS.values()))
    rows = 1 << max(entry.tile_queries // num_heads, 1).bit_length() - 1
    too_many = max(_MIN_TILE_ROWS // rows, 1)  # the scores of a block take the same room then
    prefill = PrefillTuning(min(max(rows, _MIN_TILE_ROWS), _MAX_TILE_ROWS), max(entry.block_tokens // too_many, 128), limit)
    return Tunings(prefill, DecodeTuning(entry.decode_block_tokens, limit))
