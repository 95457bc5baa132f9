"""A mixture of experts with grouped matrix products: rows are sorted by expert, and each expert multiplies its own run of them.

Compilers for accelerators know `ragged_dot`. On CPU it becomes one product with every expert, over a transposed copy of all weights; there a
loop over tiles of rows computes what is needed and reads the weights of experts that have rows only.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pdjax.models.shape import Experts
from pdjax.models.stored import StoredWeight, Weight, stored_groups


class ExpertWeights(NamedTuple):
    """Of N experts, of which a chip may hold only n, those that follow each other from `chip index * n` on."""

    router: jax.Array  # [N, E]
    gate_up: Weight  # [n, E, 2F]
    down: Weight  # [n, F, E]


def mix_experts(x: jax.Array, weights: ExpertWeights, experts: Experts, chip: jax.Array | int = 0) -> jax.Array:
    """x [E, T] -> [E, T]: the outputs of each row's `num_active` best experts, by the router's probabilities; of those that the chip with
    index `chip` holds, in the sum."""
    rows, active, num_held = x.shape[1], experts.num_active, len(weights.gate_up)
    shares, chosen = route(weights.router @ x, experts)
    expert_of = chosen.reshape(rows * active)
    if num_held < experts.num_experts:
        expert_of = expert_of - chip * num_held
        is_held = (expert_of >= 0) & (expert_of < num_held)
        expert_of = jnp.where(is_held, expert_of, num_held)  # behind the last group, where no product is made
        shares = jnp.where(is_held.reshape(shares.shape), shares, 0.0)
    order = jnp.argsort(expert_of)
    group_sizes = jnp.bincount(expert_of, length=num_held).astype(jnp.int32)
    outputs = jax.lax.platform_dependent(
        x.T[order // active], weights.gate_up, weights.down, group_sizes, cpu=expert_mlps_in_tiles, default=expert_mlps_in_groups
    )
    weighted = outputs * shares.reshape(rows * active)[order][:, None].astype(outputs.dtype)
    in_row_order = jnp.zeros_like(weighted).at[order].set(weighted, unique_indices=True)
    return in_row_order.reshape(rows, active, -1).sum(axis=1).T


def expert_mlps_in_groups(rows: jax.Array, gate_up: Weight, down: Weight, group_sizes: jax.Array) -> jax.Array:
    """rows [m, E], the first `group_sizes[0]` for the first expert and so on -> [m, E]; 0 for rows behind the last group."""
    gate, up = jnp.split(_grouped(rows, gate_up, group_sizes), 2, axis=1)
    return _grouped(jax.nn.silu(gate) * up, down, group_sizes)


def _grouped(rows: jax.Array, weight: Weight, group_sizes: jax.Array) -> jax.Array:
    """rows [m, in], weight [n, in, out] -> [m, out]."""
    if isinstance(weight, StoredWeight):
        return stored_groups(weight, rows, group_sizes)
    return jax.lax.ragged_dot(rows, weight, group_sizes)


def expert_mlps_in_tiles(rows: jax.Array, gate_up: Weight, down: Weight, group_sizes: jax.Array) -> jax.Array:
    """As `expert_mlps_in_groups`, tile after tile, each of rows of one expert."""
    tile = _tile_rows(len(rows), len(gate_up))
    tiles_of = -(-group_sizes // tile)
    last_tile, ends = jnp.cumsum(tiles_of), jnp.cumsum(group_sizes)
    padded = jnp.pad(rows, ((0, tile), (0, 0)))

    def tile_step(i: jax.Array, out: jax.Array) -> jax.Array:
        expert = jnp.searchsorted(last_tile, i, side="right", method="compare_all")
        first = ends[expert] - group_sizes[expert] + (i - last_tile[expert] + tiles_of[expert]) * tile
        gate, up = jnp.split(jax.lax.dynamic_slice_in_dim(padded, first, tile) @ gate_up[expert], 2, axis=1)
        result = (jax.nn.silu(gate) * up) @ down[expert]
        is_own = first + jnp.arange(tile, dtype=jnp.int32) < ends[expert]
        result = jnp.where(is_own[:, None], result, jax.lax.dynamic_slice_in_dim(out, first, tile))
        return jax.lax.dynamic_update_slice_in_dim(out, result, first, 0)

    return jax.lax.fori_loop(0, last_tile[-1], tile_step, jnp.zeros_like(padded))[: len(rows)]


def _tile_rows(num_rows: int, num_experts: int) -> int:
    """About what an expert gets, in powers of two from 1 to 64: larger tiles are filled up with what is thrown away."""
    return min(64, 1 << max(0, (num_rows // num_experts - 1).bit_length()))


def route(logits: jax.Array, experts: Experts) -> tuple[jax.Array, jax.Array]:
    """Router logits [N, T] -> each row's best experts: their shares float32[T, active] and numbers int32[T, active]."""
    probabilities = jax.nn.softmax(logits.astype(jnp.float32).T, axis=-1)
    shares, chosen = jax.lax.top_k(probabilities, experts.num_active)
    if experts.are_normed:
        shares = shares / jnp.sum(shares, axis=-1, keepdims=True)
    return shares, chosen
