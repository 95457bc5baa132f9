"""Reads what config.json says about rotary embedding, in the form of transformers 4 (`rope_theta`, `rope_scaling`) or 5 (`rope_parameters`)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pdjax.checkpoints.metadata import Metadata
from pdjax.models.rope import (
    Ramp,
    llama3_frequencies,
    long_rope_magnitude,
    plain_frequencies,
    table_of,
    yarn_frequencies,
    yarn_magnitude,
)
from pdjax.models.shape import RopeTable


def rope_parameters(config: Metadata, default_theta: float, theta_key: str = "rope_theta", layer_type: str | None = None) -> Metadata:
    """The parameters of one table, with `rope_theta` always among them; `layer_type` names one of several."""
    parameters = config.section("rope_parameters")
    if layer_type is not None:
        parameters = parameters.section(layer_type)
    is_old = not parameters.values
    if is_old and theta_key == "rope_theta":
        parameters = config.section("rope_scaling")
    theta = config.optional(theta_key, default_theta) if is_old else default_theta
    return Metadata(parameters.where, {"rope_theta": theta} | {key: value for key, value in parameters.values.items() if value is not None})


def rope_table(config: Metadata, rope: Metadata, head_dim: int) -> RopeTable | None:
    """The table that `rope` describes; None where it is the plain one of whole heads.

    Raises ValueError for a kind of scaling that is not supported.
    """
    table = explicit_table(config, rope, head_dim)
    is_plain = _kind(rope) == "default" and 2 * len(table.frequencies) == head_dim
    return None if is_plain else table


def explicit_table(config: Metadata, rope: Metadata, head_dim: int) -> RopeTable:
    """As `rope_table`, the plain one too."""
    kind = _kind(rope)
    share = rope.optional("partial_rotary_factor", config.optional("partial_rotary_factor", 1.0))
    rotary_dim = int(head_dim * share)
    if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > head_dim:
        raise ValueError(f"{rope.where}: partial_rotary_factor {share} turns {rotary_dim} of {head_dim} rows, which is no even number")
    frequencies = plain_frequencies(rope.required("rope_theta", float), rotary_dim)
    if kind == "default":
        return table_of(frequencies)
    if kind not in _SCALINGS:
        raise ValueError(f"{rope.where}: rope_type {kind!r} is not supported; supported are default, {', '.join(_SCALINGS)}")
    return _SCALINGS[kind](config, rope, frequencies)


def _kind(rope: Metadata) -> str:
    return rope.optional("rope_type", rope.optional("type", "default"))


def _original_tokens(config: Metadata, rope: Metadata) -> int:
    for source in (config, rope):
        if source.has("original_max_position_embeddings"):
            return source.positive("original_max_position_embeddings")
    return config.positive("max_position_embeddings")


def _linear(config: Metadata, rope: Metadata, frequencies: np.ndarray) -> RopeTable:
    return table_of(frequencies / rope.required("factor", float))


def _llama3(config: Metadata, rope: Metadata, frequencies: np.ndarray) -> RopeTable:
    factor, low, high = (rope.required(key, float) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    return table_of(llama3_frequencies(frequencies, factor, low, high, _original_tokens(config, rope)))


def _yarn(config: Metadata, rope: Metadata, frequencies: np.ndarray) -> RopeTable:
    rope.refuse_unless("mscale", None, None)
    original = _original_tokens(config, rope)
    factor = rope.optional("factor", config.positive("max_position_embeddings") / original)
    ramp = Ramp(rope.optional("beta_fast", 32.0), rope.optional("beta_slow", 1.0), rope.optional("truncate", True))
    stretched = yarn_frequencies(frequencies, rope.required("rope_theta", float), factor, original, ramp)
    return table_of(stretched, rope.optional("attention_factor", yarn_magnitude(factor)))


def _long_rope(config: Metadata, rope: Metadata, frequencies: np.ndarray) -> RopeTable:
    factors = []
    for key in ("short_factor", "long_factor"):
        factors.append(np.array(rope.numbers(key)))
        if len(factors[-1]) != len(frequencies):
            raise ValueError(f"{rope.where}: {key} has {len(factors[-1])} entries for {len(frequencies)} pairs that turn")
    original = _original_tokens(config, rope)
    factor = rope.optional("factor", config.positive("max_position_embeddings") / original)
    short, long = (tuple((frequencies / each).tolist()) for each in factors)
    return RopeTable(short, rope.optional("attention_factor", long_rope_magnitude(factor, original)), long, original)


_SCALINGS: dict[str, Callable[[Metadata, Metadata, np.ndarray], RopeTable]] = {
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _long_rope,
    "su": _long_rope,
}
