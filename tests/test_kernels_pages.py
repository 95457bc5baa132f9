"""Page gather and install, interpreted, against plain XLA; the checksum on the host and on the device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import tpu as pltpu

from pdjax.kernels.dispatch import XLA_PAGES, Setting, choose_pages, pool_format
from pdjax.kernels.pages import gpu, tpu, xla
from pdjax.kernels.pages.checksum import chunk_checksum, host_checksum

DTYPES = [jnp.float32, jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn]
SHAPE = (3, 7, 4, 4, 16)  # of a pool
TPU = pltpu.InterpretParams(detect_races=True)


class Kernels(NamedTuple):
    gather: Callable[..., jax.Array]
    install: Callable[..., jax.Array]
    gather_summed: Callable[..., tuple[jax.Array, jax.Array]]
    install_summed: Callable[..., tuple[jax.Array, jax.Array]]


def interpreted(module: Any, interpret: Any) -> Kernels:
    functions = (module.gather, module.install, module.gather_summed, module.install_summed)
    return Kernels(*(jax.jit(functools.partial(function, interpret=interpret)) for function in functions))


KERNELS = {"tpu": interpreted(tpu, TPU), "gpu": interpreted(gpu, True)}


def random_array(seed: int, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * 20).astype(dtype)


def bits(x: jax.Array) -> np.ndarray:
    """To compare what is not a number too."""
    return np.asarray(x).view(np.uint8)


@pytest.mark.parametrize("kernels", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=[dtype.__name__ for dtype in DTYPES[:3]])  # one of each width
def test_pages_come_out_and_go_in_with_the_checksum_of_the_chunk(kernels: Kernels, dtype: jnp.dtype) -> None:
    pool = random_array(0, SHAPE, dtype).at[:, 3].set(jnp.nan if jnp.issubdtype(dtype, jnp.floating) else 0)
    pages = jnp.array([5, 2, 6, 0, 0], jnp.int32)  # out of order, padded with the null page
    chunk, checksum = kernels.gather_summed(pool, pages)
    np.testing.assert_array_equal(bits(chunk), bits(xla.gather(pool, pages)))
    np.testing.assert_array_equal(checksum, chunk_checksum(chunk))
    incoming = random_array(1, chunk.shape, dtype)
    installed, checksum = kernels.install_summed(pool, pages, incoming)
    np.testing.assert_array_equal(bits(installed[:, 1:]), bits(xla.install(pool, pages, incoming)[:, 1:]))
    np.testing.assert_array_equal(checksum, chunk_checksum(incoming))
    assert interpreter.races is None or not interpreter.races.races_found


@pytest.mark.parametrize("kernels", KERNELS.values(), ids=KERNELS)
@settings(max_examples=8, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**31))
def test_what_was_gathered_from_anywhere_can_be_installed_anywhere(kernels: Kernels, seed: int) -> None:
    rng = np.random.default_rng(seed)
    source, target = (random_array(seed + i, SHAPE, jnp.bfloat16) for i in range(2))
    out, into = (jnp.asarray(rng.permutation(np.arange(1, SHAPE[1]))[:5], jnp.int32) for _ in range(2))
    installed = kernels.install(target, into, kernels.gather(source, out))
    np.testing.assert_array_equal(bits(installed), bits(target.at[:, into].set(source[:, out])))


def test_a_page_larger_than_a_piece_is_copied_whole() -> None:
    pool = random_array(2, (1, 3, 16, 6, 80), jnp.float32)  # 7,680 elements: not a multiple of what a block of threads holds
    chunk, checksum = KERNELS["gpu"].gather_summed(pool, jnp.array([2, 1]))
    np.testing.assert_array_equal(chunk, jnp.swapaxes(pool[:, jnp.array([2, 1])], 0, 1))
    np.testing.assert_array_equal(checksum, chunk_checksum(chunk))


def test_layers_that_do_not_fit_into_one_block_come_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tpu, "_MAX_BLOCK_BYTES", 2 * 4 * 2 * 8 * 4)  # two layers of a page
    pool = random_array(3, (6, 4, 4, 2, 8), jnp.float32)
    chunk, checksum = tpu.gather_summed(pool, jnp.array([3, 1]), interpret=TPU)
    np.testing.assert_array_equal(chunk, jnp.swapaxes(pool[:, jnp.array([3, 1])], 0, 1))
    np.testing.assert_array_equal(checksum, chunk_checksum(chunk))


@pytest.mark.parametrize("dtype", DTYPES, ids=[dtype.__name__ for dtype in DTYPES])
def test_host_and_device_agree_on_the_checksum(dtype: jnp.dtype) -> None:
    chunk = random_array(4, (3, 2, 4, 2, 8), dtype)
    np.testing.assert_array_equal(chunk_checksum(chunk), host_checksum(np.asarray(chunk)))


def test_one_wrong_bit_anywhere_changes_the_first_sum() -> None:
    chunk = np.arange(64, dtype=np.uint32)
    good = host_checksum(chunk)
    for word, bit in ((0, 0), (17, 31), (63, 12)):
        damaged = chunk.copy()
        damaged[word] ^= np.uint32(1 << bit)
        assert host_checksum(damaged)[0] != good[0]


def test_what_the_kernels_do_not_take_has_a_reason() -> None:
    def pool(dtype: jnp.dtype, heads: int = 2, page_size: int = 16, pages: int = 9) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((2, pages, page_size, 2 * heads, 128), dtype)

    assert tpu.why_not(pool(jnp.bfloat16, heads=3)) is None and gpu.why_not(pool(jnp.bfloat16, heads=3)) is None
    assert tpu.why_not(pool(jnp.int8, heads=3)) is None
    assert "6 keys and values a slot of int8" in tpu.why_not_summed(pool(jnp.int8, heads=3))
    assert "a page of 4194304 bytes" in tpu.why_not(pool(jnp.bfloat16, heads=8, page_size=1024))
    assert "between 2 and 4 GiB" in gpu.why_not(pool(jnp.int8, pages=200_000))


class OtherDevice(NamedTuple):
    platform: str
    device_kind: str
    compute_capability: str = ""


V6E, A100, V100 = OtherDevice("tpu", "TPU v6 lite"), OtherDevice("gpu", "NVIDIA A100", "8.0"), OtherDevice("gpu", "Tesla V100", "7.0")


def setting(device: Any, page_size: int = 16) -> Setting:
    pool = jax.ShapeDtypeStruct((2, 9, page_size, 16, 128), jnp.bfloat16)
    return Setting(device, jax.ShapeDtypeStruct((32, 8, 128), jnp.bfloat16), pool, jax.ShapeDtypeStruct((4, 16), jnp.int32))


def test_pages_move_by_the_kernels_of_the_device_and_in_xla_with_one_line_where_there_are_none(caplog: pytest.LogCaptureFixture) -> None:
    cpu = jax.devices()[0]
    assert [choose_pages(setting(device)).name for device in (cpu, V6E, A100)] == ["xla", "pallas", "triton"]
    assert [choose_pages(setting(device), "xla").name for device in (cpu, V6E, A100)] == ["xla"] * 3
    assert choose_pages(setting(cpu), "pallas").name == "pallas"
    assert not caplog.records
    assert choose_pages(setting(V6E, page_size=1024)) is XLA_PAGES and choose_pages(setting(V100)) is XLA_PAGES
    large, old = (record.getMessage() for record in caplog.records)
    assert "pages move in XLA on TPU v6 lite: a page of 4194304 bytes" in large
    assert "pages move in XLA on Tesla V100: compute capability 7.0" in old


def test_a_pool_on_tpu_lies_with_head_dim_last_and_elsewhere_as_xla_likes() -> None:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    assert pool_format(sharding, "cpu") is sharding
    told = pool_format(sharding, "tpu")
    assert told.sharding == sharding and told.layout.major_to_minor == (0, 1, 2, 3, 4)
