"""Page traffic of the TPU attention kernels: blocks of keys and values in, new rows out, and how a block splits into keys and values.

The pool lies in HBM, `[layers, pages, page_size, 2 * K, D]`. A block is `block_tokens` consecutive positions of one sequence, whole pages,
fetched by one DMA a page into one of the two halves of a VMEM buffer.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


class Into(NamedTuple):
    """Half of the buffer for blocks, and the semaphore of its copies."""

    vmem: jax.Ref  # [D / lanes, block_tokens, rows, lanes], see blocks.py
    sem: jax.Ref


class Pages(NamedTuple):
    """Where the pages of a step's sequences lie. Scalars are read in SMEM."""

    pool_hbm: jax.Ref  # [layers, pages, page_size, 2 * K, D]
    layer_smem: jax.Ref  # int32[1]
    tables_smem: jax.Ref  # int32[S * pages_per_sequence]
    pages_per_sequence: int

    @property
    def page_size(self) -> int:
        return self.pool_hbm.shape[2]

    def page(self, sequence: jax.Array, index: jax.Array) -> jax.Ref:
        """Page `index` of a sequence, [page_size, 2 * K, D]."""
        return self.pool_hbm.at[self.layer_smem[0], self.tables_smem[sequence * self.pages_per_sequence + index]]


class Block(NamedTuple):
    """Block `index` of a sequence of which positions below `end` are held. Pages behind those are neither read nor waited for."""

    sequence: jax.Array
    index: jax.Array
    end: jax.Array


def start_fetch(pages: Pages, block: Block, into: Into) -> None:
    """Start to copy the pages of a block."""
    num_parts, tokens, _, lanes = into.vmem.shape
    in_block = tokens // pages.page_size

    def start_page(i: jax.Array | int) -> None:
        page = pages.page(block.sequence, block.index * in_block + i)
        for part in range(num_parts):
            source = page.at[:, :, pl.ds(part * lanes, lanes)] if num_parts > 1 else page
            target = _rows_in_use(pages, into).at[part, pl.ds(i * pages.page_size, pages.page_size)]
            pltpu.make_async_copy(source, target, into.sem).start()

    @pl.when(_num_held(pages, block, in_block) == in_block)
    def whole() -> None:
        for i in range(in_block):
            start_page(i)

    @pl.when(_num_held(pages, block, in_block) < in_block)
    def some() -> None:
        jax.lax.fori_loop(0, _num_held(pages, block, in_block), lambda i, _: start_page(i), None)


def wait_fetch(pages: Pages, block: Block, into: Into) -> None:
    """Wait for all pages of one `start_fetch`. The semaphore counts bytes, so one wait does for a whole block."""
    in_block = into.vmem.shape[1] // pages.page_size
    target = _rows_in_use(pages, into)

    @pl.when(_num_held(pages, block, in_block) == in_block)
    def whole() -> None:
        pltpu.make_async_copy(target, target, into.sem).wait()

    @pl.when(_num_held(pages, block, in_block) < in_block)
    def some() -> None:
        page = target.at[:, pl.ds(0, pages.page_size)]
        copy = pltpu.make_async_copy(page, page, into.sem)
        jax.lax.fori_loop(0, _num_held(pages, block, in_block), lambda i, _: copy.wait(), None)


def _num_held(pages: Pages, block: Block, in_block: int) -> jax.Array:
    return jnp.minimum(pl.cdiv(block.end, pages.page_size) - block.index * in_block, in_block)


def _rows_in_use(pages: Pages, into: Into) -> jax.Ref:
    num_rows = pages.pool_hbm.shape[3]
    return into.vmem if into.vmem.shape[2] == num_rows else into.vmem.at[:, :, pl.ds(0, num_rows)]


class Rows(NamedTuple):
    """Rows of a step that become the keys and values at consecutive positions of one sequence."""

    first_row: jax.Array
    sequence: jax.Array
    position: jax.Array
    count: jax.Array


def start_write(pages: Pages, rows: Rows, max_rows: int, kv_hbm: jax.Ref, sem: jax.Ref) -> None:
    """Start to copy rows of `kv_hbm` [T, 2 * K, D] into their pages. `rows.count` is at most `max_rows`."""
    page_size = pages.page_size
    first_page = rows.position // page_size
    for i in range(-(-max_rows // page_size) + 1):
        begin = jnp.maximum(rows.position, (first_page + i) * page_size)
        end = jnp.minimum(rows.position + rows.count, (first_page + i + 1) * page_size)
        source_row = rows.first_row + begin - rows.position
        page = pages.page(rows.sequence, jnp.minimum(first_page + i, pages.pages_per_sequence - 1))

        @pl.when(begin < end)
        def write_page(begin=begin, end=end, source_row=source_row, page=page) -> None:
            for offset, size in _powers_of_two(end - begin, page_size):

                @pl.when((end - begin) & size != 0)
                def write_run(offset=offset, size=size) -> None:
                    source = kv_hbm.at[pl.ds(source_row + offset, size)]
                    pltpu.make_async_copy(source, page.at[pl.ds(begin % page_size + offset, size)], sem).start()


def wait_write(rows: Rows, max_rows: int, kv_hbm: jax.Ref, sem: jax.Ref) -> None:
    """Wait for all rows of one `start_write`."""
    for _, size in _powers_of_two(rows.count, min(max_rows, kv_hbm.shape[0])):

        @pl.when(rows.count & size != 0)
        def wait_run(size=size) -> None:
            some = kv_hbm.at[pl.ds(0, size)]
            pltpu.make_async_copy(some, some, sem).wait()


def _powers_of_two(count: jax.Array, limit: int) -> list[tuple[jax.Array, int]]:
    """`count` <= `limit` as a sum of powers of two: for each power, large ones first, the sum of those before it. DMA sizes are static."""
    powers = [1 << bit for bit in reversed(range(limit.bit_length()))]
    return [(count & ~(2 * power - 1), power) for power in powers]
