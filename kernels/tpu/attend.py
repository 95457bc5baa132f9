"""The arithmetic of the prefill kernel for one tile; `ragged_paged_attention.py` says how it goes."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pdjax.kernels.tpu import blocks
from pdjax.kernels.tpu.blocks import LANES
from pdjax.kernels.tpu.step import Step

MASKED = -1e30
"""Score of a position that a row does not see, and the peak of a row that has seen none: finite, so that no inf - inf arises."""
SLACK = 60.0
"""How far a score may exceed the peak, in powers of two. 2 ** 60 times a million keys times values of 2 ** 40 is still a float32."""


def begin_launch(step: Step) -> None:
    """The first tile's first block, and the columns of ones, which stay."""
    scratch = step.scratch
    scratch.parity[0] = 0
    if step.sums_on_mxu:
        ones = (*scratch.values.shape[:2], scratch.values.shape[2] - step.head_dim)
        scratch.values[:, :, step.head_dim :] = jnp.ones(ones, scratch.values.dtype)
    step.wait_write(0)
    step.start_fetch(0, step.span(0).first, 0)


def clear_rows(step: Step) -> None:
    """Outputs of rows of no tile are 0: whatever reads them stays finite."""
    out = step.refs["out"]
    features = out.shape[0] // step.num_kv_heads

    def clear(head: jax.Array, _: None) -> None:
        out[pl.ds(pl.multiple_of(head * features, features), features)] = jnp.zeros((features, out.shape[1]), out.dtype)

    jax.lax.fori_loop(0, step.num_kv_heads, clear, None)


def _of_head(step: Step, head: jax.Array | int) -> pl.Slice:
    """The features of a head."""
    return pl.ds(pl.multiple_of(head * step.head_dim, step.head_dim), step.head_dim)


def _turned(x: jax.Array, refs: dict[str, jax.Ref], name: str) -> jax.Array:
    """float32 x [D, R] after its rotary embedding, as `pdjax.kernels.heads.rotate`."""
    if f"{name}_cos" not in refs:
        return x
    cos, sin = refs[f"{name}_cos"][...], refs[f"{name}_sin"][...]
    pairs = len(cos)
    first, second = x[:pairs], x[pairs : 2 * pairs]
    rest = [x[2 * pairs :]] if 2 * pairs < len(x) else []
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, *rest])


def join_heads(step: Step) -> None:
    """Put the rows of the grid step's new keys and values in the order of the pool."""
    keys, values = step.refs["new_keys"], step.refs["new_values"]
    for head in range(step.num_kv_heads):
        at = pl.ds(head * step.head_dim, step.head_dim)
        turned = _turned(keys[at].astype(jnp.float32), step.refs, "turn_keys")
        blocks.join_head(step.scratch.new_kv, head, turned, values[at].astype(jnp.float32), step.static.access.store)


def _begin_tile(step: Step, tile: jax.Array) -> None:
    """Rotate, scale and transpose the queries. Rows of other tiles, which may hold anything, become 0."""
    owns, scratch = step.owns(tile), step.scratch

    def begin(head: jax.Array, _: None) -> None:
        scratch.acc[head] = jnp.zeros(scratch.acc.shape[1:], jnp.float32)
        scratch.peak[head] = jnp.full(scratch.peak.shape[1:], MASKED, jnp.float32)
        factor = step.refs["factors"][2 * head]
        for g in range(step.group):
            query_head = head * step.group + g
            turned = _turned(step.refs["queries"][_of_head(step, query_head)].astype(jnp.float32), step.refs, "turn_queries")
            queries = jnp.where(owns, turned * factor, 0.0)
            scratch.head_queries[query_head] = queries.T.astype(scratch.head_queries.dtype)

    jax.lax.fori_loop(0, step.num_kv_heads, begin, None)


def attend_tile(step: Step, tile: jax.Array) -> None:
    scratch, span = step.scratch, step.span(tile)
    _begin_tile(step, tile)

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
    _finish_tile(step, tile)


def _fetch_next(step: Step, tile: jax.Array, block: jax.Array, last: jax.Array, half: jax.Array) -> None:
    """Start to fetch the tile's next block; behind its last one, the first of the next tile, whose rows are written by then."""
    is_last = block + 1 == last
    has_next = tile + 1 < step.tiles.count[0]
    pl.when(is_last & has_next)(lambda: step.wait_write(tile + 1))
    tile = jnp.where(is_last & has_next, tile + 1, tile)
    block = jnp.where(is_last, step.span(tile).first, block + 1)
    pl.when(~is_last | has_next)(lambda: step.start_fetch(tile, block, half))


