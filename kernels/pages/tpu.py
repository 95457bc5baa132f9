"""Pages out of and into the pool on TPU, with the chunk's checksum taken while they pass through VMEM.

A step of the grid moves one page of some layers. Pallas keeps two such blocks on their way in and two on their way out, so copies
overlap with the arithmetic of the checksum:

    pool in HBM                            VMEM                                 chunk in HBM
    [layers, pages, page_size, 2K, D]                                           [n, layers, page_size, 2K, D]
      layers l .. of page pages[i]  --DMA-->  block  -- vector copy -->  block  --DMA-->  row i, layers l ..
                                                |
                                                +--> words mixed, two sums int32[2, rows, D]; XLA adds them up

Installing is the same with both ends exchanged; the pool is aliased to the result, so pages that nobody names are not touched.

A block is a strided copy of `layers` runs of a page, as many layers as make it large enough for the copy to outlast the step's
overhead. Narrow dtypes come as 32-bit words that hold 2 or 4 consecutive entries of the fourth axis, in the order of their bits.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pdjax.kernels.pages.checksum import mixed_words

_MAX_BLOCK_BYTES = 2 << 20
"""Four blocks are in VMEM at a time; XLA gives a kernel 16 MiB unless told otherwise."""


def why_not(pool: jax.ShapeDtypeStruct) -> str | None:
    """Why the kernels cannot take a pool [layers, pages, page_size, 2 * K, D]; None where they can."""
    _, _, page_size, entries, head_dim = pool.shape
    itemsize = pool.dtype.itemsize
    if itemsize not in (1, 2, 4):
        return f"a pool of {pool.dtype.name}"
    if entries % (4 // itemsize):
        return f"{entries} keys and values a slot of {pool.dtype.name} do not fill 32-bit words"
    if page_size * entries * head_dim * itemsize > _MAX_BLOCK_BYTES:
        return f"a page of {page_size * entries * head_dim * itemsize} bytes a layer, more than {_MAX_BLOCK_BYTES}"
    return None


def gather(pool: jax.Array, pages: jax.Array, *, interpret: Any = False) -> tuple[jax.Array, jax.Array]:
    """Pages int32[n] of every layer as one chunk [n, layers, page_size, 2 * K, D], and its `chunk_checksum` uint32[2]."""
    num_layers, _, *page = pool.shape
    chunk = jax.ShapeDtypeStruct((len(pages), num_layers, *page), pool.dtype)
    layers = _block_layers(chunk)
    source, target = _pool_block(layers, page), _chunk_block(layers, page)
    chunk, sums = pl.pallas_call(
        functools.partial(_gather_kernel, _steps(chunk)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(len(pages), num_layers // layers),
            in_specs=[source],
            out_specs=[target, _sums_block(chunk)],
        ),
        out_shape=[chunk, _sums(chunk)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary", "arbitrary")),
        interpret=interpret,
        name="gather_pages",
    )(pages, pool)
    return chunk, _added_up(sums)


def install(pool: jax.Array, pages: jax.Array, chunk: jax.Array, *, interpret: Any = False) -> tuple[jax.Array, jax.Array]:
    """The pool, taken over, with row i of the chunk in page `pages[i]`, and the chunk's `chunk_checksum` uint32[2].

    Only page 0 may be named more than once; it then holds anything.
    """
    num_layers, _, *page = pool.shape
    layers = _block_layers(chunk)
    pool, sums = pl.pallas_call(
        functools.partial(_install_kernel, _steps(chunk)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(len(pages), num_layers // layers),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY), _chunk_block(layers, page)],
            out_specs=[_pool_block(layers, page), _sums_block(chunk)],
        ),
        out_shape=[jax.ShapeDtypeStruct(pool.shape, pool.dtype), _sums(chunk)],
        input_output_aliases={1: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary", "arbitrary")),
        interpret=interpret,
        name="install_pages",
    )(pages, pool, chunk)
    return pool, _added_up(sums)


def _block_layers(chunk: jax.ShapeDtypeStruct | jax.Array) -> int:
    """Layers of a block: the largest divisor of all of them whose page is not too large."""
    _, num_layers, *page = chunk.shape
    page_bytes = chunk.dtype.itemsize * page[0] * page[1] * page[2]
    fitting = [layers for layers in range(1, num_layers + 1) if num_layers % layers == 0 and layers * page_bytes <= _MAX_BLOCK_BYTES]
    return max(fitting, default=1)


def _steps(chunk: jax.ShapeDtypeStruct | jax.Array) -> int:
    """Steps of the grid for a row of the chunk."""
    return chunk.shape[1] // _block_layers(chunk)


def _pool_block(layers: int, page: list[int]) -> pl.BlockSpec:
    """[layers, page_size, 2 * K, D] of the page that the grid is at."""
    return pl.BlockSpec((layers, None, *page), lambda i, j, pages: (j, pages[i], 0, 0, 0))


def _chunk_block(layers: int, page: list[int]) -> pl.BlockSpec:
    return pl.BlockSpec((None, layers, *page), lambda i, j, pages: (i, j, 0, 0, 0))


def _sums(chunk: jax.ShapeDtypeStruct | jax.Array) -> jax.ShapeDtypeStruct:
    """Both sums, not yet added up over the 32-bit words of a slot; int32, since Mosaic adds up no unsigned ones."""
    *_, entries, head_dim = chunk.shape
    return jax.ShapeDtypeStruct((2, entries * chunk.dtype.itemsize // 4, head_dim), jnp.int32)


def _added_up(sums: jax.Array) -> jax.Array:
    return jnp.sum(sums, axis=(1, 2)).astype(jnp.uint32)


def _sums_block(chunk: jax.ShapeDtypeStruct | jax.Array) -> pl.BlockSpec:
    """All of it at every step: it stays in VMEM to the end."""
    return pl.BlockSpec(_sums(chunk).shape, lambda i, j, pages: (0, 0, 0))


def _gather_kernel(steps: int, pages_smem: Any, pool_vmem: Any, chunk_vmem: Any, sums_vmem: Any) -> None:
    """pool_vmem and chunk_vmem [layers, page_size, 2 * K, D], sums_vmem int32[2, rows, D]."""
    del pages_smem
    _move_and_sum(steps, pool_vmem, chunk_vmem, sums_vmem)


def _install_kernel(steps: int, pages_smem: Any, pool_hbm: Any, chunk_vmem: Any, pool_vmem: Any, sums_vmem: Any) -> None:
    """pool_hbm is the aliased pool, read by nobody; the rest as in `_gather_kernel`."""
    del pages_smem, pool_hbm
    _move_and_sum(steps, chunk_vmem, pool_vmem, sums_vmem)


def _move_and_sum(steps: int, source_vmem: Any, target_vmem: Any, sums_vmem: Any) -> None:
    row, step = pl.program_id(0), pl.program_id(1)
    layers, page_size, entries, head_dim = source_vmem.shape

    @pl.when((row == 0) & (step == 0))
    def _() -> None:
        sums_vmem[...] = jnp.zeros_like(sums_vmem)

    def one_layer(layer: jax.Array, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        page = source_vmem[layer]
        target_vmem[layer] = page
        first = ((row * steps + step) * layers + layer) * (page_size * entries * head_dim)
        return tuple(total + added for total, added in zip(sums, _page_sums(page, first), strict=True))

    sums = jax.lax.fori_loop(0, layers, one_layer, (sums_vmem[0], sums_vmem[1]))
    sums_vmem[0], sums_vmem[1] = sums


def _page_sums(page: jax.Array, first: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What a page [page_size, 2 * K, D] whose first word stands at `first` adds to both sums, int32[rows, D]."""
    page_size, entries, head_dim = page.shape
    bits = page.dtype.itemsize * 8
    packed = pltpu.bitcast(page, jnp.uint32)
    slot, word, dim = (jax.lax.broadcasted_iota(jnp.uint32, packed.shape, axis) for axis in range(3))
    sums = (jnp.zeros(packed.shape[1:], jnp.int32), jnp.zeros(packed.shape[1:], jnp.int32))
    for part in range(32 // bits):
        words = packed if bits == 32 else (packed >> jnp.uint32(part * bits)) & jnp.uint32((1 << bits) - 1)
        entry = word * jnp.uint32(32 // bits) + jnp.uint32(part)
        positions = first.astype(jnp.uint32) + (slot * jnp.uint32(entries) + entry) * jnp.uint32(head_dim) + dim
        added = mixed_words(words, positions)
        sums = tuple(total + jnp.sum(more.astype(jnp.int32), axis=0) for total, more in zip(sums, added, strict=True))
    return sums
