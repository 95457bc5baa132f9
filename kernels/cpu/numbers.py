"""Numbers as memory holds them, and float32 as kernels compute with; loops over these functions are what LLVM makes vector code of."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic


@intrinsic
def widened(typing_context: Any, stored: Any) -> Any:
    """float32 from float32, int8, or uint16 that holds the bits of a bfloat16."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if stored == types.float32:
            return args[0]
        if stored == types.uint16:
            bits = builder.shl(builder.zext(args[0], ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
            return builder.bitcast(bits, ir.FloatType())
        assert stored == types.int8, f"no float32 from {stored}"
        return builder.sitofp(args[0], ir.FloatType())

    return types.float32(stored), generate


@intrinsic
def float_of_bits(typing_context: Any, bits: Any) -> Any:
    """The float32 that has the bits of an int32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), generate


LOWEST_EXPONENT = np.float32(-87.0)  # the result is still a normal number
LOG2_E = np.float32(1.44269504)
LN2_HIGH, LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)  # their sum is ln 2, the former has few bits


@njit
def exponential(x: float) -> float:
    """e to the power of a float32 up to 88, within 3 units in the last place; 0 below -87. Vectorises, which a call of libm does not.

    The argument is taken apart into a multiple of ln 2 and a rest, whose power is a Taylor polynomial of degree 6.
    """
    power = np.floor(max(x, LOWEST_EXPONENT) * LOG2_E + np.float32(0.5))
    rest = (max(x, LOWEST_EXPONENT) - power * LN2_HIGH) - power * LN2_LOW
    polynomial = np.float32(1 / 720)
    polynomial = polynomial * rest + np.float32(1 / 120)
    polynomial = polynomial * rest + np.float32(1 / 24)
    polynomial = polynomial * rest + np.float32(1 / 6)
    polynomial = polynomial * rest + np.float32(0.5)
    polynomial = polynomial * rest + np.float32(1)
    polynomial = polynomial * rest + np.float32(1)
    result = polynomial * float_of_bits((np.int32(power) + np.int32(127)) << np.int32(23))
    return result if x >= LOWEST_EXPONENT else np.float32(0)
