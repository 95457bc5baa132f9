"""Paged attention of query tiles on TPU: any mix of chunks of prompts, and single rows, in one launch.

The step's rows are cut into tiles of up to R consecutive rows of one sequence (`cut`), and the grid walks over the tiles. A tile walks over
the blocks of B positions that it sees, which arrive from HBM by page while the block before is computed:

    positions   0        B        2B       3B       4B            one trip of a loop, all KV heads h:
    rows   p  +--------+--------+--------+--------+               1  split the block into keys[h] [B, D] and values[h] [B, D]
         ...  | whole  | whole  | whole  | edge   |               2  scores[h] = queries[h] keys[h]^T     [G * R, B], into VMEM
     p + R-1  +--------+--------+--------+--------+               3  seldom: move peak[h], rescale acc[h]
                                                                  4  acc[h] += 2 ** (scores[h] - peak[h]) values[h]
Whole blocks, seen by every row, run in a loop without mask arithmetic; blocks on an edge (the diagonal, or the lower end of a sliding
window) in another. Phases 2 and 4 have no dependence from head to head, so the compiler overlaps matrix unit, vector unit and stores
within each of them.

What keeps the vector unit from being the limit (figures in docs/kernels.md):
  * scale and log2(e) are in the queries already, so a weight is 2 ** (score - peak), one subtraction and one `exp2`;
  * `peak` is not the running maximum. It is a maximum of the row's scores some time ago, and it moves only when some score of the tile
    exceeds it by `SLACK`: floating point keeps its relative accuracy at 2 ** SLACK just as well as at 1. So rescaling is rare, the
    check costs one vector operation for each register of scores, and no reduction across lanes happens in the common case;
  * sums of weights are kept by lane and reduced once a tile; where D leaves lanes unused they come out of the matrix unit, from columns
    of ones in those lanes.

New rows of keys and values are copied into their pages one tile ahead. Tiles end at multiples of R positions and pages divide R, so what is
written for the next tile shares no page with what this one reads.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pdjax.kernels.tpu import blocks
from pdjax.kernels.tpu.blocks import LANES, LoadWords
from pdjax.kernels.tpu.paging import Block, Into, Pages, Rows, start_fetch, start_write, wait_fetch, wait_write
from pdjax.kernels.tpu.tuning import PrefillTuning

MASKED = -1e30
"""Score of a position that a row does not see, and the peak of a row that has seen none: finite, so that no inf - inf arises."""
SLACK = 60.0
"""How far a score may exceed the peak, in powers of two. 2 ** 60 times a million keys times values of 2 ** 40 is still a float32."""


class Tiles(NamedTuple):
    """The tiles of a step: tile i has `lengths[i]` rows from row `rows[i]` on, at `positions[i]` and following of its sequence."""

    count: jax.Array  # int32[1], tiles in use
    sequences: jax.Array  # int32[tiles]
    positions: jax.Array  # int32[tiles]
    lengths: jax.Array  # int32[tiles]
    rows: jax.Array  # int32[tiles]

    def is_in_use(self) -> jax.Array:
        """bool[tiles]."""
        return jnp.arange(self.rows.shape[0]) < self.count


class Options(NamedTuple):
    """What changes the program. Scale and the scales of a quantised pool are not here: they go into queries and output."""

    soft_cap: float | None  # queries are scaled such that a score is `soft_cap * tanh(query . key)`, in base 2
    is_windowed: bool
    has_sinks: bool


class Problem(NamedTuple):
    """What one launch computes.

    queries: [H, tiles, R, D], scaled, in base 2. Heads come first, so that a tile's rows of the G heads of a KV head make one matrix as they are.
    kv: [T, 2 * K, D], the step's keys and values as they are stored.
    pool: [layers, pages, page_size, 2 * K, D]; D a multiple of 128.
    """

    queries: jax.Array
    kv: jax.Array
    pool: jax.Array
    layer: jax.Array  # int32[1]
    tiles: Tiles
    tables: jax.Array  # int32[S, P]
    window: jax.Array  # int32[1]
    sinks: jax.Array  # float32[H], in base 2


def ragged_paged_attention(
    problem: Problem, options: Options, tuning: PrefillTuning, interpret: pltpu.InterpretParams | bool = False
) -> tuple[jax.Array, jax.Array]:
    """Write `problem.kv` into the pool and attend: outputs in the shape and dtype of the queries, and the pool (donated).

    Tiles that are not in use give garbage. Raises ValueError where pages do not divide tiles and blocks.
    """
    num_heads, num_tiles, tile_rows, head_dim = problem.queries.shape
    page_size = problem.pool.shape[2]
    if tuning.tile_rows % page_size or tuning.block_tokens % page_size:
        raise ValueError(f"pages of {page_size} tokens divide neither tiles of {tuning.tile_rows} nor blocks of {tuning.block_tokens}")
    prefetch = (problem.layer, problem.window, *problem.tiles, problem.tables.reshape(-1))
    tile_spec = pl.BlockSpec((num_heads, pl.squeezed, tile_rows, head_dim), _tile_in_use)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    call = pl.pallas_call(
        functools.partial(
            _kernel,
            options=options,
            tuning=tuning,
            pages_per_sequence=problem.tables.shape[1],
            load=blocks.load_words_interpreted if interpret else blocks.load_words,
        ),
        out_shape=tuple(jax.ShapeDtypeStruct(like.shape, like.dtype) for like in (problem.queries, problem.pool)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetch),
            grid=(num_tiles,),
            in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM), tile_spec, anywhere, anywhere],
            out_specs=(tile_spec, anywhere),
            scratch_shapes=_scratch(problem, tuning),
        ),
        input_output_aliases={len(prefetch) + 3: 1},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=tuning.vmem_limit_bytes, disable_bounds_checks=True
        ),
        interpret=interpret,
        name="ragged_paged_attention",
    )
    return call(*prefetch, problem.sinks, problem.queries, problem.kv, problem.pool)


def _tile_in_use(tile: jax.Array, _layer: jax.Ref, _window: jax.Ref, count_smem: jax.Ref, *_: jax.Ref) -> tuple[int, jax.Array, int, int]:
    """Grid steps without a tile stay on the last one, so nothing is copied for them."""
    return 0, jnp.minimum(tile, jnp.maximum(count_smem[0] - 1, 0)), 0, 0


class _Scratch(NamedTuple):
    blocks: jax.Ref  # two blocks of the pool, [2, D / lanes, B, rows, lanes], see blocks.py
    keys: jax.Ref  # [K, B, D]
    values: jax.Ref  # [K, B, D in whole lanes], with ones behind the values
    scores: jax.Ref  # float32[K, G * R, B]
    acc: jax.Ref  # float32[K, G * R, W], W > D whole lanes: outputs, then sums of weights, the same in every lane or a part in each
    peak: jax.Ref  # float32[K, G * R, LANES], the same in every lane
    parity: jax.Ref  # SMEM int32[1]: which half of `blocks` the next block lies in
    read_sems: jax.Ref  # [2]
    write_sem: jax.Ref


def _scratch(problem: Problem, tuning: PrefillTuning) -> _Scratch:
    num_heads, _, tile_rows, head_dim = problem.queries.shape
    num_kv_heads = problem.pool.shape[3] // 2
    num_rows = num_heads // num_kv_heads * tile_rows
    block, dtype = tuning.block_tokens, problem.queries.dtype
    return _Scratch(
        pltpu.VMEM((2, *blocks.block_shape(block, *problem.pool.shape[3:], problem.pool.dtype.itemsize)), problem.pool.dtype),
        pltpu.VMEM((num_kv_heads, block, head_dim), dtype),
        pltpu.VMEM((num_kv_heads, block, pl.cdiv(head_dim, LANES) * LANES), dtype),
        pltpu.VMEM((num_kv_heads, num_rows, block), jnp.float32),
        pltpu.VMEM((num_kv_heads, num_rows, pl.cdiv(head_dim + 1, LANES) * LANES), jnp.float32),
        pltpu.VMEM((num_kv_heads, num_rows, LANES), jnp.float32),
        pltpu.SMEM((1,), jnp.int32),
        pltpu.SemaphoreType.DMA((2,)),
        pltpu.SemaphoreType.DMA,
    )


class _Span(NamedTuple):
    """Which blocks a tile sees: `first .. whole` on the lower edge, `whole .. edge` without a mask, `edge .. last` on the diagonal."""

    first: jax.Array
    whole: jax.Array
    edge: jax.Array
    last: jax.Array


class _Step(NamedTuple):
    """One grid step: what is static, and the references."""

    options: Options
    tuning: PrefillTuning
    load: LoadWords
    pages: Pages
    tiles: Tiles  # in SMEM
    window_smem: jax.Ref
    sinks_smem: jax.Ref
    queries: jax.Ref  # [H, R, D]
    kv_hbm: jax.Ref
    out: jax.Ref  # [H, R, D]
    scratch: _Scratch

    @property
    def num_kv_heads(self) -> int:
        return self.scratch.keys.shape[0]

    @property
    def group(self) -> int:
        """Query heads a KV head."""
        return self.queries.shape[0] // self.num_kv_heads

    @property
    def sums_on_mxu(self) -> bool:
        """Whether sums of weights come from columns of ones beside the values."""
        return self.queries.shape[2] % LANES != 0

    def end(self, tile: jax.Array) -> jax.Array:
        """The first position that the tile does not see."""
        return self.tiles.positions[tile] + self.tiles.lengths[tile]

    def span(self, tile: jax.Array) -> _Span:
        block, position, end = self.tuning.block_tokens, self.tiles.positions[tile], self.end(tile)
        last, edge = pl.cdiv(end, block), (position + 1) // block
        if not self.options.is_windowed:
            return _Span(jnp.int32(0), jnp.int32(0), edge, last)
        window = self.window_smem[0]
        first = jnp.maximum(position - window + 1, 0) // block
        whole = jnp.clip(pl.cdiv(jnp.maximum(end - window, 0), block), first, last)
        return _Span(first, whole, jnp.maximum(edge, whole), last)

    def rows(self, tile: jax.Array) -> Rows:
        tiles = self.tiles
        return Rows(tiles.rows[tile], tiles.sequences[tile], tiles.positions[tile], tiles.lengths[tile])

    def into(self, half: jax.Array) -> Into:
        return Into(self.scratch.blocks.at[half], self.scratch.read_sems.at[half])

    def start_write(self, tile: jax.Array) -> None:
        start_write(self.pages, self.rows(tile), self.tuning.tile_rows, self.kv_hbm, self.scratch.write_sem)

    def wait_write(self, tile: jax.Array) -> None:
        wait_write(self.rows(tile), self.tuning.tile_rows, self.kv_hbm, self.scratch.write_sem)

    def start_fetch(self, tile: jax.Array, block: jax.Array, half: jax.Array) -> None:
        start_fetch(self.pages, self.block(tile, block), self.into(half))

    def wait_fetch(self, tile: jax.Array, block: jax.Array, half: jax.Array) -> None:
        wait_fetch(self.pages, self.block(tile, block), self.into(half))

    def block(self, tile: jax.Array, index: jax.Array) -> Block:
        return Block(self.tiles.sequences[tile], index, self.end(tile))


def _kernel(*refs: jax.Ref, options: Options, tuning: PrefillTuning, pages_per_sequence: int, load: LoadWords) -> None:
    layer, window, count, sequences, positions, lengths, rows, tables, sinks, queries, kv, _, out, pool, *scratch = refs
    step = _Step(
        options, tuning, load, Pages(pool, layer, tables, pages_per_sequence), Tiles(count, sequences, positions, lengths, rows),
        window, sinks, queries, kv, out, _Scratch(*scratch),
    )  # fmt: skip
    tile = pl.program_id(0)

    @pl.when((tile == 0) & (count[0] > 0))
    def begin() -> None:
        _begin_launch(step)

    @pl.when(tile < count[0])
    def attend() -> None:
        _attend_tile(step, tile)


def _begin_launch(step: _Step) -> None:
    """The first tile's rows, its first block, and the columns of ones, which stay."""
    scratch, head_dim = step.scratch, step.queries.shape[2]
    scratch.parity[0] = 0
    step.start_write(0)
    if step.sums_on_mxu:
        scratch.values[:, :, head_dim:] = jnp.ones((*scratch.values.shape[:2], scratch.values.shape[2] - head_dim), scratch.values.dtype)
    step.wait_write(0)
    step.start_fetch(0, step.span(0).first, 0)


