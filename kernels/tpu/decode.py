"""Paged attention of one row a sequence on TPU: bound by the bytes of keys and values, so it does little else than fetch them.

The grid walks over the sequences, and each over its blocks of B positions, from the first that its window reaches. While a block is
computed, the next one arrives: of the same sequence, or the first of the next sequence, so fetching does not stop between sequences.

    block in VMEM [B, 2 * K, D]  --strided loads-->  keys[h], values[h] [B, D], for each KV head h
    scores[h] = queries[h] keys[h]^T      [G, B]; then one online softmax over all heads together
    acc[h]    = acc[h] * decay[h] + weights[h] values[h]

The first and the last block of a sequence may hold positions that the row does not see; they run in a loop with masks, the others without.
The step's own rows go to their pages at the start of the launch, before any page is read.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pdjax.kernels.tpu.attend import MASKED
from pdjax.kernels.tpu.blocks import (
    LANES,
    LoadWords,
    block_shape,
    load_words,
    load_words_interpreted,
    split_head,
    times_keys,
    times_values,
    token_of_row,
)
from pdjax.kernels.tpu.paging import Block, Into, Pages, start_fetch, wait_fetch
from pdjax.kernels.tpu.step import Options
from pdjax.kernels.tpu.tuning import DecodeTuning


class Problem(NamedTuple):
    """What one launch computes; S sequences of one row each.

    queries: [S, K, G, D], G padded to whole sublanes; scaled, in base 2.
    kv: [S, 2 * K, D], the step's keys and values as they are stored.
    pool: [layers, pages, page_size, 2 * K, D].
    """

    queries: jax.Array
    kv: jax.Array
    pool: jax.Array
    layer: jax.Array  # int32[1]
    tables: jax.Array  # int32[S, P]
    visible: jax.Array  # int32[S], at least 1: positions held, the row's own included
    pages: jax.Array  # int32[S]: where the row's keys and values go; 0 for padding rows, which are not written
    offsets: jax.Array  # int32[S]
    window: jax.Array  # int32[1]
    sinks: jax.Array  # float32[K, G, LANES], the same in every lane, in base 2


def paged_decode_attention(
    problem: Problem, options: Options, tuning: DecodeTuning, interpret: pltpu.InterpretParams | bool = False
) -> tuple[jax.Array, jax.Array]:
    """Write `problem.kv` into the pool and attend: outputs in the shape and dtype of the queries, and the pool (donated).

    Raises ValueError where pages do not divide blocks.
    """
    num_sequences, *row_shape = problem.queries.shape
    page_size = problem.pool.shape[2]
    if tuning.block_tokens % page_size:
        raise ValueError(f"pages of {page_size} tokens do not divide blocks of {tuning.block_tokens}")
    prefetch = (problem.layer, problem.window, problem.visible, problem.pages, problem.offsets, problem.tables.reshape(-1))
    row_spec = pl.BlockSpec((1, *row_shape), lambda sequence, *_: (sequence, 0, 0, 0))
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    blocks = (2, *block_shape(tuning.block_tokens, *problem.pool.shape[3:], problem.pool.dtype.itemsize))
    call = pl.pallas_call(
        functools.partial(
            _kernel,
            options=options,
            pages_per_sequence=problem.tables.shape[1],
            load=load_words_interpreted if interpret else load_words,
        ),
        out_shape=tuple(jax.ShapeDtypeStruct(like.shape, like.dtype) for like in (problem.queries, problem.pool)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetch),
            grid=(num_sequences,),
            in_specs=[pl.BlockSpec(memory_space=pltpu.VMEM), row_spec, anywhere, anywhere],
            out_specs=(row_spec, anywhere),
            scratch_shapes=[
                pltpu.VMEM(blocks, problem.pool.dtype),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA,
            ],
        ),
        input_output_aliases={len(prefetch) + 3: 1},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=tuning.vmem_limit_bytes, disable_bounds_checks=True
        ),
        interpret=interpret,
        name="paged_decode_attention",
    )
    return call(*prefetch, problem.sinks, problem.queries, problem.kv, problem.pool)


class _Step(NamedTuple):
    """One grid step: what is static, and the references."""

    options: Options
    load: LoadWords
    pages: Pages
    window_smem: jax.Ref
    visible_smem: jax.Ref  # int32[S]
    queries: jax.Ref  # [K, G, D]
    blocks: jax.Ref  # two blocks of the pool, [2, D / lanes, B, rows, lanes], see blocks.py
    read_sems: jax.Ref  # [2]

    @property
    def block_tokens(self) -> int:
        return self.blocks.shape[2]

    def first(self, sequence: jax.Array) -> jax.Array:
        """The first block that the sequence's row sees any of."""
        if not self.options.is_windowed:
            return jnp.int32(0)
        return jnp.maximum(self.visible_smem[sequence] - self.window_smem[0], 0) // self.block_tokens

    def block(self, sequence: jax.Array, index: jax.Array) -> Block:
        return Block(sequence, index, self.visible_smem[sequence])

    def into(self, half: jax.Array) -> Into:
        return Into(self.blocks.at[half], self.read_sems.at[half])


