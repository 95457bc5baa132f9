"""The Llama architecture (SmolLM2 is one) over a paged KV pool.

`Block` and `Ends` are flax modules of which only the structure is kept: weights stay a plain tree of arrays, so that one block
serves stacked weights under `lax.scan` and per-layer weights alike. One forward serves prefill and decode; what differs is the
`Step` it is given.

Activations are feature-major, [E, T], and every product is `weight [out, in] @ activations [in, T]`. On CPU that order reads each row of a
weight once, from memory as it lies there, for any small T; with the operands the other way round a decode step of two takes 1.4 times as
long. An accelerator's compiler lays activations out as it likes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pdjax.kernels.base import PLAIN, Attend
from pdjax.models.shape import ModelShape, weight_specs

Params = dict[str, jax.Array]
"""Weights of one module, by the last part of their path."""


class Step(NamedTuple):
    """What every layer of a forward needs to know about the T token rows it works on."""

    cos: jax.Array  # float32[head_dim / 2, T]
    sin: jax.Array  # float32[head_dim / 2, T]
    attend: Attend


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Normalise x [E, T] over its features in float32; the result has the dtype of `x`."""
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=0, keepdims=True) + eps)
    return normed.astype(x.dtype) * scale[:, None]


def rotary_tables(positions: jax.Array, shape: ModelShape) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines float32[head_dim / 2, T] for positions int32[T]."""
    frequencies = 1.0 / shape.rope_theta ** (np.arange(0, shape.head_dim, 2, dtype=np.float32) / shape.head_dim)
    angles = jnp.asarray(frequencies, jnp.float32)[:, None] * positions.astype(jnp.float32)[None, :]
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotary embedding of x [heads, head_dim, T], pairing row i of a head with row i + head_dim / 2."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=1)
    cos, sin = cos[None], sin[None]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=1).astype(x.dtype)


class Block(nnx.Module):
    """One transformer layer. Writes the KV of its rows into the pool, then attends over the pool."""

    def __init__(self, shape: ModelShape, dtype: jnp.dtype):
        specs = weight_specs(shape)

        def param(name: str) -> nnx.Param:
            return nnx.Param(jnp.zeros(specs[f"layers/{name}"].shape[1:], dtype))

        self.shape = shape
        self.attn_norm = param("attn_norm")
        self.qkv = param("qkv")
        self.attn_out = param("attn_out")
        self.mlp_norm = param("mlp_norm")
        self.gate_up = param("gate_up")
        self.down = param("down")

    def __call__(self, x: jax.Array, pool: jax.Array, layer: jax.Array | int, step: Step) -> tuple[jax.Array, jax.Array]:
        """x [E, T] -> (x [E, T], pool with layer `layer` of the step's pages written)."""
        queries, kv = self._project(rms_norm(x, self.attn_norm[...], self.shape.norm_eps), step)
        attended, pool = step.attend(queries, kv, pool, layer, PLAIN)
        x = x + self.attn_out[...] @ attended.reshape(x.shape[1], -1).T
        gate, up = jnp.split(self.gate_up[...] @ rms_norm(x, self.mlp_norm[...], self.shape.norm_eps), 2)
        return x + self.down[...] @ (jax.nn.silu(gate) * up), pool

    def _project(self, x: jax.Array, step: Step) -> tuple[jax.Array, jax.Array]:
        """x [E, T] -> rotated queries [T, H, D] and pool entries [T, 2K, D]: keys (rotated) and values by turns."""
        rows, heads, kv_heads, dim = x.shape[1], self.shape.num_heads, self.shape.num_kv_heads, self.shape.head_dim
        projected = (self.qkv[...] @ x).reshape(heads + 2 * kv_heads, dim, rows)
        queries, keys, values = jnp.split(projected, (heads, heads + kv_heads))
        kv = jnp.stack([rotate(keys, step.cos, step.sin), values], axis=1).reshape(2 * kv_heads, dim, rows)
        return rotate(queries, step.cos, step.sin).transpose(2, 0, 1), kv.transpose(2, 0, 1)


class Ends(nnx.Module):
    """What comes before the first and after the last layer."""

    def __init__(self, shape: ModelShape, dtype: jnp.dtype):
        specs = weight_specs(shape)
        self.norm_eps = shape.norm_eps
        self.embed = nnx.Param(jnp.zeros(specs["embed"].shape, dtype))
        self.final_norm = nnx.Param(jnp.zeros(specs["final_norm"].shape, dtype))
        self.lm_head = None if shape.tied_embeddings else nnx.Param(jnp.zeros(specs["lm_head"].shape, dtype))

    def embedded(self, tokens: jax.Array) -> jax.Array:
        """int32[T] -> [E, T]."""
        return self.embed[...][tokens].T

    def normed(self, x: jax.Array) -> jax.Array:
        """Output of the last layer, [E, n], ready for `logits`."""
        return rms_norm(x, self.final_norm[...], self.norm_eps)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[E, n] -> float32[n, vocab]."""
        weight = self.embed if self.lm_head is None else self.lm_head
        logits = jnp.matmul(weight[...], hidden, preferred_element_type=jnp.float32)
        # Without the barrier the transpose is taken into the product, which then reads the weight in the slow order.
        return jax.lax.optimization_barrier(logits).T


class Llama:
    """The structure of one model, without weights. Its methods are traced inside the engine's programs."""

    def __init__(self, shape: ModelShape, dtype: jnp.dtype):
        self.shape = shape
        self._block_graph = nnx.split(nnx.eval_shape(lambda: Block(shape, dtype)))[0]
        self._ends_graph = nnx.split(nnx.eval_shape(lambda: Ends(shape, dtype)))[0]

    def block(self, params: Params) -> Block:
        return nnx.merge(self._block_graph, _as_state(params))

    def ends(self, params: Params) -> Ends:
        return nnx.merge(self._ends_graph, _as_state(params))

    def scanned(self, layers: Params, x: jax.Array, pool: jax.Array, first: jax.Array, step: Step) -> tuple[jax.Array, jax.Array]:
        """Run layers `first` and later with one traced body; `layers` holds their stacked weights. Quick to compile."""

        def body(carry: tuple[jax.Array, jax.Array], layer: tuple[Params, jax.Array]) -> tuple[tuple[jax.Array, jax.Array], None]:
            params, index = layer
            return self.block(params)(*carry, index, step), None

        indices = first + jnp.arange(len(layers["qkv"]), dtype=jnp.int32)
        (x, pool), _ = jax.lax.scan(body, (x, pool), (layers, indices))
        return x, pool

    def unrolled(
        self, layers: Sequence[Params], x: jax.Array, pool: jax.Array, first: jax.Array, step: Step
    ) -> tuple[jax.Array, jax.Array]:
        """Run layers `first` and later one after the other; `layers` holds each one's weights.

        No weight is copied: a scan on CPU slices every layer's weights out of the stack first, which for a batch of one costs as
        much as the products themselves.
        """
        for index, params in enumerate(layers):
            x, pool = self.block(params)(x, pool, first + index, step)
        return x, pool


def _as_state(params: Params) -> nnx.State:
    return nnx.State({name: nnx.Param(value) for name, value in params.items()})
