"""Paged attention: the reference against numbers worked out by hand, everything else against the reference."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdjax.config.environment import attention_override
from pdjax.kernels.base import PLAIN, Attention, AttentionSpec, PrefillBatch, as_stored
from pdjax.kernels.cpu import is_installed
from pdjax.kernels.dispatch import Setting, choose_attention
from pdjax.kernels.reference import ReferenceAttention, attend_row
from pdjax.kernels.xla import Tuning, XlaAttention
from tests.attention_kit import Case, Sizes, random_case, rows_alone, run_decode, run_prefill, stored_as

pytestmark = pytest.mark.usefixtures("compiled_quickly")

SIZES = Sizes()
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


REFERENCE = ReferenceAttention()
XLA = [XlaAttention(tuning) for tuning in TUNINGS]
SPECS = {
    "window": AttentionSpec(window=np.int32(5)),
    "window of one page and a bit": AttentionSpec(window=np.int32(6)),
    "soft cap": AttentionSpec(soft_cap=0.7),
    "scale": AttentionSpec(scale=0.9),
    "sinks": AttentionSpec(sinks=np.array([-30.0, -1.0, 0.0, 0.5, 2.0, 9.0], np.float32)),
    "all": AttentionSpec(0.4, 1.5, 3, np.linspace(-2, 2, 6).astype(np.float32)),
}


@st.composite
def ragged(draw: st.DrawFn) -> Case:
    lengths = draw(st.lists(st.integers(1, SIZES.rows), min_size=1, max_size=SIZES.seqs).filter(lambda lengths: sum(lengths) <= SIZES.rows))
    lengths += [0] * (SIZES.seqs - len(lengths))
    limit = SIZES.table_pages * SIZES.page_size
    starts = [min(draw(st.integers(0, 20)), limit - length) for length in lengths]
    return random_case(draw(st.integers(0, 2**31)), starts, lengths)


@pytest.mark.parametrize("attention", XLA, ids=[str(tuple(tuning)) for tuning in TUNINGS])
@settings(max_examples=40, deadline=None, derandomize=True)
@given(case=ragged())
def test_blockwise_prefill_equals_the_reference_on_ragged_batches(attention: Attention, case: Case) -> None:
    for layer in range(SIZES.layers):
        expected = run_prefill(REFERENCE, case, layer)
        assert np.isfinite(expected).all()
        np.testing.assert_allclose(run_prefill(attention, case, layer), expected, **FLOAT32)


@pytest.mark.parametrize("attention", [REFERENCE, *XLA[:3]], ids=["reference", *(str(tuple(tuning)) for tuning in TUNINGS[:3])])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_prefill_and_decode_equal_one_row_at_a_time_under_every_option(attention: Attention, spec: AttentionSpec) -> None:
    case = random_case(7, [3, 0, 9], [5, 11, 2])
    np.testing.assert_allclose(run_prefill(attention, case, 1, spec), rows_alone(case, 1, spec), **FLOAT32)
    case = random_case(8, [3, 0, 41], [1, 1, 1])
    np.testing.assert_allclose(run_decode(attention, case, 1, spec), rows_alone(case, 1, spec), **FLOAT32)


def test_a_window_wider_than_the_context_changes_nothing_and_a_window_of_one_gives_the_own_value() -> None:
    case = random_case(9, [3, 0, 9], [5, 11, 2])
    wide = run_prefill(XLA[0], case, 0, AttentionSpec(window=1000))
    np.testing.assert_allclose(wide, run_prefill(XLA[0], case, 0), **FLOAT32)
    own_values = np.repeat(case.kv[: case.num_used, 1::2], SIZES.heads // SIZES.kv_heads, axis=1)
    np.testing.assert_allclose(run_prefill(XLA[0], case, 0, AttentionSpec(window=1)), own_values, rtol=1e-6)


def test_a_sink_takes_its_share_of_the_weights() -> None:
    # One key with score 0, a sink of ln 3: the value counts 1 / (1 + 3).
    pool = pool_of([[[0.0]]], [[[8.0]]])
    spec = AttentionSpec(sinks=np.array([math.log(3)], np.float32))
    assert float(attend_row(np.ones((1, 1), np.float32), pool, 0, np.array([1], np.int32), 1, spec)[0, 0]) == pytest.approx(2.0)


def test_a_soft_cap_bounds_the_scores() -> None:
    # Scores of +-1000 become +-ln 3 / 2: weights 3/4 and 1/4.
    pool = pool_of([[[1000.0]], [[-1000.0]]], [[[4.0]], [[8.0]]])
    spec = AttentionSpec(soft_cap=math.log(3) / 2)
    assert float(attend_row(np.ones((1, 1), np.float32), pool, 0, np.array([1], np.int32), 2, spec)[0, 0]) == pytest.approx(5.0)


@pytest.mark.parametrize("attention", [REFERENCE, XLA[0]], ids=["reference", "xla"])
@pytest.mark.parametrize(
    "dtype", [jnp.int8, jnp.float8_e4m3fn, jnp.uint8, jnp.uint16], ids=["int8", "fp8", "bits of fp8", "bits of bfloat16"]
)
def test_quantized_pools_hold_entries_divided_by_their_scales(attention: Attention, dtype: jnp.dtype) -> None:
    scales = np.array([0.05, 0.03, 0.04, 0.06], np.float32)
    case = stored_as(random_case(11, [3, 0, 9], [5, 11, 2]), dtype, scales)
    spec = AttentionSpec(kv_scales=scales)
    np.testing.assert_allclose(run_prefill(attention, case, 1, spec), rows_alone(case, 1), **FLOAT32)


def test_what_is_stored_is_rounded_to_the_nearest_and_clamped() -> None:
    kv = jnp.array([[0.26, -0.24, 1000.0, -1000.0]])
    np.testing.assert_array_equal(as_stored(kv, jnp.dtype(jnp.int8), jnp.array([0.5])), [[1, 0, 127, -128]])
    stored = as_stored(kv, jnp.dtype(jnp.float8_e4m3fn), jnp.array([0.5])).astype(jnp.float32)
    np.testing.assert_array_equal(stored, [[0.5, -0.46875, 448, -448]])


@pytest.mark.parametrize("attention", XLA, ids=[str(tuple(tuning)) for tuning in TUNINGS])
@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**31), visible=st.tuples(*[st.integers(1, SIZES.table_pages * SIZES.page_size)] * SIZES.seqs))
def test_blockwise_decode_equals_the_reference(attention: Attention, seed: int, visible: tuple[int, ...]) -> None:
    case = random_case(seed, [n - 1 for n in visible], [1] * SIZES.seqs)
    expected = run_decode(REFERENCE, case, 0)
    assert np.isfinite(expected).all()
    np.testing.assert_allclose(run_decode(attention, case, 0), expected, **FLOAT32)


def test_bfloat16_pools_are_attended_in_float32() -> None:
    case = random_case(3, [0, 4, 0], [20, 9, 3])
    case = case._replace(**{name: getattr(case, name).astype(jnp.bfloat16) for name in ("queries", "kv", "pool")})
    expected = run_prefill(REFERENCE, case, 0).astype(np.float32)
    # Both accumulate in float32 and round once, to 8 bits: one unit in the last place of values of about 1.
    np.testing.assert_allclose(run_prefill(XLA[0], case, 0).astype(np.float32), expected, rtol=2**-7, atol=2**-7)


def test_blockwise_prefill_holds_no_matrix_of_scores() -> None:
    rows, context_pages, heads, kv_heads, dim = 512, 2048, SIZES.heads, SIZES.kv_heads, SIZES.head_dim

    def abstract(*shape: int, dtype: jnp.dtype = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    numbers = functools.partial(abstract, dtype=jnp.int32)
    batch = PrefillBatch(numbers(1, context_pages), *[numbers(1)] * 3, numbers(rows), numbers(rows))
    attend = jax.jit(lambda batch, *arrays: XlaAttention().prefill(batch)(*arrays, 0, PLAIN))
    arrays = (abstract(rows, heads, dim), abstract(rows, 2 * kv_heads, dim), abstract(1, context_pages, 16, 2 * kv_heads, dim))
    compiled = attend.lower(batch, *arrays).compile()
    scores_bytes, pool_bytes = heads * rows * context_pages * 16 * 4, context_pages * 16 * 2 * kv_heads * dim * 4
    assert compiled.memory_analysis().temp_size_in_bytes < pool_bytes + scores_bytes / 50


CPU = Setting(
    jax.devices()[0],
    jax.ShapeDtypeStruct((32, 8, 128), jnp.float32),
    jax.ShapeDtypeStruct((2, 64, 16, 4, 128), jnp.float32),
    jax.ShapeDtypeStruct((4, 16), jnp.int32),
)


class OtherDevice(NamedTuple):
    platform: str
    device_kind: str
    compute_capability: str = ""


def on(device: OtherDevice, **changes: jax.ShapeDtypeStruct) -> Setting:
    return CPU._replace(device=device, **changes)  # type: ignore[arg-type]


V6E = OtherDevice("tpu", "TPU v6 lite")


def test_the_environment_overrides_the_platform_and_unknown_names_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PDJAX_ATTENTION", raising=False)
    assert choose_attention(CPU, attention_override()).name == ("cpu" if is_installed() else "xla")
    for name in ("reference", "xla", "pallas"):
        monkeypatch.setenv("PDJAX_ATTENTION", name)
        assert choose_attention(CPU, attention_override()).name == name
        assert choose_attention(on(V6E), attention_override()).name == name
    monkeypatch.setenv("PDJAX_ATTENTION", "flash")
    with pytest.raises(ValueError, match="'flash' does not exist; choose one of pallas, reference, xla"):
        choose_attention(CPU, attention_override())


@pytest.mark.parametrize(
    ("device", "name"),
    [
        (V6E, "pallas"),
        (OtherDevice("gpu", "NVIDIA A100-SXM4-80GB", "8.0"), "triton"),
        (OtherDevice("gpu", "NVIDIA H100 80GB HBM3", "9.0"), "hopper"),
        (OtherDevice("gpu", "Tesla V100-SXM2-16GB", "7.0"), "xla"),
    ],
)
def test_each_device_gets_its_kernels(device: OtherDevice, name: str) -> None:
    assert choose_attention(on(device)).name == name


def test_what_no_kernel_supports_runs_in_xla_with_one_line_that_says_why(caplog: pytest.LogCaptureFixture) -> None:
    uneven = jax.ShapeDtypeStruct((2, 64, 24, 4, 128), jnp.float32)
    assert choose_attention(on(V6E, pool=uneven)).name == "xla"
    [record] = caplog.records
    assert "attention runs in XLA on TPU v6 lite: pages of 24 tokens" in record.getMessage()
    with pytest.raises(ValueError, match="no attention kernel for TPU v6 lite: pages of 24 tokens"):
        choose_attention(on(V6E, pool=uneven), "pallas")