class _Softmax(NamedTuple):
    """Online softmax of a row so far."""

    peak: jax.Array  # float32[K, G, 1]
    total: jax.Array  # float32[K, G, LANES], a part of the sum of weights in each lane
    acc: jax.Array  # float32[K, G, D]


def _kernel(*refs: jax.Ref, options: Options, pages_per_sequence: int, load: LoadWords) -> None:
    layer, window, visible, page, offset, tables, sinks, queries, kv, _, out, pool, blocks, parity, read_sems, write_sem = refs
    pages = Pages(pool, layer, tables, pages_per_sequence)
    step = _Step(options, load, pages, window, visible, queries.at[0], blocks, read_sems)
    sequence = pl.program_id(0)

    @pl.when(sequence == 0)
    def begin() -> None:
        parity[0] = 0
        _write_rows(pages, page, offset, kv, write_sem)
        start_fetch(pages, step.block(0, step.first(0)), step.into(0))

    half, softmax = _attend_sequence(step, sequence, parity[0])
    parity[0] = half
    total = jnp.sum(softmax.total, axis=2, keepdims=True)
    if options.has_sinks:
        total += jnp.exp2(sinks[:, :, :1] - softmax.peak)
    out[0] = (softmax.acc * (1.0 / total)).astype(out.dtype)


def _write_rows(pages: Pages, page_smem: jax.Ref, offset_smem: jax.Ref, kv_hbm: jax.Ref, sem: jax.Ref) -> None:
    """Copy each sequence's row of `kv_hbm` [S, 2 * K, D] to its slot, and wait for all."""

    def start(sequence: jax.Array, num_started: jax.Array) -> jax.Array:
        slot = pages.pool_hbm.at[pages.layer_smem[0], page_smem[sequence], offset_smem[sequence]]
        is_real = page_smem[sequence] != 0
        pl.when(is_real)(lambda: pltpu.make_async_copy(kv_hbm.at[sequence], slot, sem).start())
        return num_started + is_real.astype(jnp.int32)

    row = kv_hbm.at[0]
    num_started = jax.lax.fori_loop(0, kv_hbm.shape[0], start, jnp.int32(0))
    jax.lax.fori_loop(0, num_started, lambda i, _: pltpu.make_async_copy(row, row, sem).wait(), None)


