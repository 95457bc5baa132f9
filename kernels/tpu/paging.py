"""Page traffic of the TPU attention kernels: blocks of keys and values in, new rows out, and how a block splits into keys and values.

The pool lies in HBM, `[layers, pages, page_size, 2 * K, D]`. A block is `block_tokens` consecutive positions of one sequence, whole pages,
fetched by one DMA a page into one of the two halves of a VMEM buffer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
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
    """Block `index` of a sequence of which positions below `end` are held. What lies behind those is neither read nor waited for: somebody
    may be writing there."""

    sequence: jax.Array
    index: jax.Array
    end: jax.Array


def start_fetch(pages: Pages, block: Block, into: Into) -> None:
    """Start to copy the pages of a block."""
    num_parts, tokens, _, lanes = into.vmem.shape
    page_size, in_block = pages.page_size, tokens // pages.page_size
    num_held = block.end - block.index * tokens

    def start_run(i: jax.Array | int, offset: jax.Array | int, size: int) -> None:
        run = pages.page(block.sequence, block.index * in_block + i).at[pl.ds(offset, size)]
        for part in range(num_parts):
            source = run.at[:, :, pl.ds(part * lanes, lanes)] if num_parts > 1 else run
            target = _rows_in_use(pages, into).at[part, pl.ds(i * page_size + offset, size)]
            pltpu.make_async_copy(source, target, into.sem).start()

    @pl.when(num_held >= tokens)
    def whole() -> None:
        for i in range(in_block):
            start_run(i, 0, page_size)

    @pl.when(num_held < tokens)
    def some() -> None:
        num_pages, rest = num_held // page_size, num_held % page_size
        jax.lax.fori_loop(0, num_pages, lambda i, _: start_run(i, 0, page_size), None)
        _by_runs(rest, page_size, functools.partial(start_run, num_pages))


def wait_fetch(pages: Pages, block: Block, into: Into) -> None:
    """Wait for all copies of one `start_fetch`. The semaphore counts bytes, so one wait does for a whole block."""
    tokens, page_size = into.vmem.shape[1], pages.page_size
    target = _rows_in_use(pages, into)
    num_held = block.end - block.index * tokens

    def wait(size: int) -> None:
        some = target.at[:, pl.ds(0, size)]
        pltpu.make_async_copy(some, some, into.sem).wait()

    pl.when(num_held >= tokens)(lambda: wait(tokens))

    @pl.when(num_held < tokens)
    def some() -> None:
        jax.lax.fori_loop(0, num_held // page_size, lambda i, _: wait(page_size), None)
        _by_runs(num_held % page_size, page_size, lambda _, size: wait(size))


def _by_runs(count: jax.Array, page_size: int, run: Callable[[jax.Array, int], None]) -> None:
    """`run(offset, size)` for the first `count` < `page_size` slots of a page.

    The loop has one trip, or none: behind a branch, all this would count, and be scheduled, as part of the loop over blocks.
    """

    def all_runs(_trip: jax.Array, _carry: None) -> None:
        for offset, size in _powers_of_two(count, page_size - 1):
            pl.when(count & size != 0)(functools.partial(run, offset, size))

    jax.lax.fori_loop(0, jnp.minimum(count, 1), all_runs, None)


def _rows_in_use(pages: Pages, into: Into) -> jax.Ref:
    num_rows = pages.pool_hbm.shape[3]
    return into.vmem if into.vmem.shape[2] == num_rows else into.vmem.at[:, :, pl.ds(0, num_rows)]


class Rows(NamedTuple):
    """Rows that become the keys and values at consecutive positions of one sequence."""

    sequence: jax.Array
    position: jax.Array
    count: jax.Array


class Source(NamedTuple):
    """Where such rows lie: the first one is row `first` of `rows`."""

    rows: jax.Ref  # [parts, any number, 2 * K, D / parts]
    first: jax.Array
    max_count: int


def start_write(pages: Pages, rows: Rows, source: Source, sem: jax.Ref) -> None:
    """Start to copy rows into their pages. `rows.count` is at most `source.max_count`."""
    page_size, first_page = pages.page_size, rows.position // pages.page_size
    num_parts, lanes = source.rows.shape[0], source.rows.shape[3]

    def start_run(page: jax.Ref, begin: jax.Array, size: int) -> None:
        run = page.at[pl.ds(begin % page_size, size)]
        for part in range(num_parts):
            target = run.at[:, :, pl.ds(part * lanes, lanes)] if num_parts > 1 else run
            at = source.first + begin - rows.position
            pltpu.make_async_copy(source.rows.at[part, pl.ds(at, size)], target, sem).start()

    for i in range(-(-source.max_count // page_size) + 1):
        begin = jnp.maximum(rows.position, (first_page + i) * page_size)
        end = jnp.minimum(rows.position + rows.count, (first_page + i + 1) * page_size)
        page = pages.page(rows.sequence, jnp.minimum(first_page + i, pages.pages_per_sequence - 1))

        @pl.when(begin < end)
        def write_page(begin=begin, end=end, page=page) -> None:
            for offset, size in _powers_of_two(end - begin, page_size):
                pl.when((end - begin) & size != 0)(functools.partial(start_run, page, begin + offset, size))


def wait_write(rows: Rows, source: Source, sem: jax.Ref) -> None:
    """Wait for all rows of one `start_write`."""
    for _, size in _powers_of_two(rows.count, min(source.max_count, source.rows.shape[1])):

        @pl.when(rows.count & size != 0)
        def wait_run(size=size) -> None:
            some = source.rows.at[:, pl.ds(0, size)]
            pltpu.make_async_copy(some, some, sem).wait()


def _powers_of_two(count: jax.Array, limit: int) -> list[tuple[jax.Array, int]]:
    """`count` <= `limit` as a sum of powers of two: for each power, large ones first, the sum of those before it. DMA sizes are static."""
    powers = [1 << bit for bit in reversed(range(limit.bit_length()))]
    return [(count & ~(2 * power - 1), power) for power in powers]
