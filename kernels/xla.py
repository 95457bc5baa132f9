"""Paged attention in plain XLA, for CPUs: blockwise, with online softmax.

Work is a list of query tiles, each of one sequence; a tile walks over the KV blocks of its sequence with a trip count known only at
run time. So no S x S matrix of scores exists, and no page is gathered that the sequence does not have (up to the rest of a block,
where the table points at the null page).

Long prompts are cut into large tiles, whose products are large enough to keep every core busy; what is left of a sequence into small
ones, which waste less of what they compute. Blocks that a whole tile sees need no mask. Of the blocks on the diagonal a large tile
computes only the rows that see any of it, to half a tile.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pdjax.kernels.base import Attend, AttentionSpec, DecodeBatch, PrefillBatch, from_stored, write_kv
from pdjax.kernels.tiles import Cut, cut_rows

_MASKED = -1e30
"""Score of a position that is not seen: finite, so that a fully masked block gives exp(_MASKED - max) = 0 and never inf - inf."""


class Tuning(NamedTuple):
    """Block sizes in tokens; `docs/performance.md` says how they were found."""

    large_query_tile: int = 512
    query_tile: int = 128
    prefill_kv_block: int = 256
    decode_kv_block: int = 256


DEFAULT_TUNING = Tuning()


class XlaAttention:
    """`pdjax.kernels.base.Attention` in blocks."""

    name = "xla"

    def __init__(self, tuning: Tuning = DEFAULT_TUNING):
        self._tuning = tuning

    def prefill(self, batch: PrefillBatch) -> Attend:
        kv_block, num_rows = self._tuning.prefill_kv_block, len(batch.pages)
        tilings = _cut(batch, num_rows, self._tuning)

        def attend(
            queries: jax.Array, kv: jax.Array, pool: jax.Array, layer: jax.Array | int, spec: AttentionSpec
        ) -> tuple[jax.Array, jax.Array]:
            pool = write_kv(pool, layer, batch, kv, spec.kv_scales)
            num_heads, head_dim = queries.shape[1:]
            rows = jnp.pad(_scaled(queries, spec), ((0, tilings[0].tile_rows), (0, 0), (0, 0)))
            source = _Source(pool, layer, _pad_tables(batch.tables, pool.shape[2], kv_block), _block_tokens(kv_block, pool.shape[2]))
            out = jnp.zeros((len(rows), num_heads, head_dim), jnp.float32)
            for tiling in tilings:
                out = _attend_tiles(out, rows, source, tiling, spec)
            return out[:num_rows].astype(queries.dtype), pool

        return attend

    def decode(self, batch: DecodeBatch) -> Attend:
        kv_block = self._tuning.decode_kv_block

        def attend(
            queries: jax.Array, kv: jax.Array, pool: jax.Array, layer: jax.Array | int, spec: AttentionSpec
        ) -> tuple[jax.Array, jax.Array]:
            pool = write_kv(pool, layer, batch, kv, spec.kv_scales)
            source = _Source(pool, layer, _pad_tables(batch.tables, pool.shape[2], kv_block), _block_tokens(kv_block, pool.shape[2]))

            def one(row: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
                query, table, visible = row
                spans = [_Span(0, -(-visible // source.block), is_masked=True)]
                return _attend_tile(query, _Keys(source, table, visible, spec), visible - 1, spans)

            rows = jax.lax.map(one, (_scaled(queries, spec)[:, None], source.tables, batch.visible))
            return rows.reshape(queries.shape).astype(queries.dtype), pool

        return attend


def _scaled(queries: jax.Array, spec: AttentionSpec) -> jax.Array:
    scale = queries.shape[-1] ** -0.5 if spec.scale is None else spec.scale
    return queries.astype(jnp.float32) * scale


def _pad_tables(tables: jax.Array, page_size: int, kv_block: int) -> jax.Array:
    """Widen page tables by null pages to whole KV blocks, so that the last block can be read in one piece."""
    return jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % (_block_tokens(kv_block, page_size) // page_size))))


def _block_tokens(kv_block: int, page_size: int) -> int:
    """The size of a KV block: whole pages, at least one."""
    return max(1, kv_block // page_size) * page_size


class _Tiling(NamedTuple):
    """Query tiles of one size. A tile covers `tile_rows` rows, of which those at `ends` and later are not its own."""

    tile_rows: int
    is_split: bool  # whether blocks on the diagonal are computed for the tile's second half alone where the first sees nothing
    tiles: Cut


def _cut(batch: PrefillBatch, num_rows: int, tuning: Tuning) -> list[_Tiling]:
    """Cut every sequence into large tiles and then small ones. A rest that fills all but one small tile of a large one is a large one."""
    large, small = tuning.large_query_tile, min(tuning.query_tile, num_rows)
    if num_rows < large:
        return [_Tiling(small, False, cut_rows(batch, small, -(-batch.lengths // small)))]
    num_large = (batch.lengths + small) // large
    in_large = jnp.minimum(num_large * large, batch.lengths)
    rest = cut_rows(batch, small, -(-(batch.lengths - in_large) // small), in_large)
    return [_Tiling(large, True, cut_rows(batch, large, num_large)), _Tiling(small, False, rest)]


class _Source(NamedTuple):
    """Where keys and values of a step come from, read in blocks of `block` positions."""

    pool: jax.Array
    layer: jax.Array | int
    tables: jax.Array  # int32[S, P], P a multiple of a block's pages
    block: int


def _attend_tiles(out: jax.Array, queries: jax.Array, source: _Source, tiling: _Tiling, spec: AttentionSpec) -> jax.Array:
    """Compute tile after tile into `out`, both float32[rows, H, D]; rows that are not a tile's own keep what they hold."""
    shape, tiles = (tiling.tile_rows, *queries.shape[1:]), tiling.tiles

    def tile_step(i: jax.Array, out: jax.Array) -> jax.Array:
        position, end, corner = tiles.positions[i], tiles.ends[i], (tiles.rows[i], 0, 0)
        keys = _Keys(source, source.tables[tiles.sequences[i]], end, spec)
        spans = _spans(position, end, tiling, source.block, spec)
        result = _attend_tile(jax.lax.dynamic_slice(queries, corner, shape), keys, position, spans)
        is_own = position + jnp.arange(tiling.tile_rows, dtype=jnp.int32) < end
        result = jnp.where(is_own[:, None, None], result, jax.lax.dynamic_slice(out, corner, shape))
        return jax.lax.dynamic_update_slice(out, result, corner)

    return jax.lax.fori_loop(0, tiles.count, tile_step, out)


