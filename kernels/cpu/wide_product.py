"""Products of a weight with many columns on CPU, for prefill and for decode steps of several sequences.

XLA's product is as fast where it is large and has the machine to itself. This one reads a weight for few columns at the bandwidth of the
memory, multiplies narrow numbers, and applies the gate of an MLP while both its halves are in the cache. Work is shared in small parts, so
that a core that another process takes for a moment holds nobody up.

Columns are first packed into panels, as `pdjax.kernels.cpu.tile` wants them; then each part takes some rows of the weight through all
panels. Importing this compiles the kernel.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numba import carray, njit, types

from pdjax.kernels.cpu import calls
from pdjax.kernels.cpu.calls import floats, pointer
from pdjax.kernels.cpu.numbers import widened
from pdjax.kernels.cpu.tile import PANEL, TILE_ROWS, multiply, multiply_eight, multiply_four, multiply_half, multiply_streamed
from pdjax.kernels.cpu.vectors import LANES, added, divided, exponential, filled, greater, load, multiplied, store, subtracted

_PART_ROWS = 4 * TILE_ROWS
_WEIGHT, _COLUMNS = 0, 1  # arguments of the call


def is_wide(num_rows: int, num_columns: int) -> bool:
    """Whether `wide_product` takes a weight of so many rows and so many columns."""
    return num_rows >= TILE_ROWS and (num_columns in (4, 8) or num_columns % LANES == 0)


def wide_product(weight: jax.Array, columns: jax.Array) -> jax.Array:
    """weight [out, in] @ columns float32[in, T]: float32[out, T], for shapes that `is_wide`.

    The weight is float32, int8, or uint16 that holds the bits of bfloat16. Arithmetic is float32.
    """
    return _call(weight, columns, weight.shape[0])


def gated_product(weight: jax.Array, columns: jax.Array) -> jax.Array:
    """silu(gate) * up, float32[F, T], of weight [2F, in] @ columns float32[in, T], whose first half of rows is the gate. F and T as for
    `is_wide`."""
    return _call(weight, columns, weight.shape[0] // 2)


def _call(weight: jax.Array, columns: jax.Array, num_rows: int) -> jax.Array:
    return jax.ffi.ffi_call("pdjax_wide_product", jax.ShapeDtypeStruct((num_rows, columns.shape[1]), jnp.float32))(weight, columns)


@njit
def _depth(frame: int) -> int:
    return calls.argument_dim(frame, _COLUMNS, 0)


@njit
def _num_columns(frame: int) -> int:
    return calls.argument_dim(frame, _COLUMNS, 1)


@njit
def _num_panels(frame: int) -> int:
    return (_num_columns(frame) + PANEL - 1) // PANEL


@njit
def _num_packed(frame: int) -> int:
    """Panels to be packed: none where the columns are one already."""
    return _num_panels(frame) if _num_columns(frame) > PANEL else 0


@njit
def _num_parts(frame: int) -> int:
    """Each panel to be packed is a part, and each stretch of rows."""
    return _num_packed(frame) + (calls.result_dim(frame, 0, 0) + _PART_ROWS - 1) // _PART_ROWS


@njit
def _panel_bytes(frame: int) -> int:
    return 4 * PANEL * _depth(frame)


@njit
def _pack(frame: int, scratch: int, panel: int) -> None:
    """Copy the columns of a panel, which may be half a one, into `scratch` float32[panels, depth, PANEL]."""
    columns = calls.argument(frame, _COLUMNS) + 4 * PANEL * panel
    packed, stride = scratch + panel * _panel_bytes(frame), 4 * _num_columns(frame)
    if _num_columns(frame) - PANEL * panel >= PANEL:
        for step in range(_depth(frame)):
            store(packed + 8 * LANES * step, load(columns + stride * step))
            store(packed + 8 * LANES * step + 4 * LANES, load(columns + stride * step + 4 * LANES))
    else:
        for step in range(_depth(frame)):
            store(packed + 4 * LANES * step, load(columns + stride * step))


@njit
def _num_halves(frame: int) -> int:
    """Of the weight's rows: 2 if a gate goes with them."""
    return calls.argument_dim(frame, _WEIGHT, 0) // calls.result_dim(frame, 0, 0)


@njit
def _own_bytes(frame: int) -> int:
    """Scratch of a thread: two tiles, and the rows of a part as float32 where the weight is narrower."""
    is_narrow = calls.argument_dtype(frame, _WEIGHT) != calls.FLOAT32
    return 8 * TILE_ROWS * PANEL + (_num_halves(frame) * 4 * _PART_ROWS * _depth(frame) if is_narrow else 0)


