"""Paged attention of query tiles on TPU: any mix of chunks of prompts, and single rows, in one launch.

The step's rows are cut into tiles of up to R consecutive rows of one sequence (`cut`), and the grid walks over the tiles. Tiles end at
multiples of R rows of the step, so queries are read, and outputs written, where they lie: feature-major, [features, T], as projections
yield and take them. A block of R rows with rows of two sequences has a tile for each; every tile computes all R rows and keeps its own. A
tile walks over the blocks of B positions that it sees, which arrive from HBM by page while the block before is computed:

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

What happens once a tile happens here too, because on its own each of it would be a pass over memory: rotary embedding, scales, the
transposes from and to [features, T], the order of keys and values in a page. Grid step i puts the keys and values of tile i into their
pages and then attends for tile i - 1. Both may share a page; so no fetch reads behind the positions that its tile sees.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pdjax.kernels.tpu import blocks
from pdjax.kernels.tpu.attend import attend_tile, begin_launch, clear_rows, join_heads
from pdjax.kernels.tpu.blocks import LANES
from pdjax.kernels.tpu.paging import Pages
from pdjax.kernels.tpu.step import Access, Options, Scratch, Static, Step, Tiles
from pdjax.kernels.tpu.tuning import PrefillTuning


class Problem(NamedTuple):
    """What one launch computes. T is a multiple of R.

    projected: [(H + 2 * K) * D, T], heads of queries, keys and values, as the projection yields them. XLA would take a third axis into the
        product, and copy its weights.
    turns: cosines and sines of the rotary embedding, float32[pairs, T] each; None where queries and keys have been rotated.
    stored: [T, 2 * K, D], the step's keys and values as the pool holds them; None where `projected` has them, in the pool's dtype.
    pool: [layers, pages, page_size, 2 * K, D].
    factors: float32[2 * K], by turns, of the queries and of the outputs of a KV head; scores come out in base 2.
    """

    projected: jax.Array
    turns: tuple[jax.Array, jax.Array] | None
    stored: jax.Array | None
    pool: jax.Array
    layer: jax.Array  # int32[1]
    tiles: Tiles
    tables: jax.Array  # int32[S, P]
    window: jax.Array  # int32[1]
    sinks: jax.Array  # float32[H], in base 2
    factors: jax.Array


def ragged_paged_attention(
    problem: Problem, options: Options, tuning: PrefillTuning, interpret: pltpu.InterpretParams | bool = False
) -> tuple[jax.Array, jax.Array]:
    """Write the step's keys and values into the pool and attend: outputs [H * D, T], 0 in rows of no tile, and the pool (donated).

    Raises ValueError where pages do not divide blocks, or tiles the rows.
    """
    num_rows, page_size = problem.projected.shape[1], problem.pool.shape[2]
    if tuning.block_tokens % page_size:
        raise ValueError(f"pages of {page_size} tokens do not divide blocks of {tuning.block_tokens}")
    if num_rows % tuning.tile_rows:
        raise ValueError(f"tiles of {tuning.tile_rows} rows do not divide {num_rows}")
    prefetch = (problem.layer, problem.window, *problem.tiles, problem.tables.reshape(-1))
    operands = _operands(problem, tuning.tile_rows)
    scratch = _scratch(problem, tuning)
    vmem_bytes = _vmem_bytes(operands, scratch)
    width = problem.sinks.shape[0] * problem.pool.shape[4]
    call = pl.pallas_call(
        functools.partial(
            _kernel,
            names=(*_PREFETCHED, *operands, "out", "pool", *scratch._fields),
            static=Static(options, tuning, problem.tables.shape[1], Access.of(interpret)),
        ),
        out_shape=(
            jax.ShapeDtypeStruct((width, num_rows), problem.projected.dtype),
            jax.ShapeDtypeStruct(problem.pool.shape, problem.pool.dtype),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetch),
            grid=(len(problem.tiles.rows) + 1,),
            in_specs=[spec for _, spec in operands.values()],
            out_specs=(_columns(width, 0, tuning.tile_rows, _attended), pl.BlockSpec(memory_space=pl.ANY)),
            scratch_shapes=scratch,
        ),
        input_output_aliases={len(prefetch) + list(operands).index("pool_in"): 1},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=min(vmem_bytes + vmem_bytes // 8 + _SPARE_VMEM_BYTES, tuning.vmem_limit_bytes),
            disable_bounds_checks=True,
        ),
        interpret=interpret,
        name="ragged_paged_attention",
    )
    return call(*prefetch, *(operand for operand, _ in operands.values()))


_SPARE_VMEM_BYTES = 4 << 20
"""For spilled registers and what Mosaic adds. The limit is no higher than need be: in the rest XLA keeps what comes before and after."""

_PREFETCHED = ("layer", "window", *Tiles._fields, "tables")

_TileOf = Callable[[jax.Array], jax.Array]
"""Which tile a grid step needs an operand for."""


def _attended(trip: jax.Array) -> jax.Array:
    return jnp.maximum(trip - 1, 0)


def _written(trip: jax.Array) -> jax.Array:
    return jnp.minimum(trip, pl.num_programs(0) - 2)


def _operands(problem: Problem, tile_rows: int) -> dict[str, tuple[jax.Array, pl.BlockSpec]]:
    """What the kernel reads beside scalars, in order, with where it reads it."""
    num_heads, num_kv_heads, head_dim = problem.sinks.shape[0], problem.pool.shape[3] // 2, problem.pool.shape[4]
    in_smem, anywhere = pl.BlockSpec(memory_space=pltpu.SMEM), pl.BlockSpec(memory_space=pl.ANY)

    def of_heads(count: int, index: int, tile_of: _TileOf) -> tuple[jax.Array, pl.BlockSpec]:
        return problem.projected, _columns(count * head_dim, index, tile_rows, tile_of)

    operands = {"sinks": (problem.sinks, in_smem), "factors": (problem.factors, in_smem), "queries": of_heads(num_heads, 0, _attended)}
    if problem.turns is not None:
        for name, tile_of in (("turn_queries", _attended), ("turn_keys", _written)):
            spec = _columns(len(problem.turns[0]), 0, tile_rows, tile_of)
            operands |= {f"{name}_{part}": (turn, spec) for part, turn in zip(("cos", "sin"), problem.turns, strict=True)}
    if problem.stored is None:
        first = num_heads // num_kv_heads
        operands |= {"new_keys": of_heads(num_kv_heads, first, _written), "new_values": of_heads(num_kv_heads, first + 1, _written)}
    else:
        operands["stored"] = (problem.stored[None], anywhere)
    return operands | {"pool_in": (problem.pool, anywhere)}


def _columns(height: int, index: int, tile_rows: int, tile_of: _TileOf) -> pl.BlockSpec:
    """Of an array [n * height, T]: `height` features, the `index`-th so many, of the block of rows in which a tile lies."""

    def block(trip: jax.Array, *scalars: jax.Ref) -> tuple[int, jax.Array]:
        return index, scalars[_PREFETCHED.index("rows")][tile_of(trip)] // tile_rows

    return pl.BlockSpec((height, tile_rows), block)


def _vmem_bytes(operands: dict[str, tuple[jax.Array, pl.BlockSpec]], scratch: Scratch) -> int:
    """What the kernel's buffers take: blocks of operands twice, and of the outputs, which are those of the queries."""
    windows = [(array.dtype, spec.block_shape) for array, spec in operands.values() if spec.block_shape is not None]
    windows.append((operands["queries"][0].dtype, operands["queries"][1].block_shape))
    in_windows = sum(2 * dtype.itemsize * math.prod(shape) for dtype, shape in windows)
    return in_windows + sum(ref.dtype.itemsize * math.prod(ref.shape) for ref in scratch[: scratch._fields.index("parity")])


