"""Pages out of and into the pool on TPU; where asked for, the chunk's checksum is taken while they pass through VMEM.

A step of the grid moves one page of some layers. Pallas keeps two such blocks on their way in and two on their way out, so copies
overlap with each other, and with the arithmetic of the checksum:

    pool in HBM                            VMEM                                 chunk in HBM
    [layers, pages, page_size, 2K, D]                                           [n, layers, page_size, 2K, D]
      layers l .. of page pages[i]  --DMA-->  block  -- vector copy -->  block  --DMA-->  row i, layers l ..
                                                |
                                                +--> words mixed, two sums int32[2, rows, D]; XLA adds them up

Installing is the same with both ends exchanged; the pool is aliased to the result, so pages that nobody names are not touched.

A block is a strided copy of `layers` runs of a page, as many layers as make it large enough for the copy to outlast the step's
overhead. Narrow dtypes come as 32-bit words that hold 2 or 4 consecutive entries of the fourth axis, in the order of their bits.

The checksum mixes element by element. On v6e that takes 679 bundles a page of 256 KB in bfloat16, whose way in and out takes 560 cycles,
and 1,521 in int8, where the way takes 280: so pages whose checksum nobody asks for move without.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pdjax.kernels.pages.checksum import mixed_words

_MAX_BLOCK_BYTES = 2 << 20
"""Four blocks are in VMEM at a time; XLA gives a kernel 16 MiB unless told otherwise."""
_UNREAD = pl.BlockSpec(memory_space=pl.ANY)
"""Of a pool that is given away: the result lies where it did."""

_Output = tuple[pl.BlockSpec, jax.ShapeDtypeStruct]


def why_not(pool: jax.ShapeDtypeStruct) -> str | None:
    """Why the kernels cannot move pages of a pool [layers, pages, page_size, 2 * K, D]; None where they can."""
    _, _, page_size, entries, head_dim = pool.shape
    if pool.dtype.itemsize not in (1, 2, 4):
        return f"a pool of {pool.dtype.name}"
    if (page_bytes := page_size * entries * head_dim * pool.dtype.itemsize) > _MAX_BLOCK_BYTES:
        return f"a page of {page_bytes} bytes a layer, more than {_MAX_BLOCK_BYTES}"
    return None


def why_not_summed(pool: jax.ShapeDtypeStruct) -> str | None:
    """As `why_not`, of those that take the checksum too."""
    entries, itemsize = pool.shape[3], pool.dtype.itemsize
    reason = why_not(pool)
    if reason is None and entries % (4 // itemsize):
        return f"{entries} keys and values a slot of {pool.dtype.name} do not fill 32-bit words"
    return reason


def gather(pool: jax.Array, pages: jax.Array, *, interpret: Any = False) -> jax.Array:
    """Pages int32[n] of every layer as one chunk [n, layers, page_size, 2 * K, D]."""
    blocks = _Blocks(_chunk_of(pool, pages))
    [chunk] = _launch("gather_pages", _gather_kernel, blocks, [blocks.of_pool()], [(blocks.of_chunk(), blocks.chunk)], interpret)(pages, pool)
    return chunk


def install(pool: jax.Array, pages: jax.Array, chunk: jax.Array, *, interpret: Any = False) -> jax.Array:
    """The pool, taken over, with row i of the chunk in page `pages[i]`. Only page 0 may be named more than once; it then holds anything."""
    blocks = _Blocks(jax.ShapeDtypeStruct(chunk.shape, chunk.dtype))
    outputs = [(blocks.of_pool(), jax.ShapeDtypeStruct(pool.shape, pool.dtype))]
    [pool] = _launch("install_pages", _install_kernel, blocks, [_UNREAD, blocks.of_chunk()], outputs, interpret)(pages, pool, chunk)
    return pool


def gather_summed(pool: jax.Array, pages: jax.Array, *, interpret: Any = False) -> tuple[jax.Array, jax.Array]:
    """What `gather` gives, and its `chunk_checksum` uint32[2]. Ask `why_not_summed` first."""
    blocks = _Blocks(_chunk_of(pool, pages))
    kernel = functools.partial(_gather_summed_kernel, blocks.steps)
    outputs = [(blocks.of_chunk(), blocks.chunk), blocks.sums()]
    chunk, sums = _launch("gather_summed_pages", kernel, blocks, [blocks.of_pool()], outputs, interpret)(pages, pool)
    return chunk, _added_up(sums)


def install_summed(pool: jax.Array, pages: jax.Array, chunk: jax.Array, *, interpret: Any = False) -> tuple[jax.Array, jax.Array]:
    """What `install` gives, and the chunk's `chunk_checksum` uint32[2]. Ask `why_not_summed` first."""
    blocks = _Blocks(jax.ShapeDtypeStruct(chunk.shape, chunk.dtype))
    kernel = functools.partial(_install_summed_kernel, blocks.steps)
    outputs = [(blocks.of_pool(), jax.ShapeDtypeStruct(pool.shape, pool.dtype)), blocks.sums()]
    pool, sums = _launch("install_summed_pages", kernel, blocks, [_UNREAD, blocks.of_chunk()], outputs, interpret)(pages, pool, chunk)
    return pool, _added_up(sums)


