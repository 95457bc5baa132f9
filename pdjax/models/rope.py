"""Rotary frequencies: the plain ones, and the ways in which they are stretched for contexts longer than those first trained on."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from pdjax.models.shape import RopeTable


class Ramp(NamedTuple):
    """Where YaRN goes over from kept to stretched frequencies: turns within the original context; and whether to whole pairs."""

    fast_turns: float = 32.0
    slow_turns: float = 1.0
    is_truncated: bool = True


USUAL_RAMP = Ramp()


def plain_frequencies(theta: float, rotary_dim: int) -> np.ndarray:
    """Radians a position of each pair: float64[rotary_dim / 2]."""
    return 1.0 / theta ** (np.arange(0, rotary_dim, 2) / rotary_dim)


def table_of(frequencies: np.ndarray, magnitude: float = 1.0) -> RopeTable:
    return RopeTable(tuple(frequencies.tolist()), magnitude)


def still_table(rotary_dim: int) -> RopeTable:
    """The table of layers without rotary embedding."""
    return RopeTable((0.0,) * (rotary_dim // 2))


def llama3_frequencies(frequencies: np.ndarray, factor: float, low: float, high: float, original_tokens: int) -> np.ndarray:
    """Llama 3.1: waves longer than original_tokens / low are stretched by `factor`, those shorter than original_tokens / high are kept,
    those between are blended."""
    turns = original_tokens * frequencies / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return frequencies * (kept + (1 - kept) / factor)


def yarn_frequencies(frequencies: np.ndarray, theta: float, factor: float, original_tokens: int, ramp: Ramp = USUAL_RAMP) -> np.ndarray:
    """YaRN: pairs that turn often within the original context are kept, slow ones stretched by `factor`, on a ramp over the pairs."""
    dim = 2 * len(frequencies)

    def pair_with(turns: float) -> float:
        return dim * math.log(original_tokens / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_with(ramp.fast_turns), pair_with(ramp.slow_turns)
    if ramp.is_truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    stretched = np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0.0, 1.0)
    return frequencies * (1 - stretched + stretched / factor)


def yarn_magnitude(factor: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0


def long_rope_magnitude(factor: float, original_tokens: int) -> float:
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original_tokens))
