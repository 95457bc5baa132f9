"""Qwen 2 and 2.5: a Llama block whose queries, keys and values have a bias."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pdjax.models import llama
from pdjax.models.layers import heads_of, layer_params
from pdjax.models.shape import ModelShape


class Block(llama.Block):
    """One layer: attention with a bias in its projection, and a gated MLP, each behind a norm."""

    def __init__(self, shape: ModelShape, dtype: jnp.dtype):
        super().__init__(shape, dtype)
        self.qkv_bias = layer_params(shape, dtype)("qkv_bias")

    def heads(self, normed: jax.Array) -> jax.Array:
        return heads_of(self.qkv[...] @ normed + self.qkv_bias[...][:, None], self.shape)