class _Span(NamedTuple):
    """KV blocks from where the span before stopped up to `stop_block`, for the tile's rows from `first_row` on."""

    first_row: int
    stop_block: jax.Array  # int32 scalar
    is_masked: bool  # whether some row does not see all of them


def _spans(position: jax.Array, end: jax.Array, tiling: _Tiling, block: int, spec: AttentionSpec) -> list[_Span]:
    """The blocks that every row sees whole; those that all rows see some of; those that only the second half sees any of.

    With a window, whose left edge is another diagonal, all blocks are masked.
    """
    whole = _Span(0, (position + 1) // block, is_masked=False)
    rest = _Span(0, -(-end // block), is_masked=True)
    if spec.window is not None:
        return [rest]
    if not tiling.is_split:
        return [whole, rest]
    half = tiling.tile_rows // 2
    return [whole, rest._replace(stop_block=-(-jnp.minimum(end, position + half) // block)), rest._replace(first_row=half)]


class _Keys(NamedTuple):
    """Keys and values of one sequence, of which the first `end` positions are held, and what rows see of them."""

    source: _Source
    table: jax.Array  # int32[P]
    end: jax.Array  # int32 scalar
    spec: AttentionSpec

    def first_block(self, position: jax.Array) -> jax.Array:
        """The first block that rows at `position` and later see any of."""
        if self.spec.window is None:
            return jnp.int32(0)
        return jnp.maximum(position - self.spec.window + 1, 0) // self.source.block

    def is_seen(self, row_positions: jax.Array, positions: jax.Array) -> jax.Array:
        """bool[rows, positions]."""
        is_seen = (positions[None, :] <= row_positions[:, None]) & (positions < self.end)[None, :]
        if self.spec.window is None:
            return is_seen
        return is_seen & (positions[None, :] > row_positions[:, None] - self.spec.window)

    def scores(self, query: jax.Array, keys: jax.Array) -> jax.Array:
        """float32[K, rows, D], float32[K, block, D] -> float32[K, rows, block]."""
        scores = jnp.einsum("kqd,ksd->kqs", query, keys)
        return scores if self.spec.soft_cap is None else self.spec.soft_cap * jnp.tanh(scores / self.spec.soft_cap)

    def read(self, j: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Block j: keys and values float32[K, block, D], positions int32[block]."""
        pool, layer, _, block = self.source
        page_size, num_kv_heads, head_dim = pool.shape[2], pool.shape[3] // 2, pool.shape[4]
        block_pages = block // page_size
        assert self.table.shape[0] % block_pages == 0, f"page table of {self.table.shape[0]} pages is not a multiple of {block_pages}"
        pages = jax.lax.dynamic_slice(self.table, (j * block_pages,), (block_pages,))
        kv = from_stored(pool[layer, pages], self.spec.kv_scales).reshape(block, num_kv_heads, 2, head_dim)
        positions = j * block + jnp.arange(block, dtype=jnp.int32)
        return kv[:, :, 0].transpose(1, 0, 2), kv[:, :, 1].transpose(1, 0, 2), positions


class _Softmax(NamedTuple):
    """Online softmax so far, for n query rows of each KV head."""

    peak: jax.Array  # float32[K, n]
    total: jax.Array  # float32[K, n]
    out: jax.Array  # float32[K, n, D], not yet divided by `total`

    def updated(self, scores: jax.Array, values: jax.Array) -> _Softmax:
        """With a block of scores [K, n, block] and values [K, block, D] added."""
        peak = jnp.maximum(self.peak, jnp.max(scores, axis=-1))
        weights = jnp.exp(scores - peak[..., None])
        decay = jnp.exp(self.peak - peak)
        out = self.out * decay[..., None] + jnp.einsum("kqs,ksd->kqd", weights, values)
        return _Softmax(peak, self.total * decay + jnp.sum(weights, axis=-1), out)


def _attend_tile(query: jax.Array, keys: _Keys, position: jax.Array, spans: list[_Span]) -> jax.Array:
    """Attention of consecutive query rows of one sequence.

    Args:
        query: float32[rows, H, D], scaled.
        position: int32 scalar, position of the first row.

    Returns: float32[rows, H, D]; rows whose position is not below `keys.end` hold garbage.
    """
    rows, num_heads, head_dim = query.shape
    num_kv_heads = keys.source.pool.shape[3] // 2
    group = num_heads // num_kv_heads
    query = query.reshape(rows, num_kv_heads, group, head_dim).transpose(1, 0, 2, 3).reshape(num_kv_heads, rows * group, head_dim)
    row_positions = position + jnp.arange(rows * group, dtype=jnp.int32) // group
    softmax = _Softmax(
        *_before_any_key(keys.spec.sinks, num_kv_heads, rows, group),
        jnp.zeros((num_kv_heads, rows * group, head_dim), jnp.float32),
    )
    block = keys.first_block(position)
    for span in spans:
        first = span.first_row * group
        before, at_work = [jax.tree.map(lambda leaf, part=part: leaf[:, part], softmax) for part in (slice(first), slice(first, None))]
        at_work = _attend_span(query[:, first:], keys, row_positions[first:], block, span, at_work)
        softmax = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), before, at_work)
        block = span.stop_block
    out = (softmax.out / softmax.total[..., None]).reshape(num_kv_heads, rows, group, head_dim)
    return out.transpose(1, 0, 2, 3).reshape(rows, num_heads, head_dim)


def _before_any_key(sinks: jax.Array | None, num_kv_heads: int, rows: int, group: int) -> tuple[jax.Array, jax.Array]:
    """Peak and total float32[K, rows * G] of a softmax that has seen no key, only the sinks if there are any."""
    if sinks is None:
        return jnp.full((num_kv_heads, rows * group), _MASKED, jnp.float32), jnp.zeros((num_kv_heads, rows * group), jnp.float32)
    peak = jnp.tile(sinks.astype(jnp.float32).reshape(num_kv_heads, group), (1, rows))
    return peak, jnp.ones_like(peak)


def _attend_span(
    query: jax.Array, keys: _Keys, row_positions: jax.Array, first_block: jax.Array, span: _Span, softmax: _Softmax
) -> _Softmax:
    """`query` float32[K, n, D], `row_positions` int32[n]."""

    def whole_block(j: jax.Array, softmax: _Softmax) -> _Softmax:
        block_keys, values, _ = keys.read(j)
        return softmax.updated(keys.scores(query, block_keys), values)

    def masked_block(j: jax.Array, softmax: _Softmax) -> _Softmax:
        block_keys, values, positions = keys.read(j)
        is_held = positions < keys.end
        scores = jnp.where(keys.is_seen(row_positions, positions)[None], keys.scores(query, block_keys), _MASKED)
        # A weight of 0 times what an unused slot holds, which may be NaN, is not 0.
        return softmax.updated(scores, jnp.where(is_held[None, :, None], values, 0.0))

    return jax.lax.fori_loop(first_block, span.stop_block, masked_block if span.is_masked else whole_block, softmax)