def _attend_tile(step: _Step, tile: jax.Array) -> None:
    scratch, span = step.scratch, step.span(tile)
    has_next = tile + 1 < step.tiles.count[0]
    pl.when(has_next)(lambda: step.start_write(tile + 1))
    scratch.acc[...] = jnp.zeros_like(scratch.acc)
    scratch.peak[...] = jnp.full_like(scratch.peak, MASKED)

    def block_step(block: jax.Array, half: jax.Array, is_edge: bool) -> jax.Array:
        _fetch_next(step, tile, block, span.last, 1 - half)
        step.wait_fetch(tile, block, half)
        _attend_block(step, tile, block, half, is_edge)
        return 1 - half

    half = scratch.parity[0]
    half = jax.lax.fori_loop(span.first, span.whole, functools.partial(block_step, is_edge=True), half)
    half = jax.lax.fori_loop(span.whole, span.edge, functools.partial(block_step, is_edge=False), half)
    half = jax.lax.fori_loop(span.edge, span.last, functools.partial(block_step, is_edge=True), half)
    scratch.parity[0] = half
    _finish_tile(step)


def _fetch_next(step: _Step, tile: jax.Array, block: jax.Array, last: jax.Array, half: jax.Array) -> None:
    """Start to fetch the tile's next block; behind its last one, the first of the next tile, whose rows are written by then."""
    is_last = block + 1 == last
    has_next = tile + 1 < step.tiles.count[0]
    pl.when(is_last & has_next)(lambda: step.wait_write(tile + 1))
    tile = jnp.where(is_last & has_next, tile + 1, tile)
    block = jnp.where(is_last, step.span(tile).first, block + 1)
    pl.when(~is_last | has_next)(lambda: step.start_fetch(tile, block, half))


