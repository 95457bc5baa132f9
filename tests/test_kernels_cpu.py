"""Kernels for CPUs that numba compiles: attention against the oracle, products against numpy, the calls among XLA's threads."""

from __future__ import annotations

import functools
import math
import os
import subprocess
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("numba", reason="numba is not installed; it comes with the extra `cpu`")

from numba import njit

from pdjax.engine.engine import Engine
from pdjax.kernels.base import PLAIN, AttentionSpec
from pdjax.kernels.cpu import vectors
from pdjax.kernels.cpu.attention import CpuAttention, why_not
from pdjax.kernels.cpu.numbers import exponential
from pdjax.kernels.cpu.product import narrow_product
from pdjax.kernels.cpu.wide_product import gated_product, is_wide, wide_product
from pdjax.kernels.xla import XlaAttention
from tests.attention_kit import Sizes, random_case, rows_alone, run_decode, run_prefill, stored_as
from tests.engine_kit import CONFIG, SHAPE, generate, greedy_with_logprobs, random_weights

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


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_prefill_equals_each_row_by_itself(spec: AttentionSpec) -> None:
    case = random_case(4, [17, 0, 42], [5, 21, 1])
    np.testing.assert_allclose(run_prefill(cpu_attention(), case, 1, spec), rows_alone(case, 1, spec), **FLOAT32)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 1 << 20),
    starts=st.lists(st.integers(0, 300), min_size=3, max_size=3),
    lengths=st.tuples(st.integers(1, 150), st.integers(0, 40), st.integers(0, 70)),
    heads=st.sampled_from([(9, 3, 64), (5, 5, 24)]),
    page_size=st.sampled_from([1, 16]),
    window=st.sampled_from([None, 40]),
)
def test_prefill_puts_blocks_of_any_length_together(
    seed: int, starts: list[int], lengths: tuple[int, ...], heads: tuple[int, int, int], page_size: int, window: int | None
) -> None:
    num_heads, kv_heads, dim = heads
    lengths = tuple(sorted(lengths, reverse=True))  # padding comes last
    case = random_case(seed, starts, lengths, Sizes(264, 3, num_heads, kv_heads, dim, page_size, -(-450 // page_size), 1))
    spec = AttentionSpec(window=window)
    np.testing.assert_allclose(run_prefill(cpu_attention(), case, 0, spec), rows_alone(case, 0, spec), **FLOAT32)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint16], ids=["int8", "bits of bfloat16"])
def test_prefill_reads_narrow_pools_by_their_scales(dtype: jnp.dtype) -> None:
    scales = np.linspace(0.02, 0.05, 4).astype(np.float32)
    case = stored_as(random_case(5, [20, 3, 30], [7, 2, 12]), dtype, scales)
    spec = AttentionSpec(kv_scales=scales)
    np.testing.assert_allclose(run_prefill(cpu_attention(), case, 1, spec), rows_alone(case, 1, spec), **FLOAT32)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint16], ids=["int8", "bits of bfloat16"])
def test_decode_reads_narrow_pools_by_their_scales(dtype: jnp.dtype) -> None:
    scales = np.linspace(0.02, 0.05, 4).astype(np.float32)
    case = stored_as(random_case(5, [20, 3, 30], [1, 1, 1]), dtype, scales)
    spec = AttentionSpec(kv_scales=scales)
    np.testing.assert_allclose(run_decode(cpu_attention(), case, 1, spec), rows_alone(case, 1, spec), **FLOAT32)


def test_a_pool_that_no_kernel_reads_is_named() -> None:
    assert why_not(jax.ShapeDtypeStruct((1, 2, 4, 2, 8), jnp.float32)) is None
    assert why_not(jax.ShapeDtypeStruct((1, 2, 4, 2, 12), jnp.float32)) == "head_dim 12 is no multiple of 8"
    assert why_not(jax.ShapeDtypeStruct((1, 2, 4, 2, 8), jnp.uint8)) == "a pool of float8_e4m3fn is none of float32, bfloat16 and int8"


