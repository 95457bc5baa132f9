"""The TPU kernels behind the interfaces of `kernels/base.py` and `kernels/heads.py`: lays a step's rows out as the kernels take them.

What no kernel supports is told by `unsupported`, before any tracing.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pdjax.kernels.base import Attend, AttentionSpec, DecodeBatch, PrefillBatch, as_stored
from pdjax.kernels.heads import AttendHeads, Heads, kv_rows
from pdjax.kernels.tpu import decode
from pdjax.kernels.tpu import ragged_paged_attention as ragged
from pdjax.kernels.tpu.blocks import LANES
from pdjax.kernels.tpu.step import Options, Tiles
from pdjax.kernels.tpu.tuning import PrefillTuning, Tunings

_LOG2_E = math.log2(math.e)
_SUBLANES = 8
_PACKED_SUBLANES = 16
"""Rows of a tile of bfloat16; heads lie one below the other."""
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
    if head_dim % _PACKED_SUBLANES:
        return f"head_dim {head_dim} is no multiple of {_PACKED_SUBLANES}"
    if pool.dtype.itemsize == 1 and num_rows % 4:
        return f"{num_rows // 2} KV heads of {pool.dtype.name} a chip: words of 32 bits hold those of two"
    for tokens in (tunings.prefill.block_tokens, tunings.decode.block_tokens):
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

    def prefill(self, batch: PrefillBatch) -> AttendHeads:
        return _Prefill(batch, self._tunings.prefill, self._interpret)

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


class _Rows(NamedTuple):
    """The step's rows as `ragged.Problem` has them, before padding."""

    projected: jax.Array
    turns: tuple[jax.Array, jax.Array] | None
    stored: jax.Array | None
    num_heads: int


