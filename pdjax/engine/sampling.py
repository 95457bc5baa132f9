"""Sampling on the device.

The token drawn for a row depends on its logits, its parameters, its seed and its index in the answer, never on the batch around it
or on the slot. Filters are exact and sort nothing: a top-k or top-p set holds every token whose logit reaches a threshold (ties
stay together), and the threshold is found bit by bit.

Order of operations: logit bias and min_tokens, penalties, temperature, min_p, top_k, top_p over what is left. Log probabilities are
those of the unmodified distribution.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pdjax.engine.packing import Field, PackedLayout
from pdjax.engine.state import History
from pdjax.protocol import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, MAX_TOP_LOGPROBS, Sampling

MIN_TEMPERATURE = 1e-5
"""Below it a temperature means greedy."""

_BIAS_CHUNK = 32
_LANES = 128
_INT32_MIN = np.int32(-(2**31))


class SamplerRow(NamedTuple):
    """One sequence of a step as the sampler sees it."""

    slot: int
    sampling: Sampling
    output_index: int

    @property
    def masks_stop_tokens(self) -> bool:
        return self.output_index < self.sampling.min_tokens

    @property
    def is_plain_greedy(self) -> bool:
        """Whether argmax of the untouched logits is all that it takes."""
        s = self.sampling
        return s.temperature < MIN_TEMPERATURE and not (s.logit_bias or s.uses_history or self.masks_stop_tokens or s.logprobs is not None)


class Sampled(NamedTuple):
    """Tokens of a step, still on the device. The rest is None where no row wanted log probabilities."""

    tokens: jax.Array  # int32[rows]
    logprobs: jax.Array | None = None  # float32[rows]
    top_ids: jax.Array | None = None  # int32[rows, MAX_TOP_LOGPROBS]
    top_logprobs: jax.Array | None = None  # float32[rows, MAX_TOP_LOGPROBS]


def sampler_layout(num_rows: int) -> PackedLayout:
    """Parameters of `num_rows` rows. Bias entries of all rows lie end to end; only the first `num_entries` count."""
    rows, floats = Field((num_rows,)), Field((num_rows,), np.float32)
    max_entries = num_rows * (MAX_LOGIT_BIAS + MAX_STOP_TOKEN_IDS)
    max_entries += -max_entries % _BIAS_CHUNK
    return PackedLayout(
        {
            "slots": rows,
            "top_k": rows,
            "seeds": Field((num_rows, 2), np.uint32),
            "output_indices": rows,
            "temperatures": floats,
            "top_p": floats,
            "min_p": floats,
            "presence": floats,
            "frequency": floats,
            "repetition": floats,
            "num_entries": Field((1,)),
            "entry_rows": Field((max_entries,)),
            "entry_ids": Field((max_entries,)),
            "entry_values": Field((max_entries,), np.float32),
        }
    )


def pack_rows(layout: PackedLayout, rows: list[SamplerRow], padding_slot: int) -> np.ndarray:
    flat, views = layout.new()
    views["slots"][:] = padding_slot
    views["repetition"][:] = views["top_p"][:] = 1.0
    end = 0
    for i, (slot, s, output_index) in enumerate(rows):
        views["slots"][i], views["top_k"][i], views["output_indices"][i] = slot, s.top_k, output_index
        views["seeds"][i] = (s.seed >> 32 & 0xFFFFFFFF, s.seed & 0xFFFFFFFF)
        views["temperatures"][i] = s.temperature if s.temperature >= MIN_TEMPERATURE else 0.0
        views["top_p"][i], views["min_p"][i] = s.top_p, s.min_p
        views["presence"][i], views["frequency"][i], views["repetition"][i] = s.presence_penalty, s.frequency_penalty, s.repetition_penalty
        entries = [*s.logit_bias.items(), *((stop, -np.inf) for stop in s.stop_token_ids if rows[i].masks_stop_tokens)]
        if entries:
            start, end = end, end + len(entries)
            views["entry_rows"][start:end] = i
            views["entry_ids"][start:end], views["entry_values"][start:end] = zip(*entries, strict=True)
    views["num_entries"][0] = end
    return flat


def greedy(logits: jax.Array) -> jax.Array:
    """float32[rows, vocab] -> int32[rows]; the lowest id among equals."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def sample(logits: jax.Array, history: History, params: dict[str, jax.Array]) -> jax.Array:
    """Draw one token a row from float32[rows, vocab] logits, under the fields of `sampler_layout`. Returns int32[rows]."""
    logits = _add_entries(logits, params)
    logits = _penalised(logits, history, params)
    is_random = params["temperatures"] > 0
    drawn = jax.lax.cond(jnp.any(is_random), lambda: _draw(logits, params), lambda: jnp.zeros(logits.shape[0], jnp.int32))
    return jnp.where(is_random, drawn, greedy(logits))


def count_tokens(history: History, slots: jax.Array, tokens: jax.Array) -> History:
    """Note one output token for each of `slots`."""
    return history._replace(output_counts=history.output_counts.at[slots, tokens].add(1))


