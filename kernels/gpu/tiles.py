"""The work list of a step on a GPU: query tiles, one block of threads each (and for each KV head)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pdjax.kernels.base import DecodeBatch, PrefillBatch
from pdjax.kernels.tiles import cut_rows


class Tiles(NamedTuple):
    """Tile i computes the rows `rows[i] ..` whose positions are `positions[i] .. ends[i] - 1`; none where the two are equal."""

    rows: jax.Array  # int32[tiles]: first row
    positions: jax.Array  # int32[tiles]: its position
    ends: jax.Array  # int32[tiles]: positions of the sequence that the tile may read
    sequences: jax.Array  # int32[tiles]


def prefill_tiles(batch: PrefillBatch, tile_rows: int) -> Tiles:
    """Tiles of up to `tile_rows` rows, those with most keys first, so that none of the long ones starts when the others end. Those that are
    left over have no rows."""
    count, *found = cut_rows(batch, tile_rows, -(-batch.lengths // tile_rows))
    is_used = jnp.arange(len(found[0]), dtype=jnp.int32) < count
    used = Tiles(*(jnp.where(is_used, values, 0) for values in found))
    order = jnp.argsort(-used.ends)
    return Tiles(*(values[order] for values in used))


def decode_tiles(batch: DecodeBatch) -> Tiles:
    """A tile a sequence."""
    rows = jnp.arange(len(batch.visible), dtype=jnp.int32)
    return Tiles(rows, batch.visible - 1, batch.visible, rows)
