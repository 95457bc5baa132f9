"""Scales of a pool of int8: how much one step of its integers is worth, for keys and for values of each head of each layer.

Scales are static: prefill and decode, and everything that is cached, must mean the same by the same integers. Unless a file says what they
are, each worker finds them from the weights when it loads the model: it runs made-up prompts through the model once and takes the largest
keys and values of each head. Workers of different kind or width do not add in the same order, so their findings differ in the last bits.
Therefore that run computes in float32 whatever the dtype of the model, and scales are rounded up to three significant bits: they come out
equal unless a finding lies within rounding errors of such a number. What workers exchange before they trust each other's KV (`Layout`)
holds a digest of the scales, which finds those cases. Powers of two would be safer still; they make int8 less accurate than fp8.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import xxhash

from pdjax.engine.mesh import Chips, put
from pdjax.engine.steps import Rows
from pdjax.engine.weights import LayerParams, PlacedWeights
from pdjax.kernels.base import Attend, AttentionSpec, PrefillBatch, prefill_batch, row_owners
from pdjax.kernels.reference import ReferenceAttention
from pdjax.models.layers import Params, rotary_tables
from pdjax.models.model import KV_SCALES, Model, Step
from pdjax.models.shape import ModelShape, WeightSpec

MARGIN = 1.125
"""Room above the largest key or value that was found. On SmolLM2, the largest of texts are 1.13 times as large as those of the made-up
prompts in the median head, and 1.9 times in the worst. What does not fit is clamped, which costs less than coarser steps for all."""

MAX_INT8 = 127

_NUM_SEQS, _SEQ_TOKENS, _PAGE_TOKENS = 8, 64, 16
_SEQ_PAGES = _SEQ_TOKENS // _PAGE_TOKENS


class KVScales(NamedTuple):
    """`values`: float32[layers, 2 * K], all positive, keys and values by turns as in the pool. `digest`: equal exactly for equal values."""

    values: np.ndarray
    digest: str

    @classmethod
    def of(cls, values: np.ndarray) -> KVScales:
        return cls(values, f"xxh3:{xxhash.xxh3_64_hexdigest(np.ascontiguousarray(values, '<f4').tobytes())}")


def read_scales(path: Path, shape: ModelShape) -> KVScales:
    """Scales from a file that `write_scales` wrote, or anybody: JSON, one list of 2 * K numbers for each layer.

    Raises ValueError naming the file and what is wrong with it, OSError where it cannot be read.
    """
    try:
        rows = msgspec.json.decode(path.read_bytes(), type=list[list[float]])
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} does not hold a list of lists of numbers: {error}") from error
    lengths = sorted({len(row) for row in rows})
    if len(rows) != shape.num_layers or lengths != [2 * shape.num_kv_heads]:
        wanted = f"{shape.num_layers} lists of {2 * shape.num_kv_heads}"
        raise ValueError(f"{path} holds {len(rows)} lists of {', '.join(map(str, lengths)) or 0} scales, the model needs {wanted}")
    limits = np.finfo(np.float32)
    if bad := [value for row in rows for value in row if not float(limits.tiny) <= value <= float(limits.max)]:
        raise ValueError(f"{path} holds the scale {bad[0]}; scales are positive float32 numbers")
    return KVScales.of(np.array(rows, np.float32))


def write_scales(path: Path, scales: KVScales) -> None:
    """For `read_scales`: a line a layer."""
    lines = [msgspec.json.encode(row).decode() for row in scales.values.tolist()]
    path.write_text("[" + ",\n ".join(lines) + "]\n")


def find_scales(shape: ModelShape, weights: PlacedWeights, chips: Chips, specs: dict[str, WeightSpec]) -> KVScales:
    """Scales for these weights. `specs`: of one layer's weights, by name. Compiles two programs, of which one runs once a layer.

    Raises ValueError naming the layer where keys or values are not finite.
    """
    peaks = _largest(shape, weights, chips, specs)
    if not np.isfinite(peaks).all():
        raise ValueError(f"keys or values of layer {int(np.argwhere(~np.isfinite(peaks))[0, 0])} are not finite")
    return KVScales.of(rounded_up(MARGIN * peaks / MAX_INT8))


def rounded_up(values: np.ndarray) -> np.ndarray:
    """To three significant bits, so to 4, 5, 6 or 7 times a power of two, float32; 1 for zero, as of a head without any use."""
    mantissas, exponents = np.frexp(values)
    return np.where(values > 0, np.ldexp(np.ceil(mantissas * 8) / 8, exponents), 1).astype(np.float32)


def with_scales(weights: PlacedWeights, scales: KVScales, chips: Chips) -> PlacedWeights:
    """The weights with each layer's scales beside its own, split over the chips as the pool is."""
    copied = np.asarray(chips.copied(jnp.asarray(scales.values)[..., None]))[..., 0]
    if isinstance(weights.layers, dict):
        return weights._replace(layers={**weights.layers, KV_SCALES: chips.place(_spec(copied[0]).stacked(len(copied)), copied)})
    placed = [chips.place(_spec(row), row) for row in copied]
    return weights._replace(layers=tuple({**layer, KV_SCALES: row} for layer, row in zip(weights.layers, placed, strict=True)))


