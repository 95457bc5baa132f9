"""Paged attention, obviously right: every query row gathers its whole page table and takes one softmax over it.

The oracle for every other implementation. Its cost grows with the width of the page table, so it is for tests and small contexts.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from pdjax.kernels.base import PLAIN, Attend, AttentionSpec, DecodeBatch, PrefillBatch, from_stored, row_owners, write_kv


def attend_row(
    query: jax.Array,
    pool: jax.Array,
    layer: jax.Array | int,
    table: jax.Array,
    visible: jax.Array | int,
    spec: AttentionSpec = PLAIN,
) -> jax.Array:
    """Attention of one query row, at position `visible - 1` of its sequence.

    Args:
        query: [H, D].
        pool: [layers, pages, page_size, 2 * K, D].
        layer: int32 scalar.
        table: int32[P], the sequence's pages in order.
        visible: int32 scalar; 0 gives a row of zeros.

    Returns: float32[H, D].
    """
    num_heads, head_dim = query.shape
    kv = from_stored(pool[layer, table], spec.kv_scales)
    num_positions, num_kv_heads = kv.shape[0] * kv.shape[1], kv.shape[2] // 2
    kv = kv.reshape(num_positions, num_kv_heads, 2, head_dim)
    positions = jnp.arange(num_positions)
    is_visible = positions < visible
    if spec.window is not None:
        is_visible &= positions >= visible - spec.window
    kv = jnp.where(is_visible[:, None, None, None], kv, 0.0)
    keys, values = kv[:, :, 0], kv[:, :, 1]
    grouped = query.astype(jnp.float32).reshape(num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = jnp.einsum("kgd,skd->kgs", grouped, keys).reshape(num_heads, num_positions)
    scores *= 1 / math.sqrt(head_dim) if spec.scale is None else spec.scale
    if spec.soft_cap is not None:
        scores = spec.soft_cap * jnp.tanh(scores / spec.soft_cap)
    peak = jnp.max(scores, axis=-1, initial=-1e30, where=is_visible)
    if spec.sinks is not None:
        peak = jnp.maximum(peak, spec.sinks)
    weights = jnp.where(is_visible, jnp.exp(scores - peak[:, None]), 0.0)
    total = jnp.sum(weights, axis=-1)
    if spec.sinks is not None:
        total += jnp.exp(spec.sinks - peak)
    shares = (weights / jnp.maximum(total, 1e-30)[:, None]).reshape(*grouped.shape[:2], num_positions)
    return jnp.einsum("kgs,skd->kgd", shares, values).reshape(num_heads, head_dim)


class ReferenceAttention:
    """`pdjax.kernels.base.Attention` by the definition, row by row."""

    name = "reference"

    def prefill(self, batch: PrefillBatch) -> Attend:
        sequences, positions, is_real = row_owners(batch)
        return _attend_rows(batch, sequences, jnp.where(is_real, positions + 1, 0))

    def decode(self, batch: DecodeBatch) -> Attend:
        return _attend_rows(batch, jnp.arange(len(batch.visible)), batch.visible)


def _attend_rows(batch: PrefillBatch | DecodeBatch, sequences: jax.Array, visible: jax.Array) -> Attend:
    """`attend_row` for each row; `sequences` int32[T] picks its table, `visible` int32[T] says how far it sees."""

    def attend(
        queries: jax.Array, kv: jax.Array, pool: jax.Array, layer: jax.Array | int, spec: AttentionSpec
    ) -> tuple[jax.Array, jax.Array]:
        pool = write_kv(pool, layer, batch, kv, spec.kv_scales)

        def one(row: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
            query, sequence, visible = row
            return attend_row(query, pool, layer, batch.tables[sequence], visible, spec)

        return jax.lax.map(one, (queries, sequences, visible)).astype(queries.dtype), pool

    return attend