def _scratch(problem: Problem, tuning: PrefillTuning) -> Scratch:
    num_heads, tile_rows, head_dim = problem.sinks.shape[0], tuning.tile_rows, problem.pool.shape[4]
    num_kv_heads = problem.pool.shape[3] // 2
    num_rows = num_heads // num_kv_heads * tile_rows
    block, dtype = tuning.block_tokens, problem.projected.dtype
    lanes = min(head_dim, LANES)
    return Scratch(
        pltpu.VMEM((num_heads, tile_rows, head_dim), dtype),
        pltpu.VMEM((head_dim // lanes, tile_rows, 2 * num_kv_heads, lanes), dtype),
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


def _kernel(*refs: jax.Ref, names: tuple[str, ...], static: Static) -> None:
    """Grid step i writes the keys and values of tile i and attends for tile i - 1."""
    named = dict(zip(names, refs, strict=True))
    tiles = Tiles(*(named[name] for name in Tiles._fields))
    pages = Pages(named["pool"], named["layer"], named["tables"], static.pages_per_sequence)
    step = Step(static, pages, tiles, named, Scratch(*(named[name] for name in Scratch._fields)))
    trip = pl.program_id(0)
    tile, count = trip - 1, tiles.count[0]

    @pl.when(trip < count)
    def write() -> None:
        if "stored" not in named:
            join_heads(step)
        step.start_write(trip)

    pl.when((trip == 0) & (count > 0))(lambda: begin_launch(step))

    before, here = (tiles.rows[jnp.maximum(trip - back, 0)] // static.tuning.tile_rows for back in (2, 1))

    @pl.when((trip == 1) | ((trip > 1) & (here != before)))
    def begin_rows() -> None:
        clear_rows(step)

    @pl.when((trip > 0) & (tile < count))
    def attend() -> None:
        attend_tile(step, tile)
