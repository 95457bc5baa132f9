"""KV pages out of and into the pool. Chunks are page-major `[n, layers, page_size, 2 * kv_heads, head_dim]`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def gather_pages(pool: jax.Array, pages: jax.Array) -> jax.Array:
    """Pages int32[n] of every layer, as one chunk."""
    return jnp.swapaxes(pool[:, pages], 0, 1)


def install_pages(pool: jax.Array, pages: jax.Array, kv: jax.Array) -> jax.Array:
    """Write row i of the chunk `kv` to page `pages[i]`; rows without a page of their own go to the null page 0."""
    return pool.at[:, pages].set(jnp.swapaxes(kv, 0, 1).astype(pool.dtype))


def padded_pages(pages: list[int], bucket: int) -> np.ndarray:
    """int32[bucket], padded with the null page."""
    padded = np.zeros(bucket, np.int32)
    padded[: len(pages)] = pages
    return padded


def padded_rows(kv: np.ndarray, bucket: int) -> np.ndarray:
    """The chunk with zero rows up to `bucket`."""
    padded = np.zeros((bucket, *kv.shape[1:]), kv.dtype)
    padded[: len(kv)] = kv
    return padded
