"""Random batches for attention tests: ragged, with pages out of order, and with NaN wherever nothing may be read."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pdjax.kernels.base import PLAIN, Attention, AttentionSpec, PrefillBatch, as_stored, decode_batch, from_stored, prefill_batch
from pdjax.kernels.reference import attend_row


class Sizes(NamedTuple):
    """Static sizes of a case, dimensions as in `pdjax.kernels.base`."""

    rows: int = 32
    seqs: int = 3
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 8
    page_size: int = 4
    table_pages: int = 11
    layers: int = 2

    @property
    def num_pages(self) -> int:
        """Enough for every sequence to fill its table, and the null page."""
        return self.seqs * self.table_pages + 1


class Case(NamedTuple):
    """`pool` holds what was there before the step and NaN elsewhere, the slots of the step's own rows among them; those get `kv`, to which
    layer l adds l. `full` is the pool after the step, for the oracle."""

    batch: PrefillBatch
    queries: np.ndarray  # float32[rows, heads, head_dim]
    kv: np.ndarray  # float32[rows, 2 * kv_heads, head_dim], NaN in padding rows
    pool: np.ndarray  # float32[layers, pages, page_size, 2 * kv_heads, head_dim]
    full: np.ndarray

    @property
    def num_used(self) -> int:
        """Rows that belong to a sequence."""
        return int(np.sum(self.batch.lengths))

    @property
    def page_size(self) -> int:
        return self.pool.shape[2]


def random_case(seed: int, starts: Sequence[int], lengths: Sequence[int], sizes: Sizes = Sizes()) -> Case:
    """Sequence i holds `starts[i]` positions before the step and computes `lengths[i]` in it."""
    rng = np.random.default_rng(seed)
    free = rng.permutation(np.arange(1, sizes.num_pages))
    full = np.full((sizes.layers, sizes.num_pages, sizes.page_size, 2 * sizes.kv_heads, sizes.head_dim), np.nan, np.float32)
    pool, kv = full.copy(), np.full((sizes.rows, *full.shape[3:]), np.nan, np.float32)
    tables = np.zeros((sizes.seqs, sizes.table_pages), np.int32)
    layers = np.arange(sizes.layers)[:, None, None]
    row = 0
    for i, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        num_pages = -(-(start + length) // sizes.page_size) if length else 0
        assert num_pages <= sizes.table_pages, f"{start} + {length} positions do not fit into a table of {sizes.table_pages} pages"
        tables[i, :num_pages], free = free[:num_pages], free[num_pages:]
        for position in range(start + length if length else 0):
            page, offset, entry = tables[i, position // sizes.page_size], position % sizes.page_size, rng.normal(size=kv.shape[1:])
            full[:, page, offset] = entry + layers
            if position < start:
                pool[:, page, offset] = entry + layers
            else:
                kv[row], row = entry, row + 1
    firsts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    described = (jnp.asarray(values, jnp.int32) for values in (tables, firsts, starts, lengths))
    queries = rng.normal(size=(sizes.rows, sizes.heads, sizes.head_dim)).astype(np.float32)
    return Case(prefill_batch(*described, sizes.rows, sizes.page_size), queries, kv, pool, full)


def stored_as(case: Case, dtype: jnp.dtype, kv_scales: np.ndarray) -> Case:
    """The case with pools of int8, fp8 or bits of floats; `full` holds what such a pool gives back."""

    def stored(values: np.ndarray) -> np.ndarray:
        return np.asarray(as_stored(jnp.asarray(values), jnp.dtype(dtype), jnp.asarray(kv_scales)))

    full = np.asarray(from_stored(jnp.asarray(stored(case.full)), jnp.asarray(kv_scales)))
    return case._replace(pool=stored(case.pool), full=np.where(np.isnan(case.full), np.nan, full))


def run_prefill(attention: Attention, case: Case, layer: int, spec: AttentionSpec = PLAIN) -> np.ndarray:
    """What the rows that belong to a sequence attend to, in the dtype of the queries."""
    run = _jitted_prefill(attention, spec.scale, spec.soft_cap)
    return np.asarray(run(case.batch, case.queries, case.kv + layer, case.pool, layer, *spec[2:])[0])[: case.num_used]


def run_decode(attention: Attention, case: Case, layer: int, spec: AttentionSpec = PLAIN) -> np.ndarray:
    """For a case with one row a sequence: the same by the decode method."""
    batch = decode_batch(case.batch.tables, case.batch.starts, case.page_size)
    rows = slice(len(case.batch.starts))
    run = _jitted_decode(attention, spec.scale, spec.soft_cap)
    return np.asarray(run(batch, case.queries[rows], case.kv[rows] + layer, case.pool, layer, *spec[2:])[0])


def rows_alone(case: Case, layer: int, spec: AttentionSpec = PLAIN) -> np.ndarray:
    """The oracle, float32[num_used, heads, head_dim]: each row by itself, over the full pool."""
    if spec.kv_scales is not None:
        spec = spec._replace(kv_scales=None)
    rows, alone = [], _jitted_row(spec.scale, spec.soft_cap)
    described = (np.asarray(values) for values in (case.batch.tables, case.batch.first_rows, case.batch.starts, case.batch.lengths))
    for table, first, start, length in zip(*described, strict=True):
        for i in range(length):
            rows.append(alone(case.queries[first + i], case.full, layer, table, start + i + 1, *spec[2:]))
    return np.stack(rows).astype(np.float32)


@functools.cache
def _jitted_prefill(attention: Attention, scale: float | None, soft_cap: float | None) -> Callable[..., tuple[jax.Array, jax.Array]]:
    return jax.jit(lambda batch, *arrays: attention.prefill(batch)(*arrays[:4], AttentionSpec(scale, soft_cap, *arrays[4:])))


@functools.cache
def _jitted_decode(attention: Attention, scale: float | None, soft_cap: float | None) -> Callable[..., tuple[jax.Array, jax.Array]]:
    return jax.jit(lambda batch, *arrays: attention.decode(batch)(*arrays[:4], AttentionSpec(scale, soft_cap, *arrays[4:])))


@functools.cache
def _jitted_row(scale: float | None, soft_cap: float | None) -> Callable[..., jax.Array]:
    return jax.jit(lambda *arrays: attend_row(*arrays[:5], AttentionSpec(scale, soft_cap, *arrays[5:])))
