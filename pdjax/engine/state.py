"""The device state of one engine: values that programs take by donation and give back updated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pdjax.models.shape import ModelShape


class History(NamedTuple):
    """What the penalties look at, one row a request slot. Only slots whose request uses penalties hold anything of use."""

    in_prompt: jax.Array  # bool[slots + 1, vocab]
    output_counts: jax.Array  # int32[slots + 1, vocab]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeviceState:
    """Owned by the engine. Whoever donates a part rebinds it in the same statement; row `slots` serves padding rows."""

    pool: jax.Array  # [layers, pages, page_size, 2 * kv_heads, head_dim]
    last_token: jax.Array  # int32[slots + 1]: what was sampled last for each request slot
    history: History


def new_state(
    shape: ModelShape, num_pool_heads: int, num_pages: int, page_size: int, num_slots: int, dtype: jnp.dtype
) -> DeviceState:
    """All zeros. Traced, so that the pool is made where it stays."""
    rows = num_slots + 1
    return DeviceState(
        pool=jnp.zeros((shape.num_layers, num_pages, page_size, 2 * num_pool_heads, shape.head_dim), dtype),
        last_token=jnp.zeros((rows,), jnp.int32),
        history=History(jnp.zeros((rows, shape.vocab_size), bool), jnp.zeros((rows, shape.vocab_size), jnp.int32)),
    )


HISTORY_CHUNK_TOKENS = 512
"""Tokens that one call of `extend_history` takes; longer lists take several calls."""


def extend_history(history: History, slot: jax.Array, keep: jax.Array, prompt: jax.Array, output: jax.Array) -> History:
    """Add tokens to one slot's row.

    Args:
        slot: int32 scalar.
        keep: int32 scalar, 0 to forget what the row holds first, 1 to add to it.
        prompt, output: int32[HISTORY_CHUNK_TOKENS], padded with the vocabulary's size.
    """
    in_prompt = (history.in_prompt[slot] & (keep > 0)).at[prompt].set(True, mode="drop")
    counts = (history.output_counts[slot] * keep).at[output].add(1, mode="drop")
    return History(history.in_prompt.at[slot].set(in_prompt), history.output_counts.at[slot].set(counts))
