"""Pages out of and into the pool on NVIDIA GPUs, in Pallas on Triton, with the chunk's checksum taken in the same pass.

What a layer has of a page is one run of `page_size * 2 * K * D` elements, in the pool and in the chunk, so a block of threads copies
one run, piece by piece, and writes what it adds to the two sums of the checksum; XLA adds those up:

    pool, as runs [layers * pages, E]        chunk, as runs [n * layers, E]
      run l * pages + pages[i]     ------>     run i * layers + l        block of threads (i, l)
                                      |
                                      +--> sums uint32[n, layers, 2]

Installing is the same with both ends exchanged, into the pool that it was given.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pdjax.kernels.pages.checksum import mixed_words, words_of

_PIECE = 4096
"""Elements that a block of threads holds at a time: 16 to 32 a thread."""
_NUM_WARPS = 8
_WHOLE = pl.BlockSpec(memory_space=pl.ANY)


def why_not(pool: jax.ShapeDtypeStruct) -> str | None:
    """Why the kernels cannot take a pool [layers, pages, page_size, 2 * K, D]; None where they can."""
    if pool.dtype.itemsize not in (1, 2, 4):
        return f"a pool of {pool.dtype.name}"
    if pool.dtype.itemsize == 1 and 2**31 <= pool.size <= 2**32:
        return f"a pool of {pool.size} bytes of {pool.dtype.name}: between 2 and 4 GiB this version of JAX addresses it wrongly"
    return None


def gather(pool: jax.Array, pages: jax.Array, *, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
    """Pages int32[n] of every layer as one chunk [n, layers, page_size, 2 * K, D], and its `chunk_checksum` uint32[2]."""
    num_layers, num_pages, *page = pool.shape
    chunk = (len(pages), num_layers, *page)
    runs = _runs(pool)
    out, sums = pl.pallas_call(
        functools.partial(_gather_kernel, num_pages),
        grid=(len(pages), num_layers),
        in_specs=[_WHOLE, _WHOLE],
        out_specs=[_WHOLE, _WHOLE],
        out_shape=[
            jax.ShapeDtypeStruct((len(pages) * num_layers, runs.shape[1]), pool.dtype),
            jax.ShapeDtypeStruct((len(pages), num_layers, 2), jnp.uint32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=_NUM_WARPS, num_stages=1),
        interpret=interpret,
        name="gather_pages",
    )(pages, runs)
    return out.reshape(chunk), jnp.sum(sums, axis=(0, 1), dtype=jnp.uint32)


def install(pool: jax.Array, pages: jax.Array, chunk: jax.Array, *, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
    """The pool, taken over, with row i of the chunk in page `pages[i]`, and the chunk's `chunk_checksum` uint32[2].

    Only page 0 may be named more than once; it then holds anything.
    """
    num_layers, num_pages, *page = pool.shape
    runs = _runs(pool)
    out, sums = pl.pallas_call(
        functools.partial(_install_kernel, num_pages),
        grid=(len(pages), num_layers),
        in_specs=[_WHOLE, _WHOLE, _WHOLE],
        out_specs=[_WHOLE, _WHOLE],
        out_shape=[
            jax.ShapeDtypeStruct(runs.shape, pool.dtype),
            jax.ShapeDtypeStruct((len(pages), num_layers, 2), jnp.uint32),
        ],
        input_output_aliases={1: 0},
        compiler_params=plgpu.CompilerParams(num_warps=_NUM_WARPS, num_stages=1),
        interpret=interpret,
        name="install_pages",
    )(pages, runs, _runs(chunk))
    return out.reshape(pool.shape), jnp.sum(sums, axis=(0, 1), dtype=jnp.uint32)


def _runs(kv: jax.Array) -> jax.Array:
    """[a, b, page_size, 2 * K, D] as [a * b, E]."""
    return kv.reshape(kv.shape[0] * kv.shape[1], -1)


def _gather_kernel(num_pages: int, pages_ref: Any, pool_ref: Any, chunk_ref: Any, sums_ref: Any) -> None:
    """pages_ref int32[n], pool_ref [layers * pages, E], chunk_ref [n * layers, E], sums_ref uint32[n, layers, 2]."""
    row, layer = pl.program_id(0), pl.program_id(1)
    in_pool, in_chunk = layer * num_pages + pages_ref[row], row * pl.num_programs(1) + layer
    _move_and_sum(pool_ref, in_pool, chunk_ref, in_chunk, in_chunk, sums_ref)


def _install_kernel(num_pages: int, pages_ref: Any, before_ref: Any, chunk_ref: Any, pool_ref: Any, sums_ref: Any) -> None:
    """before_ref is pool_ref; the rest as in `_gather_kernel`."""
    del before_ref
    row, layer = pl.program_id(0), pl.program_id(1)
    in_pool, in_chunk = layer * num_pages + pages_ref[row], row * pl.num_programs(1) + layer
    _move_and_sum(chunk_ref, in_chunk, pool_ref, in_pool, in_chunk, sums_ref)


def _move_and_sum(source_ref: Any, source: jax.Array, target_ref: Any, target: jax.Array, in_chunk: jax.Array, sums_ref: Any) -> None:
    """Copy run `source` to run `target`; the sums are those of run `in_chunk` of the chunk."""
    size = source_ref.shape[1]

    def piece(j: jax.Array, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        at = j * _PIECE + jnp.arange(_PIECE, dtype=jnp.int32)
        is_inside = at < size
        kv = plgpu.load(source_ref.at[source, at], mask=is_inside)
        plgpu.store(target_ref.at[target, at], kv, mask=is_inside)
        positions = in_chunk.astype(jnp.uint32) * jnp.uint32(size) + at.astype(jnp.uint32)
        added = (jnp.where(is_inside, more, jnp.uint32(0)) for more in mixed_words(words_of(kv), positions))
        return tuple(total + jnp.sum(more, dtype=jnp.uint32) for total, more in zip(sums, added, strict=True))

    sums = jax.lax.fori_loop(0, pl.cdiv(size, _PIECE), piece, (jnp.uint32(0), jnp.uint32(0)))
    for k in range(2):
        sums_ref[pl.program_id(0), pl.program_id(1), k] = sums[k]