def _attend_sequence(step: _Step, sequence: jax.Array, half: jax.Array) -> tuple[jax.Array, _Softmax]:
    """`half` of the buffer is where the first block arrives. Returns the half for the next sequence."""
    tokens, visible = step.block_tokens, step.visible_smem[sequence]
    first, last = step.first(sequence), pl.cdiv(visible, tokens)
    whole, edge = first, visible // tokens
    if step.options.is_windowed:
        whole = jnp.minimum(pl.cdiv(jnp.maximum(visible - step.window_smem[0], 0), tokens), last)
        edge = jnp.maximum(edge, whole)

    def block_step(block: jax.Array, carry: tuple[jax.Array, _Softmax], is_edge: bool) -> tuple[jax.Array, _Softmax]:
        half, softmax = carry
        _fetch_next(step, sequence, block, last, 1 - half)
        wait_fetch(step.pages, step.block(sequence, block), step.into(half))
        return 1 - half, _attend_block(step, sequence, block, step.blocks.at[half], softmax, is_edge)

    shape = step.queries.shape
    softmax = _Softmax(
        jnp.full((*shape[:2], 1), MASKED, jnp.float32), jnp.zeros((*shape[:2], LANES), jnp.float32), jnp.zeros(shape, jnp.float32)
    )
    carry = jax.lax.fori_loop(first, whole, functools.partial(block_step, is_edge=True), (half, softmax))
    carry = jax.lax.fori_loop(whole, edge, functools.partial(block_step, is_edge=False), carry)
    return jax.lax.fori_loop(edge, last, functools.partial(block_step, is_edge=True), carry)


def _fetch_next(step: _Step, sequence: jax.Array, block: jax.Array, last: jax.Array, half: jax.Array) -> None:
    """Start to fetch the block after this one: of the same sequence, or the first of the next one."""
    is_last = block + 1 == last
    has_next = sequence + 1 < pl.num_programs(0)
    sequence = jnp.where(is_last & has_next, sequence + 1, sequence)
    block = jnp.where(is_last, step.first(sequence), block + 1)
    pl.when(~is_last | has_next)(lambda: start_fetch(step.pages, step.block(sequence, block), step.into(half)))


def _attend_block(step: _Step, sequence: jax.Array, block: jax.Array, kv: jax.Ref, softmax: _Softmax, is_edge: bool) -> _Softmax:
    """`softmax` with a block `kv` [D / lanes, B, rows, lanes] added."""
    num_kv_heads, dtype = step.queries.shape[0], step.queries.dtype
    scores = [times_keys(step.queries[head], split_head(kv, head, dtype, step.load)[0]) for head in range(num_kv_heads)]
    scores = jnp.stack(scores)
    if step.options.soft_cap is not None:
        scores = step.options.soft_cap * jnp.tanh(scores)
    if is_edge:
        scores = jnp.where(_is_seen(step, sequence, block, kv.dtype, scores.shape), scores, MASKED)
    peak = jnp.maximum(softmax.peak, jnp.max(scores, axis=2, keepdims=True))
    weights, decay = jnp.exp2(scores - peak), jnp.exp2(softmax.peak - peak)
    total = softmax.total * decay + sum(weights[:, :, i : i + LANES] for i in range(0, step.block_tokens, LANES))
    products = []
    for head in range(num_kv_heads):
        values = split_head(kv, head, dtype, step.load)[1]
        if is_edge:
            values = _held_values(step, sequence, block, kv.dtype, values)
        products.append(times_values(weights[head].astype(dtype), values))
    return _Softmax(peak, total, softmax.acc * decay + jnp.stack(products))


def _is_seen(step: _Step, sequence: jax.Array, block: jax.Array, stored: jnp.dtype, shape: tuple[int, ...]) -> jax.Array:
    """bool[K, G, B]: whether the row sees the position of each column."""
    first = block * step.block_tokens
    token = token_of_row(jax.lax.broadcasted_iota(jnp.int32, shape, 2), step.block_tokens, stored.itemsize)
    visible = step.visible_smem[sequence]
    is_seen = token < visible - first
    return is_seen & (token >= visible - step.window_smem[0] - first) if step.options.is_windowed else is_seen


def _held_values(step: _Step, sequence: jax.Array, block: jax.Array, stored: jnp.dtype, values: jax.Array) -> jax.Array:
    """`values` [B, D] with 0 for positions not held: what is in unused slots may be NaN."""
    token = token_of_row(jax.lax.broadcasted_iota(jnp.int32, values.shape, 0), step.block_tokens, stored.itemsize)
    num_held = step.visible_smem[sequence] - block * step.block_tokens
    return jnp.where(token < num_held, values.astype(jnp.float32), 0.0).astype(values.dtype)
