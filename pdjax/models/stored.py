"""Weights that are stored narrower than the model computes: int8 with a scale for each output channel, or bfloat16.

A `StoredWeight` stands where an array stands in the tree of weights: blocks multiply by it and look rows up in it as they do with an array.
Products use the numbers as they are stored and scale what comes out. No weight is widened as a whole, but by compilers that know no product
of unlike numbers.

On CPU a bfloat16 is held as its bits. XLA there goes through a slow conversion of single numbers otherwise: a product takes ten times as
long.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pdjax.kernels.base import BITS_OF_FLOAT, FLOAT_OF_BITS, same_bits
from pdjax.kernels.cpu import is_installed
from pdjax.models.shape import WeightSpec

MAX_INT8 = 127
"""So that a weight and its negative are both there."""

_TILE_VALUES = 1 << 18
"""Of a weight, widened at a time on CPU: 1 MB of float32, which stays in a core's cache until it is multiplied."""

_FEW_COLUMNS = 2
"""So many are cheaper one by one than side by side."""

_HOST_BLOCK_VALUES = 1 << 22
"""Of a weight, rounded at a time on the host."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StoredWeight:
    """A weight [.., out, in], or of experts [.., in, out]: `values`, times `scales` where there are any.

    `values`: int8, bfloat16 or, on CPU, uint16 that holds the bits of bfloat16, or float32, which is not narrower but multiplied the same
    way. `scales`: float32[.., out]. `dtype`: that of rows that are looked up; products have the dtype of what is multiplied.
    """

    values: Any
    scales: Any
    dtype: np.dtype = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def ndim(self) -> int:
        return self.values.ndim

    def __len__(self) -> int:
        return self.values.shape[0]

    def __getitem__(self, index: Any) -> Any:
        """One of stacked weights, for an int32 scalar; of a matrix its rows, for int32[T]: `dtype`[T, in]."""
        if index is ...:
            return self
        values, scales = self.values[index], None if self.scales is None else self.scales[index]
        if self.ndim > 2:
            return replace(self, values=values, scales=scales)
        rows = _widened(values, jnp.float32)
        return (rows if scales is None else rows * scales[..., None]).astype(self.dtype)

    def __matmul__(self, x: jax.Array) -> jax.Array:
        """[out, in] @ x [in, T] -> [out, T]."""
        return stored_product(self, x).astype(x.dtype)

    def __rmatmul__(self, x: jax.Array) -> jax.Array:
        """x [T, in] @ the weight of an expert, [in, out] -> [T, out]."""
        product = jnp.matmul(x, _widened(self.values, x.dtype), preferred_element_type=jnp.float32)
        return (product if self.scales is None else product * self.scales).astype(x.dtype)

    def astype(self, dtype: Any) -> StoredWeight:
        """The same numbers for a model that computes in `dtype`."""
        return replace(self, dtype=np.dtype(dtype))


Weight = jax.Array | StoredWeight


def stored_product(weight: StoredWeight, x: jax.Array) -> jax.Array:
    """weight [out, in] @ x [in, T] -> float32[out, T]. Every product of a stored matrix with activations goes through here."""
    assert weight.ndim == 2, f"a product with a weight of {weight.shape}"
    product = jax.lax.platform_dependent(weight.values, x, cpu=_product_on_cpu, default=_product_at_once)
    return product if weight.scales is None else product * weight.scales[:, None]


def stored_groups(weight: StoredWeight, rows: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """rows [m, in], the first `group_sizes[0]` for the first of the experts of weight [n, in, out] and so on -> [m, out]; 0 for rows behind
    the last group."""
    values = _widened(weight.values, rows.dtype) if weight.values.dtype in FLOAT_OF_BITS else weight.values
    product = jax.lax.ragged_dot(rows, values, group_sizes, preferred_element_type=jnp.float32)
    if weight.scales is not None:
        expert_of = jnp.searchsorted(jnp.cumsum(group_sizes), jnp.arange(len(rows)), side="right", method="compare_all")
        product = product * weight.scales[jnp.minimum(expert_of, len(weight) - 1)]
    return product.astype(rows.dtype)


def gated_product(weight: Weight, x: jax.Array) -> jax.Array:
    """silu(gate) * up, [F, T], where weight [2F, E] @ x [E, T] are the two, one above the other."""
    if not isinstance(weight, StoredWeight) or weight.scales is not None:
        return _gated(weight @ x)
    gated = jax.lax.platform_dependent(weight.values, x, cpu=_gated_on_cpu, default=lambda values, x: _gated(_product_at_once(values, x)))
    return gated.astype(x.dtype)


def _gated_on_cpu(values: jax.Array, x: jax.Array) -> jax.Array:
    num_columns = x.shape[1]
    if is_installed() and num_columns > _FEW_COLUMNS:
        from pdjax.kernels.cpu import wide_product  # which loads a compiler

        if wide_product.is_wide(values.shape[0] // 2, num_columns):
            return wide_product.gated_product(values, x.astype(jnp.float32))
    return _gated(_product_on_cpu(values, x))


def _gated(gate_up: jax.Array) -> jax.Array:
    gate, up = jnp.split(gate_up, 2)
    return jax.nn.silu(gate) * up


def _product_at_once(values: jax.Array, x: jax.Array) -> jax.Array:
    """What compilers for accelerators make a product of that widens as it reads. int8 is exact in bfloat16."""
    return jnp.matmul(_widened(values, x.dtype), x, preferred_element_type=jnp.float32)


def _product_on_cpu(values: jax.Array, x: jax.Array) -> jax.Array:
    num_rows, num_columns = values.shape[0], x.shape[1]
    if is_installed():
        # These load a compiler.
        from pdjax.kernels.cpu.product import narrow_product
        from pdjax.kernels.cpu.wide_product import is_wide, wide_product

        if num_columns <= _FEW_COLUMNS:
            return narrow_product(values, x.astype(jnp.float32))
        if is_wide(num_rows, num_columns):
            return wide_product(values, x.astype(jnp.float32))
    return values @ x if values.dtype == x.dtype else _product_in_tiles(values, x)


def _product_in_tiles(values: jax.Array, x: jax.Array) -> jax.Array:
    """Some rows at a time, so that what is widened never reaches memory. The last tile repeats rows of the one before it."""
    num_rows, num_columns = values.shape
    tile = min(num_rows, max(16, _TILE_VALUES // num_columns))
    x = x.astype(jnp.float32)
    if tile == num_rows:
        return _widened(values, jnp.float32) @ x

    def one_tile(i: jax.Array, out: jax.Array) -> jax.Array:
        rows = jax.lax.dynamic_slice_in_dim(values, i * tile, tile)
        return jax.lax.dynamic_update_slice_in_dim(out, _widened(rows, jnp.float32) @ x, i * tile, 0)

    return jax.lax.fori_loop(0, -(-num_rows // tile), one_tile, jnp.zeros((num_rows, x.shape[1]), jnp.float32))


def _widened(values: jax.Array, dtype: Any) -> jax.Array:
    if values.dtype in FLOAT_OF_BITS:
        values = same_bits(values, FLOAT_OF_BITS[values.dtype])
    return values.astype(dtype)


def stored(array: np.ndarray, spec: WeightSpec, dtype: np.dtype, is_on_cpu: bool) -> StoredWeight:
    """A weight on the host, rounded to the nearest that `dtype`, int8 or bfloat16, holds. Scales of int8 are largest / 127, or 1 for zeros.

    Raises ValueError where int8 is to hold what is not finite.
    """
    if dtype != np.int8:
        rounded = array.astype(dtype)
        return StoredWeight(rounded.view(BITS_OF_FLOAT[jnp.dtype(dtype)]) if is_on_cpu else rounded, None, array.dtype)
    axis = spec.summed_axis
    assert axis != 0, f"a weight that is summed over its first axis, {spec.axes}"
    values, scales = np.empty(spec.shape, np.int8), np.empty(spec.of_scales().shape, np.float32)
    block = max(1, _HOST_BLOCK_VALUES * len(array) // max(1, array.size))
    for first in range(0, len(array), block):
        some = slice(first, first + block)
        scales[some] = np.max(np.abs(array[some]), axis=axis)
        if not np.isfinite(scales[some]).all():
            raise ValueError("int8 holds finite numbers only")
        scales[some] = np.where(scales[some] > 0, scales[some] / MAX_INT8, 1)
        values[some] = np.rint(array[some].astype(np.float32) / np.expand_dims(scales[some], axis))
    return StoredWeight(values, scales, array.dtype)


def map_parts(function: Callable[[Any, WeightSpec], Any], weight: Any, spec: WeightSpec) -> Any:
    """`function(array, its spec)` in the place of a weight's array, or of both arrays of a stored one."""
    if not isinstance(weight, StoredWeight):
        return function(weight, spec)
    scales = None if weight.scales is None else function(weight.scales, spec.of_scales())
    return replace(weight, values=function(weight.values, spec), scales=scales)
