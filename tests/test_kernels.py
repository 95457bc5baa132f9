"""Paged attention: the reference against numbers worked out by hand, everything else against the reference."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdjax.config.environment import attention_override
from pdjax.kernels.base import Attention, DecodeBatch, PrefillBatch
from pdjax.kernels.dispatch import choose_attention
from pdjax.kernels.reference import ReferenceAttention, attend_row
from pdjax.kernels.xla import Tuning, XlaAttention

LAYERS, PAGES, PAGE, HEADS, KV_HEADS, DIM = 2, 40, 4, 6, 2, 8
TABLE_PAGES, ROWS, SEQS = 11, 32, 3
TUNINGS = [Tuning(16, 8, 8, 8), Tuning(10, 5, 12, 4), Tuning(512, 128, 256, 256), Tuning(2, 1, 2, 1), Tuning(32, 4, 4, 16)]
FLOAT32 = {"rtol": 2e-5, "atol": 2e-5}
"""Sums over 44 positions in another order: a few units in the last place."""


def pool_of(keys: list[list[list[float]]], values: list[list[list[float]]], page_size: int = 2) -> np.ndarray:
    """A pool of one layer whose pages 1, 2, .. hold [position][kv head][dim] in order, and whose every other slot holds NaN."""
    num_kv_heads, dim = len(keys[0]), len(keys[0][0])
    pool = np.full((1, 8, page_size, 2 * num_kv_heads, dim), np.nan, np.float32)
    for position, (key, value) in enumerate(zip(keys, values, strict=True)):
        pool[0, 1 + position // page_size, position % page_size, 0::2] = key
        pool[0, 1 + position // page_size, position % page_size, 1::2] = value
    return pool


def test_reference_weighs_values_by_the_softmax_of_scaled_scores() -> None:
    # Scores (2 ln 3 * 1) / sqrt(4) = ln 3 and 0: weights 3/4 and 1/4, so 3/4 * 4 + 1/4 * 8 = 5.
    pool = pool_of([[[1, 0, 0, 0]], [[0, 0, 0, 0]]], [[[4, 0, 0, 1]], [[8, 0, 0, 1]]])
    query = np.array([[2 * math.log(3), 0, 0, 0]], np.float32)
    out = attend_row(query, pool, 0, np.array([1, 0], np.int32), 2)
    np.testing.assert_allclose(out, [[5, 0, 0, 1]], rtol=1e-6)


def test_reference_sees_only_the_visible_positions_and_no_nan_behind_them() -> None:
    pool = pool_of([[[0.0]], [[0.0]], [[0.0]]], [[[1.0]], [[3.0]], [[8.0]]])
    table = np.array([1, 2, 0], np.int32)
    means = [float(attend_row(np.ones((1, 1), np.float32), pool, 0, table, visible)[0, 0]) for visible in (1, 2, 3)]
    assert means == pytest.approx([1.0, 2.0, 4.0])


def test_reference_gives_each_group_of_query_heads_its_own_kv_head() -> None:
    pool = pool_of([[[0.0], [0.0]]], [[[1.0], [2.0]]])
    out = attend_row(np.ones((4, 1), np.float32), pool, 0, np.array([1], np.int32), 1)
    np.testing.assert_array_equal(out, [[1], [1], [2], [2]])


def test_reference_follows_the_page_table_and_the_layer() -> None:
    pool = np.zeros((2, 4, 1, 2, 1), np.float32)
    pool[1, :, 0, 1, 0] = [np.nan, 10, 20, 30]
    out = attend_row(np.ones((1, 1), np.float32), pool, 1, np.array([3, 1], np.int32), 2)
    assert float(out[0, 0]) == pytest.approx(20.0)


def random_case(seed: int, starts: list[int], lengths: list[int]) -> tuple[PrefillBatch, np.ndarray, np.ndarray]:
    """A prefill batch, queries, and a pool with NaN in every slot that no sequence holds."""
    rng = np.random.default_rng(seed)
    pages = rng.permutation(np.arange(1, PAGES))
    pool = np.full((LAYERS, PAGES, PAGE, 2 * KV_HEADS, DIM), np.nan, np.float32)
    tables = np.zeros((SEQS, TABLE_PAGES), np.int32)
    for i, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        held, pages = np.split(pages, [-(-(start + length) // PAGE)]) if length else (pages[:0], pages)
        tables[i, : len(held)] = held
        for position in range(start + length if length else 0):
            pool[:, held[position // PAGE], position % PAGE] = rng.normal(size=(LAYERS, 2 * KV_HEADS, DIM))
    firsts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int32)
    batch = PrefillBatch(tables, firsts, np.array(starts, np.int32), np.array(lengths, np.int32))
    return batch, rng.normal(size=(ROWS, HEADS, DIM)).astype(np.float32), pool


def run_prefill(attention: Attention, batch: PrefillBatch, queries: np.ndarray, pool: np.ndarray, layer: int) -> np.ndarray:
    return np.asarray(jitted_prefill(attention)(batch, queries, pool, layer))


@functools.cache
def jitted_prefill(attention: Attention) -> Callable[..., jax.Array]:
    return jax.jit(lambda batch, queries, pool, layer: attention.prefill(batch, ROWS)(queries, pool, layer))


@functools.cache
def jitted_decode(attention: Attention) -> Callable[..., jax.Array]:
    return jax.jit(lambda batch, queries, pool, layer: attention.decode(batch)(queries, pool, layer))


REFERENCE = ReferenceAttention()
XLA = [XlaAttention(tuning) for tuning in TUNINGS]


@pytest.mark.parametrize("attention", XLA, ids=[str(tuple(tuning)) for tuning in TUNINGS])
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31),
    starts=st.tuples(*[st.integers(0, 20)] * SEQS),
    lengths=st.lists(st.integers(1, ROWS), min_size=1, max_size=SEQS).filter(lambda lengths: sum(lengths) <= ROWS),
)
def test_blockwise_prefill_equals_the_reference_on_ragged_batches(
    attention: Attention, seed: int, starts: tuple[int, ...], lengths: list[int]
) -> None:
    padded = lengths + [0] * (SEQS - len(lengths))
    if sum(-(-(start + length) // PAGE) for start, length in zip(starts, padded, strict=True) if length) >= PAGES:
        starts = (0,) * SEQS
    starts = tuple(min(start, TABLE_PAGES * PAGE - length) for start, length in zip(starts, padded, strict=True))
    batch, queries, pool = random_case(seed, list(starts), padded)
    used = sum(lengths)
    for layer in range(LAYERS):
        expected = run_prefill(REFERENCE, batch, queries, pool, layer)[:used]
        assert np.isfinite(expected).all()
        np.testing.assert_allclose(run_prefill(attention, batch, queries, pool, layer)[:used], expected, **FLOAT32)


def test_the_reference_prefill_equals_one_row_at_a_time() -> None:
    batch, queries, pool = random_case(7, [3, 0, 9], [5, 11, 2])
    out = run_prefill(REFERENCE, batch, queries, pool, 1)
    for sequence, (first, start, length) in enumerate(zip(*batch[1:], strict=True)):
        for i in range(length):
            alone = attend_row(queries[first + i], pool, 1, batch.tables[sequence], start + i + 1)
            np.testing.assert_allclose(out[first + i], alone, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("attention", XLA, ids=[str(tuple(tuning)) for tuning in TUNINGS])
@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**31), visible=st.tuples(*[st.integers(1, TABLE_PAGES * PAGE)] * SEQS))
def test_blockwise_decode_equals_the_reference(attention: Attention, seed: int, visible: tuple[int, ...]) -> None:
    batch, queries, pool = random_case(seed, [n - 1 for n in visible], [1] * SEQS)
    decode = DecodeBatch(batch.tables, np.array(visible, np.int32))
    expected = np.asarray(jitted_decode(REFERENCE)(decode, queries[:SEQS], pool, 0))
    assert np.isfinite(expected).all()
    np.testing.assert_allclose(jitted_decode(attention)(decode, queries[:SEQS], pool, 0), expected, **FLOAT32)


def test_bfloat16_pools_are_attended_in_float32() -> None:
    batch, queries, pool = random_case(3, [0, 4, 0], [20, 9, 3])
    queries, pool = queries.astype(jnp.bfloat16), pool.astype(jnp.bfloat16)
    expected = run_prefill(REFERENCE, batch, queries, pool, 0)[:32].astype(np.float32)
    # Both accumulate in float32 and round once, to 8 bits: one unit in the last place of values of about 1.
    np.testing.assert_allclose(run_prefill(XLA[0], batch, queries, pool, 0)[:32].astype(np.float32), expected, rtol=2**-7, atol=2**-7)


def test_blockwise_prefill_holds_no_matrix_of_scores() -> None:
    rows, context_pages = 512, 2048
    abstract = lambda shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
    batch = PrefillBatch(abstract((1, context_pages), jnp.int32), *[abstract((1,), jnp.int32)] * 3)
    attend = jax.jit(lambda batch, queries, pool: XlaAttention().prefill(batch, rows)(queries, pool, 0))
    compiled = attend.lower(batch, abstract((rows, HEADS, DIM)), abstract((1, context_pages, 16, 2 * KV_HEADS, DIM))).compile()
    scores_bytes = HEADS * rows * context_pages * 16 * 4
    assert compiled.memory_analysis().temp_size_in_bytes < scores_bytes / 50


def test_the_environment_overrides_the_platform_and_unknown_names_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PDJAX_ATTENTION", raising=False)
    assert choose_attention("cpu", attention_override()).name == "xla"
    monkeypatch.setenv("PDJAX_ATTENTION", "reference")
    assert choose_attention("cpu", attention_override()).name == "reference"
    monkeypatch.setenv("PDJAX_ATTENTION", "flash")
    with pytest.raises(ValueError, match="'flash' does not exist; choose one of reference, xla"):
        choose_attention("cpu", attention_override())
