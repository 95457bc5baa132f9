"""The work list of a step on a GPU: query tiles, one block of threads each (and for each KV head).

    rows of the step     | sequence 0        | sequence 1 | sequence 2 (decoding) |
    tiles of 4 rows      | 0 . . . | 1 . - - | 2 . . .    | 3 - - -               |

A tile holds consecutive rows of one sequence, so that its keys are those of one page table. At most one tile of a sequence is not
full, which bounds their number; tiles that are left over have no rows.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pdjax.kernels.base import DecodeBatch, PrefillBatch


class Tiles(NamedTuple):
    """Tile i computes the rows `rows[i] ..` whose positions are `positions[i] .. ends[i] - 1`; none where the two are equal."""

    rows: jax.Array  # int32[tiles]: first row
    positions: jax.Array  # int32[tiles]: its position
    ends: jax.Array  # int32[tiles]: positions of the sequence that the tile may read
    sequences: jax.Array  # int32[tiles]


def prefill_tiles(batch: PrefillBatch, tile_rows: int) -> Tiles:
    """Tiles of up to `tile_rows` rows, those with most keys first, so that none of the long ones starts when the others end."""
    num_sequences = batch.lengths.shape[0]
    per_sequence = -(-batch.lengths // tile_rows)
    last_tile = jnp.cumsum(per_sequence)
    tile = jnp.arange(len(batch.pages) // tile_rows + num_sequences, dtype=jnp.int32)
    sequence = jnp.searchsorted(last_tile, tile, side="right", method="compare_all").astype(jnp.int32)
    is_used = sequence < num_sequences
    sequence = jnp.minimum(sequence, num_sequences - 1)
    offset = (tile - last_tile[sequence] + per_sequence[sequence]) * tile_rows
    positions = batch.starts[sequence] + offset
    ends = jnp.minimum(positions + tile_rows, batch.starts[sequence] + batch.lengths[sequence])
    tiles = Tiles(batch.first_rows[sequence] + offset, positions, ends, sequence)
    used = Tiles(*(jnp.where(is_used, values, 0) for values in tiles))
    order = jnp.argsort(-used.ends)
    return Tiles(*(values[order] for values in used))


def decode_tiles(batch: DecodeBatch) -> Tiles:
    """A tile a sequence."""
    rows = jnp.arange(len(batch.visible), dtype=jnp.int32)
    return Tiles(rows, batch.visible - 1, batch.visible, rows)
