"""What several families share: norms, rotary embedding, attention around its projections, and the ends of a model.

Activations are feature-major, [E, T], and every product is `weight [out, in] @ activations [in, T]`. On CPU that order reads each row of a
weight once, from memory as it lies there, for any small T; with the operands the other way round a decode step of two takes 1.4 times as
long. An accelerator's compiler lays activations out as it likes.

Modules here and in the families are flax modules of which only the structure is kept: weights stay a plain tree of arrays, so that one
block serves stacked weights under `lax.scan` and per-layer weights alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pdjax.kernels.heads import Heads
from pdjax.models.shape import ModelShape, weight_specs
from pdjax.models.stored import StoredWeight, Weight, gated_product, stored_product

Params = dict[str, Weight]
"""Weights of one module, by the last part of their path."""

MakeParam = Callable[[str], nnx.Param]


class Chip(NamedTuple):
    """This chip among those that share every layer.

    `combine` adds up what each of them has computed of a result; `index`: an int32 scalar, or 0, among them.
    """

    combine: Callable[[jax.Array], jax.Array]
    index: Callable[[], jax.Array | int]


ALONE = Chip(lambda partial_sum: partial_sum, lambda: 0)


class LayerStep(NamedTuple):
    """What one layer of a forward needs to know about the T token rows it works on."""

    cos: jax.Array  # float32[pairs, T]
    sin: jax.Array  # float32[pairs, T]
    attend: Callable[[Heads, jax.Array], tuple[jax.Array, jax.Array]]
    """(heads, pool) -> (attended [H, D, T], pool with the layer's KV of these rows written)"""
    chip: Chip = ALONE


def layer_params(shape: ModelShape, dtype: jnp.dtype) -> MakeParam:
    """Makes the parameters of one layer by name, as `weight_specs` describes them."""
    specs = weight_specs(shape)
    return lambda name: nnx.Param(jnp.zeros(specs[f"layers/{name}"].shape[1:], dtype))


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Normalise x [E, T] over its features in float32; the result has the dtype of `x`."""
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=0, keepdims=True) + eps)
    return normed.astype(x.dtype) * scale[:, None]


def head_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """`rms_norm` of every head on its own: x [heads, D, T]."""
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=1, keepdims=True) + eps)
    return normed.astype(x.dtype) * scale[None, :, None]


def rotary_tables(positions: jax.Array, shape: ModelShape) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines for positions int32[T]: float32[pairs, T] of a model with one table, else float32[tables, pairs, T]."""
    if not shape.rope_tables:
        frequencies = 1.0 / shape.rope_theta ** (np.arange(0, shape.head_dim, 2, dtype=np.float32) / shape.head_dim)
        return _turned(positions, frequencies, 1.0)
    tables = []
    for table in shape.rope_tables:
        frequencies = np.array(table.long_frequencies if shape.is_long(table) else table.frequencies)
        tables.append(_turned(positions, frequencies, table.magnitude))
    if len(tables) == 1:
        return tables[0]
    cosines, sines = zip(*tables, strict=True)
    return jnp.stack(cosines), jnp.stack(sines)


def _turned(positions: jax.Array, frequencies: np.ndarray, magnitude: float) -> tuple[jax.Array, jax.Array]:
    angles = jnp.asarray(frequencies, jnp.float32)[:, None] * positions.astype(jnp.float32)[None, :]
    if magnitude == 1.0:
        return jnp.cos(angles), jnp.sin(angles)
    return magnitude * jnp.cos(angles), magnitude * jnp.sin(angles)


def heads_of(projected: jax.Array, shape: ModelShape) -> jax.Array:
    """[qkv, T] -> heads of queries, keys and values, [H + 2 * K, D, T]. `split_heads` takes them apart."""
    return projected.reshape(shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim, -1)


def attend(heads: jax.Array, pool: jax.Array, step: LayerStep) -> tuple[jax.Array, jax.Array]:
    """Rotate queries and keys of heads [H + 2 * K, D, T], write keys and values to the pool and attend over it.

    Returns: attended [H * D, T], the pool.
    """
    with jax.named_scope("attention"):
        attended, pool = step.attend(Heads(heads, step.cos, step.sin), pool)
        return attended.reshape(-1, attended.shape[2]), pool


def silu_mlp(x: jax.Array, gate_up: Weight, down: Weight) -> jax.Array:
    """x [E, T] -> [E, T] through gate_up [2F, E] and down [E, F]."""
    with jax.named_scope("mlp"):
        return down @ gated_product(gate_up, x)


def _added(x: jax.Array, y: jax.Array) -> jax.Array:
    """x + y, rounded once. A plain sum of bfloat16 goes through small blocks on TPU, at three times the cycles that XLA expects of this."""
    return (x.astype(jnp.float32) + y.astype(jnp.float32)).astype(x.dtype)


class Block(nnx.Module):
    """One layer: attention, then what feeds forward, each behind a norm and added to its input.

    A family adds weights and says what differs: how heads come out of a projection, what feeds forward, which norms there are.
    """

    def __init__(self, shape: ModelShape, dtype: jnp.dtype):
        param = layer_params(shape, dtype)
        self.shape = nnx.static(shape)
        self.attn_norm = param("attn_norm")
        self.qkv = param("qkv")
        self.attn_out = param("attn_out")
        self.mlp_norm = param("mlp_norm")

    def __call__(self, x: jax.Array, pool: jax.Array, step: LayerStep) -> tuple[jax.Array, jax.Array]:
        """x [E, T] -> (x [E, T], pool with the KV of the step's rows written)."""
        attended, pool = attend(self.heads(self.norm(x, self.attn_norm[...])), pool, step)
        x = _added(x, self.behind_attention(step.chip.combine(self.attn_out[...] @ attended)))
        fed = self.feed(self.norm(x, self.mlp_norm[...]), step.chip.index())
        return _added(x, self.behind_feed(step.chip.combine(fed))), pool

    def norm(self, x: jax.Array, scale: jax.Array) -> jax.Array:
        return rms_norm(x, scale, self.shape.norm_eps)

    def heads(self, normed: jax.Array) -> jax.Array:
        """[E, T] -> heads of queries, keys and values, [H + 2 * K, D, T]."""
        return heads_of(self.qkv[...] @ normed, self.shape)

    def feed(self, normed: jax.Array, chip: jax.Array | int) -> jax.Array:
        """[E, T] -> [E, T], or what the chip with index `chip` adds to it."""
        raise NotImplementedError

    def behind_attention(self, result: jax.Array) -> jax.Array:
        """[E, T] -> [E, T], on its way to the residual stream."""
        return result

    def behind_feed(self, result: jax.Array) -> jax.Array:
        """[E, T] -> [E, T], on its way to the residual stream."""
        return result


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
        return project_to_vocab(hidden, self.embed[...] if self.lm_head is None else self.lm_head[...])


def project_to_vocab(hidden: jax.Array, weight: Weight) -> jax.Array:
    """hidden [E, n], weight [vocab, E] -> float32[n, vocab]."""
    if isinstance(weight, StoredWeight):
        logits = stored_product(weight, hidden)
    else:
        logits = jnp.matmul(weight, hidden, preferred_element_type=jnp.float32)
    # Without the barrier the transpose is taken into the product, which then reads the weight in the slow order.
    return jax.lax.optimization_barrier(logits).T
