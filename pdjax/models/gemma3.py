"""Gemma 3: as Gemma 2, with norms on queries and keys instead of capped scores. Layers with a window turn by a rotary table of their own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from pdjax.models.gemma import gelu_mlp, unit_norm
from pdjax.models.layers import LayerStep, attend, heads_of, layer_params
from pdjax.models.shape import ModelShape


class Block(nnx.Module):
    """One layer: attention and a gated MLP, each between two norms."""

    def __init__(self, shape: ModelShape, dtype: jnp.dtype):
        param = layer_params(shape, dtype)
        self.shape = nnx.static(shape)
        self.attn_norm = param("attn_norm")
        self.qkv = param("qkv")
        self.q_norm = param("q_norm")
        self.k_norm = param("k_norm")
        self.attn_out = param("attn_out")
        self.attn_post_norm = param("attn_post_norm")
        self.mlp_norm = param("mlp_norm")
        self.gate_up = param("gate_up")
        self.down = param("down")
        self.mlp_post_norm = param("mlp_post_norm")

    def __call__(self, x: jax.Array, pool: jax.Array, step: LayerStep) -> tuple[jax.Array, jax.Array]:
        """x [E, T] -> (x [E, T], pool with the KV of the step's rows written)."""
        eps = self.shape.norm_eps
        queries, keys, values = heads_of(self.qkv[...] @ unit_norm(x, self.attn_norm[...], eps), self.shape)
        queries, keys = unit_norm(queries, self.q_norm[...], eps, axis=1), unit_norm(keys, self.k_norm[...], eps, axis=1)
        attended, pool = attend(queries, keys, values, pool, step)
        x = x + unit_norm(step.chip.combine(self.attn_out[...] @ attended), self.attn_post_norm[...], eps)
        fed = gelu_mlp(unit_norm(x, self.mlp_norm[...], eps), self.gate_up[...], self.down[...])
        return x + unit_norm(step.chip.combine(fed), self.mlp_post_norm[...], eps), pool