@njit
def _multiply_part(frame: int, panels: int, own: int, part: int) -> None:
    """Rows of the result: `_PART_ROWS`, or those that are left, or the last `TILE_ROWS` if fewer are."""
    num_rows, depth, rows_at = calls.result_dim(frame, 0, 0), _depth(frame), calls.argument(frame, _WEIGHT)
    stop = min((part + 1) * _PART_ROWS, num_rows)
    start, dtype = min(part * _PART_ROWS, stop - TILE_ROWS), calls.argument_dtype(frame, _WEIGHT)
    tiles, widened_rows, half_rows, num_halves = own, own + 8 * TILE_ROWS * PANEL, num_rows, _num_halves(frame)
    if dtype != calls.FLOAT32:
        for half in range(num_halves):
            first = half * num_rows + start
            if dtype == calls.UINT16:
                _widen(rows_at + 2 * depth * first, widened_rows + 4 * depth * half * _PART_ROWS, depth * (stop - start), types.uint16)
            else:
                _widen(rows_at + depth * first, widened_rows + 4 * depth * half * _PART_ROWS, depth * (stop - start), types.int8)
        rows_at, half_rows = widened_rows - 4 * depth * start, _PART_ROWS
    for panel in range(_num_panels(frame)):
        width, right = min(PANEL, _num_columns(frame) - PANEL * panel), panels + panel * _panel_bytes(frame)
        row = start
        while row < stop:
            first = min(row, stop - TILE_ROWS)
            out, out_row = calls.result(frame, 0) + 4 * (first * _num_columns(frame) + PANEL * panel), 4 * _num_columns(frame)
            for half in range(num_halves):
                left = rows_at + 4 * depth * (first + half * half_rows)
                target, target_row = (out, out_row) if num_halves == 1 else (tiles + 4 * PANEL * TILE_ROWS * half, 4 * PANEL)
                _multiply_tile(left, right, depth, width, target, target_row, panel == 0)
            if num_halves == 2:
                _gate(tiles, tiles + 4 * PANEL * TILE_ROWS, width, out, out_row)
            row += TILE_ROWS


@njit
def _widen(stored: int, wide: int, length: int, dtype: Any) -> None:
    numbers, result = carray(pointer(stored), length, dtype), floats(wide, length)
    for i in range(length):
        result[i] = widened(numbers[i])


@njit
def _multiply_tile(left: int, panel: int, depth: int, width: int, out: int, out_row: int, is_first: bool) -> None:
    """`TILE_ROWS` rows of a product, `width` columns of them."""
    if width == PANEL and is_first:
        multiply_streamed(left, 4 * depth, 4, panel, depth, out, out_row)
    elif width == PANEL:
        multiply(left, 4 * depth, 4, panel, depth, out, out_row)
    elif width == LANES:
        multiply_half(left, 4 * depth, 4, panel, depth, out, out_row)
    elif width == 8:
        multiply_eight(left, 4 * depth, 4, panel, depth, out, out_row)
    else:
        multiply_four(left, 4 * depth, 4, panel, depth, out, out_row)


@njit
def _gate(gate: int, up: int, width: int, out: int, out_row: int) -> None:
    """out = silu(gate) * up, of tiles. Numbers behind `width`, up to `LANES`, are of no meaning and go nowhere."""
    for row in range(TILE_ROWS):
        for column in range(0, width, LANES):
            at = 4 * (PANEL * row + column)
            result = _silu_times(load(gate + at), load(up + at))
            if width >= LANES:
                store(out + out_row * row + 4 * column, result)
            else:
                store(gate + at, result)
                numbers, target = floats(gate + at, width), floats(out + out_row * row, width)
                for i in range(width):
                    target[i] = numbers[i]


@njit
def _silu_times(x: Any, y: Any) -> Any:
    bounded = greater(x, filled(np.float32(-88)))  # silu is 0 below, and the power of more than 88 is not finite
    power = exponential(subtracted(filled(np.float32(0)), bounded))
    return multiplied(divided(bounded, added(filled(np.float32(1)), power)), y)


@calls.c_function
def _task(job: int) -> int:
    part, own = calls.take_part(job), 0
    while part >= 0:
        frame = calls.frame_of(job)
        num_packed = _num_packed(frame)
        if part < num_packed:
            _pack(frame, calls.scratch_of(job), part)
        else:
            if own == 0:
                own = calls.allocate(_own_bytes(frame))
            calls.wait_for_parts(job, num_packed)
            panels = calls.scratch_of(job) if num_packed else calls.argument(frame, _COLUMNS)
            _multiply_part(frame, panels, own, part - num_packed)
        calls.part_done(job)
        part = calls.take_part(job)
    if own != 0:
        calls.free(own)
    calls.release(job)
    return 0


calls.name_task("pdjax_wide_product_task", _task)


@calls.c_function
def _handler(frame: int) -> int:
    if not calls.answered_metadata(frame):
        scratch_bytes = _num_packed(frame) * _panel_bytes(frame)
        calls.end(calls.run_parts(frame, calls.address_of("pdjax_wide_product_task"), _num_parts(frame), scratch_bytes))
    return 0


calls.register_handler("pdjax_wide_product", _handler)
