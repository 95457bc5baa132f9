"""Pages out of and into the pool on NVIDIA GPUs, in Pallas on Triton; where asked for, the chunk's checksum is taken in the same pass.

What a layer has of a page is one run of `page_size * 2 * K * D` elements, in the pool and in the chunk, so a block of threads copies
one run, piece by piece, and may write what it adds to the two sums of the checksum; XLA adds those up:

    pool, as runs [layers * pages, E]        chunk, as runs [n * layers, E]
      run l * pages + pages[i]     ------>     run i * layers + l        block of threads (i, l)
                                      |
                                      +--> sums uint32[n, layers, 2]

Installing is the same with both ends exchanged, into the pool that it was given.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

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


def gather(pool: jax.Array, pages: jax.Array, *, interpret: bool = False) -> jax.Array:
    """Pages int32[n] of every layer as one chunk [n, layers, page_size, 2 * K, D]."""
    num_layers, num_pages, *page = pool.shape
    grid, runs = (len(pages), num_layers), _runs(pool)
    out = _chunk_runs(pool, pages)
    [chunk] = _launch("gather_pages", functools.partial(_gather_kernel, num_pages), grid, [out], interpret)(pages, runs)
    return chunk.reshape(*grid, *page)


def install(pool: jax.Array, pages: jax.Array, chunk: jax.Array, *, interpret: bool = False) -> jax.Array:
    """The pool, taken over, with row i of the chunk in page `pages[i]`. Only page 0 may be named more than once; it then holds anything."""
    grid, runs = chunk.shape[:2], _runs(pool)
    out = jax.ShapeDtypeStruct(runs.shape, runs.dtype)
    [pool_runs] = _launch("install_pages", functools.partial(_install_kernel, pool.shape[1]), grid, [out], interpret)(pages, runs, _runs(chunk))
    return pool_runs.reshape(pool.shape)


def gather_summed(pool: jax.Array, pages: jax.Array, *, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
    """What `gather` gives, and its `chunk_checksum` uint32[2]."""
    num_layers, num_pages, *page = pool.shape
    grid, runs = (len(pages), num_layers), _runs(pool)
    outputs = [_chunk_runs(pool, pages), _sums(grid)]
    chunk, sums = _launch("gather_summed_pages", functools.partial(_gather_summed_kernel, num_pages), grid, outputs, interpret)(pages, runs)
    return chunk.reshape(*grid, *page), jnp.sum(sums, axis=(0, 1), dtype=jnp.uint32)


def install_summed(pool: jax.Array, pages: jax.Array, chunk: jax.Array, *, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
    """What `install` gives, and the chunk's `chunk_checksum` uint32[2]."""
    grid, runs = chunk.shape[:2], _runs(pool)
    outputs = [jax.ShapeDtypeStruct(runs.shape, runs.dtype), _sums(grid)]
    kernel = functools.partial(_install_summed_kernel, pool.shape[1])
    pool_runs, sums = _launch("install_summed_pages", kernel, grid, outputs, interpret)(pages, runs, _runs(chunk))
    return pool_runs.reshape(pool.shape), jnp.sum(sums, axis=(0, 1), dtype=jnp.uint32)


def _launch(
    name: str, kernel: Callable[..., None], grid: tuple[int, ...], outputs: list[jax.ShapeDtypeStruct], interpret: bool
) -> Callable[..., Any]:
    """Called with the page numbers and either the pool, or the pool, which is given away for the first result, and a chunk."""

    def run(pages: jax.Array, *arrays: jax.Array) -> Any:
        return pl.pallas_call(
            kernel,
            grid=grid,
            in_specs=[_WHOLE] * (1 + len(arrays)),
            out_specs=[_WHOLE] * len(outputs),
            out_shape=outputs,
            input_output_aliases={1: 0} if len(arrays) == 2 else {},
            compiler_params=plgpu.CompilerParams(num_warps=_NUM_WARPS, num_stages=1),
            interpret=interpret,
            name=name,
        )(pages, *arrays)

    return run


def _runs(kv: jax.Array) -> jax.Array:
    """[a, b, page_size, 2 * K, D] as [a * b, E]."""
    return kv.reshape(kv.shape[0] * kv.shape[1], -1)


