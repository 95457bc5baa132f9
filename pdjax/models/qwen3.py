"""Qwen 3: a Llama block that normalises each head of queries and keys before it rotates them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pdjax.kernels.heads import split_heads
from pdjax.models import layers, llama
from pdjax.models.layers import head_norm, layer_params
from pdjax.models.shape import ModelShape


class QkNorms(layers.Block):
    """Attention with a norm on each head's queries and keys."""

    def __init__(self, shape: ModelShape, dtype: jnp.dtype):
        super().__init__(shape, dtype)
        param = layer_params(shape, dtype)
        self.q_norm = param("q_norm")
        self.k_norm = param("k_norm")

    def heads(self, normed: jax.Array) -> jax.Array:
        queries, keys, values = split_heads(super().heads(normed), self.shape.num_kv_heads)
        eps = self.shape.norm_eps
        return jnp.concatenate([head_norm(queries, self.q_norm[...], eps), head_norm(keys, self.k_norm[...], eps), values])


class Block(QkNorms, llama.Block):
    """One layer: attention with normed queries and keys, and a gated MLP, each behind a norm."""
