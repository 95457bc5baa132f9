"""Pages out of and into the pool in plain XLA: the copy, and the checksum of what was copied. The oracle for the kernels beside it.

    pool  [layers, pages, page_size, 2 * K, D]          chunk [n, layers, page_size, 2 * K, D]

          page:    0    1    2    3    4                    row 0      row 1
    layer 0      | .  | a0 | .  | b0 | .  |    pages     +----+----+----+----+
    layer 1      | .  | a1 | .  | b1 | .  |  ==[3, 1]==> | b0 | b1 | a0 | a1 |
                                                         +----+----+----+----+
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pdjax.kernels.pages.checksum import chunk_checksum


def gather(pool: jax.Array, pages: jax.Array) -> jax.Array:
    """Pages int32[n] of every layer as one chunk [n, layers, page_size, 2 * K, D]."""
    return jnp.swapaxes(pool[:, pages], 0, 1)


def install(pool: jax.Array, pages: jax.Array, chunk: jax.Array) -> jax.Array:
    """The pool, taken over, with row i of the chunk in page `pages[i]`. Only page 0 may be named more than once; it then holds anything."""
    return pool.at[:, pages].set(jnp.swapaxes(chunk, 0, 1))


def gather_summed(pool: jax.Array, pages: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What `gather` gives, and its `chunk_checksum` uint32[2]."""
    chunk = gather(pool, pages)
    return chunk, chunk_checksum(chunk)


def install_summed(pool: jax.Array, pages: jax.Array, chunk: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What `install` gives, and the chunk's `chunk_checksum` uint32[2]."""
    return install(pool, pages, chunk), chunk_checksum(chunk)
