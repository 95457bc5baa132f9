"""Vectors of float32 as variables of compiled code: what LLVM's own vectoriser would not find, a kernel spells out with these.

A vector has `LANES` numbers, a register of the CPU that compiles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.extending import intrinsic, register_model

from pdjax.kernels.cpu.numbers import LN2_HIGH, LN2_LOW, LOG2_E, LOWEST_EXPONENT

HAS_WIDE_REGISTERS = bool(llvm.get_host_cpu_features().get("avx512f"))
LANES = 16 if HAS_WIDE_REGISTERS else 8

_FLOAT, _INDEX = ir.FloatType(), ir.IntType(32)


class _Vector(types.Type):
    def __init__(self) -> None:
        super().__init__(name="Vector")


_VECTOR = _Vector()


@register_model(_Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, vector: Any):
        super().__init__(manager, vector, ir_vector(LANES))


def ir_vector(lanes: int) -> ir.VectorType:
    return ir.VectorType(_FLOAT, lanes)


def ir_load(builder: ir.IRBuilder, vector: ir.VectorType, address: Any) -> Any:
    return builder.load(builder.inttoptr(address, vector.as_pointer()), align=4)


def ir_store(builder: ir.IRBuilder, value: Any, address: Any) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=4)


def ir_broadcast(builder: ir.IRBuilder, number: Any, lanes: int) -> Any:
    undefined = ir.Constant(ir_vector(lanes), ir.Undefined)
    first = builder.insert_element(undefined, number, _INDEX(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(_INDEX, lanes), None))


def ir_call(builder: ir.IRBuilder, name: str, *args: Any) -> Any:
    """One of LLVM's functions on vectors of one type: `llvm.NAME`."""
    vector = args[0].type
    function = ir.FunctionType(vector, [vector] * len(args))
    return builder.call(cgutils.get_or_insert_function(builder.module, function, f"llvm.{name}.v{vector.count}f32"), args)


@intrinsic
def load(typing_context: Any, address: Any) -> Any:
    """The `LANES` numbers at an address, which needs no alignment."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir_load(builder, ir_vector(LANES), args[0])

    return _VECTOR(types.intp), generate


@intrinsic
def store(typing_context: Any, address: Any, vector: Any) -> Any:
    """Put a vector at an address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        ir_store(builder, args[1], args[0])
        return context.get_dummy_value()

    return types.void(types.intp, _VECTOR), generate


@intrinsic
def filled(typing_context: Any, number: Any) -> Any:
    """A vector of one float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir_broadcast(builder, args[0], LANES)

    return _VECTOR(types.float32), generate


def _operation(num_operands: int, generate_ir: Callable[..., Any]) -> Any:
    """A compiled function of so many vectors, from one that writes its code: (builder, operands ..) -> result."""
    signature = _VECTOR(*(_VECTOR,) * num_operands)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return generate_ir(builder, *args)

    typings = {
        1: lambda typing_context, a: (signature, generate),
        2: lambda typing_context, a, b: (signature, generate),
        3: lambda typing_context, a, b, c: (signature, generate),
    }
    return intrinsic(typings[num_operands])


added = _operation(2, lambda builder, a, b: builder.fadd(a, b))
subtracted = _operation(2, lambda builder, a, b: builder.fsub(a, b))
multiplied = _operation(2, lambda builder, a, b: builder.fmul(a, b))
divided = _operation(2, lambda builder, a, b: builder.fdiv(a, b))
multiply_add = _operation(3, lambda builder, a, b, c: ir_call(builder, "fma", a, b, c))
"""a * b + c."""
greater = _operation(2, lambda builder, a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b))
lesser = _operation(2, lambda builder, a, b: builder.select(builder.fcmp_ordered("<", a, b), a, b))
_rounded_down = _operation(1, lambda builder, a: ir_call(builder, "floor", a))


def _ir_scaled(builder: ir.IRBuilder, a: Any, power: Any) -> Any:
    whole = ir.VectorType(_INDEX, a.type.count)
    exponent = builder.add(builder.fptosi(power, whole), ir.Constant(whole, [127] * whole.count))
    return builder.fmul(a, builder.bitcast(builder.shl(exponent, ir.Constant(whole, [23] * whole.count)), a.type))


_scaled = _operation(2, _ir_scaled)
"""a * 2**b, for whole b from -126 to 127."""


@njit
def exponential(x: Any) -> Any:
    """e to the power of each number, within 3 units in the last place up to 88; what is below -87 counts as -87, whose power is 2e-38."""
    bounded = greater(x, filled(LOWEST_EXPONENT))
    power = _rounded_down(multiply_add(bounded, filled(LOG2_E), filled(np.float32(0.5))))
    rest = multiply_add(power, filled(-LN2_LOW), multiply_add(power, filled(-LN2_HIGH), bounded))
    polynomial = filled(np.float32(1 / 720))
    polynomial = multiply_add(polynomial, rest, filled(np.float32(1 / 120)))
    polynomial = multiply_add(polynomial, rest, filled(np.float32(1 / 24)))
    polynomial = multiply_add(polynomial, rest, filled(np.float32(1 / 6)))
    polynomial = multiply_add(polynomial, rest, filled(np.float32(0.5)))
    polynomial = multiply_add(polynomial, rest, filled(np.float32(1)))
    polynomial = multiply_add(polynomial, rest, filled(np.float32(1)))
    return _scaled(polynomial, power)
