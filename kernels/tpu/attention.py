"""The TPU kernels behind the interface of `kernels/base.py`: lays a step's queries out as the kernels take them, and their outputs back.

What no kernel supports is told by `unsupported`, before any tracing.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pdjax.kernels.base import Attend, AttentionSpec, DecodeBatch, PrefillBatch, as_stored, row_owners
from pdjax.kernels.tpu import decode
from pdjax.kernels.tpu import ragged_paged_attention as ragged
from pdjax.kernels.tpu.blocks import LANES
from pdjax.kernels.tpu.tuning import Tunings

_LOG2_E = math.log2(math.e)
_SUBLANES = 8
_STORED = ("float32", "bfloat16", "int8", "float8_e4m3fn")
_SMEM_BYTES = 512 << 10
"""What page tables may take of the scalar memory of 1 MiB."""


def unsupported(pool: jax.ShapeDtypeStruct, tables: jax.ShapeDtypeStruct, tunings: Tunings) -> str | None:
    """Why the kernels cannot serve a pool [layers, pages, page_size, 2 * K, D] with page tables int32[S, P]; None: they can."""
    page_size, num_rows, head_dim = pool.shape[2:]
    if pool.dtype.name not in _STORED:
        return f"pages of {pool.dtype.name}: there are {', '.join(_STORED)}"
    if head_dim > LANES and head_dim % LANES:
        return f"head_dim {head_dim} is above {LANES} and no multiple of it"
    if pool.dtype.itemsize == 1 and num_rows % 4:
        return f"{num_rows // 2} KV heads of {pool.dtype.name} a chip: words of 32 bits hold those of two"
    for tokens in (tunings.prefill.tile_rows, tunings.prefill.block_tokens, tunings.decode.block_tokens):
        if tokens % page_size:
            return f"pages of {page_size} tokens do not divide {tokens}"
    if 4 * math.prod(tables.shape) > _SMEM_BYTES:
        return f"page tables of {math.prod(tables.shape)} entries: {_SMEM_BYTES // 4} fit in scalar memory"
    return None


class PallasTpuAttention:
    """`pdjax.kernels.base.Attention` on TPU. `interpret` runs the kernels on CPU, for tests."""

    name = "pallas"

    def __init__(self, tunings: Tunings, interpret: pltpu.InterpretParams | bool = False):
        self._tunings = tunings
        self._interpret = interpret

    def prefill(self, batch: PrefillBatch) -> Attend:
        tile_rows = self._tunings.prefill.tile_rows
        tiles = cut(batch, tile_rows)
        to_tiles, to_rows = _tile_rows(batch, tiles, tile_rows)

        def attend(
            queries: jax.Array, kv: jax.Array, pool: jax.Array, layer: jax.Array | int, spec: AttentionSpec
        ) -> tuple[jax.Array, jax.Array]:
            num_heads, head_dim = queries.shape[1:]
            by_head = _scaled_queries(queries, kv.shape[1] // 2, spec).reshape(-1, num_heads, head_dim).transpose(1, 0, 2)
            problem = ragged.Problem(
                queries=by_head[:, to_tiles],  # [H, tiles, R, D]
                kv=as_stored(kv, pool.dtype, spec.kv_scales),
                pool=pool,
                layer=_scalar(layer),
                tiles=tiles,
                tables=batch.tables,
                window=_window(spec),
                sinks=_sinks(spec, queries.shape[1]),
            )
            out, pool = ragged.ragged_paged_attention(problem, _options(spec), self._tunings.prefill, self._interpret)
            rows = out.reshape(num_heads, -1, head_dim)[:, to_rows].transpose(1, 0, 2)
            return _unscaled_output(rows.reshape(len(rows), kv.shape[1] // 2, -1, head_dim), spec, queries.dtype), pool

        return attend

    def decode(self, batch: DecodeBatch) -> Attend:
        def attend(
            queries: jax.Array, kv: jax.Array, pool: jax.Array, layer: jax.Array | int, spec: AttentionSpec
        ) -> tuple[jax.Array, jax.Array]:
            rows = _scaled_queries(queries, kv.shape[1] // 2, spec)  # [S, K, G, D]
            group = rows.shape[2]
            padding = ((0, 0), (0, -group % _SUBLANES), (0, 0))
            sinks = jnp.broadcast_to(_sinks(spec, queries.shape[1]).reshape(*rows.shape[1:3], 1), (*rows.shape[1:3], LANES))
            problem = decode.Problem(
                queries=jnp.pad(rows, ((0, 0), *padding)),
                kv=as_stored(kv, pool.dtype, spec.kv_scales),
                pool=pool,
                layer=_scalar(layer),
                tables=batch.tables,
                visible=batch.visible,
                pages=batch.pages,
                offsets=batch.offsets,
                window=_window(spec),
                sinks=jnp.pad(sinks, padding),
            )
            out, pool = decode.paged_decode_attention(problem, _options(spec), self._tunings.decode, self._interpret)
            return _unscaled_output(out[:, :, :group], spec, queries.dtype), pool

        return attend


def cut(batch: PrefillBatch, tile_rows: int) -> ragged.Tiles:
    """Tiles of one sequence each that end at multiples of `tile_rows` positions, or with the sequence's rows.

    A sequence of n rows has at most (n - 1) // tile_rows + 2 of them, which bounds their number.
    """
    num_sequences = batch.lengths.shape[0]
    first_tile = batch.starts // tile_rows
    per_sequence = jnp.where(batch.lengths > 0, -(-(batch.starts + batch.lengths) // tile_rows) - first_tile, 0)
    ends = jnp.cumsum(per_sequence)
    tile = jnp.arange(batch.pages.shape[0] // tile_rows + 2 * num_sequences, dtype=jnp.int32)
    sequence = jnp.minimum(jnp.searchsorted(ends, tile, side="right", method="compare_all"), num_sequences - 1).astype(jnp.int32)
    start, stop = batch.starts[sequence], batch.starts[sequence] + batch.lengths[sequence]
    boundary = (first_tile[sequence] + tile - ends[sequence] + per_sequence[sequence]) * tile_rows
    position = jnp.maximum(boundary, start)
    length = jnp.clip(jnp.minimum(boundary + tile_rows, stop) - position, 0)
    return ragged.Tiles(ends[-1:].astype(jnp.int32), sequence, position, length, batch.first_rows[sequence] + position - start)


def _tile_rows(batch: PrefillBatch, tiles: ragged.Tiles, tile_rows: int) -> tuple[jax.Array, jax.Array]:
    """Which row each row of a tile is, int32[tiles, R], and where in tiles * R each row is, int32[T]. Padding rows are anywhere."""
    num_rows, num_sequences = batch.pages.shape[0], batch.lengths.shape[0]
    to_tiles = jnp.clip(tiles.rows[:, None] + jnp.arange(tile_rows, dtype=jnp.int32), 0, num_rows - 1)
    num_before = jnp.sum(tiles.is_in_use()[:, None] & (tiles.sequences[:, None] < jnp.arange(num_sequences)), axis=0)
    sequences, positions, is_real = row_owners(batch)
    tile = num_before[sequences] + positions // tile_rows - batch.starts[sequences] // tile_rows
    within = jnp.arange(num_rows, dtype=jnp.int32) - tiles.rows[jnp.where(is_real, tile, 0)]
    return to_tiles, jnp.where(is_real, tile * tile_rows + within, 0)


def _scaled_queries(queries: jax.Array, num_kv_heads: int, spec: AttentionSpec) -> jax.Array:
    """[T, K, G, D]: times all that scores are multiplied by, so that a product with a stored key is a score in base 2.

    With a soft cap, it is the argument of the tanh instead.
    """
    num_rows, num_heads, head_dim = queries.shape
    scale = head_dim**-0.5 if spec.scale is None else spec.scale
    factor = scale * _LOG2_E if spec.soft_cap is None else scale / spec.soft_cap
    scaled = (queries.astype(jnp.float32) * factor).reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    if spec.kv_scales is not None:
        scaled *= spec.kv_scales[0::2, None, None]
    return scaled.astype(queries.dtype)


def _unscaled_output(rows: jax.Array, spec: AttentionSpec, dtype: jnp.dtype) -> jax.Array:
    """rows [T, K, G, D] times the scales of the values: [T, H, D]."""
    if spec.kv_scales is not None:
        rows = rows.astype(jnp.float32) * spec.kv_scales[1::2, None, None]
    return rows.reshape(len(rows), -1, rows.shape[3]).astype(dtype)


def _options(spec: AttentionSpec) -> ragged.Options:
    soft_cap = None if spec.soft_cap is None else spec.soft_cap * _LOG2_E
    return ragged.Options(soft_cap, is_windowed=spec.window is not None, has_sinks=spec.sinks is not None)


def _sinks(spec: AttentionSpec, num_heads: int) -> jax.Array:
    return jnp.zeros(num_heads, jnp.float32) if spec.sinks is None else spec.sinks.astype(jnp.float32) * _LOG2_E


def _window(spec: AttentionSpec) -> jax.Array:
    return _scalar(1 if spec.window is None else spec.window)


def _scalar(value: jax.Array | int) -> jax.Array:
    return jnp.asarray(value, jnp.int32).reshape(1)
