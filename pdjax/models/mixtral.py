"""Mixtral: a Llama block with a mixture of experts in place of the MLP."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from pdjax.models.layers import LayerStep, attend, heads_of, layer_params, rms_norm
from pdjax.models.moe import ExpertWeights, mix_experts
from pdjax.models.shape import ModelShape


class Block(nnx.Module):
    """One layer: attention and experts, each behind a norm."""

    def __init__(self, shape: ModelShape, dtype: jnp.dtype):
        param = layer_params(shape, dtype)
        self.shape = nnx.static(shape)
        self.attn_norm = param("attn_norm")
        self.qkv = param("qkv")
        self.attn_out = param("attn_out")
        self.mlp_norm = param("mlp_norm")
        self.router = param("router")
        self.experts_gate_up = param("experts_gate_up")
        self.experts_down = param("experts_down")

    def __call__(self, x: jax.Array, pool: jax.Array, step: LayerStep) -> tuple[jax.Array, jax.Array]:
        """x [E, T] -> (x [E, T], pool with the KV of the step's rows written)."""
        eps = self.shape.norm_eps
        queries, keys, values = heads_of(self.qkv[...] @ rms_norm(x, self.attn_norm[...], eps), self.shape)
        attended, pool = attend(queries, keys, values, pool, step)
        x = x + step.chip.combine(self.attn_out[...] @ attended)
        weights = ExpertWeights(self.router[...], self.experts_gate_up[...], self.experts_down[...])
        fed = mix_experts(rms_norm(x, self.mlp_norm[...], eps), weights, self.shape.experts, step.chip.index())
        return x + step.chip.combine(fed), pool
