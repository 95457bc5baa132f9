"""Mixtral: a Llama block with a mixture of experts in place of the MLP."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pdjax.models import layers
from pdjax.models.layers import layer_params
from pdjax.models.moe import ExpertWeights, mix_experts
from pdjax.models.shape import ModelShape


class Block(layers.Block):
    """One layer: attention and experts, each behind a norm."""

    def __init__(self, shape: ModelShape, dtype: jnp.dtype):
        super().__init__(shape, dtype)
        param = layer_params(shape, dtype)
        self.router = param("router")
        self.experts_gate_up = param("experts_gate_up")
        self.experts_down = param("experts_down")

    def feed(self, normed: jax.Array, chip: jax.Array | int) -> jax.Array:
        assert self.shape.experts is not None, "a model without experts"
        weights = ExpertWeights(self.router[...], self.experts_gate_up[...], self.experts_down[...])
        return mix_experts(normed, weights, self.shape.experts, chip)