class _Blocks(NamedTuple):
    """How the work over a chunk [n, layers, page_size, 2 * K, D] is cut: a page of some layers a step."""

    chunk: jax.ShapeDtypeStruct

    @property
    def layers(self) -> int:
        """Layers of a block: the largest divisor of all of them whose page is not too large."""
        _, num_layers, *page = self.chunk.shape
        page_bytes = self.chunk.dtype.itemsize * math.prod(page)
        fitting = [layers for layers in range(1, num_layers + 1) if num_layers % layers == 0 and layers * page_bytes <= _MAX_BLOCK_BYTES]
        return max(fitting, default=1)

    @property
    def steps(self) -> int:
        """Steps of the grid for a row of the chunk."""
        return self.chunk.shape[1] // self.layers

    def of_pool(self) -> pl.BlockSpec:
        """[layers, page_size, 2 * K, D] of the page that the grid is at."""
        return pl.BlockSpec((self.layers, None, *self.chunk.shape[2:]), lambda i, j, pages: (j, pages[i], 0, 0, 0))

    def of_chunk(self) -> pl.BlockSpec:
        return pl.BlockSpec((None, self.layers, *self.chunk.shape[2:]), lambda i, j, pages: (i, j, 0, 0, 0))

    def sums(self) -> _Output:
        """Both sums, not yet added up over the 32-bit words of a slot; int32, since Mosaic adds up no unsigned ones. All of it at every
        step: it stays in VMEM to the end."""
        *_, entries, head_dim = self.chunk.shape
        sums = jax.ShapeDtypeStruct((2, entries * self.chunk.dtype.itemsize // 4, head_dim), jnp.int32)
        return pl.BlockSpec(sums.shape, lambda i, j, pages: (0, 0, 0)), sums


def _launch(
    name: str, kernel: Callable[..., None], blocks: _Blocks, in_specs: list[pl.BlockSpec], outputs: list[_Output], interpret: Any
) -> Callable[..., Any]:
    """Of a kernel that is called with the page numbers first. Where two arrays come in, the first is the pool, and the first result too."""
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(blocks.chunk.shape[0], blocks.steps),
            in_specs=in_specs,
            out_specs=[spec for spec, _ in outputs],
        ),
        out_shape=[shape for _, shape in outputs],
        input_output_aliases={1: 0} if len(in_specs) == 2 else {},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary", "arbitrary")),
        interpret=interpret,
        name=name,
    )


def _chunk_of(pool: jax.Array, pages: jax.Array) -> jax.ShapeDtypeStruct:
    num_layers, _, *page = pool.shape
    return jax.ShapeDtypeStruct((len(pages), num_layers, *page), pool.dtype)


def _added_up(sums: jax.Array) -> jax.Array:
    return jnp.sum(sums, axis=(1, 2)).astype(jnp.uint32)


def _gather_kernel(pages_smem: Any, pool_vmem: Any, chunk_vmem: Any) -> None:
    """pool_vmem and chunk_vmem [layers, page_size, 2 * K, D]."""
    del pages_smem
    _move(pool_vmem, chunk_vmem)


def _install_kernel(pages_smem: Any, pool_hbm: Any, chunk_vmem: Any, pool_vmem: Any) -> None:
    """pool_hbm is the aliased pool, read by nobody; the rest as in `_gather_kernel`."""
    del pages_smem, pool_hbm
    _move(chunk_vmem, pool_vmem)


def _gather_summed_kernel(steps: int, pages_smem: Any, pool_vmem: Any, chunk_vmem: Any, sums_vmem: Any) -> None:
    """sums_vmem int32[2, rows, D]; the rest as in `_gather_kernel`."""
    del pages_smem
    _move_and_sum(steps, pool_vmem, chunk_vmem, sums_vmem)


def _install_summed_kernel(steps: int, pages_smem: Any, pool_hbm: Any, chunk_vmem: Any, pool_vmem: Any, sums_vmem: Any) -> None:
    """As `_install_kernel` and `_gather_summed_kernel`."""
    del pages_smem, pool_hbm
    _move_and_sum(steps, chunk_vmem, pool_vmem, sums_vmem)


def _move(source_vmem: Any, target_vmem: Any) -> None:
    def one_layer(layer: jax.Array, carry: None) -> None:
        target_vmem[layer] = source_vmem[layer]

    jax.lax.fori_loop(0, source_vmem.shape[0], one_layer, None)


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
    _, entries, head_dim = page.shape
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