def _chunk_runs(pool: jax.Array, pages: jax.Array) -> jax.ShapeDtypeStruct:
    num_layers, _, *page = pool.shape
    return jax.ShapeDtypeStruct((len(pages) * num_layers, math.prod(page)), pool.dtype)


def _sums(grid: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((*grid, 2), jnp.uint32)


class _Run(NamedTuple):
    """A page of a layer, in the pool or in the chunk."""

    ref: Any  # [runs, E]
    index: jax.Array

    @property
    def size(self) -> int:
        return self.ref.shape[1]


def _in_pool(num_pages: int, pages_ref: Any, pool_ref: Any) -> _Run:
    """The run that a block of threads is for: pages_ref int32[n], pool_ref [layers * num_pages, E]."""
    return _Run(pool_ref, pl.program_id(1) * num_pages + pages_ref[pl.program_id(0)])


def _in_chunk(chunk_ref: Any) -> _Run:
    """The same in the chunk [n * layers, E]."""
    return _Run(chunk_ref, pl.program_id(0) * pl.num_programs(1) + pl.program_id(1))


def _gather_kernel(num_pages: int, pages_ref: Any, pool_ref: Any, chunk_ref: Any) -> None:
    _move(_in_pool(num_pages, pages_ref, pool_ref), _in_chunk(chunk_ref))


def _install_kernel(num_pages: int, pages_ref: Any, before_ref: Any, chunk_ref: Any, pool_ref: Any) -> None:
    """before_ref is pool_ref."""
    del before_ref
    _move(_in_chunk(chunk_ref), _in_pool(num_pages, pages_ref, pool_ref))


def _gather_summed_kernel(num_pages: int, pages_ref: Any, pool_ref: Any, chunk_ref: Any, sums_ref: Any) -> None:
    """sums_ref uint32[n, layers, 2]."""
    in_chunk = _in_chunk(chunk_ref)
    _move_and_sum(_in_pool(num_pages, pages_ref, pool_ref), in_chunk, in_chunk.index, sums_ref)


def _install_summed_kernel(num_pages: int, pages_ref: Any, before_ref: Any, chunk_ref: Any, pool_ref: Any, sums_ref: Any) -> None:
    """As `_install_kernel` and `_gather_summed_kernel`."""
    del before_ref
    in_chunk = _in_chunk(chunk_ref)
    _move_and_sum(in_chunk, _in_pool(num_pages, pages_ref, pool_ref), in_chunk.index, sums_ref)


def _move(source: _Run, target: _Run) -> None:
    def piece(j: jax.Array, carry: None) -> None:
        _copy_piece(source, target, j)

    jax.lax.fori_loop(0, pl.cdiv(source.size, _PIECE), piece, None)


def _move_and_sum(source: _Run, target: _Run, in_chunk: jax.Array, sums_ref: Any) -> None:
    """As `_move`; the sums are those of run `in_chunk` of the chunk."""
    size = source.size

    def piece(j: jax.Array, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        kv, at = _copy_piece(source, target, j)
        positions = in_chunk.astype(jnp.uint32) * jnp.uint32(size) + at.astype(jnp.uint32)
        added = (jnp.where(at < size, more, jnp.uint32(0)) for more in mixed_words(words_of(kv), positions))
        return tuple(total + jnp.sum(more, dtype=jnp.uint32) for total, more in zip(sums, added, strict=True))

    sums = jax.lax.fori_loop(0, pl.cdiv(size, _PIECE), piece, (jnp.uint32(0), jnp.uint32(0)))
    for k in range(2):
        sums_ref[pl.program_id(0), pl.program_id(1), k] = sums[k]


def _copy_piece(source: _Run, target: _Run, j: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Copy piece j; returns it, and where its elements stand in the run."""
    at = j * _PIECE + jnp.arange(_PIECE, dtype=jnp.int32)
    is_inside = at < source.size
    kv = plgpu.load(source.ref.at[source.index, at], mask=is_inside)
    plgpu.store(target.ref.at[target.index, at], kv, mask=is_inside)
    return kv, at
