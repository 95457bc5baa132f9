"""The kernel of decode attention on CPU: one pass over the pages, with scores, softmax and the sum of values of a stretch of positions
while its keys and values are in the cache.

XLA gathers the pages of a sequence, transposes them and multiplies them, which passes over them three times, and takes the sequences of a
batch one behind the other. Here the work is cut by sequence and, as in FlashDecoding (Dao et al., 2023), by stretches of positions; what the
stretches found is put together at the end. Importing this compiles the kernel.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numba import carray, njit, types

from pdjax.kernels.cpu import calls
from pdjax.kernels.cpu.calls import floats, integers, pointer
from pdjax.kernels.cpu.numbers import exponential, widened

_STRETCH = 128
"""Positions of one part of the work. Their keys and values have to stay in the second cache until all heads have used them: 196 KB in
float32 at 3 KV heads and head_dim 64."""
_ROWS = 4
"""Positions that a loop over head_dim works on at a time."""
_QUERIES, _POOL, _TABLES, _VISIBLE, _NUMBERS, _FACTORS, _SCALES, _SINKS = range(8)
"""Arguments of the call."""
_LAYER, _WINDOW = 0, 1  # of the argument _NUMBERS: int32; a window of 0 is none
_SCALE, _SOFT_CAP = 0, 1  # of the argument _FACTORS: float32; a soft cap of 0 is none


def attend_pages(
    queries: jax.Array,
    pool: jax.Array,
    tables: jax.Array,
    visible: jax.Array,
    numbers: jax.Array,
    factors: jax.Array,
    scales: jax.Array,
    sinks: jax.Array,
) -> jax.Array:
    """What each of the queries float32[S, H, D] attends to, float32[S, H, D]; the pool, tables, visible, scales float32[2 * K] and sinks as
    in `pdjax.kernels.base`.

    Args:
        pool: float32, int8, or uint16 that holds the bits of bfloat16.
        numbers: int32[2]: the layer, and the window, 0 for none.
        factors: float32[2]: of the scores, and the soft cap, 0 for none.
        sinks: -inf where there are none.
    """
    call = jax.ffi.ffi_call("pdjax_decode_attention", jax.ShapeDtypeStruct(queries.shape, jnp.float32))
    return call(queries, pool, tables, visible, numbers, factors, scales, sinks)


@njit
def _num_stretches(frame: int) -> int:
    """Of the longest sequence."""
    visible, longest = integers(frame, _VISIBLE), 1
    for sequence in range(calls.argument_dim(frame, _VISIBLE, 0)):
        longest = max(longest, visible[sequence])
    return (longest + _STRETCH - 1) // _STRETCH


@njit
def _num_kv_heads(frame: int) -> int:
    return calls.argument_dim(frame, _POOL, 3) // 2


@njit
def _num_parts(frame: int) -> int:
    return calls.argument_dim(frame, _QUERIES, 0) * _num_stretches(frame)


@njit
def _state_bytes(frame: int) -> int:
    """Of the softmax of every query head over a stretch, float32[H, 2 + D]: its peak, its total, and what it has summed of values. Whole words."""
    num_floats = calls.argument_dim(frame, _QUERIES, 1) * (2 + calls.argument_dim(frame, _QUERIES, 2))
    return 8 * ((num_floats + 1) // 2)


@njit
def _part_bytes(frame: int) -> int:
    """Scratch of a part: its states, where its rows lie int64[_STRETCH + 1], its scores float32[H, _STRETCH]."""
    return _state_bytes(frame) + 8 * (_STRETCH + 1) + 4 * _STRETCH * calls.argument_dim(frame, _QUERIES, 1)  # _STRETCH is even


@njit
def _scratch_bytes(frame: int) -> int:
    return _num_parts(frame) * _part_bytes(frame)


@njit
def _run_part(frame: int, scratch: int, part: int) -> None:
    """Attention of all heads of one sequence over one stretch."""
    num_stretches, dtype = _num_stretches(frame), calls.argument_dtype(frame, _POOL)
    sequence, stretch = part // num_stretches, part % num_stretches
    end, window = integers(frame, _VISIBLE)[sequence], integers(frame, _NUMBERS)[_WINDOW]
    first = max(stretch * _STRETCH, end - window if window > 0 else 0)
    num_rows, states = max(min((stretch + 1) * _STRETCH, end) - first, 0), scratch + part * _part_bytes(frame)
    if dtype == calls.FLOAT32:
        _attend(frame, states, sequence, first, num_rows, types.float32, 4)
    elif dtype == calls.UINT16:
        _attend(frame, states, sequence, first, num_rows, types.uint16, 2)
    else:
        _attend(frame, states, sequence, first, num_rows, types.int8, 1)


@njit
def _attend(frame: int, states: int, sequence: int, first: int, num_rows: int, dtype: Any, itemsize: int) -> None:
    """All heads over the `num_rows` positions from `first` on, of which there may be none. `dtype`, `itemsize`: of the pool."""
    num_heads, dim = calls.argument_dim(frame, _QUERIES, 1), calls.argument_dim(frame, _QUERIES, 2)
    group, row_bytes = num_heads // _num_kv_heads(frame), calls.argument_dim(frame, _POOL, 3) * dim * itemsize
    queries = calls.argument(frame, _QUERIES) + 4 * dim * sequence * num_heads
    factors, scales = floats(calls.argument(frame, _FACTORS), 2), floats(calls.argument(frame, _SCALES), 2 * _num_kv_heads(frame))
    rows_at = states + _state_bytes(frame)
    rows, scores_at = carray(pointer(rows_at), _STRETCH + 1, types.intp), rows_at + 8 * (_STRETCH + 1)
    num_padded = (num_rows + _ROWS - 1) // _ROWS * _ROWS
    for i in range(num_padded):
        rows[i] = calls.argument(frame, _POOL) + _page_row(frame, sequence, first + min(i, num_rows - 1)) * row_bytes
    rows[_STRETCH] = _touch(rows_at, num_rows, row_bytes)
    for i in range(0, num_padded, _ROWS):
        for head in range(num_heads):
            query, kv_head = floats(queries + 4 * dim * head, dim), head // group
            key_offset, scale = 2 * kv_head * dim * itemsize, factors[_SCALE] * scales[2 * kv_head]
            _score(query, rows_at + 8 * i, key_offset, floats(scores_at + 4 * (head * _STRETCH + i), _ROWS), scale, dim, dtype)
    for head in range(num_heads):
        scores = floats(scores_at + 4 * head * _STRETCH, _STRETCH)
        if factors[_SOFT_CAP] > 0:
            _cap(scores, num_rows, factors[_SOFT_CAP])
        for i in range(num_rows, num_padded):
            scores[i] = -np.inf
        state = floats(states + 4 * head * (2 + dim), 2)
        state[0], state[1] = _softmax(scores, num_rows, num_padded)
        out = floats(states + 4 * (head * (2 + dim) + 2), dim)
        for i in range(dim):
            out[i] = 0
        value_offset, scale = (2 * (head // group) + 1) * dim * itemsize, scales[2 * (head // group) + 1]
        for i in range(0, num_padded, _ROWS):
            _add(out, rows_at + 8 * i, value_offset, floats(scores_at + 4 * (head * _STRETCH + i), _ROWS), scale, dim, dtype)


@njit
def _touch(rows_at: int, num_rows: int, row_bytes: int) -> int:
    """Read the rows whose addresses lie at `rows_at`, as they lie in memory. That order is the one that CPUs
    fetch ahead in; by heads, the rows would come at a third of the bandwidth. Gives something, so that no compiler leaves it out."""
    rows, total = carray(pointer(rows_at), _STRETCH, types.intp), 0
    for i in range(num_rows):
        words = carray(pointer(rows[i]), row_bytes // 8, types.intp)
        for word in range(row_bytes // 8):
            total ^= words[word]
    return total


@njit
def _page_row(frame: int, sequence: int, position: int) -> int:
    """Index of a position among all rows [layers * pages * page_size] of the pool."""
    num_pages, page_size = calls.argument_dim(frame, _POOL, 1), calls.argument_dim(frame, _POOL, 2)
    table_pages = calls.argument_dim(frame, _TABLES, 1)
    page = integers(frame, _TABLES)[sequence * table_pages + position // page_size]
    return (integers(frame, _NUMBERS)[_LAYER] * num_pages + page) * page_size + position % page_size


@njit(fastmath=True)
def _score(query: Any, rows_at: int, offset: int, scores: Any, scale: float, dim: int, dtype: Any) -> None:
    """scores[_ROWS] of the keys `offset` bytes behind the rows at `rows_at`: so many at a time, because each ends in a sum over the lanes of a register."""
    rows = carray(pointer(rows_at), _ROWS, types.intp)
    key_0, key_1 = carray(pointer(rows[0] + offset), dim, dtype), carray(pointer(rows[1] + offset), dim, dtype)
    key_2, key_3 = carray(pointer(rows[2] + offset), dim, dtype), carray(pointer(rows[3] + offset), dim, dtype)
    score_0, score_1, score_2, score_3 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
    for i in range(dim):
        score_0 += query[i] * widened(key_0[i])
        score_1 += query[i] * widened(key_1[i])
        score_2 += query[i] * widened(key_2[i])
        score_3 += query[i] * widened(key_3[i])
    scores[0], scores[1], scores[2], scores[3] = score_0 * scale, score_1 * scale, score_2 * scale, score_3 * scale


@njit
def _cap(scores: Any, length: int, soft_cap: float) -> None:
    """soft_cap * tanh(scores / soft_cap), in place."""
    for i in range(length):
        scores[i] = soft_cap * (np.float32(1) - np.float32(2) / (exponential(np.float32(2) * scores[i] / soft_cap) + np.float32(1)))


@njit(fastmath={"nsz", "arcp", "contract", "afn", "reassoc"})
def _softmax(scores: Any, length: int, padded_length: int) -> Any:
    """Turn scores into weights relative to the greatest of the first `length`; gives that one and the sum of the weights."""
    peak, total = np.float32(-np.inf), np.float32(0)
    for i in range(length):
        peak = max(peak, scores[i])
    for i in range(padded_length):
        weight = exponential(scores[i] - peak)
        scores[i] = weight
        total += weight
    return peak, total


@njit(fastmath=True)
def _add(out: Any, rows_at: int, offset: int, weights: Any, scale: float, dim: int, dtype: Any) -> None:
    """Add the values `offset` bytes behind the rows at `rows_at` [_ROWS] to out [dim], by their weights."""
    rows = carray(pointer(rows_at), _ROWS, types.intp)
    value_0, value_1 = carray(pointer(rows[0] + offset), dim, dtype), carray(pointer(rows[1] + offset), dim, dtype)
    value_2, value_3 = carray(pointer(rows[2] + offset), dim, dtype), carray(pointer(rows[3] + offset), dim, dtype)
    weight_0, weight_1, weight_2, weight_3 = weights[0] * scale, weights[1] * scale, weights[2] * scale, weights[3] * scale
    for i in range(dim):
        first, second = (
            weight_0 * widened(value_0[i]) + weight_1 * widened(value_1[i]),
            weight_2 * widened(value_2[i]) + weight_3 * widened(value_3[i]),
        )
        out[i] += first + second


@njit
def _finish(frame: int, scratch: int) -> None:
    """Put the stretches of each head together."""
    num_heads, dim = calls.argument_dim(frame, _QUERIES, 1), calls.argument_dim(frame, _QUERIES, 2)
    num_stretches, part_bytes = _num_stretches(frame), _part_bytes(frame)
    sinks = floats(calls.argument(frame, _SINKS), num_heads)
    for sequence in range(calls.argument_dim(frame, _QUERIES, 0)):
        for head in range(num_heads):
            states = scratch + sequence * num_stretches * part_bytes + 4 * head * (2 + dim)
            out = floats(calls.result(frame, 0) + 4 * dim * (sequence * num_heads + head), dim)
            _combine(states, part_bytes, num_stretches, sinks[head], out, dim)


@njit
def _combine(states: int, stride: int, num_stretches: int, sink: float, out: Any, dim: int) -> None:
    """The softmax over all stretches of one query head, from that of each, `stride` bytes apart."""
    peak = sink
    for stretch in range(num_stretches):
        peak = max(peak, floats(states + stretch * stride, 2)[0])
    total = exponential(sink - peak)
    for i in range(dim):
        out[i] = 0
    for stretch in range(num_stretches):
        state = floats(states + stretch * stride, 2 + dim)
        if state[0] > -np.inf:
            factor = exponential(state[0] - peak)
            total += factor * state[1]
            for i in range(dim):
                out[i] += factor * state[2 + i]
    for i in range(dim):
        out[i] /= total


@calls.c_function
def _task(job: int) -> int:
    part = calls.take_part(job)
    while part >= 0:
        _run_part(calls.frame_of(job), calls.scratch_of(job), part)
        calls.part_done(job)
        part = calls.take_part(job)
    calls.release(job)
    return 0


calls.name_task("pdjax_decode_attention_task", _task)


@calls.c_function
def _handler(frame: int) -> int:
    if not calls.answered_metadata(frame):
        job = calls.run_parts(frame, calls.address_of("pdjax_decode_attention_task"), _num_parts(frame), _scratch_bytes(frame))
        _finish(frame, calls.scratch_of(job))
        calls.end(job)
    return 0


calls.register_handler("pdjax_decode_attention", _handler)