def scales_spec(num_pool_heads: int) -> WeightSpec:
    """Of one layer's scales, as they lie on the chips: those of each chip's heads side by side."""
    return WeightSpec((2 * num_pool_heads,), ("heads",))


def _spec(row: np.ndarray) -> WeightSpec:
    return scales_spec(len(row) // 2)


def made_up_tokens(vocab_size: int) -> np.ndarray:
    """int32[rows]: spread evenly over the vocabulary, the same everywhere."""
    steps = np.arange(1, _NUM_SEQS * _SEQ_TOKENS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return ((steps >> np.uint64(33)) % np.uint64(vocab_size)).astype(np.int32)


def _largest(shape: ModelShape, weights: PlacedWeights, chips: Chips, specs: dict[str, WeightSpec]) -> np.ndarray:
    """The largest size of a key and of a value of each head: float32[layers, 2 * K].

    It stands in an array that the layers take for the pool, so that they run as in any other step.
    """
    model = Model(chips.local_shape, jnp.dtype(jnp.float32), chips.chip)

    def begin(ends: Params, tokens: jax.Array) -> tuple[jax.Array, Rows]:
        batch = _batch()
        rows = Rows(*rotary_tables(row_owners(batch)[1], model.shape), batch)
        return model.ends(ends).embedded(tokens).astype(jnp.float32), rows

    def one_layer(params: LayerParams, layer: jax.Array, x: jax.Array, peaks: jax.Array, rows: Rows) -> tuple[jax.Array, jax.Array]:
        own = {name: weight[layer] for name, weight in params.items()} if isinstance(params, dict) else params[0]
        step = Step(rows.cos, rows.sin, _recorded(rows.batch, rows.cos.shape[-2]))
        return model.unrolled((_widened(own),), x, peaks, layer, step)

    with jax.default_matmul_precision("highest"):
        x, rows = jax.jit(begin, out_shardings=chips.replicated)(weights.ends, made_up_tokens(shape.vocab_size))
        run = jax.jit(chips.over_chips(one_layer, specs), donate_argnums=(2, 3), out_shardings=(chips.replicated, chips.pool))
        peaks = put(np.zeros((shape.num_layers, 1, 1, 2 * chips.num_pool_heads, 1), np.float32), chips.pool)
        for layer in range(shape.num_layers):
            params = weights.layers if isinstance(weights.layers, dict) else (weights.layers[layer],)
            x, peaks = run(params, np.int32(layer), x, peaks, rows)
        return np.asarray(jax.jit(chips.canonical, out_shardings=chips.replicated)(peaks)).reshape(shape.num_layers, -1)


def _batch() -> PrefillBatch:
    """All made-up prompts, each on pages of its own."""
    tables = 1 + jnp.arange(_NUM_SEQS * _SEQ_PAGES, dtype=jnp.int32).reshape(_NUM_SEQS, -1)
    starts, lengths = jnp.zeros(_NUM_SEQS, jnp.int32), jnp.full(_NUM_SEQS, _SEQ_TOKENS, jnp.int32)
    first_rows = jnp.arange(_NUM_SEQS, dtype=jnp.int32) * _SEQ_TOKENS
    return prefill_batch(tables, first_rows, starts, lengths, _NUM_SEQS * _SEQ_TOKENS, _PAGE_TOKENS)


def _recorded(batch: PrefillBatch, num_pairs: int) -> Attend:
    """Attention of a step that has no pool: what it is given for one takes the largest keys and values, [layers, 1, 1, 2 * K, 1]."""
    attend = ReferenceAttention().prefill(batch)

    def record(
        queries: jax.Array, kv: jax.Array, peaks: jax.Array, layer: jax.Array | int, spec: AttentionSpec
    ) -> tuple[jax.Array, jax.Array]:
        pool = jnp.zeros((1, 1 + _NUM_SEQS * _SEQ_PAGES, _PAGE_TOKENS, *kv.shape[1:]), kv.dtype)
        attended, _ = attend(queries, kv, pool, 0, spec)
        largest = jnp.stack([_largest_turned(kv[:, 0::2], num_pairs), jnp.max(jnp.abs(kv[:, 1::2]), axis=(0, 2))], axis=1)
        return attended, peaks.at[layer, 0, 0, :, 0].set(largest.reshape(-1))

    return record


def _largest_turned(keys: jax.Array, num_pairs: int) -> jax.Array:
    """float32[K] of keys [T, K, D]: as large as an entry gets at any position, since pairs turn and keep their length."""
    first, second, rest = jnp.split(keys, (num_pairs, 2 * num_pairs), axis=2)
    return jnp.max(jnp.concatenate([jnp.hypot(first, second), jnp.abs(rest)], axis=2), axis=(0, 2))


def _widened(params: Params) -> Params:
    """Weights of bfloat16, or stored narrower for a model in bfloat16, as those of a model in float32."""
    return {name: weight.astype(jnp.float32) if weight.dtype == jnp.bfloat16 else weight for name, weight in params.items()}