def _attend_block(step: _Step, tile: jax.Array, block: jax.Array, half: jax.Array, is_edge: bool) -> None:
    """The four phases of the module's docstring."""
    heads = range(step.num_kv_heads)
    edge = _Edge.of(step, tile, block) if is_edge else None
    for head in heads:
        _split(step, head, half, edge)
    excess = functools.reduce(jnp.maximum, [_score(step, head, edge) for head in heads])
    pl.when(jnp.max(excess) > SLACK)(lambda: _move_peaks(step))
    for head in heads:
        _accumulate(step, head)


class _Edge(NamedTuple):
    """What the rows of a tile see of one block that they do not all see whole."""

    num_held: jax.Array  # positions of the block that hold anything yet, from its first on; int32 scalar
    is_seen: jax.Array  # bool[R, B], in the order of the split block's rows

    @staticmethod
    def of(step: _Step, tile: jax.Array, block: jax.Array) -> _Edge:
        rows, tokens = step.tuning.tile_rows, step.tuning.block_tokens
        num_held = step.end(tile) - block * tokens
        shape = (rows, tokens)
        column = blocks.token_of_row(jax.lax.broadcasted_iota(jnp.int32, shape, 1), tokens, step.scratch.blocks.dtype.itemsize)
        row = jax.lax.broadcasted_iota(jnp.int32, shape, 0) + (step.tiles.positions[tile] - block * tokens)
        is_seen = (column <= row) & (column < num_held)
        if step.options.is_windowed:
            is_seen &= column > row - step.window_smem[0]
        return _Edge(num_held, is_seen)


