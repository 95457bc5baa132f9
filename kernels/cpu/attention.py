"""Decode attention on CPU by a kernel of its own; prefill in XLA, whose products are large."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from pdjax.kernels.base import FLOAT_OF_BITS, Attend, AttentionSpec, DecodeBatch, PrefillBatch, write_kv
from pdjax.kernels.xla import XlaAttention

_SUPPORTED = (jnp.float32, jnp.int8, jnp.uint16)


def why_not(pool: jax.ShapeDtypeStruct) -> str | None:
    """What keeps the kernel from a pool [layers, pages, page_size, 2 * K, D], if anything does."""
    if pool.dtype in _SUPPORTED:
        return None
    return f"a pool of {FLOAT_OF_BITS.get(pool.dtype, pool.dtype)} is none of float32, bfloat16 and int8"


class CpuAttention:
    """`pdjax.kernels.base.Attention` for pools that `why_not` has nothing against."""

    name = "cpu"

    def __init__(self) -> None:
        self._prefill = XlaAttention()

    def prefill(self, batch: PrefillBatch) -> Attend:
        return self._prefill.prefill(batch)

    def decode(self, batch: DecodeBatch) -> Attend:
        # Only a process that decodes compiles the kernel and loads its compiler.
        from pdjax.kernels.cpu.decode_attention import attend_pages

        def attend(
            queries: jax.Array, kv: jax.Array, pool: jax.Array, layer: jax.Array | int, spec: AttentionSpec
        ) -> tuple[jax.Array, jax.Array]:
            pool = write_kv(pool, layer, batch, kv, spec.kv_scales)
            num_heads, head_dim = queries.shape[1:]
            attended = attend_pages(
                queries.astype(jnp.float32),
                pool,
                batch.tables,
                batch.visible,
                jnp.stack([jnp.asarray(layer, jnp.int32), jnp.asarray(0 if spec.window is None else spec.window, jnp.int32)]),
                jnp.array([head_dim**-0.5 if spec.scale is None else spec.scale, spec.soft_cap or 0.0], jnp.float32),
                jnp.ones(pool.shape[3], jnp.float32) if spec.kv_scales is None else spec.kv_scales,
                jnp.full(num_heads, -math.inf, jnp.float32) if spec.sinks is None else spec.sinks.astype(jnp.float32),
            )
            return attended.astype(queries.dtype), pool

        return attend
