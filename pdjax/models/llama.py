"""The Llama block. Llama 2 and 3, SmolLM2 and 3, Mistral and Phi-3 and 4 are this block: what differs between them are the rotary tables
and windows of their layers, which are data (`ModelShape`)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from pdjax.models.layers import LayerStep, attend, heads_of, layer_params, rms_norm, silu_mlp
from pdjax.models.shape import ModelShape


class Block(nnx.Module):
    """One layer: attention and a gated MLP, each behind a norm."""

    def __init__(self, shape: ModelShape, dtype: jnp.dtype):
        param = layer_params(shape, dtype)
        self.shape = nnx.static(shape)
        self.attn_norm = param("attn_norm")
        self.qkv = param("qkv")
        self.attn_out = param("attn_out")
        self.mlp_norm = param("mlp_norm")
        self.gate_up = param("gate_up")
        self.down = param("down")

    def __call__(self, x: jax.Array, pool: jax.Array, step: LayerStep) -> tuple[jax.Array, jax.Array]:
        """x [E, T] -> (x [E, T], pool with the KV of the step's rows written)."""
        eps = self.shape.norm_eps
        queries, keys, values = heads_of(self.qkv[...] @ rms_norm(x, self.attn_norm[...], eps), self.shape)
        attended, pool = attend(queries, keys, values, pool, step)
        x = x + step.chip.combine(self.attn_out[...] @ attended)
        fed = silu_mlp(rms_norm(x, self.mlp_norm[...], eps), self.gate_up[...], self.down[...])
        return x + step.chip.combine(fed), pool
