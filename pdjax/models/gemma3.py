"""Gemma 3: as Gemma 2, with norms on queries and keys instead of capped scores. Layers with a window turn by a rotary table of their own."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pdjax.kernels.heads import split_heads
from pdjax.models import gemma2
from pdjax.models.gemma import unit_norm
from pdjax.models.layers import layer_params
from pdjax.models.shape import ModelShape


class Block(gemma2.Block):
    """One layer: attention with normed queries and keys, and a gated MLP, each between two norms."""

    def __init__(self, shape: ModelShape, dtype: jnp.dtype):
        super().__init__(shape, dtype)
        param = layer_params(shape, dtype)
        self.q_norm = param("q_norm")
        self.k_norm = param("k_norm")

    def heads(self, normed: jax.Array) -> jax.Array:
        queries, keys, values = split_heads(super().heads(normed), self.shape.num_kv_heads)
        eps = self.shape.norm_eps
        normed_heads = [unit_norm(queries, self.q_norm[...], eps, axis=1), unit_norm(keys, self.k_norm[...], eps, axis=1)]
        return jnp.concatenate([*normed_heads, values])
