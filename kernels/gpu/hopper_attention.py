"""Ragged paged attention for Hopper GPUs (compute capability 9.0), in Pallas on Mosaic GPU: bfloat16, head_dim 64 and 128, prefill.

One block is three warpgroups: one brings keys and values by TMA, two compute. Each computing one has 64 matrix rows (rows of the tile
times the G query heads of the KV head, row-major) and goes through all keys of the tile:

    memory       | K0 V0 | K1 V1 | K2 V2 | (waits for stage 0) K3 V3 ...         pages -> ring of `stages` blocks in shared memory
                     |       |       |
    warpgroup 0  | Q.K0 | softmax 0 | P0.V0 | softmax 1 | P1.V1 | ...
                 |      | Q.K1      |       | Q.K2      |                         matrix products run while the softmax does
    warpgroup 1  | the same for matrix rows 64-127

The product of the next block's keys is issued before this block's softmax, so the tensor cores have work meanwhile; two warpgroups
that drift apart fill what is left.

Keys are paged, and a page is what one TMA copies: `page_size` entries of `head_dim` numbers, rows of the pool seen as a matrix
[layers * pages * page_size, 2 * K * D], into its place in the block. Shared memory is swizzled in tiles of 8 rows of 128 bytes, so
pages must be a multiple of 8, and larger ones take fewer copies: 128 keys are 8 copies of pages of 16, one of pages of 128.

Queries come and results leave in the order of the tiles; and slots that hold nothing are cleared ahead: `hopper_layout` says why.

What is known of it: in the interpreter it agrees with the reference and has no race (barriers, copies and masks are simulated there,
matrix products are JAX's); for sm_90a it compiles to wgmma and TMA instructions that ptxas neither spills for nor serializes. It has
not been timed on a GPU.

Left out: attention sinks, pools of another dtype than bfloat16, decoding (no tile there fills 64 rows).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pdjax.kernels.base import AttentionSpec
from pdjax.kernels.gpu.hopper_layout import MATRIX_ROWS, Plan, from_tiles, to_tiles
from pdjax.kernels.gpu.hopper_products import INTERPRETED, TENSOR_CORES, Products
from pdjax.kernels.gpu.tiles import Tiles

_NUM_COMPUTING, _WARPGROUP_ROWS = 2, 64
_SWIZZLE_ROWS, _SWIZZLE_BYTES = 8, 128
_COMPUTING_REGISTERS, _MEMORY_REGISTERS = 240, 24
_MASKED = -1e30
_LOG2_E = math.log2(math.e)
_BLOCK_KEYS = 128


class Tuning(NamedTuple):
    """Sizes of one launch."""

    block_keys: int  # a multiple of the page size and of 64
    stages: int  # blocks of keys and values in shared memory

    def check(self, page_size: int) -> None:
        """Raises ValueError where the sizes do not go together."""
        if page_size % _SWIZZLE_ROWS:
            raise ValueError(f"page_size {page_size} is no multiple of {_SWIZZLE_ROWS}")
        if self.block_keys % page_size or self.block_keys % 64:
            raise ValueError(f"block_keys {self.block_keys} is no multiple of 64 and of page_size {page_size}")
        if self.stages < 2:
            raise ValueError(f"stages {self.stages} is less than 2: a block must come in while one is computed")


TUNINGS = {64: Tuning(_BLOCK_KEYS, 4), 128: Tuning(_BLOCK_KEYS, 2)}
"""By head_dim. At 128: 32 KiB of queries and 128 KiB of keys and values, of the 227 KiB that a block may have; of a thread's 240 registers
224 hold the running result, two blocks' scores and the weights."""


class _Shape(NamedTuple):
    """What is static about a launch."""

    page_size: int
    pages: int  # of one layer
    group: int  # query heads a KV head
    head_dim: int
    num_tiles: int
    factor: float  # the weight of a score u is 2^(factor * u)
    cap_scale: float | None  # of scores before the soft cap's tanh
    tuning: Tuning


