"""Arrays as the Hopper attention kernel wants them, by XLA around it.

Queries come and results leave in the order of the tiles, `[K, tiles, 128, D]`, rows without use at the end of each tile:

    rows of the step   [T, H, D]    | sequence 0 . . . . . | sequence 1 . . |
    tiles, KV head 0   [128, D]     | rows x G heads | rows x G heads, unused | rows x G heads, unused |
    tiles, KV head 1                | ...

A TMA store cannot leave rows out, so tiles of the step's own rows would overwrite each other's. The gathers on both sides cost two
passes over queries and results, small beside the keys of a long context.

Values meet weights of 0 in slots past the end of a sequence, and 0 * NaN is not 0. So `clear_tails` zeroes what a sequence's last page
holds past its end (slots of its own, unused as yet), and page tables are padded with that page, not with page 0.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pdjax.kernels.base import PrefillBatch
from pdjax.kernels.gpu.tiles import Tiles, prefill_tiles

MATRIX_ROWS = 128
"""Rows of a tile times query heads a KV head: 64 for each computing warpgroup."""


class Plan(NamedTuple):
    """What all layers of a step share."""

    tiles: Tiles
    rows: jax.Array  # int32[tiles, tile_rows]: the rows of each tile, -1 where it has fewer
    places: jax.Array  # int32[T]: where a row is, counted over all tiles
    tables: jax.Array  # int32[S, P], padded with each sequence's last page to whole blocks of keys
    tail_pages: jax.Array  # int32[S, page_size - 1]: pages of the slots to clear, -1 where there are fewer
    tail_offsets: jax.Array  # int32[S, page_size - 1]


def plan(batch: PrefillBatch, group: int, page_size: int, block_keys: int) -> Plan:
    """The plan of a step with `group` query heads a KV head."""
    tile_rows = MATRIX_ROWS // group
    tiles = prefill_tiles(batch, tile_rows)
    offset = jnp.arange(tile_rows, dtype=jnp.int32)
    rows = jnp.where(tiles.positions[:, None] + offset < tiles.ends[:, None], tiles.rows[:, None] + offset, -1)
    num_rows = len(batch.pages)
    places = jnp.zeros(num_rows, jnp.int32).at[jnp.where(rows < 0, num_rows, rows)]
    places = places.set(jnp.arange(rows.size, dtype=jnp.int32).reshape(rows.shape), mode="drop")
    return Plan(tiles, rows, places, _tables(batch, page_size, block_keys // page_size), *_tails(batch, page_size))


def _tables(batch: PrefillBatch, page_size: int, block_pages: int) -> jax.Array:
    last = jnp.maximum(batch.starts + batch.lengths - 1, 0)[:, None] // page_size
    slots = jnp.arange(-(-batch.tables.shape[1] // block_pages) * block_pages, dtype=jnp.int32)
    return jnp.take_along_axis(batch.tables, jnp.minimum(slots, last), axis=1)


def _tails(batch: PrefillBatch, page_size: int) -> tuple[jax.Array, jax.Array]:
    ends = (batch.starts + batch.lengths)[:, None]
    positions = ends + jnp.arange(page_size - 1, dtype=jnp.int32)
    is_tail = (positions // page_size == (ends - 1) // page_size) & (batch.lengths > 0)[:, None]
    last_pages = jnp.take_along_axis(batch.tables, jnp.maximum(ends - 1, 0) // page_size, axis=1)
    return jnp.where(is_tail, last_pages, -1), positions % page_size


def clear_tails(pool: jax.Array, layer: jax.Array | int, plan: Plan) -> jax.Array:
    """The pool with zeros in layer `layer` wherever a sequence's last page has slots past its end."""
    pages = jnp.where(plan.tail_pages < 0, pool.shape[1], plan.tail_pages)
    return pool.at[layer, pages, plan.tail_offsets].set(jnp.zeros((), pool.dtype), mode="drop")


def to_tiles(queries: jax.Array, plan: Plan, kv_heads: int) -> jax.Array:
    """Queries [T, H, D] as [K * tiles * 128, D]: for each KV head and tile, its rows times query heads."""
    _, num_heads, head_dim = queries.shape
    num_tiles, tile_rows = plan.rows.shape
    group = num_heads // kv_heads
    picked = queries[jnp.maximum(plan.rows, 0)].reshape(num_tiles, tile_rows, kv_heads, group, head_dim)
    picked = picked.transpose(2, 0, 1, 3, 4).reshape(kv_heads, num_tiles, tile_rows * group, head_dim)
    padded = jnp.pad(picked, ((0, 0), (0, 0), (0, MATRIX_ROWS - tile_rows * group), (0, 0)))
    return padded.reshape(kv_heads * num_tiles * MATRIX_ROWS, head_dim)


def from_tiles(out: jax.Array, plan: Plan, group: int) -> jax.Array:
    """out [K, tiles, 128, D] as [T, H, D]; rows of no tile get those of the first."""
    kv_heads, _, _, head_dim = out.shape
    num_tiles, tile_rows = plan.rows.shape
    by_place = out[:, :, : tile_rows * group].reshape(kv_heads, num_tiles * tile_rows, group, head_dim)
    return by_place[:, plan.places].transpose(1, 0, 2, 3).reshape(len(plan.places), kv_heads * group, head_dim)
