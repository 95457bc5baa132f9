"""Gemma 2: norms before and after attention and MLP, capped attention scores, every other layer with a window."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pdjax.models import layers
from pdjax.models.gemma import gelu_mlp, unit_norm
from pdjax.models.layers import layer_params
from pdjax.models.shape import ModelShape


class Block(layers.Block):
    """One layer: attention and a gated MLP, each between two norms."""

    def __init__(self, shape: ModelShape, dtype: jnp.dtype):
        super().__init__(shape, dtype)
        param = layer_params(shape, dtype)
        self.attn_post_norm = param("attn_post_norm")
        self.gate_up = param("gate_up")
        self.down = param("down")
        self.mlp_post_norm = param("mlp_post_norm")

    def norm(self, x: jax.Array, scale: jax.Array) -> jax.Array:
        return unit_norm(x, scale, self.shape.norm_eps)

    def feed(self, normed: jax.Array, chip: jax.Array | int) -> jax.Array:
        return gelu_mlp(normed, self.gate_up[...], self.down[...])

    def behind_attention(self, result: jax.Array) -> jax.Array:
        return self.norm(result, self.attn_post_norm[...])

    def behind_feed(self, result: jax.Array) -> jax.Array:
        return self.norm(result, self.mlp_post_norm[...])
