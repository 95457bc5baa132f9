"""Attention from the heads of a layer as their projection yields them: feature-major, queries and keys not rotated yet.

Any implementation of `kernels/base.py` gets its rows from `attend_heads`, which rotates, turns rows up front and stacks keys and values by
head. On a TPU each of these is a pass over memory, so an implementation may do them itself: its `Attend` is an `AttendHeads` then.
"""

from __future__ import annotations

import abc
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pdjax.kernels.base import Attend, AttentionSpec


class Heads(NamedTuple):
    """Queries, keys and values of T rows, and the rotary embedding that queries and keys have still to get (`rotate`)."""

    projected: jax.Array  # [H + 2 * K, D, T]: queries, then keys, then values
    cos: jax.Array  # float32[pairs, T]
    sin: jax.Array  # float32[pairs, T]


class AttendHeads(abc.ABC):
    """An `Attend` that takes heads as well."""

    @abc.abstractmethod
    def __call__(
        self, queries: jax.Array, kv: jax.Array, pool: jax.Array, layer: jax.Array | int, spec: AttentionSpec
    ) -> tuple[jax.Array, jax.Array]:
        """As `pdjax.kernels.base.Attend`."""

    @abc.abstractmethod
    def heads(self, heads: Heads, pool: jax.Array, layer: jax.Array | int, spec: AttentionSpec) -> tuple[jax.Array, jax.Array]:
        """The same from heads. Returns: attended [H, D, T] in the dtype of the queries, the pool."""


def attend_heads(
    attend: Attend, heads: Heads, pool: jax.Array, layer: jax.Array | int, spec: AttentionSpec
) -> tuple[jax.Array, jax.Array]:
    """Rotate queries and keys, write keys and values to the pool and attend over it: attended [H, D, T], the pool."""
    if isinstance(attend, AttendHeads):
        return attend.heads(heads, pool, layer, spec)
    num_kv_heads = pool.shape[3] // 2
    queries, _, _ = split_heads(heads.projected, num_kv_heads)
    rows = rotate(queries, heads.cos, heads.sin).transpose(2, 0, 1)
    attended, pool = attend(rows, kv_rows(heads, num_kv_heads), pool, layer, spec)
    return attended.transpose(1, 2, 0), pool


def split_heads(projected: jax.Array, num_kv_heads: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """[H + 2 * K, D, T] -> queries [H, D, T], keys [K, D, T], values [K, D, T]."""
    num_heads = projected.shape[0] - 2 * num_kv_heads
    queries, keys, values = jnp.split(projected, (num_heads, num_heads + num_kv_heads))
    return queries, keys, values


def kv_rows(heads: Heads, num_kv_heads: int) -> jax.Array:
    """Rotated keys, and values, by turns: [T, 2 * K, D]."""
    _, keys, values = split_heads(heads.projected, num_kv_heads)
    _, head_dim, num_rows = keys.shape
    kv = jnp.stack([rotate(keys, heads.cos, heads.sin), values], axis=1)
    return kv.reshape(2 * num_kv_heads, head_dim, num_rows).transpose(2, 0, 1)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotary embedding of x [heads, head_dim, T], pairing row i of a head with row i + pairs. Rows behind the pairs stay as they are."""
    pairs = cos.shape[0]
    first, second, rest = jnp.split(x, (pairs, 2 * pairs), axis=1)
    first, second = first.astype(jnp.float32), second.astype(jnp.float32)
    cos, sin = cos[None], sin[None]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=1).astype(x.dtype)
    return turned if rest.shape[1] == 0 else jnp.concatenate([turned, rest], axis=1)