def _split(step: _Step, head: int, half: jax.Array, edge: _Edge | None) -> None:
    """Phase 1. A weight of 0 times what an unused slot holds, which may be NaN, is not 0: such values become 0."""
    scratch, head_dim = step.scratch, step.queries.shape[2]
    keys, values = blocks.split_head(scratch.blocks.at[half], head, scratch.keys.dtype, step.load)
    if edge is not None:
        row = jax.lax.broadcasted_iota(jnp.int32, values.shape, 0)
        token = blocks.token_of_row(row, values.shape[0], scratch.blocks.dtype.itemsize)
        values = jnp.where(token < edge.num_held, values.astype(jnp.float32), 0.0).astype(values.dtype)
    scratch.keys[head] = keys
    scratch.values[head, :, :head_dim] = values


def _score(step: _Step, head: int, edge: _Edge | None) -> jax.Array:
    """Phase 2. Returns by how much scores exceed their row's peak, as maxima float32[8, LANES]."""
    scratch, rows = step.scratch, step.tuning.tile_rows
    excess = []
    for g in range(step.group):
        at = pl.ds(g * rows, rows)
        scores = blocks.times_keys(step.queries[head * step.group + g], scratch.keys[head])
        if step.options.soft_cap is not None:
            scores = step.options.soft_cap * jnp.tanh(scores)
        if edge is not None:
            scores = jnp.where(edge.is_seen, scores, MASKED)
        scratch.scores[head, at] = scores
        by_lane = functools.reduce(jnp.maximum, _lane_columns(scores))
        excess.append(jnp.max((by_lane - scratch.peak[head, at]).reshape(rows // 8, 8, LANES), axis=0))
    return functools.reduce(jnp.maximum, excess)


def _move_peaks(step: _Step) -> None:
    """Phase 3: every row's peak becomes the maximum of its scores so far."""
    scratch, width = step.scratch, step.scratch.acc.shape[2] // LANES

    def move(head: jax.Array, _: None) -> None:
        before = scratch.peak[head]
        peak = jnp.maximum(before, jnp.max(scratch.scores[head], axis=1, keepdims=True))
        scratch.peak[head] = peak
        scratch.acc[head] *= jnp.concatenate([jnp.exp2(before - peak)] * width, axis=1)

    jax.lax.fori_loop(0, step.num_kv_heads, move, None)


def _accumulate(step: _Step, head: int) -> None:
    """Phase 4."""
    scratch, head_dim = step.scratch, step.queries.shape[2]
    peak = scratch.peak[head]
    weights = [jnp.exp2(column - peak) for column in _lane_columns(scratch.scores[head])]
    packed = jnp.concatenate([column.astype(scratch.values.dtype) for column in weights], axis=1)
    product = blocks.times_values(packed, scratch.values[head])
    if step.sums_on_mxu:
        scratch.acc[head] += product
        return
    scratch.acc[head, :, :head_dim] += product
    scratch.acc[head, :, head_dim:] += functools.reduce(jnp.add, weights)


def _finish_tile(step: _Step) -> None:
    """Divide by the sums of weights, sinks included."""
    scratch, rows, head_dim = step.scratch, step.tuning.tile_rows, step.queries.shape[2]

    def finish(head: jax.Array, _: None) -> None:
        for g in range(step.group):
            query_head = head * step.group + g
            at = pl.ds(g * rows, rows)
            sums = scratch.acc[head, at, head_dim:]
            total = sums[:, :1] if step.sums_on_mxu else jnp.sum(sums, axis=1, keepdims=True)
            if step.options.has_sinks:
                total += jnp.exp2(step.sinks_smem[query_head] - scratch.peak[head, at, :1])
            step.out[query_head] = (scratch.acc[head, at, :head_dim] * (1.0 / total)).astype(step.out.dtype)

    jax.lax.fori_loop(0, step.num_kv_heads, finish, None)


def _lane_columns(x: jax.Array) -> list[jax.Array]:
    """The columns of x [rows, n * LANES], LANES wide."""
    return [x[:, i : i + LANES] for i in range(0, x.shape[1], LANES)]
