"""The kernel of prefill attention on CPU: FlashAttention (Dao et al., 2022) with queries in the columns of its tiles.

Scores, softmax and the sum of values of a block stay in the second cache. XLA writes scores to memory, and turns queries, keys and
results round between its products. Here queries come feature-major, as their projection yields them, which is how tiles want them:

    scores  [keys, queries]  = keys [keys, D] @ queries [D, queries]
    out     [D, queries]    += values [keys, D].T @ weights [keys, queries]

so each number of a query is a lane, a softmax runs down the rows, and nothing is transposed. A part of the work is one tile of query rows
of one sequence with the query heads of one KV head; it gathers each block of keys and values once. Importing this compiles the kernel.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numba import carray, njit, types

from pdjax.kernels.cpu import calls
from pdjax.kernels.cpu.calls import floats, integers, pointer
from pdjax.kernels.cpu.numbers import widened
from pdjax.kernels.cpu.tile import PANEL, SHORT_ROWS, TILE_ROWS, add_product_short, multiply
from pdjax.kernels.cpu.vectors import (
    LANES,
    added,
    divided,
    exponential,
    filled,
    greater,
    lesser,
    load,
    multiplied,
    multiply_add,
    store,
    subtracted,
)

_TILE_PANELS = 2
"""Panels of query rows that share the blocks of keys that a part gathers."""
_TILE = _TILE_PANELS * PANEL
_BLOCK = 96
"""Keys of a block: whole tiles, of 12 rows and of 4."""
_MASKED = np.float32(-1e30)
"""Score of what is not seen: finite, so that no difference of two is NaN."""
_QUERIES, _POOL, _TABLES, _FIRST_ROWS, _STARTS, _LENGTHS, _NUMBERS, _FACTORS, _SCALES, _SINKS = range(10)
"""Arguments of the call."""
_LAYER, _WINDOW = 0, 1  # of the argument _NUMBERS: int32; a window of 0 is none
_SCALE, _SOFT_CAP = 0, 1  # of the argument _FACTORS: float32; a soft cap of 0 is none


def attend_rows(
    queries: jax.Array,
    pool: jax.Array,
    tables: jax.Array,
    first_rows: jax.Array,
    starts: jax.Array,
    lengths: jax.Array,
    numbers: jax.Array,
    factors: jax.Array,
    scales: jax.Array,
    sinks: jax.Array,
) -> jax.Array:
    """What each of the queries float32[H, D, T] attends to, float32[H, D, T], D a multiple of `SHORT_ROWS`; the pool and what describes the
    batch as in `pdjax.kernels.base`. Rows that belong to no sequence are 0.

    Args:
        pool: float32, int8, or uint16 that holds the bits of bfloat16.
        numbers: int32[2]: the layer, and the window, 0 for none.
        factors: float32[2]: of the scores, and the soft cap, 0 for none.
        scales: float32[2 * K]: factors of what the pool holds.
        sinks: float32[H], -inf where there are none.
    """
    call = jax.ffi.ffi_call("pdjax_prefill_attention", jax.ShapeDtypeStruct(queries.shape, jnp.float32))
    return call(queries, pool, tables, first_rows, starts, lengths, numbers, factors, scales, sinks)


@njit
def _num_kv_heads(frame: int) -> int:
    return calls.argument_dim(frame, _POOL, 3) // 2


@njit
def _group(frame: int) -> int:
    return calls.argument_dim(frame, _QUERIES, 0) // _num_kv_heads(frame)


@njit
def _dim(frame: int) -> int:
    return calls.argument_dim(frame, _QUERIES, 1)


@njit
def _num_rows(frame: int) -> int:
    return calls.argument_dim(frame, _QUERIES, 2)


@njit
def _num_tiles(frame: int) -> int:
    lengths, total = integers(frame, _LENGTHS), 0
    for sequence in range(calls.argument_dim(frame, _LENGTHS, 0)):
        total += (lengths[sequence] + _TILE - 1) // _TILE
    return total


@njit
def _own_bytes(frame: int) -> int:
    """Scratch of a thread."""
    panel, group = 4 * _dim(frame) * PANEL, _group(frame)
    return 8 * _BLOCK * _dim(frame) + 4 * _BLOCK * PANEL + group * _TILE_PANELS * (2 * panel + 8 * PANEL)


@njit
def _run_part(frame: int, own: int, part: int) -> None:
    """Part 0 has the last tile of the last sequence, which is among the longest: those at the end are short, so that threads end together."""
    kv_head, tile = part % _num_kv_heads(frame), _num_tiles(frame) - 1 - part // _num_kv_heads(frame)
    lengths, sequence = integers(frame, _LENGTHS), 0
    while tile >= (lengths[sequence] + _TILE - 1) // _TILE:
        tile -= (lengths[sequence] + _TILE - 1) // _TILE
        sequence += 1
    _attend(frame, own, sequence, kv_head, tile * _TILE)


@njit
def _attend(frame: int, own: int, sequence: int, kv_head: int, offset: int) -> None:
    """The rows of a sequence from its row `offset` on, up to `_TILE` of them."""
    dim, group, window = _dim(frame), _group(frame), integers(frame, _NUMBERS)[_WINDOW]
    num_rows = min(integers(frame, _LENGTHS)[sequence] - offset, _TILE)
    position, first_row = integers(frame, _STARTS)[sequence] + offset, integers(frame, _FIRST_ROWS)[sequence] + offset
    num_panels = (num_rows + PANEL - 1) // PANEL
    panel_bytes = 4 * dim * PANEL
    keys, values = own, own + 4 * _BLOCK * dim
    scores, queries = own + 8 * _BLOCK * dim, own + 8 * _BLOCK * dim + 4 * _BLOCK * PANEL
    outs = queries + group * _TILE_PANELS * panel_bytes
    states = outs + group * _TILE_PANELS * panel_bytes
    for i in range(group * num_panels):
        head, panel = kv_head * group + i // num_panels, i % num_panels
        width = min(PANEL, num_rows - panel * PANEL)
        _begin(frame, head, first_row + panel * PANEL, width, queries + i * panel_bytes, outs + i * panel_bytes, states + 8 * PANEL * i)
    first = max(position - window + 1, 0) if window > 0 else 0
    while first < position + num_rows:
        num_keys = min(position + num_rows - first, _BLOCK)
        _gather(frame, sequence, kv_head, first, num_keys, keys, values)
        for i in range(group * num_panels):
            begin = position + i % num_panels * PANEL
            num_seen = min(begin + min(PANEL, position + num_rows - begin) - first, num_keys)
            if num_seen > 0:
                _add_block(
                    frame,
                    keys,
                    values,
                    num_seen,
                    first - begin,
                    window,
                    scores,
                    queries + i * panel_bytes,
                    outs + i * panel_bytes,
                    states + 8 * PANEL * i,
                )
        first += _BLOCK
    for i in range(group * num_panels):
        head, panel = kv_head * group + i // num_panels, i % num_panels
        width = min(PANEL, num_rows - panel * PANEL)
        _finish(frame, head, first_row + panel * PANEL, width, outs + i * panel_bytes, states + 8 * PANEL * i)


@njit
def _begin(frame: int, head: int, row: int, width: int, queries: int, out: int, state: int) -> None:
    """Copy `width` queries from `row` on, scaled, into a panel [D, PANEL]; nothing is summed yet. A state is that of a softmax down the
    columns of a panel, its peaks and totals float32[2, PANEL]."""
    dim, stride = _dim(frame), 4 * _num_rows(frame)
    source = calls.argument(frame, _QUERIES) + head * dim * stride + 4 * row
    scale = floats(calls.argument(frame, _FACTORS), 2)[_SCALE]
    sink, nothing = floats(calls.argument(frame, _SINKS), head + 1)[head], filled(np.float32(0))
    for i in range(dim):
        at = queries + 4 * PANEL * i
        if width == PANEL:
            store(at, multiplied(load(source + stride * i), filled(scale)))
            store(at + 4 * LANES, multiplied(load(source + stride * i + 4 * LANES), filled(scale)))
        else:
            numbers, target = floats(source + stride * i, width), floats(at, PANEL)
            for column in range(PANEL):
                target[column] = numbers[column] * scale if column < width else np.float32(0)
        store(out + 4 * PANEL * i, nothing)
        store(out + 4 * PANEL * i + 4 * LANES, nothing)
    for at in range(state, state + 4 * PANEL, 4 * LANES):
        store(at, filled(sink))
        store(at + 4 * PANEL, filled(np.float32(1) if sink > _MASKED else np.float32(0)))


@njit
def _gather(frame: int, sequence: int, kv_head: int, first: int, num_keys: int, keys: int, values: int) -> None:
    """Keys and values of positions from `first` on as float32[_BLOCK, D], with rows of 0 behind `num_keys`."""
    num_pages, page_size = calls.argument_dim(frame, _POOL, 1), calls.argument_dim(frame, _POOL, 2)
    table_pages, dim, num_kv = calls.argument_dim(frame, _TABLES, 1), _dim(frame), 2 * _num_kv_heads(frame)
    tables, scales = integers(frame, _TABLES), floats(calls.argument(frame, _SCALES), num_kv)
    layer, key_scale, value_scale = integers(frame, _NUMBERS)[_LAYER], scales[2 * kv_head], scales[2 * kv_head + 1]
    for i in range(num_keys):
        position = first + i
        page = tables[sequence * table_pages + position // page_size]
        row = (layer * num_pages + page) * page_size + position % page_size
        first_number = (row * num_kv + 2 * kv_head) * dim
        _widen(frame, first_number, keys + 4 * dim * i, key_scale)
        _widen(frame, first_number + dim, values + 4 * dim * i, value_scale)
    rest, none, more = (
        dim * (_BLOCK - num_keys),
        floats(keys + 4 * dim * num_keys, dim * _BLOCK),
        floats(values + 4 * dim * num_keys, dim * _BLOCK),
    )
    for i in range(rest):
        none[i] = 0
        more[i] = 0


@njit
def _widen(frame: int, first: int, wide: int, scale: float) -> None:
    """D numbers of the pool from number `first` on, times `scale`."""
    dtype, at = calls.argument_dtype(frame, _POOL), calls.argument(frame, _POOL)
    if dtype == calls.FLOAT32:
        _scale(at + 4 * first, wide, scale, _dim(frame), types.float32)
    elif dtype == calls.UINT16:
        _scale(at + 2 * first, wide, scale, _dim(frame), types.uint16)
    else:
        _scale(at + first, wide, scale, _dim(frame), types.int8)


@njit
def _scale(stored: int, wide: int, scale: float, length: int, dtype: Any) -> None:
    numbers, result = carray(pointer(stored), length, dtype), floats(wide, length)
    for i in range(length):
        result[i] = widened(numbers[i]) * scale


@njit
def _add_block(
    frame: int, keys: int, values: int, num_keys: int, distance: int, window: int, scores: int, queries: int, out: int, state: int
) -> None:
    """Have a panel of queries attend to the first `num_keys` keys of a block. `distance`: from the position of the first query to that of
    the first key."""
    dim = _dim(frame)
    num_padded = (num_keys + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS
    for row in range(0, num_padded, TILE_ROWS):
        multiply(keys + 4 * dim * row, 4 * dim, 4, queries, dim, scores + 4 * PANEL * row, 4 * PANEL)
    soft_cap = floats(calls.argument(frame, _FACTORS), 2)[_SOFT_CAP]
    if soft_cap > 0:
        _cap(scores, num_padded, soft_cap)
    if distance + num_padded > 1 or window > 0:
        _mask(scores, num_padded, distance, window)
    _softmax(scores, num_padded, out, state, dim)
    for row in range(0, dim, SHORT_ROWS):
        add_product_short(values + 4 * row, 4, 4 * dim, scores, num_padded, out + 4 * PANEL * row, 4 * PANEL)


@njit
def _cap(scores: int, num_keys: int, soft_cap: float) -> None:
    """soft_cap * tanh(scores / soft_cap) = soft_cap * (1 - 2 / (exp(2 * scores / soft_cap) + 1)), in place."""
    one, two, cap = filled(np.float32(1)), filled(np.float32(2)), filled(soft_cap)
    for at in range(scores, scores + 4 * PANEL * num_keys, 4 * LANES):
        power = exponential(lesser(divided(multiplied(two, load(at)), cap), filled(np.float32(88))))
        store(at, multiplied(cap, subtracted(one, divided(two, added(power, one)))))


@njit
def _mask(scores: int, num_keys: int, distance: int, window: int) -> None:
    """Column c sees row r if r + distance <= c, and in a window of w if r + distance > c - w."""
    for row in range(num_keys):
        line = floats(scores + 4 * PANEL * row, PANEL)
        last = row + distance + window - 1 if window > 0 else PANEL
        for column in range(PANEL):
            line[column] = line[column] if row + distance <= column and column <= last else _MASKED


@njit
def _softmax(scores: int, num_keys: int, out: int, state: int, dim: int) -> None:
    """Turn scores into weights relative to the greatest so far; bring totals and the sums of values to the same. Two rows at a time, and both
    halves of them: a chain of operations on one vector would wait for each result."""
    half, row_bytes = 4 * LANES, 4 * PANEL
    end = scores + row_bytes * num_keys
    before, before_2 = load(state), load(state + half)
    peak, peak_2, other, other_2 = before, before_2, before, before_2
    for row in range(scores, end, 2 * row_bytes):
        peak, peak_2 = greater(peak, load(row)), greater(peak_2, load(row + half))
        other, other_2 = greater(other, load(row + row_bytes)), greater(other_2, load(row + row_bytes + half))
    peak, peak_2 = greater(peak, other), greater(peak_2, other_2)
    total, total_2 = filled(np.float32(0)), filled(np.float32(0))
    for row in range(scores, end, row_bytes):
        weight, weight_2 = exponential(subtracted(load(row), peak)), exponential(subtracted(load(row + half), peak_2))
        store(row, weight)
        store(row + half, weight_2)
        total, total_2 = added(total, weight), added(total_2, weight_2)
    decay, decay_2 = exponential(subtracted(before, peak)), exponential(subtracted(before_2, peak_2))
    store(state, peak)
    store(state + half, peak_2)
    store(state + row_bytes, multiply_add(load(state + row_bytes), decay, total))
    store(state + row_bytes + half, multiply_add(load(state + row_bytes + half), decay_2, total_2))
    for line in range(out, out + row_bytes * dim, row_bytes):
        store(line, multiplied(load(line), decay))
        store(line + half, multiplied(load(line + half), decay_2))


@njit(error_model="numpy")
def _finish(frame: int, head: int, row: int, width: int, out: int, state: int) -> None:
    dim, num_rows = _dim(frame), _num_rows(frame)
    totals = floats(state + 4 * PANEL, PANEL)
    for i in range(dim):
        numbers, result = floats(out + 4 * PANEL * i, PANEL), floats(calls.result(frame, 0) + 4 * ((head * dim + i) * num_rows + row), width)
        for column in range(width):
            result[column] = numbers[column] / totals[column]


@njit
def _clear_padding(frame: int) -> None:
    """Rows behind those of the last sequence."""
    lengths, end, num_rows = integers(frame, _LENGTHS), 0, _num_rows(frame)
    for sequence in range(calls.argument_dim(frame, _LENGTHS, 0)):
        end += lengths[sequence]
    for i in range(calls.argument_dim(frame, _QUERIES, 0) * _dim(frame)):
        line = floats(calls.result(frame, 0) + 4 * num_rows * i, num_rows)
        for row in range(end, num_rows):
            line[row] = 0


@calls.c_function
def _task(job: int) -> int:
    part, own = calls.take_part(job), 0
    while part >= 0:
        frame = calls.frame_of(job)
        if own == 0:
            own = calls.allocate(_own_bytes(frame))
        _run_part(frame, own, part)
        calls.part_done(job)
        part = calls.take_part(job)
    if own != 0:
        calls.free(own)
    calls.release(job)
    return 0


calls.name_task("pdjax_prefill_attention_task", _task)


@calls.c_function
def _handler(frame: int) -> int:
    if not calls.answered_metadata(frame):
        num_parts = _num_tiles(frame) * _num_kv_heads(frame)
        _clear_padding(frame)
        calls.end(calls.run_parts(frame, calls.address_of("pdjax_prefill_attention_task"), num_parts, 0))
    return 0


calls.register_handler("pdjax_prefill_attention", _handler)