class _Prefill(AttendHeads):
    """The attention of one prefill step. Everything stays feature-major, as the projection yields it."""

    def __init__(self, batch: PrefillBatch, tuning: PrefillTuning, interpret: pltpu.InterpretParams | bool):
        num_rows = batch.pages.shape[0]
        self._tuning = tuning._replace(tile_rows=min(tuning.tile_rows, max(LANES, 1 << (num_rows - 1).bit_length())))
        self._padding = -num_rows % self._tuning.tile_rows
        self._batch = batch
        self._tiles = cut(batch, self._tuning.tile_rows)
        self._interpret = interpret

    def __call__(
        self, queries: jax.Array, kv: jax.Array, pool: jax.Array, layer: jax.Array | int, spec: AttentionSpec
    ) -> tuple[jax.Array, jax.Array]:
        stored = None if _keeps(pool, kv) else as_stored(kv, pool.dtype, spec.kv_scales)
        by_head = (queries, kv[:, 0::2], kv[:, 1::2]) if stored is None else (queries,)
        projected = jnp.concatenate(by_head, axis=1).reshape(len(queries), -1).T
        out, pool = self._launch(_Rows(projected, None, stored, queries.shape[1]), pool, layer, spec)
        return out.T.reshape(queries.shape), pool

    def heads(self, heads: Heads, pool: jax.Array, layer: jax.Array | int, spec: AttentionSpec) -> tuple[jax.Array, jax.Array]:
        num_kv_heads = pool.shape[3] // 2
        stored = None if _keeps(pool, heads.projected) else as_stored(kv_rows(heads, num_kv_heads), pool.dtype, spec.kv_scales)
        num_heads = heads.projected.shape[0] - 2 * num_kv_heads
        _, head_dim, num_rows = heads.projected.shape
        rows = _Rows(heads.projected.reshape(-1, num_rows), (heads.cos, heads.sin), stored, num_heads)
        out, pool = self._launch(rows, pool, layer, spec)
        return out.reshape(num_heads, head_dim, num_rows), pool

    def _launch(self, rows: _Rows, pool: jax.Array, layer: jax.Array | int, spec: AttentionSpec) -> tuple[jax.Array, jax.Array]:
        problem = ragged.Problem(
            projected=self._padded(rows.projected),
            turns=None if rows.turns is None else (self._padded(rows.turns[0]), self._padded(rows.turns[1])),
            stored=rows.stored,
            pool=pool,
            layer=_scalar(layer),
            tiles=self._tiles,
            tables=self._batch.tables,
            window=_window(spec),
            sinks=_sinks(spec, rows.num_heads),
            factors=_factors(spec, pool.shape[4], pool.shape[3] // 2),
        )
        out, pool = ragged.ragged_paged_attention(problem, _options(spec), self._tuning, self._interpret)
        return out[:, : rows.projected.shape[1]], pool

    def _padded(self, columns: jax.Array) -> jax.Array:
        """Whole tiles of rows: [..., T] with zeros behind."""
        return jnp.pad(columns, (*[(0, 0)] * (columns.ndim - 1), (0, self._padding))) if self._padding else columns


def _keeps(pool: jax.Array, kv: jax.Array) -> bool:
    """Whether the pool holds keys and values as they are computed."""
    return pool.dtype == kv.dtype and pool.dtype.itemsize > 1


def cut(batch: PrefillBatch, tile_rows: int) -> Tiles:
    """Tiles of one sequence each that end at multiples of `tile_rows` rows of the step, or with the sequence's rows.

    Each sequence behind the first adds at most one to the number of blocks of rows. Tiles that are not in use stand for the blocks of
    padding rows behind all sequences.
    """
    num_blocks, num_sequences = -(-batch.pages.shape[0] // tile_rows), batch.lengths.shape[0]
    stops = batch.first_rows + batch.lengths
    first_block = batch.first_rows // tile_rows
    per_sequence = jnp.where(batch.lengths > 0, -(-stops // tile_rows) - first_block, 0)
    ends = jnp.cumsum(per_sequence)
    tile = jnp.arange(num_blocks + num_sequences - 1, dtype=jnp.int32)
    sequence = jnp.minimum(jnp.searchsorted(ends, tile, side="right", method="compare_all"), num_sequences - 1).astype(jnp.int32)
    boundary = (first_block[sequence] + tile - ends[sequence] + per_sequence[sequence]) * tile_rows
    first, stop = batch.first_rows[sequence], stops[sequence]
    row = jnp.maximum(boundary, first)
    padding = jnp.minimum(-(-jnp.max(stops * (batch.lengths > 0)) // tile_rows) + tile - ends[-1], num_blocks - 1)
    is_used = tile < ends[-1]
    return Tiles(
        count=ends[-1:].astype(jnp.int32),
        sequences=sequence,
        positions=batch.starts[sequence] + row - first,
        lengths=jnp.where(is_used, jnp.minimum(boundary + tile_rows, stop) - row, 0),
        rows=jnp.where(is_used, row, padding * tile_rows),
    )


def _factor(spec: AttentionSpec, head_dim: int) -> float:
    """What queries are multiplied by, so that a product with a key is a score in base 2; with a soft cap, the argument of its tanh."""
    scale = head_dim**-0.5 if spec.scale is None else spec.scale
    return scale * _LOG2_E if spec.soft_cap is None else scale / spec.soft_cap


def _factors(spec: AttentionSpec, head_dim: int, num_kv_heads: int) -> jax.Array:
    """float32[2 * K]: by turns, what the queries and the outputs of a KV head are multiplied by."""
    factors = jnp.tile(jnp.array([_factor(spec, head_dim), 1.0], jnp.float32), num_kv_heads)
    return factors if spec.kv_scales is None else factors * spec.kv_scales


def _scaled_queries(queries: jax.Array, num_kv_heads: int, spec: AttentionSpec) -> jax.Array:
    """[T, K, G, D]: times their factors."""
    num_rows, num_heads, head_dim = queries.shape
    scaled = queries.astype(jnp.float32) * _factor(spec, head_dim)
    scaled = scaled.reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    if spec.kv_scales is not None:
        scaled *= spec.kv_scales[0::2, None, None]
    return scaled.astype(queries.dtype)


def _unscaled_output(rows: jax.Array, spec: AttentionSpec, dtype: jnp.dtype) -> jax.Array:
    """rows [T, K, G, D] times the scales of the values: [T, H, D]."""
    if spec.kv_scales is not None:
        rows = rows.astype(jnp.float32) * spec.kv_scales[1::2, None, None]
    return rows.reshape(len(rows), -1, rows.shape[3]).astype(dtype)


def _options(spec: AttentionSpec) -> Options:
    soft_cap = None if spec.soft_cap is None else spec.soft_cap * _LOG2_E
    return Options(soft_cap, is_windowed=spec.window is not None, has_sinks=spec.sinks is not None)


def _sinks(spec: AttentionSpec, num_heads: int) -> jax.Array:
    return jnp.zeros(num_heads, jnp.float32) if spec.sinks is None else spec.sinks.astype(jnp.float32) * _LOG2_E


def _window(spec: AttentionSpec) -> jax.Array:
    return _scalar(1 if spec.window is None else spec.window)


def _scalar(value: jax.Array | int) -> jax.Array:
    return jnp.asarray(value, jnp.int32).reshape(1)