def random_product(stored: str, num_out: int, num_in: int, num_columns: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A weight as it is stored, the numbers it stands for, and columns."""
    rng = np.random.default_rng(num_out)
    weight, columns = (rng.normal(size=size).astype(np.float32) for size in ((num_out, num_in), (num_in, num_columns)))
    if stored == "uint16":
        values = np.asarray(jax.lax.bitcast_convert_type(jnp.asarray(weight, jnp.bfloat16), jnp.uint16))
        return values, np.asarray(jnp.asarray(weight, jnp.bfloat16).astype(jnp.float32)), columns
    if stored == "int8":
        values = np.clip(np.round(weight * 30), -127, 127).astype(np.int8)
        return values, values.astype(np.float32), columns
    return weight, weight, columns


def assert_is_product(product: Callable[[jax.Array, jax.Array], jax.Array], stored: str, num_out: int, num_in: int, num_columns: int) -> None:
    values, weight, columns = random_product(stored, num_out, num_in, num_columns)
    exact, wide = weight.astype(np.float64) @ columns, np.abs(weight) @ np.abs(columns)
    # A sum in 64 lanes, or one number after the other, is off by some dozen roundings of 6e-8 of what it adds up.
    assert np.all(np.abs(np.asarray(jax.jit(product)(values, columns)) - exact) <= 1e-6 * wide)


@pytest.mark.parametrize("stored", ["float32", "uint16", "int8"])
@pytest.mark.parametrize(("num_out", "num_in", "num_columns"), [(1, 1, 1), (37, 100, 1), (300, 576, 4), (129, 701, 3)])
def test_a_product_of_few_columns_equals_numpys(stored: str, num_out: int, num_in: int, num_columns: int) -> None:
    assert_is_product(narrow_product, stored, num_out, num_in, num_columns)


@pytest.mark.parametrize("stored", ["float32", "uint16", "int8"])
@pytest.mark.parametrize(
    ("num_out", "num_in", "num_columns"), [(12, 1, 4), (37, 100, 8), (49, 77, 16), (129, 301, 32), (100, 64, 48), (61, 576, 512)]
)
def test_a_product_of_many_columns_equals_numpys(stored: str, num_out: int, num_in: int, num_columns: int) -> None:
    assert is_wide(num_out, num_columns)
    assert_is_product(wide_product, stored, num_out, num_in, num_columns)


@pytest.mark.parametrize("stored", ["float32", "uint16", "int8"])
@pytest.mark.parametrize(("num_gated", "num_in", "num_columns"), [(12, 3, 4), (13, 50, 8), (61, 20, 16), (110, 33, 80)])
def test_a_gated_product_equals_numpys(stored: str, num_gated: int, num_in: int, num_columns: int) -> None:
    values, weight, columns = random_product(stored, 2 * num_gated, num_in, num_columns)
    gate, up = np.split(weight.astype(np.float64) @ columns, 2)
    exact = gate / (1 + np.exp(-gate)) * up
    np.testing.assert_allclose(np.asarray(jax.jit(gated_product)(values, columns)), exact, rtol=2e-5, atol=1e-5 * np.abs(exact).max())


def test_gates_that_are_wide_open_or_shut_stay_finite() -> None:
    gates = np.array([-3e38, -1000, -100, -88, -30, 0, 30, 88, 1000, 3e38, 1, -1], np.float32)
    weight = np.concatenate([gates, np.ones(12, np.float32)])[:, None]
    gated = np.asarray(jax.jit(gated_product)(weight, np.ones((1, 4), np.float32)))[:, 0]
    wide = gates.astype(np.float64)
    np.testing.assert_allclose(gated, wide / (1 + np.exp(np.minimum(-wide, 700))), rtol=1e-5, atol=1e-10)


def test_shapes_that_are_not_wide_are_left_to_xla() -> None:
    assert not is_wide(5, 16) and not is_wide(100, 3) and not is_wide(100, 20) and is_wide(100, 64)


NARROW_REGISTERS = """
import llvmlite.binding as llvm
found = llvm.get_host_cpu_features()
found["avx512f"] = False
llvm.get_host_cpu_features = lambda: found
import numpy as np
from pdjax.kernels.cpu.attention import CpuAttention
from pdjax.kernels.cpu.vectors import LANES
from tests.attention_kit import random_case, rows_alone, run_prefill
from tests.test_kernels_cpu import FLOAT32, assert_is_product
from pdjax.kernels.cpu.wide_product import wide_product
assert LANES == 8
for columns in (4, 8, 16, 24, 64):
    assert_is_product(wide_product, "float32", 37, 100, columns)
case = random_case(4, [17, 0, 42], [5, 21, 1])
np.testing.assert_allclose(run_prefill(CpuAttention(), case, 1), rows_alone(case, 1), **FLOAT32)
"""


def test_cpus_with_narrower_registers_compute_the_same() -> None:
    # Another set of tiles from the same sources, which a cache would not tell apart; and what runs so shortly is compiled in a hurry.
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"} | {"NUMBA_OPT": "1"}
    ran = subprocess.run([sys.executable, "-c", NARROW_REGISTERS], capture_output=True, text=True, timeout=300, env=environment)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("stored", ["auto", "bfloat16", "int8"])
def test_an_engine_with_the_kernels_gives_the_tokens_of_one_without(stored: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, tokens = CONFIG.model_copy(update={"weights_dtype": stored}), []
    for attention in (XlaAttention(), CpuAttention()):
        monkeypatch.setattr("pdjax.models.stored.is_installed", lambda attention=attention: isinstance(attention, CpuAttention))
        engine = Engine(SHAPE, random_weights(), config, jnp.float32, jax.devices()[0], attention)
        tokens.append(generate(engine, 0, [5, 17, 3, 42, 8, 1, 30], [7, 3, 9, 4, 5], 12, greedy_with_logprobs()))
    assert tokens[0] == tokens[1]


def test_the_exponential_of_vectors_is_right_to_three_units_in_the_last_place() -> None:
    @njit
    def all_of(address: int, results: int, length: int) -> None:
        for at in range(0, 4 * length, 4 * vectors.LANES):
            vectors.store(results + at, vectors.exponential(vectors.load(address + at)))

    values = np.concatenate([np.linspace(-86.9, 88, 16_000 - 16), np.full(16, -1e30)]).astype(np.float32)
    results = np.empty_like(values)
    all_of(values.ctypes.data, results.ctypes.data, len(values))
    exact = np.exp(values.astype(np.float64))
    assert np.all(np.abs(results - exact)[:-16] <= 3 * np.spacing(exact.astype(np.float32))[:-16])
    assert np.all(results[-16:] < 1e-37) and np.all(results[-16:] >= 0)


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
