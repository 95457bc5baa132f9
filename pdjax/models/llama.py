"""The Llama architecture (SmolLM2 is one) over a paged KV pool.

`Block` and `Ends` are flax modules of which only the structure is kept: weights stay a plain tree of arrays, so that one block
serves stacked weights under `lax.scan` and per-layer weights alike. One forward serves prefill and decode; what differs is the
`Step` it is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pdjax.kernels.base import Attend
from pdjax.models.shape import ModelShape, weight_specs

Params = dict[str, jax.Array]
"""Weights of one module, by the last part of their path."""


class Step(NamedTuple):
    """What every layer of a forward needs to know about the T token rows it works on."""

    cos: jax.Array  # float32[T, head_dim / 2]
    sin: jax.Array  # float32[T, head_dim / 2]
    pages: jax.Array  # int32[T]: page that takes the row's KV; 0 for padding
    offsets: jax.Array  # int32[T]: slot in that page
    attend: Attend


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Normalise over the last axis in float32; the result has the dtype of `x`."""
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return normed.astype(x.dtype) * jnp.broadcast_to(scale, x.shape)


def rotary_tables(positions: jax.Array, shape: ModelShape) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines float32[T, head_dim / 2] for positions int32[T]."""
    frequencies = 1.0 / shape.rope_theta ** (np.arange(0, shape.head_dim, 2, dtype=np.float32) / shape.head_dim)
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(frequencies, jnp.float32)[None, :]
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotary embedding of x [T, heads, head_dim], pairing column i with column i + head_dim / 2."""
    half = x.shape[-1] // 2
    wide, cos, sin = x.astype(jnp.float32), cos[:, None, :], sin[:, None, :]
    first, second = wide[..., :half], wide[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


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
        """x [T, E] -> (x [T, E], pool with layer `layer` of the step's pages written)."""
        queries, kv = self._project(rms_norm(x, self.attn_norm[...], self.shape.norm_eps), step)
        pool = pool.at[layer, step.pages, step.offsets].set(kv.astype(pool.dtype))
        attended = step.attend(queries, pool, layer)
        x = x + attended.reshape(x.shape[0], -1) @ self.attn_out[...]
        gate, up = jnp.split(rms_norm(x, self.mlp_norm[...], self.shape.norm_eps) @ self.gate_up[...], 2, axis=-1)
        return x + (jax.nn.silu(gate) * up) @ self.down[...], pool

    def _project(self, x: jax.Array, step: Step) -> tuple[jax.Array, jax.Array]:
        """x [T, E] -> rotated queries [T, H, D] and pool entries [T, 2K, D]: keys (rotated) and values by turns."""
        rows, heads, kv_heads, dim = x.shape[0], self.shape.num_heads, self.shape.num_kv_heads, self.shape.head_dim
        projected = (x @ self.qkv[...]).reshape(rows, heads + 2 * kv_heads, dim)
        queries, keys, values = jnp.split(projected, (heads, heads + kv_heads), axis=1)
        keys = rotate(keys, step.cos, step.sin)
        kv = jnp.stack([keys, values], axis=2).reshape(rows, 2 * kv_heads, dim)
        return rotate(queries, step.cos, step.sin), kv


class Ends(nnx.Module):
    """What comes before the first and after the last layer."""

    def __init__(self, shape: ModelShape, dtype: jnp.dtype):
        specs = weight_specs(shape)
        self.norm_eps = shape.norm_eps
        self.embed = nnx.Param(jnp.zeros(specs["embed"].shape, dtype))
        self.final_norm = nnx.Param(jnp.zeros(specs["final_norm"].shape, dtype))
        self.lm_head = None if shape.tied_embeddings else nnx.Param(jnp.zeros(specs["lm_head"].shape, dtype))

    def embedded(self, tokens: jax.Array) -> jax.Array:
        """int32[T] -> [T, E]."""
        return self.embed[...][tokens]

    def normed(self, x: jax.Array) -> jax.Array:
        """Output of the last layer, [n, E], ready for `logits`."""
        return rms_norm(x, self.final_norm[...], self.norm_eps)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[n, E] -> float32[n, vocab]."""
        if self.lm_head is None:
            return jnp.einsum("ne,ve->nv", hidden, self.embed[...], preferred_element_type=jnp.float32)
        return jnp.einsum("ne,ev->nv", hidden, self.lm_head[...], preferred_element_type=jnp.float32)


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

    def scanned(self, layers: Params, x: jax.Array, pool: jax.Array, step: Step) -> tuple[jax.Array, jax.Array]:
        """Run all layers with one traced body; `layers` holds stacked weights. Quick to compile."""

        def body(carry: tuple[jax.Array, jax.Array], layer: tuple[Params, jax.Array]) -> tuple[tuple[jax.Array, jax.Array], None]:
            params, index = layer
            return self.block(params)(*carry, index, step), None

        indices = jnp.arange(self.shape.num_layers, dtype=jnp.int32)
        (x, pool), _ = jax.lax.scan(body, (x, pool), (layers, indices))
        return x, pool

    def unrolled(self, layers: Sequence[Params], x: jax.Array, pool: jax.Array, step: Step) -> tuple[jax.Array, jax.Array]:
        """Run all layers one after the other; `layers` holds each layer's weights.

        No weight is copied: a scan on CPU slices every layer's weights out of the stack first, which for a batch of one costs as
        much as the products themselves.
        """
        for index, params in enumerate(layers):
            x, pool = self.block(params)(x, pool, index, step)
        return x, pool


def _as_state(params: Params) -> nnx.State:
    return nnx.State({name: nnx.Param(value) for name, value in params.items()})
