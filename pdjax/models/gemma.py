"""What Gemma 2 and 3 share: norms that scale by 1 + weight, an MLP with GELU, a scaled embedding, capped logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from pdjax.models.layers import project_to_vocab
from pdjax.models.shape import ModelShape, weight_specs
from pdjax.models.stored import Weight


def unit_norm(x: jax.Array, weight: jax.Array, eps: float, axis: int = 0) -> jax.Array:
    """Normalise x over `axis` and scale by 1 + weight [length of that axis], all in float32; the result has the dtype of `x`."""
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=axis, keepdims=True) + eps)
    scale = (1.0 + weight.astype(jnp.float32)).reshape(-1, *(1,) * (x.ndim - axis - 1))
    return (normed * scale).astype(x.dtype)


def gelu_mlp(x: jax.Array, gate_up: Weight, down: Weight) -> jax.Array:
    """x [E, T] -> [E, T] through gate_up [2F, E] and down [E, F]."""
    with jax.named_scope("mlp"):
        gate, up = jnp.split(gate_up @ x, 2)
        return down @ (jax.nn.gelu(gate, approximate=True) * up)


class Ends(nnx.Module):
    """What comes before the first and after the last layer."""

    def __init__(self, shape: ModelShape, dtype: jnp.dtype):
        specs = weight_specs(shape)
        self.norm_eps = shape.norm_eps
        self.soft_cap = shape.logits_soft_cap
        self.embed = nnx.Param(jnp.zeros(specs["embed"].shape, dtype))
        self.final_norm = nnx.Param(jnp.zeros(specs["final_norm"].shape, dtype))
        self.lm_head = None if shape.tied_embeddings else nnx.Param(jnp.zeros(specs["lm_head"].shape, dtype))

    def embedded(self, tokens: jax.Array) -> jax.Array:
        """int32[T] -> [E, T], times sqrt(E) as the weights' dtype holds it."""
        rows = self.embed[...][tokens].T
        return rows * jnp.asarray(rows.shape[0] ** 0.5, rows.dtype)

    def normed(self, x: jax.Array) -> jax.Array:
        """Output of the last layer, [E, n], ready for `logits`."""
        return unit_norm(x, self.final_norm[...], self.norm_eps)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[E, n] -> float32[n, vocab]."""
        logits = project_to_vocab(hidden, self.embed[...] if self.lm_head is None else self.lm_head[...])
        return logits if self.soft_cap is None else self.soft_cap * jnp.tanh(logits / self.soft_cap)
