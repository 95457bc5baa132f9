"""Kernels for CPUs that numba compiles: decode attention against the oracle, products against numpy, the calls among XLA's threads."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("numba", reason="numba is not installed; it comes with the extra `cpu`")

from numba import njit  # noqa: E402

from pdjax.engine.engine import Engine  # noqa: E402
from pdjax.kernels.base import PLAIN, AttentionSpec  # noqa: E402
from pdjax.kernels.cpu.attention import CpuAttention, why_not  # noqa: E402
from pdjax.kernels.cpu.numbers import exponential  # noqa: E402
from pdjax.kernels.cpu.product import narrow_product  # noqa: E402
from pdjax.kernels.xla import XlaAttention  # noqa: E402
from tests.attention_kit import Sizes, random_case, rows_alone, run_decode, stored_as  # noqa: E402
from tests.engine_kit import CONFIG, SHAPE, generate, greedy_with_logprobs, random_weights  # noqa: E402

pytestmark = pytest.mark.usefixtures("compiled_quickly")
FLOAT32 = {"rtol": 3e-5, "atol": 3e-5}
"""Sums in another order, and an exponential that is right to 3 units in the last place."""
SPECS = {
    "plain": PLAIN,
    "scale": AttentionSpec(scale=0.3),
    "soft cap": AttentionSpec(soft_cap=1.5),
    "window": AttentionSpec(window=5),
    "window of one": AttentionSpec(window=1),
    "sinks": AttentionSpec(sinks=np.linspace(-2, 4, 6).astype(np.float32)),
    "all": AttentionSpec(scale=0.7, soft_cap=4.0, window=7, sinks=np.linspace(-1, 1, 6).astype(np.float32)),
}


@functools.cache
def cpu_attention() -> CpuAttention:
    return CpuAttention()


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_decode_equals_each_row_by_itself(spec: AttentionSpec) -> None:
    case = random_case(3, [17, 0, 42], [1, 1, 1])
    np.testing.assert_allclose(run_decode(cpu_attention(), case, 1, spec), rows_alone(case, 1, spec), **FLOAT32)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 1 << 20),
    starts=st.lists(st.integers(0, 700), min_size=3, max_size=3),
    heads=st.sampled_from([(9, 3, 64), (8, 2, 5)]),
    page_size=st.sampled_from([1, 64]),
)
def test_decode_puts_stretches_of_any_length_together(seed: int, starts: list[int], heads: tuple[int, int, int], page_size: int) -> None:
    num_heads, kv_heads, dim = heads
    sizes = Sizes(len(starts), len(starts), num_heads, kv_heads, dim, page_size, -(-701 // page_size), 1)
    case = random_case(seed, starts, [1] * len(starts), sizes)
    np.testing.assert_allclose(run_decode(cpu_attention(), case, 0), rows_alone(case, 0), **FLOAT32)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint16], ids=["int8", "bits of bfloat16"])
def test_decode_reads_narrow_pools_by_their_scales(dtype: jnp.dtype) -> None:
    scales = np.linspace(0.02, 0.05, 4).astype(np.float32)
    case = stored_as(random_case(5, [20, 3, 30], [1, 1, 1]), dtype, scales)
    spec = AttentionSpec(kv_scales=scales)
    np.testing.assert_allclose(run_decode(cpu_attention(), case, 1, spec), rows_alone(case, 1, spec), **FLOAT32)


def test_a_pool_that_no_kernel_reads_is_named() -> None:
    assert why_not(jax.ShapeDtypeStruct((1, 2, 4, 2, 8), jnp.float32)) is None
    assert why_not(jax.ShapeDtypeStruct((1, 2, 4, 2, 8), jnp.uint8)) == "a pool of float8_e4m3fn is none of float32, bfloat16 and int8"


@pytest.mark.parametrize("stored", ["float32", "uint16", "int8"])
@pytest.mark.parametrize(("num_out", "num_in", "num_columns"), [(1, 1, 1), (37, 100, 1), (300, 576, 4), (129, 701, 3)])
def test_a_product_of_few_columns_equals_numpys(stored: str, num_out: int, num_in: int, num_columns: int) -> None:
    rng = np.random.default_rng(num_out)
    weight, columns = (rng.normal(size=size).astype(np.float32) for size in ((num_out, num_in), (num_in, num_columns)))
    values = weight
    if stored == "uint16":
        values = np.asarray(jax.lax.bitcast_convert_type(jnp.asarray(weight, jnp.bfloat16), jnp.uint16))
        weight = np.asarray(jnp.asarray(weight, jnp.bfloat16).astype(jnp.float32))
    elif stored == "int8":
        values = np.clip(np.round(weight * 30), -127, 127).astype(np.int8)
        weight = values.astype(np.float32)
    product = np.asarray(jax.jit(narrow_product)(values, columns))
    exact, wide = weight.astype(np.float64) @ columns, np.abs(weight) @ np.abs(columns)
    assert np.all(np.abs(product - exact) <= 1e-6 * wide)  # a sum in 64 lanes is off by some dozen roundings of 6e-8


@pytest.mark.parametrize("stored", ["auto", "bfloat16", "int8"])
def test_an_engine_with_the_kernels_gives_the_tokens_of_one_without(stored: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, tokens = CONFIG.model_copy(update={"weights_dtype": stored}), []
    for attention in (XlaAttention(), CpuAttention()):
        monkeypatch.setattr("pdjax.models.stored.is_installed", lambda attention=attention: isinstance(attention, CpuAttention))
        engine = Engine(SHAPE, random_weights(), config, jnp.float32, jax.devices()[0], attention)
        tokens.append(generate(engine, 0, [5, 17, 3, 42, 8, 1, 30], [7, 3, 9, 4, 5], 12, greedy_with_logprobs()))
    assert tokens[0] == tokens[1]


def test_the_exponential_is_right_to_three_units_in_the_last_place() -> None:
    @njit
    def all_of(values: np.ndarray, results: np.ndarray) -> None:
        for i in range(len(values)):
            results[i] = exponential(values[i])

    values = np.concatenate([np.linspace(-86.9, 88, 20_001), [0.0, -1e-30, -math.inf, -88.0, -1e30]]).astype(np.float32)
    results = np.empty_like(values)
    all_of(values, results)
    exact = np.exp(values.astype(np.float64))
    assert np.all(np.abs(results - exact)[:-3] <= 3 * np.spacing(exact.astype(np.float32))[:-3])
    assert results[-5] == 1.0 and list(results[-3:]) == [0.0, 0.0, 0.0]
