"""Products of a weight with few columns, for decode steps on CPU: bound by the bytes of the weight, which are read once and as they lie.

XLA's product of one column reads weights at about 60 % of the memory's bandwidth, and it knows no weight that is narrower than what it
computes with; here a row is widened in registers. Importing this compiles the kernel.
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

_PART_BYTES = 256 * 1024
"""Of weights, for one thread at a time: some 20 us of reading. A quarter of that costs a tenth of the bandwidth: each part begins without
what the hardware fetches ahead."""


def narrow_product(weight: jax.Array, columns: jax.Array) -> jax.Array:
    """weight [out, in] @ columns float32[in, T]: float32[out, T].

    The weight is float32, int8, or uint16 that holds the bits of bfloat16. Arithmetic is float32. For small T: each column takes a pass over
    a row of the weight, of which only the first reads memory.
    """
    call = jax.ffi.ffi_call(
        "pdjax_narrow_product",
        jax.ShapeDtypeStruct((weight.shape[0], columns.shape[1]), jnp.float32),
        input_layouts=((0, 1), (1, 0)),  # a weight by rows, activations by columns
        output_layouts=(1, 0),
    )
    return call(weight, columns)


@njit
def _itemsize(frame: int) -> int:
    """Bytes of one number of the weight."""
    dtype = calls.argument_dtype(frame, 0)
    return 4 if dtype == calls.FLOAT32 else 2 if dtype == calls.UINT16 else 1


@njit
def _rows_in_part(frame: int) -> int:
    return max(1, _PART_BYTES // (calls.argument_dim(frame, 0, 1) * _itemsize(frame)))


@njit
def _num_parts(frame: int) -> int:
    rows = _rows_in_part(frame)
    return (calls.argument_dim(frame, 0, 0) + rows - 1) // rows


@njit
def _run_part(frame: int, part: int) -> None:
    dtype, num_rows = calls.argument_dtype(frame, 0), _rows_in_part(frame)
    start, stop = part * num_rows, min((part + 1) * num_rows, calls.argument_dim(frame, 0, 0))
    if dtype == calls.FLOAT32:
        _multiply(frame, start, stop, types.float32)
    elif dtype == calls.UINT16:
        _multiply(frame, start, stop, types.uint16)
    else:
        _multiply(frame, start, stop, types.int8)


@njit
def _multiply(frame: int, start: int, stop: int, dtype: Any) -> None:
    """Rows `start` to `stop` of the product."""
    num_out, num_in, num_columns = calls.argument_dim(frame, 0, 0), calls.argument_dim(frame, 0, 1), calls.argument_dim(frame, 1, 1)
    products, row_bytes = floats(calls.result(frame, 0), num_columns * num_out), num_in * _itemsize(frame)
    for row in range(start, stop):
        weights = carray(pointer(calls.argument(frame, 0) + row * row_bytes), num_in, dtype)
        for column in range(num_columns):
            products[column * num_out + row] = _dot(weights, floats(calls.argument(frame, 1) + 4 * column * num_in, num_in), num_in)


@njit(fastmath=True)
def _dot(weights: Any, column: Any, length: int) -> float:
    total = np.float32(0)
    for i in range(length):
        total += widened(weights[i]) * column[i]
    return total


@calls.c_function
def _task(job: int) -> int:
    part = calls.take_part(job)
    while part >= 0:
        _run_part(calls.frame_of(job), part)
        calls.part_done(job)
        part = calls.take_part(job)
    calls.release(job)
    return 0


calls.name_task("pdjax_narrow_product_task", _task)


@calls.c_function
def _handler(frame: int) -> int:
    if not calls.answered_metadata(frame):
        calls.end(calls.run_parts(frame, calls.address_of("pdjax_narrow_product_task"), _num_parts(frame), 0))
    return 0


calls.register_handler("pdjax_narrow_product", _handler)
