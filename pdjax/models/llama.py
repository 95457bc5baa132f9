"""The Llama block. Llama 2 and 3, SmolLM2 and 3, Mistral and Phi-3 and 4 are this block: what differs between them are the rotary tables
and windows of their layers, which are data (`ModelShape`)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pdjax.models import layers
from pdjax.models.layers import layer_params, silu_mlp
from pdjax.models.shape import ModelShape


class Block(layers.Block):
    """One layer: attention and a gated MLP, each behind a norm."""

    def __init__(self, shape: ModelShape, dtype: jnp.dtype):
        super().__init__(shape, dtype)
        param = layer_params(shape, dtype)
        self.gate_up = param("gate_up")
        self.down = param("down")

    def feed(self, normed: jax.Array, chip: jax.Array | int) -> jax.Array:
        return silu_mlp(normed, self.gate_up[...], self.down[...])
