"""Paged attention in plain XLA, for CPUs: blockwise, with online softmax.

Work is a list of query tiles, each of one sequence; a tile walks over the KV blocks of its sequence with a trip count known only at
run time. So no S x S matrix of scores exists, and no page is gathered that the sequence does not have (up to the rest of a block,
where the table points at the null page).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pdjax.kernels.base import Attend, DecodeBatch, PrefillBatch

_MASKED = -1e30
"""Score of a position that is not seen: finite, so that a fully masked block gives exp(_MASKED - max) = 0 and never inf - inf."""


class Tuning(NamedTuple):
    """Block sizes in tokens. Measured with SmolLM2-135M in float32 on 2 AVX2 cores: 128 x 256 best for 512-token prefills."""

    prefill_query_tile: int = 128
    prefill_kv_block: int = 256
    decode_kv_block: int = 128


DEFAULT_TUNING = Tuning()


class XlaAttention:
    """`pdjax.kernels.base.Attention` in blocks."""

    name = "xla"

    def __init__(self, tuning: Tuning = DEFAULT_TUNING):
        self._tuning = tuning

    def prefill(self, batch: PrefillBatch, num_rows: int) -> Attend:
        tuning = self._tuning
        tile_rows = min(tuning.prefill_query_tile, num_rows)
        tiles = _tile_list(batch, num_rows, tile_rows)

        def attend(queries: jax.Array, pool: jax.Array, layer: jax.Array | int) -> jax.Array:
            padded_tables = _pad_tables(tiles.tables, pool.shape[2], tuning.prefill_kv_block)
            return _attend_tiles(queries, pool, layer, tiles._replace(tables=padded_tables), tile_rows, tuning.prefill_kv_block)

        return attend

    def decode(self, batch: DecodeBatch) -> Attend:
        kv_block = self._tuning.decode_kv_block

        def attend(queries: jax.Array, pool: jax.Array, layer: jax.Array | int) -> jax.Array:
            def one(row: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
                query, table, visible = row
                return _attend_tile(query, pool, layer, table, visible - 1, visible, kv_block)

            tables = _pad_tables(batch.tables, pool.shape[2], kv_block)
            rows = jax.lax.map(one, (_scale(queries)[:, None], tables, batch.visible))
            return rows.reshape(queries.shape).astype(queries.dtype)

        return attend


def _pad_tables(tables: jax.Array, page_size: int, kv_block: int) -> jax.Array:
    """Widen page tables by null pages to whole KV blocks, so that the last block can be read in one piece."""
    return jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % _pages_of_block(kv_block, page_size))))


def _pages_of_block(block_tokens: int, page_size: int) -> int:
    return max(1, block_tokens // page_size)


class _Tiles(NamedTuple):
    """Query tiles in row order. A tile covers `tile_rows` rows; those past `ends` belong to the next tile, or to nobody."""

    count: jax.Array  # int32 scalar: tiles in use
    rows: jax.Array  # int32[tiles]: first row
    positions: jax.Array  # int32[tiles]: position of the first row
    ends: jax.Array  # int32[tiles]: first position that the tile does not compute
    tables: jax.Array  # int32[tiles, P]


def _tile_list(batch: PrefillBatch, num_rows: int, tile_rows: int) -> _Tiles:
    """Cut every sequence into tiles. At most one tile of a sequence is not full, which bounds their number."""
    num_sequences = batch.lengths.shape[0]
    max_tiles = num_rows // tile_rows + num_sequences
    per_sequence = (batch.lengths + tile_rows - 1) // tile_rows
    last_tile = jnp.cumsum(per_sequence)
    tile = jnp.arange(max_tiles, dtype=jnp.int32)
    sequence = jnp.minimum(jnp.searchsorted(last_tile, tile, side="right", method="compare_all"), num_sequences - 1)
    offset = (tile - last_tile[sequence] + per_sequence[sequence]) * tile_rows
    positions = batch.starts[sequence] + offset
    ends = jnp.minimum(positions + tile_rows, batch.starts[sequence] + batch.lengths[sequence])
    return _Tiles(last_tile[-1], batch.first_rows[sequence] + offset, positions, ends, batch.tables[sequence])


def _scale(queries: jax.Array) -> jax.Array:
    return queries.astype(jnp.float32) * queries.shape[-1] ** -0.5


def _attend_tiles(queries: jax.Array, pool: jax.Array, layer: jax.Array | int, tiles: _Tiles, tile_rows: int, kv_block: int) -> jax.Array:
    """Compute tile after tile. A tile may write garbage past its end: the next tile in row order overwrites it, or it is padding."""
    num_rows, num_heads, head_dim = queries.shape
    padded = jnp.pad(_scale(queries), ((0, tile_rows), (0, 0), (0, 0)))

    def tile_step(i: jax.Array, out: jax.Array) -> jax.Array:
        query = jax.lax.dynamic_slice(padded, (tiles.rows[i], 0, 0), (tile_rows, num_heads, head_dim))
        result = _attend_tile(query, pool, layer, tiles.tables[i], tiles.positions[i], tiles.ends[i], kv_block)
        return jax.lax.dynamic_update_slice(out, result, (tiles.rows[i], 0, 0))

    out = jax.lax.fori_loop(0, tiles.count, tile_step, jnp.zeros_like(padded))
    return out[:num_rows].astype(queries.dtype)


def _attend_tile(
    query: jax.Array,
    pool: jax.Array,
    layer: jax.Array | int,
    table: jax.Array,
    position: jax.Array,
    end: jax.Array,
    kv_block: int,
) -> jax.Array:
    """Online softmax of consecutive query rows of one sequence over its KV blocks.

    Args:
        query: float32[rows, H, D], scaled.
        table: int32[P], the sequence's pages.
        position: int32 scalar, position of the first row.
        end: int32 scalar, the number of positions that the sequence holds as far as this tile is concerned.
        kv_block: tokens a block.

    Returns: float32[rows, H, D]; rows whose position is not below `end` hold garbage.
    """
    rows, num_heads, head_dim = query.shape
    page_size, num_kv_heads = pool.shape[2], pool.shape[3] // 2
    group = num_heads // num_kv_heads
    block_pages = _pages_of_block(kv_block, page_size)
    block = block_pages * page_size
    assert table.shape[0] % block_pages == 0, f"page table of {table.shape[0]} pages is not a multiple of {block_pages}"
    query = query.reshape(rows, num_kv_heads, group, head_dim).transpose(1, 2, 0, 3).reshape(num_kv_heads, group * rows, head_dim)
    row_positions = position + jnp.arange(rows, dtype=jnp.int32)

    def block_step(j: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        peak, total, out = carry
        pages = jax.lax.dynamic_slice(table, (j * block_pages,), (block_pages,))
        kv = pool[layer, pages].astype(jnp.float32).reshape(block, num_kv_heads, 2, head_dim)
        positions = j * block + jnp.arange(block, dtype=jnp.int32)
        is_held = positions < end
        keys = kv[:, :, 0].transpose(1, 0, 2)
        values = jnp.where(is_held[None, :, None], kv[:, :, 1].transpose(1, 0, 2), 0.0)
        is_seen = (positions[None, :] <= row_positions[:, None]) & is_held[None, :]
        scores = jnp.einsum("kqd,ksd->kqs", query, keys).reshape(num_kv_heads, group, rows, block)
        scores = jnp.where(is_seen[None, None], scores, _MASKED).reshape(num_kv_heads, group * rows, block)
        new_peak = jnp.maximum(peak, jnp.max(scores, axis=-1))
        weights = jnp.exp(scores - new_peak[..., None])
        decay = jnp.exp(peak - new_peak)
        new_out = out * decay[..., None] + jnp.einsum("kqs,ksd->kqd", weights, values)
        return new_peak, total * decay + jnp.sum(weights, axis=-1), new_out

    start = (
        jnp.full((num_kv_heads, group * rows), _MASKED, jnp.float32),
        jnp.zeros((num_kv_heads, group * rows), jnp.float32),
        jnp.zeros((num_kv_heads, group * rows, head_dim), jnp.float32),
    )
    _, total, out = jax.lax.fori_loop(0, (end + block - 1) // block, block_step, start)
    out = (out / total[..., None]).reshape(num_kv_heads, group, rows, head_dim)
    return out.transpose(2, 0, 1, 3).reshape(rows, num_heads, head_dim)