def _attend_block(step: Step, tile: jax.Array, block: jax.Array, half: jax.Array, is_edge: bool) -> None:
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
    def of(step: Step, tile: jax.Array, block: jax.Array) -> _Edge:
        rows, tokens = step.tuning.tile_rows, step.tuning.block_tokens
        num_held = step.end(tile) - block * tokens
        shape = (rows, tokens)
        column = blocks.token_of_row(jax.lax.broadcasted_iota(jnp.int32, shape, 1), tokens, step.scratch.blocks.dtype.itemsize)
        row = jax.lax.broadcasted_iota(jnp.int32, shape, 0) + (step.tiles.positions[tile] - step.within(tile) - block * tokens)
        is_seen = (column <= row) & (column < num_held)
        if step.options.is_windowed:
            is_seen &= column > row - step.refs["window"][0]
        return _Edge(num_held, is_seen)


def _split(step: Step, head: int, half: jax.Array, edge: _Edge | None) -> None:
    """Phase 1. A weight of 0 times what an unused slot holds, which may be NaN, is not 0: such values become 0."""
    scratch, head_dim = step.scratch, step.head_dim
    keys, values = blocks.split_head(scratch.blocks.at[half], head, scratch.keys.dtype, step.static.access.load)
    if edge is not None:
        row = jax.lax.broadcasted_iota(jnp.int32, values.shape, 0)
        token = blocks.token_of_row(row, values.shape[0], scratch.blocks.dtype.itemsize)
        values = jnp.where(token < edge.num_held, values.astype(jnp.float32), 0.0).astype(values.dtype)
    scratch.keys[head] = keys
    scratch.values[head, :, :head_dim] = values


def _score(step: Step, head: int, edge: _Edge | None) -> jax.Array:
    """Phase 2. Returns by how much scores exceed their row's peak, as maxima float32[8, LANES]."""
    scratch, rows = step.scratch, step.tuning.tile_rows
    excess = []
    for g in range(step.group):
        at = pl.ds(g * rows, rows)
        scores = blocks.times_keys(scratch.head_queries[head * step.group + g], scratch.keys[head])
        if step.options.soft_cap is not None:
            scores = step.options.soft_cap * jnp.tanh(scores)
        if edge is not None:
            scores = jnp.where(edge.is_seen, scores, MASKED)
        scratch.scores[head, at] = scores
        by_lane = functools.reduce(jnp.maximum, _lane_columns(scores))
        excess.append(jnp.max((by_lane - scratch.peak[head, at]).reshape(rows // 8, 8, LANES), axis=0))
    return functools.reduce(jnp.maximum, excess)


def _move_peaks(step: Step) -> None:
    """Phase 3: every row's peak becomes the maximum of its scores so far."""
    scratch, width = step.scratch, step.scratch.acc.shape[2] // LANES

    def move(head: jax.Array, _: None) -> None:
        before = scratch.peak[head]
        peak = jnp.maximum(before, jnp.max(scratch.scores[head], axis=1, keepdims=True))
        scratch.peak[head] = peak
        scratch.acc[head] *= jnp.concatenate([jnp.exp2(before - peak)] * width, axis=1)

    jax.lax.fori_loop(0, step.num_kv_heads, move, None)


def _accumulate(step: Step, head: int) -> None:
    """Phase 4."""
    scratch, head_dim = step.scratch, step.head_dim
    peak = scratch.peak[head]
    weights = [jnp.exp2(column - peak) for column in _lane_columns(scratch.scores[head])]
    packed = jnp.concatenate([column.astype(scratch.values.dtype) for column in weights], axis=1)
    product = blocks.times_values(packed, scratch.values[head])
    if step.sums_on_mxu:
        scratch.acc[head] += product
        return
    scratch.acc[head, :, :head_dim] += product
    scratch.acc[head, :, head_dim:] += functools.reduce(jnp.add, weights)


def _finish_tile(step: Step, tile: jax.Array) -> None:
    """Divide by the sums of weights, sinks included, and put the tile's rows where they belong."""
    scratch, rows, head_dim, out = step.scratch, step.tuning.tile_rows, step.head_dim, step.refs["out"]
    owns = step.owns(tile)

    def finish(head: jax.Array, _: None) -> None:
        factor = step.refs["factors"][2 * head + 1]
        for g in range(step.group):
            query_head = head * step.group + g
            at, mine = pl.ds(g * rows, rows), _of_head(step, query_head)
            sums = scratch.acc[head, at, head_dim:]
            total = sums[:, :1] if step.sums_on_mxu else jnp.sum(sums, axis=1, keepdims=True)
            if step.options.has_sinks:
                total += jnp.exp2(step.refs["sinks"][query_head] - scratch.peak[head, at, :1])
            attended = scratch.acc[head, at, :head_dim] * (factor / total)
            out[mine] = jnp.where(owns, attended.T, out[mine].astype(jnp.float32)).astype(out.dtype)

    jax.lax.fori_loop(0, step.num_kv_heads, finish, None)


def _lane_columns(x: jax.Array) -> list[jax.Array]:
    """The columns of x [rows, n * LANES], LANES wide."""
    return [x[:, i : i + LANES] for i in range(0, x.shape[1], LANES)]
