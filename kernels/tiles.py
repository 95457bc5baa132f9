"""Query tiles: the work list of a prefill step.

    rows of the step     | sequence 0        | sequence 1 | sequence 2 (decoding) |
    tiles of 4 rows      | 0 . . . | 1 . - - | 2 . . .    | 3 - - -               |

A tile holds consecutive rows of one sequence, so that its keys are those of one page table. At most one tile of a sequence is not
full, which bounds their number.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pdjax.kernels.base import PrefillBatch


class Cut(NamedTuple):
    """Tiles in row order, of which the first `count` are in use. Tile i computes the rows `rows[i] ..` at `positions[i] .. ends[i] - 1`."""

    count: jax.Array  # int32 scalar
    rows: jax.Array  # int32[tiles]: first row
    positions: jax.Array  # int32[tiles]: its position
    ends: jax.Array  # int32[tiles]: first position that the tile does not compute
    sequences: jax.Array  # int32[tiles]


def cut_rows(batch: PrefillBatch, tile_rows: int, per_sequence: jax.Array, skipped: jax.Array | int = 0) -> Cut:
    """`per_sequence[s]` tiles of up to `tile_rows` rows of each sequence s, behind its first `skipped[s]` rows."""
    num_sequences = batch.lengths.shape[0]
    last_tile = jnp.cumsum(per_sequence)
    tile = jnp.arange(len(batch.pages) // tile_rows + num_sequences, dtype=jnp.int32)
    sequence = jnp.minimum(jnp.searchsorted(last_tile, tile, side="right", method="compare_all"), num_sequences - 1).astype(jnp.int32)
    skipped = jnp.broadcast_to(jnp.asarray(skipped, jnp.int32), batch.lengths.shape)
    offset = skipped[sequence] + (tile - last_tile[sequence] + per_sequence[sequence]) * tile_rows
    positions = batch.starts[sequence] + offset
    ends = jnp.minimum(positions + tile_rows, batch.starts[sequence] + batch.lengths[sequence])
    return Cut(last_tile[-1], batch.first_rows[sequence] + offset, positions, ends, sequence)
