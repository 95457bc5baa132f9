"""Paged attention, obviously right: every query row gathers its whole page table and takes one softmax over it.

The oracle for every other implementation. Its cost grows with the width of the page table, so it is for tests and small contexts.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from pdjax.kernels.base import Attend, DecodeBatch, PrefillBatch


def attend_row(query: jax.Array, pool: jax.Array, layer: jax.Array | int, table: jax.Array, visible: jax.Array) -> jax.Array:
    """Attention of one query row over the first `visible` positions of one sequence.

    Args:
        query: [H, D].
        pool: [layers, pages, page_size, 2 * K, D].
        layer: int32 scalar.
        table: int32[P], the sequence's pages in order.
        visible: int32 scalar; 0 gives a row of zeros.

    Returns: float32[H, D].
    """
    num_heads, head_dim = query.shape
    kv = pool[layer, table].astype(jnp.float32)
    num_positions, num_kv_heads = kv.shape[0] * kv.shape[1], kv.shape[2] // 2
    kv = kv.reshape(num_positions, num_kv_heads, 2, head_dim)
    is_visible = jnp.arange(num_positions) < visible
    kv = jnp.where(is_visible[:, None, None, None], kv, 0.0)
    keys, values = kv[:, :, 0], kv[:, :, 1]
    grouped = query.astype(jnp.float32).reshape(num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = jnp.einsum("kgd,skd->kgs", grouped, keys) / math.sqrt(head_dim)
    weights = jnp.where(is_visible, jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True, initial=-1e30, where=is_visible)), 0.0)
    total = jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), 1e-30)
    return jnp.einsum("kgs,skd->kgd", weights / total, values).reshape(num_heads, head_dim)


class ReferenceAttention:
    """`pdjax.kernels.base.Attention` by the definition, row by row."""

    name = "reference"

    def prefill(self, batch: PrefillBatch, num_rows: int) -> Attend:
        rows = jnp.arange(num_rows, dtype=jnp.int32)
        offsets = rows[:, None] - batch.first_rows[None, :]
        owns = (offsets >= 0) & (offsets < batch.lengths[None, :])
        sequences = jnp.argmax(owns, axis=1)
        positions = batch.starts[sequences] + rows - batch.first_rows[sequences]
        visible = jnp.where(jnp.any(owns, axis=1), positions + 1, 0)

        def attend(queries: jax.Array, pool: jax.Array, layer: jax.Array | int) -> jax.Array:
            return _attend_rows(queries, pool, layer, batch.tables, sequences, visible)

        return attend

    def decode(self, batch: DecodeBatch) -> Attend:
        def attend(queries: jax.Array, pool: jax.Array, layer: jax.Array | int) -> jax.Array:
            return _attend_rows(queries, pool, layer, batch.tables, jnp.arange(queries.shape[0]), batch.visible)

        return attend


def _attend_rows(
    queries: jax.Array, pool: jax.Array, layer: jax.Array | int, tables: jax.Array, sequences: jax.Array, visible: jax.Array
) -> jax.Array:
    """`attend_row` for each row; `sequences` int32[T] picks its table, `visible` int32[T] says how far it sees."""
    rows = jax.lax.map(lambda row: attend_row(row[0], pool, layer, tables[row[1]], row[2]), (queries, sequences, visible))
    return rows.astype(queries.dtype)
