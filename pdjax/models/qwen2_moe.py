"""Qwen 2 with a mixture of experts in place of the MLP, and a shared expert beside it that every token goes through."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pdjax.models import mixtral
from pdjax.models.layers import heads_of, layer_params, silu_mlp
from pdjax.models.shape import ModelShape


class Block(mixtral.Block):
    """One layer: attention with a bias in its projection, and experts with a shared one beside them, each behind a norm."""

    def __init__(self, shape: ModelShape, dtype: jnp.dtype):
        super().__init__(shape, dtype)
        param = layer_params(shape, dtype)
        self.qkv_bias = param("qkv_bias")
        self.shared_gate = param("shared_gate")
        self.shared_gate_up = param("shared_gate_up")
        self.shared_down = param("shared_down")

    def heads(self, normed: jax.Array) -> jax.Array:
        return heads_of(self.qkv[...] @ normed + self.qkv_bias[...][:, None], self.shape)

    def feed(self, normed: jax.Array, chip: jax.Array | int) -> jax.Array:
        shared = silu_mlp(normed, self.shared_gate_up[...], self.shared_down[...])
        shared = jax.nn.sigmoid(self.shared_gate[...] @ normed) * shared
        return super().feed(normed, chip) + shared
