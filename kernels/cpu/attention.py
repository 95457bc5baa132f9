"""Attention on CPU by kernels of its own."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from pdjax.kernels.base import FLOAT_OF_BITS, Attend, AttentionSpec, DecodeBatch, PrefillBatch, write_kv
from pdjax.kernels.heads import AttendHeads, Heads, kv_rows, rotate, split_heads

_SUPPORTED = (jnp.float32, jnp.int8, jnp.uint16)
_DIM_UNIT = 8
"""head_dim is whole tiles of the sum of values."""


def why_not(pool: jax.ShapeDtypeStruct) -> str | None:
    """What keeps the kernels from a pool [layers, pages, page_size, 2 * K, D], if anything does."""
    if pool.dtype not in _SUPPORTED:
        return f"a pool of {FLOAT_OF_BITS.get(pool.dtype, pool.dtype)} is none of float32, bfloat16 and int8"
    if pool.shape[4] % _DIM_UNIT:
        return f"head_dim {pool.shape[4]} is no multiple of {_DIM_UNIT}"
    return None


class CpuAttention:
    """`pdjax.kernels.base.Attention` for pools that `why_not` has nothing against."""

    name = "cpu"

    def prefill(self, batch: PrefillBatch) -> Attend:
        return _AttendRows(batch)

    def decode(self, batch: DecodeBatch) -> Attend:
        # Only a process that decodes compiles the kernel and loads its compiler.
        from pdjax.kernels.cpu.decode_attention import attend_pages

        def attend(
            queries: jax.Array, kv: jax.Array, pool: jax.Array, layer: jax.Array | int, spec: AttentionSpec
        ) -> tuple[jax.Array, jax.Array]:
            pool = write_kv(pool, layer, batch, kv, spec.kv_scales)
            attended = attend_pages(
                queries.astype(jnp.float32), pool, batch.tables, batch.visible, *_arguments(pool, queries.shape[1], layer, spec)
            )
            return attended.astype(queries.dtype), pool

        return attend


class _AttendRows(AttendHeads):
    """The rows of a prefill step; the kernel takes heads as they come."""

    def __init__(self, batch: PrefillBatch):
        self._batch = batch

    def __call__(
        self, queries: jax.Array, kv: jax.Array, pool: jax.Array, layer: jax.Array | int, spec: AttentionSpec
    ) -> tuple[jax.Array, jax.Array]:
        attended, pool = self._attend(queries.transpose(1, 2, 0), kv, pool, layer, spec)
        return attended.transpose(2, 0, 1), pool

    def heads(self, heads: Heads, pool: jax.Array, layer: jax.Array | int, spec: AttentionSpec) -> tuple[jax.Array, jax.Array]:
        num_kv_heads = pool.shape[3] // 2
        queries, _, _ = split_heads(heads.projected, num_kv_heads)
        return self._attend(rotate(queries, heads.cos, heads.sin), kv_rows(heads, num_kv_heads), pool, layer, spec)

    def _attend(
        self, queries: jax.Array, kv: jax.Array, pool: jax.Array, layer: jax.Array | int, spec: AttentionSpec
    ) -> tuple[jax.Array, jax.Array]:
        """`queries` [H, D, T], `kv` [T, 2 * K, D]. Returns: attended [H, D, T], the pool."""
        # Only a process that prefills compiles the kernel and loads its compiler.
        from pdjax.kernels.cpu.prefill_attention import attend_rows

        batch = self._batch
        pool = write_kv(pool, layer, batch, kv, spec.kv_scales)
        attended = attend_rows(
            queries.astype(jnp.float32),
            pool,
            batch.tables,
            batch.first_rows,
            batch.starts,
            batch.lengths,
            *_arguments(pool, len(queries), layer, spec),
        )
        return attended.astype(queries.dtype), pool


def _arguments(pool: jax.Array, num_heads: int, layer: jax.Array | int, spec: AttentionSpec) -> tuple[jax.Array, ...]:
    """What both kernels take as `numbers`, `factors`, `scales` and `sinks`."""
    return (
        jnp.stack([jnp.asarray(layer, jnp.int32), jnp.asarray(0 if spec.window is None else spec.window, jnp.int32)]),
        jnp.array([pool.shape[4] ** -0.5 if spec.scale is None else spec.scale, spec.soft_cap or 0.0], jnp.float32),
        jnp.ones(pool.shape[3], jnp.float32) if spec.kv_scales is None else spec.kv_scales,
        jnp.full(num_heads, -math.inf, jnp.float32) if spec.sinks is None else spec.sinks.astype(jnp.float32),
    )