class _Inputs(NamedTuple):
    """What the kernel reads, in global memory."""

    tiles: Tiles
    tables: jax.Array  # int32[S, P]
    layer: jax.Array  # int32[1]
    window: jax.Array | None  # int32[1]
    queries: jax.Array  # bfloat16[K * tiles * 128, D]
    entries: jax.Array  # bfloat16[layers * pages * page_size, 2 * K * D]


class _Shared(NamedTuple):
    """What the warpgroups of a block share: shared memory, and barriers that say what is in it."""

    queries: Any  # bfloat16[2, 64, D] by warpgroup, later the results
    keys: Any  # bfloat16[stages, block_keys, D]
    values: Any  # bfloat16[stages, block_keys, D]
    queries_there: Any
    keys_there: Any
    values_there: Any
    keys_done: Any  # neither warpgroup has any more use for the stage's keys
    values_done: Any


class _Tile(NamedTuple):
    """int32 scalars: the tile as in `Tiles`, and the blocks of keys that it goes through."""

    position: jax.Array
    end: jax.Array
    sequence: jax.Array
    window: jax.Array | None
    first: jax.Array
    left: jax.Array  # the first block that no row's window cuts
    whole: jax.Array  # the first block that not every row sees whole
    last: jax.Array  # behind the last one


class _Softmax(NamedTuple):
    """Online softmax so far, of one warpgroup."""

    peak: jax.Array  # float32[64]
    total: jax.Array  # float32[64]
    out: jax.Array  # float32[64, D], not yet divided by `total`


def why_not(queries: jax.ShapeDtypeStruct, pool: jax.ShapeDtypeStruct, spec: AttentionSpec) -> str | None:
    """Why this kernel cannot attend with queries [T, H, D] over pool [layers, pages, page_size, 2 * K, D]; None where it can."""
    head_dim, group = queries.shape[-1], queries.shape[1] // (pool.shape[3] // 2)
    if queries.dtype != jnp.bfloat16 or pool.dtype != jnp.bfloat16:
        return f"queries of {queries.dtype.name} over a pool of {pool.dtype.name}; both must be bfloat16"
    if head_dim not in TUNINGS:
        return f"head_dim {head_dim}; known: {', '.join(map(str, TUNINGS))}"
    if group > MATRIX_ROWS:
        return f"{group} query heads share a KV head, more than the {MATRIX_ROWS} rows of a tile"
    if pool.shape[2] % _SWIZZLE_ROWS or _BLOCK_KEYS % pool.shape[2]:
        return f"page_size {pool.shape[2]} is no multiple of {_SWIZZLE_ROWS} that divides {_BLOCK_KEYS}"
    if spec.sinks is not None:
        return "attention sinks"
    if spec.kv_scales is not None:
        return "KV scales"
    return None