def log_probabilities(logits: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of the chosen tokens, float32[rows], and the best tokens with theirs, [rows, MAX_TOP_LOGPROBS], best first."""
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    top_logprobs, top_ids = jax.lax.top_k(logprobs, MAX_TOP_LOGPROBS)
    chosen = jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]
    return chosen, top_ids, top_logprobs


def _add_entries(logits: jax.Array, params: dict[str, jax.Array]) -> jax.Array:
    """Add bias entries, a chunk at a time, so that the cost follows the entries in use. Entries past the last add 0 to token 0."""

    def add_chunk(i: jax.Array, logits: jax.Array) -> jax.Array:
        rows, ids, values = (
            jax.lax.dynamic_slice_in_dim(params[name], i * _BIAS_CHUNK, _BIAS_CHUNK) for name in ("entry_rows", "entry_ids", "entry_values")
        )
        return logits.at[rows, ids].add(values)

    return jax.lax.fori_loop(0, (params["num_entries"][0] + _BIAS_CHUNK - 1) // _BIAS_CHUNK, add_chunk, logits)


def _penalised(logits: jax.Array, history: History, params: dict[str, jax.Array]) -> jax.Array:
    presence, frequency, repetition = (params[name][:, None] for name in ("presence", "frequency", "repetition"))
    is_used = jnp.any((presence != 0) | (frequency != 0) | (repetition != 1))

    def apply() -> jax.Array:
        counts = history.output_counts[params["slots"]]
        is_output = counts > 0
        is_seen = is_output | history.in_prompt[params["slots"]]
        repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
        penalised = jnp.where(is_seen, repeated, logits)
        return penalised - frequency * counts.astype(jnp.float32) - presence * is_output.astype(jnp.float32)

    return jax.lax.cond(is_used, apply, lambda: logits)


def _draw(logits: jax.Array, params: dict[str, jax.Array]) -> jax.Array:
    """Gumbel-max over the kept tokens. Rows with temperature 0 draw something that nobody looks at."""
    temperatures = jnp.where(params["temperatures"] > 0, params["temperatures"], 1.0)
    scaled = logits / temperatures[:, None]
    keys = ordered_bits(logits)
    weights = jnp.exp(scaled - jnp.max(scaled, axis=-1, keepdims=True))
    threshold = filter_threshold(keys, weights, params)

    def noise(seed: jax.Array, index: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), index)
        return jax.random.gumbel(key, logits.shape[1:], jnp.float32)

    perturbed = scaled + jax.vmap(noise)(params["seeds"], params["output_indices"])
    return greedy(jnp.where(keys >= threshold[:, None], perturbed, -jnp.inf))


def ordered_bits(values: jax.Array) -> jax.Array:
    """int32 with the order of the float32 values; +0 and -0 are the same."""
    bits = jax.lax.bitcast_convert_type(jnp.where(values == 0, 0.0, values), jnp.int32)
    return jnp.where(bits < 0, bits ^ np.int32(0x7FFFFFFF), bits)


def filter_threshold(keys: jax.Array, weights: jax.Array, params: dict[str, jax.Array]) -> jax.Array:
    """The lowest key that min_p, top_k and top_p leave, int32[rows]; never above the best token's.

    Every filter keeps the best tokens up to some point, so thresholds combine by maximum. `weights` float32[rows, vocab] are
    probabilities but for a factor, the best token's being 1.
    """
    best = jnp.max(keys, axis=-1)
    none = jnp.full_like(best, _INT32_MIN)
    min_p, top_p = params["min_p"], params["top_p"]
    in_min_p = jnp.where(weights >= min_p[:, None], keys, best[:, None])
    threshold = jnp.where(min_p > 0, jnp.min(in_min_p, axis=-1), none)

    top_k = params["top_k"]
    has_top_k = (top_k > 0) & (top_k < keys.shape[-1])

    def with_top_k() -> jax.Array:
        kth = _largest_reaching(keys, jnp.ones_like(weights), top_k.astype(jnp.float32))
        return jnp.maximum(threshold, jnp.where(has_top_k, kth, none))

    threshold = jax.lax.cond(jnp.any(has_top_k), with_top_k, lambda: threshold)

    def with_top_p() -> jax.Array:
        kept = jnp.where(keys >= threshold[:, None], weights, 0.0)
        edge = _largest_reaching(keys, kept, top_p * _lane_sum(kept))
        return jnp.maximum(threshold, jnp.where(top_p < 1, edge, none))

    threshold = jax.lax.cond(jnp.any(top_p < 1), with_top_p, lambda: threshold)
    return jnp.minimum(threshold, best)


def _largest_reaching(keys: jax.Array, weights: jax.Array, targets: jax.Array) -> jax.Array:
    """The largest int32 t of each row for which the weights of all tokens with key >= t sum up to the row's target.

    Bit by bit from the top: 32 masked sums. Summing in one fixed order makes the sum monotone in t, rounding included.
    """

    def try_bit(i: jax.Array, found: jax.Array) -> jax.Array:
        candidate = found | jax.lax.shift_left(np.uint32(1), (31 - i).astype(jnp.uint32))
        as_key = jax.lax.bitcast_convert_type(candidate, jnp.int32) ^ _INT32_MIN
        total = _lane_sum(jnp.where(keys >= as_key[:, None], weights, 0.0))
        return jnp.where(total >= targets, candidate, found)

    found = jax.lax.fori_loop(0, 32, try_bit, jnp.zeros(targets.shape, jnp.uint32))
    return jax.lax.bitcast_convert_type(found, jnp.int32) ^ _INT32_MIN


def _lane_sum(values: jax.Array) -> jax.Array:
    """float32[rows, vocab] -> float32[rows], over many lanes at a time: a plain sum over the last axis runs one by one on CPU."""
    padded = jnp.pad(values, ((0, 0), (0, -values.shape[1] % _LANES)))
    return jnp.sum(jnp.sum(padded.reshape(values.shape[0], -1, _LANES), axis=1), axis=-1)
