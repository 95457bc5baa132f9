"""How a model is shared between the chips of one worker (tensor parallel): which axis of a weight is split, and what a chip then holds.

Imports no JAX, so that memory can be planned on a machine that has no accelerator.
"""

from __future__ import annotations

import math

from pdjax.models.shape import ModelShape, WeightSpec

_SPLIT_AXES = ("experts", "qkv", "heads", "gate_up", "ffn", "vocab")
"""Logical axes that are split, the first of them that a weight has."""


def check_split(shape: ModelShape, number: int) -> None:
    """Raises ValueError where the model cannot be split over `number` chips."""
    problems = []
    if shape.num_heads % number:
        problems.append(f"{shape.num_heads} heads")
    if shape.num_kv_heads % number and number % shape.num_kv_heads:
        problems.append(f"{shape.num_kv_heads} KV heads")
    for name, size in _mlp_sizes(shape, number).items():
        if size % number:
            problems.append(f"{name} of {size}")
    if problems:
        raise ValueError(f"tensor_parallel {number} does not divide {', '.join(problems)}")


def split_axis(spec: WeightSpec, number: int) -> int | None:
    """Which axis of a weight is split over `number` chips; None where each chip has all of it."""
    for name in _SPLIT_AXES:
        if name in spec.axes:
            axis = spec.axes.index(name)
            if name in ("experts", "vocab") and spec.shape[axis] % number:
                continue
            return axis
    return None


def num_pool_heads(shape: ModelShape, number: int) -> int:
    """KV heads of the pool over all `number` chips, the copies included that chips beyond the model's KV heads hold."""
    return max(shape.num_kv_heads, number)


def values_per_chip(shape: ModelShape, spec: WeightSpec, number: int) -> int:
    """How many values of a weight each of `number` chips holds, copies of KV heads' rows included."""
    axis = split_axis(spec, number)
    if axis is None:
        return math.prod(spec.shape)
    others = math.prod(spec.shape) // spec.shape[axis]
    if spec.axes[axis] == "qkv":
        return others * (shape.num_heads + 2 * num_pool_heads(shape, number)) * shape.head_dim // number
    return others * spec.shape[axis] // number


def _mlp_sizes(shape: ModelShape, number: int) -> dict[str, int]:
    """What an MLP is split by."""
    if shape.experts is None:
        return {"an MLP": shape.ffn_dim}
    shared = {"a shared expert": shape.experts.shared_ffn_dim}
    return shared if shape.experts.num_experts % number == 0 else {"an expert": shape.experts.ffn_dim, **shared}
