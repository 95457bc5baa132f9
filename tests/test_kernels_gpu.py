"""The Triton attention kernel, interpreted step by step, against the reference; its work list and its rules by hand."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdjax.kernels.base import AttentionSpec, decode_batch
from pdjax.kernels.gpu.attention import Form, HopperAttention, TritonAttention, attention_for, form_of, why_no_gpu, why_not
from pdjax.kernels.gpu.tiles import decode_tiles, prefill_tiles
from pdjax.kernels.gpu.triton_attention import Tuning, powers_of_two, widened_e4m3
from pdjax.kernels.gpu.tuning import Chip, chip_of, decode_tuning, num_splits, prefill_tuning
from pdjax.kernels.reference import ReferenceAttention
from tests.attention_kit import Case, Sizes, random_case, rows_alone, run_decode, run_prefill, stored_as

SIZES = Sizes(rows=24, head_dim=16, table_pages=32)
"""Tables of 128 positions: with blocks of 16 keys decoding cuts them into two runs."""


@functools.cache
def triton(sizes: Sizes = SIZES, queries: str = "float32", pool: str = "float32") -> TritonAttention:
    form = Form(sizes.heads // sizes.kv_heads, sizes.head_dim, sizes.page_size, jnp.dtype(queries), jnp.dtype(pool))
    return TritonAttention(Chip.SM_80, form, Tuning(16, 16, 4, 2), interpret=True)


TRITON = triton()
REFERENCE = ReferenceAttention()
FLOAT32 = {"rtol": 2e-5, "atol": 2e-5}
"""Sums over 128 positions in another order: a few units in the last place."""
SPECS = {
    "soft cap and sinks": AttentionSpec(soft_cap=0.7, sinks=np.array([-30.0, -1.0, 0.0, 0.5, 2.0, 9.0], np.float32)),
    "all": AttentionSpec(0.4, 1.5, np.int32(3), np.linspace(-2, 2, 6).astype(np.float32)),
}


@st.composite
def ragged(draw: st.DrawFn) -> Case:
    lengths = draw(st.lists(st.integers(1, SIZES.rows), min_size=1, max_size=SIZES.seqs).filter(lambda lengths: sum(lengths) <= SIZES.rows))
    lengths += [0] * (SIZES.seqs - len(lengths))
    limit = SIZES.table_pages * SIZES.page_size
    starts = [min(draw(st.integers(0, 60)), limit - length) for length in lengths]
    return random_case(draw(st.integers(0, 2**31)), starts, lengths, SIZES)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(case=ragged(), layer=st.integers(0, 1))
def test_prefill_equals_the_reference_on_ragged_batches(case: Case, layer: int) -> None:
    np.testing.assert_allclose(run_prefill(TRITON, case, layer), run_prefill(REFERENCE, case, layer), **FLOAT32)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**31), visible=st.tuples(*[st.integers(1, SIZES.table_pages * SIZES.page_size)] * SIZES.seqs))
def test_decode_in_runs_of_keys_equals_the_reference(seed: int, visible: tuple[int, ...]) -> None:
    case = random_case(seed, [n - 1 for n in visible], [1] * SIZES.seqs, SIZES)
    np.testing.assert_allclose(run_decode(TRITON, case, 0), run_decode(REFERENCE, case, 0), **FLOAT32)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_prefill_and_decode_equal_the_reference_under_every_option(spec: AttentionSpec) -> None:
    case = random_case(7, [33, 0, 9], [5, 17, 2], SIZES)
    np.testing.assert_allclose(run_prefill(TRITON, case, 1, spec), run_prefill(REFERENCE, case, 1, spec), **FLOAT32)
    case = random_case(8, [3, 0, 119], [1, 1, 1], SIZES)
    np.testing.assert_allclose(run_decode(TRITON, case, 1, spec), run_decode(REFERENCE, case, 1, spec), **FLOAT32)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(case=ragged(), window=st.integers(1, 90))
def test_any_window_equals_the_reference(case: Case, window: int) -> None:
    spec = AttentionSpec(window=np.int32(window))
    np.testing.assert_allclose(run_prefill(TRITON, case, 0, spec), run_prefill(REFERENCE, case, 0, spec), **FLOAT32)


@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(rows=8, seqs=2, head_dim=80, heads=9, kv_heads=3, page_size=3, table_pages=15),
        Sizes(rows=8, seqs=2, head_dim=256, heads=16, kv_heads=1, page_size=1, table_pages=44),
    ],
    ids=["80, 9 heads over 3, pages of 3", "256, 16 over 1, pages of 1"],
)
def test_head_dims_ratios_and_page_sizes_of_every_kind(sizes: Sizes) -> None:
    case = random_case(5, [31, 0], [5, 2], sizes)
    np.testing.assert_allclose(run_prefill(triton(sizes), case, 1), rows_alone(case, 1), **FLOAT32)


def test_bfloat16_loses_its_own_precision_and_no_more() -> None:
    case = random_case(3, [0, 40, 0], [12, 9, 3], SIZES)
    case = case._replace(queries=case.queries.astype(jnp.bfloat16), kv=case.kv.astype(jnp.bfloat16), pool=case.pool.astype(jnp.bfloat16))
    expected = run_prefill(REFERENCE, case, 0).astype(np.float32)
    # Weights and the result are rounded once each, to 8 bits; both are about 1 or less.
    tolerance = 2 * 2**-8
    got = run_prefill(triton(SIZES, "bfloat16", "bfloat16"), case, 0).astype(np.float32)
    np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn], ids=["int8", "e4m3"])
def test_quantized_pools_hold_entries_divided_by_their_scales(dtype: jnp.dtype) -> None:
    scales = np.array([0.05, 0.03, 0.04, 0.06], np.float32)
    case = stored_as(random_case(11, [3, 0, 9], [5, 11, 2], SIZES), dtype, scales)
    spec = AttentionSpec(soft_cap=2.0, kv_scales=scales)
    attention = triton(SIZES, "float32", jnp.dtype(dtype).name)
    np.testing.assert_allclose(run_prefill(attention, case, 1, spec), run_prefill(REFERENCE, case, 1, spec), **FLOAT32)


def test_every_fp8_number_is_widened_by_moving_its_bits() -> None:
    numbers = np.arange(256, dtype=np.uint8).view(jnp.float8_e4m3fn)
    numbers = numbers[np.isfinite(numbers.astype(np.float32))]
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        np.testing.assert_array_equal(widened_e4m3(jnp.asarray(numbers), jnp.dtype(dtype)), numbers.astype(dtype))


def test_tiles_take_rows_of_one_sequence_and_come_with_most_keys_first() -> None:
    case = random_case(1, [0, 10, 0], [5, 3, 0], Sizes(rows=8))
    tiles = prefill_tiles(case.batch, 4)
    # Sequence 0: rows 0-3 read 4 keys, row 4 reads 5. Sequence 1: rows 5-7, positions 10-12, read 13.
    described = list(zip(*(np.asarray(values).tolist() for values in tiles), strict=True))
    assert described == [(5, 10, 13, 1), (4, 4, 5, 0), (0, 0, 4, 0), (0, 0, 0, 0), (0, 0, 0, 0)]


def test_decoding_has_a_tile_a_sequence() -> None:
    tiles = decode_tiles(decode_batch(jnp.array([[1, 2], [3, 4]]), jnp.array([5, 2]), 4))
    assert [np.asarray(values).tolist() for values in tiles] == [[0, 1], [5, 2], [6, 3], [0, 1]]


@pytest.mark.parametrize(
    ("head_dim", "runs"), [(64, [(0, 64)]), (80, [(0, 64), (64, 16)]), (96, [(0, 64), (64, 32)]), (112, [(0, 64), (64, 32), (96, 16)])]
)
def test_a_head_dimension_is_cut_into_powers_of_two(head_dim: int, runs: list[tuple[int, int]]) -> None:
    assert list(powers_of_two(head_dim)) == runs


def test_keys_are_cut_where_there_are_few_programs_and_long_contexts() -> None:
    assert num_splits(num_programs=512, max_keys=8192, block_keys=64) == 1
    assert num_splits(num_programs=64, max_keys=8192, block_keys=64) == 4
    assert num_splits(num_programs=8, max_keys=1 << 20, block_keys=64) == 32
    assert num_splits(num_programs=8, max_keys=512, block_keys=64) == 2
    assert num_splits(num_programs=8, max_keys=32, block_keys=64) == 1


def test_what_the_kernel_does_not_do_has_a_reason() -> None:
    def reason(heads: int = 8, head_dim: int = 64, pages: int = 10, dtype: jnp.dtype = jnp.bfloat16) -> str | None:
        queries = jax.ShapeDtypeStruct((32, heads, head_dim), jnp.bfloat16)
        return why_not(queries, jax.ShapeDtypeStruct((2, pages, 16, 4, head_dim), dtype))

    assert reason() is None
    assert reason(dtype=jnp.int8) is None
    assert "head_dim 40" in reason(head_dim=40)
    assert "head_dim 512" in reason(head_dim=512)
    assert "int16" in reason(dtype=jnp.int16)
    assert "256 query heads" in reason(heads=512)
    assert reason(heads=32) is None
    assert "between 2 and 4 GiB" in reason(pages=300_000, dtype=jnp.int8)
    assert reason(pages=600_000, dtype=jnp.int8) is None


def test_the_implementation_follows_the_compute_capability() -> None:
    form = form_of(jax.ShapeDtypeStruct((32, 8, 64), jnp.bfloat16), jax.ShapeDtypeStruct((2, 10, 16, 4, 64), jnp.bfloat16))
    assert form == Form(4, 64, 16, jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.bfloat16))
    assert isinstance(attention_for("9.0", form), HopperAttention)
    assert isinstance(attention_for("8.0", form), TritonAttention) and isinstance(attention_for("10.0", form), TritonAttention)
    assert why_no_gpu("8.0") is None and why_no_gpu("12.0") is None
    assert why_no_gpu("7.5") == "compute capability 7.5 is below 8.0"
    assert why_no_gpu("gfx942") == "gfx942 is no GPU by NVIDIA"


def test_every_chip_head_dim_and_dtype_has_sizes_that_can_be() -> None:
    for head_dim in (64, 80, 96, 128, 256):
        for dtype in (jnp.float32, jnp.bfloat16):
            decode_tuning(dtype, dtype, head_dim, group=4).check()
            for chip in Chip:
                tunings = [prefill_tuning(chip, dtype, dtype, head_dim, has_window) for has_window in (False, True)]
                assert tunings[0].matrix_rows == tunings[1].matrix_rows, "layers with and without a window share tiles"
                for tuning in tunings:
                    tuning.check()
    assert decode_tuning(jnp.bfloat16, jnp.bfloat16, 128, group=12).matrix_rows == 16


def test_what_takes_registers_takes_smaller_tiles_where_they_would_spill() -> None:
    plain = prefill_tuning(Chip.SM_90, jnp.bfloat16, jnp.bfloat16, 128)
    windowed = prefill_tuning(Chip.SM_90, jnp.bfloat16, jnp.bfloat16, 128, has_window=True)
    quantized = prefill_tuning(Chip.SM_90, jnp.bfloat16, jnp.int8, 128)
    assert plain.block_keys == 128 and windowed.block_keys == quantized.block_keys == 64
    narrow, wide = (decode_tuning(jnp.bfloat16, pool, 128, group=4) for pool in (jnp.int8, jnp.bfloat16))
    assert narrow.block_keys < wide.block_keys


def test_a_chip_or_head_dim_that_is_not_in_the_table_takes_another_entry_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    assert chip_of("9.0") is Chip.SM_90 and not caplog.records
    assert chip_of("12.0") is Chip.SM_80, "consumer chips of the Blackwell generation have neither its instructions nor its shared memory"
    assert "no attention tuning for compute capability 12.0" in caplog.text
    assert prefill_tuning(Chip.SM_80, jnp.bfloat16, jnp.bfloat16, 112) == prefill_tuning(Chip.SM_80, jnp.bfloat16, jnp.bfloat16, 128)
    assert "no attention tuning for head_dim 112" in caplog.text


def test_a_tuning_that_cannot_be_names_the_size() -> None:
    with pytest.raises(ValueError, match="block_keys 48"):
        Tuning(16, 48, 4, 2).check()
    with pytest.raises(ValueError, match="matrix_rows 8"):
        Tuning(8, 16, 4, 2).check()