def hopper_attention(
    queries: jax.Array,
    pool: jax.Array,
    layer: jax.Array | int,
    plan: Plan,
    spec: AttentionSpec,
    tuning: Tuning,
    *,
    interpret: Any = None,
) -> jax.Array:
    """Attention of every row of every tile over its sequence's keys in the pool, its own included.

    Args:
        queries: bfloat16[T, H, D].
        pool: bfloat16[layers, pages, page_size, 2 * K, D], from `clear_tails`.
        layer: int32 scalar.
        plan: for blocks of `tuning.block_keys`.
        interpret: None to compile, or `InterpretGPUParams`; then matrix products are JAX's, all else is simulated.

    Returns: the shape and dtype of `queries`; rows of no tile hold anything. Raises ValueError for sizes that do not go together.
    """
    tuning.check(pool.shape[2])
    shape = _shape(queries, pool, len(plan.rows), spec, tuning)
    kv_heads = pool.shape[3] // 2
    inputs = _Inputs(
        plan.tiles,
        plan.tables,
        jnp.asarray(layer, jnp.int32).reshape(1),
        None if spec.window is None else jnp.asarray(spec.window, jnp.int32).reshape(1),
        to_tiles(queries, plan, kv_heads),
        pool.reshape(-1, pool.shape[3] * pool.shape[4]),
    )
    products = TENSOR_CORES if interpret is None else INTERPRETED

    def hopper_prefill(inputs: _Inputs, out_gmem: Any) -> None:  # gives the kernel its name
        _block(shape, products, inputs, out_gmem)

    launch = plgpu.kernel(
        hopper_prefill,
        out_type=jax.ShapeDtypeStruct(inputs.queries.shape, inputs.queries.dtype),
        grid=(kv_heads, shape.num_tiles),
        grid_names=("kv_head", "tile"),
        num_threads=_NUM_COMPUTING + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    out = launch(inputs).reshape(kv_heads, shape.num_tiles, MATRIX_ROWS, shape.head_dim)
    return from_tiles(out, plan, shape.group)


def _shape(queries: jax.Array, pool: jax.Array, num_tiles: int, spec: AttentionSpec, tuning: Tuning) -> _Shape:
    _, pages, page_size, double_kv_heads, head_dim = pool.shape
    scale = head_dim**-0.5 if spec.scale is None else spec.scale
    return _Shape(
        page_size=page_size,
        pages=pages,
        group=queries.shape[1] // (double_kv_heads // 2),
        head_dim=head_dim,
        num_tiles=num_tiles,
        factor=_LOG2_E * (scale if spec.soft_cap is None else spec.soft_cap),
        cap_scale=None if spec.soft_cap is None else scale / spec.soft_cap,
        tuning=tuning,
    )


def _block(shape: _Shape, products: Products, inputs: _Inputs, out_gmem: Any) -> None:
    """One block: shared memory, and which warpgroup does what. out_gmem as `inputs.queries`."""
    tuning = shape.tuning
    tiled = (plgpu.TilingTransform((_SWIZZLE_ROWS, _SWIZZLE_BYTES // 2)), plgpu.SwizzleTransform(_SWIZZLE_BYTES))
    ring = plgpu.SMEM((tuning.stages, tuning.block_keys, shape.head_dim), jnp.bfloat16, transforms=tiled)
    there = plgpu.Barrier(num_arrivals=tuning.block_keys // shape.page_size, num_barriers=tuning.stages)
    done = plgpu.Barrier(num_arrivals=_NUM_COMPUTING, num_barriers=tuning.stages)

    def scope(*shared: Any) -> None:
        warpgroup = jax.lax.axis_index("warpgroup")

        @pl.when(warpgroup < _NUM_COMPUTING)
        def _() -> None:
            plgpu.set_max_registers(_COMPUTING_REGISTERS, action="increase")
            _compute(shape, products, inputs, _Shared(*shared), out_gmem)

        @pl.when(warpgroup == _NUM_COMPUTING)
        def _() -> None:
            plgpu.set_max_registers(_MEMORY_REGISTERS, action="decrease")
            _bring_keys(shape, inputs, _Shared(*shared))

    pl.run_scoped(
        scope,
        plgpu.SMEM((_NUM_COMPUTING, _WARPGROUP_ROWS, shape.head_dim), jnp.bfloat16, transforms=tiled),
        ring,
        ring,
        plgpu.Barrier(num_barriers=_NUM_COMPUTING),
        there,
        there,
        done,
        done,
        collective_axes="warpgroup",
    )


def _tile(shape: _Shape, inputs: _Inputs) -> _Tile:
    """The block's tile."""
    i, block = jax.lax.axis_index("tile"), shape.tuning.block_keys
    position, end, sequence = inputs.tiles.positions[i], inputs.tiles.ends[i], inputs.tiles.sequences[i]
    first, whole, last = jnp.int32(0), _quotient(position + 1, block), _quotient(end + (block - 1), block)
    if inputs.window is None:
        return _Tile(position, end, sequence, None, first, first, whole, last)
    window = inputs.window[0]
    first = _quotient(jnp.maximum(position - window + 1, 0), block)
    left = _quotient(jnp.maximum(end - window, 0) + (block - 1), block)
    return _Tile(position, end, sequence, window, first, left, whole, last)


def _quotient(x: jax.Array, divisor: int) -> jax.Array:
    """x // divisor for x of 0 and more, without the corrections for negative numbers."""
    return jax.lax.div(x, jnp.full_like(x, divisor))


def _stage(shape: _Shape, tile: _Tile, j: jax.Array) -> jax.Array:
    """Where in the ring block j lies."""
    return jax.lax.rem(j - tile.first, jnp.int32(shape.tuning.stages))


def _bring_keys(shape: _Shape, inputs: _Inputs, shared: _Shared) -> None:
    """The memory warpgroup: block after block into the ring, as stages become free."""
    tile, head = _tile(shape, inputs), jax.lax.axis_index("kv_head")
    block_pages = shape.tuning.block_keys // shape.page_size
    keys = (2 * head, shared.keys, shared.keys_there, shared.keys_done)
    values = (2 * head + 1, shared.values, shared.values_there, shared.values_done)

    def bring(j: jax.Array, _: None) -> None:
        stage = _stage(shape, tile, j)
        for entry, ring, there, done in (keys, values):

            @pl.when(j - tile.first >= shape.tuning.stages)
            def _(done: Any = done) -> None:
                plgpu.barrier_wait(done.at[stage])

            for i in range(block_pages):
                page = inputs.layer[0] * shape.pages + inputs.tables[tile.sequence, j * block_pages + i]
                source = (pl.ds(page * shape.page_size, shape.page_size), pl.ds(entry * shape.head_dim, shape.head_dim))
                place = (stage, pl.ds(i * shape.page_size, shape.page_size))
                plgpu.copy_gmem_to_smem(inputs.entries.at[source], ring.at[place], there.at[stage])

    def see_done(j: jax.Array, _: None) -> None:
        plgpu.barrier_wait(shared.keys_done.at[_stage(shape, tile, j)])
        plgpu.barrier_wait(shared.values_done.at[_stage(shape, tile, j)])

    jax.lax.fori_loop(tile.first, tile.last, bring, None)
    # A block that ends leaves no barrier in the middle of a phase.
    jax.lax.fori_loop(jnp.maximum(tile.first, tile.last - shape.tuning.stages), tile.last, see_done, None)


def _compute(shape: _Shape, products: Products, inputs: _Inputs, shared: _Shared, out_gmem: Any) -> None:
    """A computing warpgroup. A tile without rows has no blocks, and nothing is written for it."""
    tile, warpgroup = _tile(shape, inputs), jax.lax.axis_index("warpgroup")
    first_row = (jax.lax.axis_index("kv_head") * shape.num_tiles + jax.lax.axis_index("tile")) * MATRIX_ROWS
    own_rows = pl.ds(first_row + warpgroup * _WARPGROUP_ROWS, _WARPGROUP_ROWS)
    queries = shared.queries.at[warpgroup]

    @pl.when(tile.last > tile.first)
    def _() -> None:
        plgpu.copy_gmem_to_smem(inputs.queries.at[own_rows], queries, shared.queries_there.at[warpgroup])
        plgpu.barrier_wait(shared.queries_there.at[warpgroup])
        softmax = _attend(shape, products, tile, shared, queries)
        inverse = 1.0 / softmax.total
        queries[...] = (softmax.out * _across(inverse, softmax.out.shape)).astype(jnp.bfloat16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(queries, out_gmem.at[own_rows])
        plgpu.wait_smem_to_gmem(0)


def _attend(shape: _Shape, products: Products, tile: _Tile, shared: _Shared, queries: Any) -> _Softmax:
    """The softmax over all blocks of the tile, at least one."""

    def scores_beside(j: jax.Array, work: Callable[[], Any]) -> tuple[jax.Array, Any]:
        stage = _stage(shape, tile, j)
        plgpu.barrier_wait(shared.keys_there.at[stage])
        result = products.product_beside(queries, shared.keys.at[stage], work)
        plgpu.barrier_arrive(shared.keys_done.at[stage])
        return result

    def absorbed(j: jax.Array, scores: jax.Array, softmax: _Softmax, is_masked: bool) -> _Softmax:
        stage = _stage(shape, tile, j)
        softmax, weights = _weighed(shape, products, tile, j, scores, softmax, is_masked)
        plgpu.barrier_wait(shared.values_there.at[stage])
        out = products.accumulated(softmax.out, weights, shared.values.at[stage])
        plgpu.barrier_arrive(shared.values_done.at[stage])
        return softmax._replace(out=out)

    def step(is_masked: bool, j: jax.Array, carry: tuple[jax.Array, _Softmax]) -> tuple[jax.Array, _Softmax]:
        return scores_beside(j + 1, lambda: absorbed(j, carry[0], carry[1], is_masked))

    scores, _ = scores_beside(tile.first, lambda: None)
    carry = (scores, _before_any_key(shape, products))
    last = tile.last - 1  # has no next one
    left, whole = jnp.minimum(tile.left, last), jnp.minimum(tile.whole, last)
    spans = [(tile.first, whole, False), (whole, last, True)]
    if tile.window is not None:
        spans = [(tile.first, left, True), (left, whole, False), (jnp.maximum(left, whole), last, True)]
    for start, stop, is_masked in spans:
        carry = jax.lax.fori_loop(start, stop, functools.partial(step, is_masked), carry)
    return absorbed(last, *carry, is_masked=True)


def _before_any_key(shape: _Shape, products: Products) -> _Softmax:
    rows = plgpu.Layout.WGMMA.reduce(1)
    return _Softmax(
        products.laid_out(jnp.full(_WARPGROUP_ROWS, _MASKED, jnp.float32), rows),
        products.laid_out(jnp.zeros(_WARPGROUP_ROWS, jnp.float32), rows),
        products.laid_out(jnp.zeros((_WARPGROUP_ROWS, shape.head_dim), jnp.float32), plgpu.Layout.WGMMA),
    )


def _weighed(
    shape: _Shape, products: Products, tile: _Tile, j: jax.Array, scores: jax.Array, softmax: _Softmax, is_masked: bool
) -> tuple[_Softmax, jax.Array]:
    """The softmax with block j's scores float32[64, block_keys] in its peak and total, its `out` rescaled; bfloat16 weights."""
    if shape.cap_scale is not None:
        scores = 1.0 - 2.0 / (1.0 + jnp.exp2(scores * (2.0 * _LOG2_E * shape.cap_scale)))
    if is_masked:
        is_seen = _is_seen(shape, products, tile, j)
        scores = jnp.where(is_seen, scores, _MASKED)
    peak = jnp.maximum(softmax.peak, jnp.max(scores, axis=1))
    weights = jnp.exp2(scores * shape.factor - _across(peak * shape.factor, scores.shape))
    if is_masked:
        weights = jnp.where(is_seen, weights, 0.0)
    decay = jnp.exp2((softmax.peak - peak) * shape.factor)
    total = softmax.total * decay + jnp.sum(weights, axis=1)
    return _Softmax(peak, total, softmax.out * _across(decay, softmax.out.shape)), weights.astype(jnp.bfloat16)


def _is_seen(shape: _Shape, products: Products, tile: _Tile, j: jax.Array) -> jax.Array:
    """bool[64, block_keys]: whether each matrix row of the warpgroup sees each position of block j."""
    block = shape.tuning.block_keys
    size = (_WARPGROUP_ROWS, block)
    row, key = (products.laid_out(jax.lax.broadcasted_iota(jnp.int32, size, axis), plgpu.Layout.WGMMA) for axis in (0, 1))
    row_positions = tile.position + _quotient(jax.lax.axis_index("warpgroup") * _WARPGROUP_ROWS + row, shape.group)
    positions = j * block + key
    is_seen = (positions <= row_positions) & (positions < tile.end)
    return is_seen if tile.window is None else is_seen & (positions > row_positions - tile.window)


def _across(x: jax.Array, size: tuple[int, int]) -> jax.Array:
    """x [64] repeated along each row of `size`."""
    return jax.lax.broadcast_in_dim(x, size, [0])
