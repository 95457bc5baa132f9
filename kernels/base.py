"""What every attention implementation offers, and the description of a step that it works from.

Dimensions: T token rows of a step, S sequences of a step, H query heads, K KV heads, D head_dim, G = H / K query heads that share a
KV head, P pages in a page table.

The KV pool is one array `[layers, pages, page_size, 2 * K, D]`: entry 2i of the fourth axis is the key of KV head i, entry 2i + 1
its value. Page 0 is the null page: page tables are padded with it, and padding rows write there. Nothing in it, and nothing in a
slot past the end of a sequence, may reach a result, NaN included.

A pool of unsigned integers holds the bits of floats (`FLOAT_OF_BITS`). CPUs need that: XLA there turns every update of an array of narrow
floats into a conversion of the whole array to float32 and back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp


class AttentionSpec(NamedTuple):
    """What the attention of one layer is, beyond its queries, keys and values. What is None is left out of the program."""

    scale: float | None = None
    """Factor of the scores; None: 1 / sqrt(D)."""
    soft_cap: float | None = None
    """Scores become soft_cap * tanh(scores / soft_cap), before masking."""
    window: jax.Array | int | None = None
    """A row sees the last `window` positions, at least 1, its own included. An int32 scalar that is traced lets layers with different
    windows share one program."""
    sinks: jax.Array | None = None
    """float32[H]: a logit per head that joins the softmax's denominator and carries no value."""
    kv_scales: jax.Array | None = None
    """float32[2 * K]: what the pool holds, times its scale, is the key or value. For pools of int8 and fp8."""


PLAIN = AttentionSpec()

FLOAT_OF_BITS = {jnp.dtype(jnp.uint16): jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.uint8): jnp.dtype(jnp.float8_e4m3fn)}
BITS_OF_FLOAT = {floating: bits for bits, floating in FLOAT_OF_BITS.items()}

Attend = Callable[[jax.Array, jax.Array, jax.Array, jax.Array | int, AttentionSpec], tuple[jax.Array, jax.Array]]
"""(queries [T, H, D], kv [T, 2 * K, D], pool, layer, spec) -> (attended [T, H, D] in the dtype of the queries, pool).

Writes the keys and values of the step's own rows into the pool's layer first, then attends over it; the pool is taken over. Rows that
belong to no sequence hold anything. Arithmetic is float32.
"""


class PrefillBatch(NamedTuple):
    """Sequences laid end to end over the rows of a prefill step; sequence s takes rows `first_rows[s] .. first_rows[s] + lengths[s]`.

    Its row i sits at position `starts[s] + i` and sees every position of the sequence up to its own. Sequences with length 0 are
    padding and come last. `pages` and `offsets` follow from the rest: where the KV of each row goes.
    """

    tables: jax.Array  # int32[S, P], padded with page 0
    first_rows: jax.Array  # int32[S], rising
    starts: jax.Array  # int32[S]
    lengths: jax.Array  # int32[S]
    pages: jax.Array  # int32[T]; 0 for padding rows
    offsets: jax.Array  # int32[T]: slot in that page


class DecodeBatch(NamedTuple):
    """One row a sequence; row s sees positions `0 .. visible[s]`, its own included. Padding rows point at page 0 with `visible` 1."""

    tables: jax.Array  # int32[S, P], padded with page 0
    visible: jax.Array  # int32[S], at least 1
    pages: jax.Array  # int32[S]: where the KV of each row goes
    offsets: jax.Array  # int32[S]


class Attention(Protocol):
    """One implementation. Both methods are traced inside a step and do the work that all layers share."""

    name: str

    def prefill(self, batch: PrefillBatch) -> Attend: ...

    def decode(self, batch: DecodeBatch) -> Attend: ...


def prefill_batch(
    tables: jax.Array, first_rows: jax.Array, starts: jax.Array, lengths: jax.Array, num_rows: int, page_size: int
) -> PrefillBatch:
    """A batch over `num_rows` rows, padding included; see `PrefillBatch` for the arguments."""
    batch = PrefillBatch(tables, first_rows, starts, lengths, jnp.zeros(num_rows, jnp.int32), jnp.zeros(num_rows, jnp.int32))
    sequences, positions, is_real = row_owners(batch)
    pages = jnp.where(is_real, tables[sequences, positions // page_size], 0)
    return batch._replace(pages=pages, offsets=positions % page_size)


def decode_batch(tables: jax.Array, positions: jax.Array, page_size: int) -> DecodeBatch:
    """A batch of one token a sequence, at `positions` int32[S]."""
    pages = tables[jnp.arange(len(positions)), positions // page_size]
    return DecodeBatch(tables, positions + 1, pages, positions % page_size)


def row_owners(batch: PrefillBatch) -> tuple[jax.Array, jax.Array, jax.Array]:
    """For each row: its sequence int32[T], its position int32[T] (0 for padding rows), whether it belongs to a sequence bool[T]."""
    rows = jnp.arange(len(batch.pages), dtype=jnp.int32)
    ends = batch.first_rows + batch.lengths
    sequences = jnp.minimum(jnp.searchsorted(ends, rows, side="right", method="compare_all"), ends.shape[0] - 1)
    is_real = rows < ends[-1]
    return sequences, jnp.where(is_real, batch.starts[sequences] + rows - batch.first_rows[sequences], 0), is_real


def write_kv(
    pool: jax.Array, layer: jax.Array | int, batch: PrefillBatch | DecodeBatch, kv: jax.Array, kv_scales: jax.Array | None
) -> jax.Array:
    """The pool with kv [T, 2 * K, D] written to the batch's pages of layer `layer`, rounded and clamped to what the pool's dtype holds."""
    return pool.at[layer, batch.pages, batch.offsets].set(as_stored(kv, pool.dtype, kv_scales))


def as_stored(kv: jax.Array, dtype: jnp.dtype, kv_scales: jax.Array | None) -> jax.Array:
    """kv [..., 2 * K, D] as a pool of `dtype` holds it: divided by its scales, rounded to the nearest, clamped to the dtype's range."""
    if dtype in FLOAT_OF_BITS:
        return same_bits(as_stored(kv, FLOAT_OF_BITS[dtype], kv_scales), dtype)
    if kv_scales is not None:
        kv = kv.astype(jnp.float32) / kv_scales[:, None]
    if jnp.issubdtype(dtype, jnp.integer):
        limits = jnp.iinfo(dtype)
        return jnp.clip(jnp.round(kv), limits.min, limits.max).astype(dtype)
    if dtype.itemsize == 1:
        limit = float(jnp.finfo(dtype).max)
        return jnp.clip(kv, -limit, limit).astype(dtype)
    return kv.astype(dtype)


def from_stored(kv: jax.Array, kv_scales: jax.Array | None) -> jax.Array:
    """What entries [..., 2 * K, D] of a pool stand for, float32."""
    kv = same_bits(kv, FLOAT_OF_BITS.get(kv.dtype, kv.dtype)).astype(jnp.float32)
    return kv if kv_scales is None else kv * kv_scales[:, None]


def same_bits(kv: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """From floats to their bits in a pool, or back."""
    return kv if kv.dtype == dtype else jax.lax.bitcast_convert_type(kv, dtype)
