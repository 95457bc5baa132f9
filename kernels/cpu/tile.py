"""The innermost loop of large products: a tile of results that stays in registers while every step adds an outer product to it.

Its shape is such that enough sums are under way to hide the latency of a multiply-add, and few enough to fit the registers (Goto and
van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008). The loop is spelled out in vectors: what LLVM makes of the same
loop in numbers takes several times as long.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pdjax.kernels.cpu.vectors import HAS_WIDE_REGISTERS, LANES, ir_broadcast, ir_call, ir_load, ir_store, ir_vector

TILE_ROWS = 12 if HAS_WIDE_REGISTERS else 6
"""With two vectors a row 24 of the 32 registers of AVX-512, or 12 of the 16 of AVX2."""
PANEL = 2 * LANES
"""Columns of a tile. Matrices are cut into panels of so many columns: [depth, PANEL], row by row."""

_FLOAT, _INDEX, _WORD, _BYTES = ir.FloatType(), ir.IntType(32), ir.IntType(64), ir.IntType(8).as_pointer()
_READ, _TO_SECOND_CACHE, _DATA = _INDEX(0), _INDEX(2), _INDEX(1)  # arguments of a prefetch


def _tile_product(num_rows: int, num_vectors: int, lanes: int, is_streamed: bool = False, is_sum: bool = False) -> Any:
    """A compiled function for tiles of so many rows and vectors.

    `is_streamed`: it fetches the next `num_rows` rows of the left matrix ahead, which lie behind these in memory. `is_sum`: it adds to `out`.
    """
    vector = ir_vector(lanes)

    @intrinsic
    def tile_product(typing_context: Any, left: Any, left_row: Any, left_step: Any, panel: Any, depth: Any, out: Any, out_row: Any) -> Any:
        """out [num_rows, columns] = left [num_rows, depth] @ panel [depth, columns], all float32. Matrices are given by their addresses; of
        `left` the bytes from row to row and from step to step of the depth, of `out` those from row to row."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            left, left_row, left_step, panel, depth, out, out_row = args
            columns, width = range(num_vectors), 4 * lanes
            lefts = [builder.add(left, builder.mul(left_row, _WORD(row))) for row in range(num_rows)]
            outs = [
                [builder.add(out, builder.add(builder.mul(out_row, _WORD(row)), _WORD(width * column))) for column in columns]
                for row in range(num_rows)
            ]
            begun = [[ir_load(builder, vector, at) if is_sum else ir.Constant(vector, None) for at in row] for row in outs]
            entry, loop, done = builder.block, builder.append_basic_block("step"), builder.append_basic_block("done")
            builder.branch(loop)

            builder.position_at_end(loop)
            step = builder.phi(_WORD)
            sums = [[builder.phi(vector) for _ in columns] for _ in range(num_rows)]
            line = builder.add(panel, builder.mul(step, _WORD(width * num_vectors)))
            rights = [ir_load(builder, vector, builder.add(line, _WORD(width * column))) for column in columns]
            if is_streamed:
                behind = builder.add(left, builder.mul(left_row, _WORD(num_rows)))
                _prefetch(builder, builder.add(behind, builder.mul(step, _WORD(4 * num_rows))))
            added = []
            for row in range(num_rows):
                at = builder.inttoptr(builder.add(lefts[row], builder.mul(step, left_step)), _FLOAT.as_pointer())
                factor = ir_broadcast(builder, builder.load(at), lanes)
                added.append([ir_call(builder, "fma", factor, rights[column], sums[row][column]) for column in columns])
            next_step = builder.add(step, _WORD(1))
            builder.cbranch(builder.icmp_signed("<", next_step, depth), loop, done)
            step.add_incoming(_WORD(0), entry)
            step.add_incoming(next_step, loop)
            for row in range(num_rows):
                for column in columns:
                    sums[row][column].add_incoming(begun[row][column], entry)
                    sums[row][column].add_incoming(added[row][column], loop)

            builder.position_at_end(done)
            for row in range(num_rows):
                for column in columns:
                    ir_store(builder, added[row][column], outs[row][column])
            return context.get_dummy_value()

        return types.void(*(types.intp,) * 7), generate

    return tile_product


def _prefetch(builder: ir.IRBuilder, address: Any) -> None:
    function = ir.FunctionType(ir.VoidType(), [_BYTES, _INDEX, _INDEX, _INDEX])
    prefetch = cgutils.get_or_insert_function(builder.module, function, "llvm.prefetch.p0i8")
    builder.call(prefetch, [builder.inttoptr(address, _BYTES), _READ, _TO_SECOND_CACHE, _DATA])


multiply = _tile_product(TILE_ROWS, 2, LANES)
"""Of `PANEL` columns."""
multiply_streamed = _tile_product(TILE_ROWS, 2, LANES, is_streamed=True)
"""Of `PANEL` columns, for rows that no cache holds yet."""
multiply_half = _tile_product(TILE_ROWS, 1, LANES, is_streamed=True)
"""Of `LANES` columns."""
multiply_eight = _tile_product(TILE_ROWS, 1, 8, is_streamed=True)
multiply_four = _tile_product(TILE_ROWS, 1, 4, is_streamed=True)

SHORT_ROWS = 8 if HAS_WIDE_REGISTERS else 4
"""Of tiles whose rows are those of a head."""
add_product_short = _tile_product(SHORT_ROWS, 2, LANES, is_sum=True)
"""Of `PANEL` columns and `SHORT_ROWS` rows, added to what is there."""
