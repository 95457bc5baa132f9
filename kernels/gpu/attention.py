"""Attention on NVIDIA GPUs behind the interface of `pdjax.kernels.base`: which kernel, in which sizes, and what it does not do.

New keys and values are written by `write_kv`, XLA's scatter into the donated pool, ahead of the kernel. Blocks of threads of one launch
run in no order and see each other's writes only through barriers that Triton does not have, so a kernel that wrote and read in one launch
would have to read the step's own rows from `kv`, a second source of keys in its loop. The scatter moves each new entry once, some
hundred bytes, which the kernel then finds in the level 2 cache.
"""

from __future__ import annotations

import logging
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pdjax.kernels.base import PLAIN, Attend, Attention, AttentionSpec, DecodeBatch, PrefillBatch, write_kv
from pdjax.kernels.gpu import hopper_attention as hopper
from pdjax.kernels.gpu.hopper_layout import clear_tails, plan
from pdjax.kernels.gpu.tiles import decode_tiles, prefill_tiles
from pdjax.kernels.gpu.triton_attention import MIN_MATRIX_ROWS, Launch, Tuning, ragged_paged_attention
from pdjax.kernels.gpu.tuning import MAX_HEAD_DIM, Chip, chip_of, decode_tuning, num_splits, prefill_tuning

log = logging.getLogger(__name__)

_POOL_DTYPES = ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn", "float8_e5m2")
_ADDRESSABLE_BYTES = (2**31, 2**32)
"""Pools of one-byte entries between these sizes: jax 0.10.2 addresses up to 2^32 bytes by a signed 32-bit number of elements."""
_MIN_MAJOR, _HOPPER = 8, "9.0"
_MAX_GROUP = 16
"""Query heads a KV head: the smallest tile of the tuning table has 16 matrix rows."""


def why_not(queries: jax.ShapeDtypeStruct, pool: jax.ShapeDtypeStruct) -> str | None:
    """Why the Triton kernel cannot attend with queries [T, H, D] over pool [layers, pages, page_size, 2 * K, D]; None where it can."""
    head_dim, group = queries.shape[-1], queries.shape[1] // (pool.shape[3] // 2)
    num_bytes = pool.size * pool.dtype.itemsize
    if head_dim % MIN_MATRIX_ROWS or head_dim > MAX_HEAD_DIM:
        return f"head_dim {head_dim} is no multiple of {MIN_MATRIX_ROWS} up to {MAX_HEAD_DIM}"
    if group > _MAX_GROUP:
        return f"{group} query heads share a KV head, more than {_MAX_GROUP}"
    if pool.dtype.name not in _POOL_DTYPES:
        return f"a pool of {pool.dtype.name}; known: {', '.join(_POOL_DTYPES)}"
    if pool.dtype.itemsize == 1 and _ADDRESSABLE_BYTES[0] <= num_bytes <= _ADDRESSABLE_BYTES[1]:
        return f"a pool of {num_bytes} bytes of {pool.dtype.name}: between 2 and 4 GiB this version of JAX addresses it wrongly"
    if pool.size // head_dim >= 2**31:
        return f"a pool of {pool.size // head_dim} entries, 2^31 or more"
    return None


def why_no_gpu(compute_capability: str) -> str | None:
    """Why no kernel here runs on a device with this `compute_capability` (as `jax.Device` names it); None where they do."""
    if not re.fullmatch(r"\d+\.\d+", compute_capability):
        return f"{compute_capability} is no GPU by NVIDIA"
    if int(compute_capability.split(".")[0]) < _MIN_MAJOR:
        return f"compute capability {compute_capability} is below {_MIN_MAJOR}.0"
    return None


class Form(NamedTuple):
    """What a model's layers have in common, known before a step is traced: what layers share is then computed once a step."""

    group: int  # query heads a KV head
    head_dim: int
    page_size: int
    query_dtype: jnp.dtype
    pool_dtype: jnp.dtype


def form_of(queries: jax.ShapeDtypeStruct, pool: jax.ShapeDtypeStruct) -> Form:
    """For queries [T, H, D] over pool [layers, pages, page_size, 2 * K, D]."""
    _, _, page_size, double_kv_heads, head_dim = pool.shape
    return Form(queries.shape[1] // (double_kv_heads // 2), head_dim, page_size, queries.dtype, pool.dtype)


def attention_for(compute_capability: str, form: Form) -> Attention:
    """The best implementation for a GPU that `why_no_gpu` has nothing against."""
    if compute_capability == _HOPPER:
        return HopperAttention(form)
    return TritonAttention(chip_of(compute_capability), form)


class TritonAttention:
    """`pdjax.kernels.base.Attention` by `ragged_paged_attention`. Ask `why_not` first.

    `chip` is `chip_of(device.compute_capability)`. `tuning` is for experiments and tests; None takes the sizes of the table.
    `interpret` runs the kernel on any device.
    """

    name = "triton"

    def __init__(self, chip: Chip, form: Form, tuning: Tuning | None = None, interpret: bool = False) -> None:
        self._chip = chip
        self._form = form
        self._tuning = tuning
        self._interpret = interpret

    def prefill(self, batch: PrefillBatch) -> Attend:
        tiles = prefill_tiles(batch, self._prefill_tuning(has_window=False).matrix_rows // self._form.group)

        def attend(
            queries: jax.Array, kv: jax.Array, pool: jax.Array, layer: jax.Array | int, spec: AttentionSpec
        ) -> tuple[jax.Array, jax.Array]:
            pool = write_kv(pool, layer, batch, kv, spec.kv_scales)
            tuning = self._prefill_tuning(spec.window is not None)
            return ragged_paged_attention(queries, pool, layer, batch.tables, tiles, spec, tuning, self._launch()), pool

        return attend

    def decode(self, batch: DecodeBatch) -> Attend:
        tiles = decode_tiles(batch)

        def attend(
            queries: jax.Array, kv: jax.Array, pool: jax.Array, layer: jax.Array | int, spec: AttentionSpec
        ) -> tuple[jax.Array, jax.Array]:
            pool = write_kv(pool, layer, batch, kv, spec.kv_scales)
            tuning = self._tuning or decode_tuning(self._form.query_dtype, self._form.pool_dtype, self._form.head_dim, self._form.group)
            splits = num_splits(len(tiles.rows) * pool.shape[3] // 2, batch.tables.shape[1] * pool.shape[2], tuning.block_keys)
            return ragged_paged_attention(queries, pool, layer, batch.tables, tiles, spec, tuning, self._launch(splits)), pool

        return attend

    def _prefill_tuning(self, has_window: bool) -> Tuning:
        form = self._form
        return self._tuning or prefill_tuning(self._chip, form.query_dtype, form.pool_dtype, form.head_dim, has_window)

    def _launch(self, num_splits: int = 1) -> Launch:
        return Launch(num_splits, self._chip.converts_fp8, self._interpret)


class HopperAttention:
    """`pdjax.kernels.base.Attention` with `hopper_attention` for prefill wherever it can, `TritonAttention` for all else.

    `tuning` is for experiments and tests. `interpret` is None, or what Mosaic GPU's interpreter takes; both kernels are then interpreted.
    """

    name = "hopper"

    def __init__(self, form: Form, tuning: hopper.Tuning | None = None, interpret: Any = None) -> None:
        self._form = form
        self._tuning = tuning
        self._interpret = interpret
        self._triton = TritonAttention(Chip.SM_90, form, interpret=interpret is not None)
        self._is_able = _says_yes(hopper.why_not(*_smallest(form), PLAIN))

    def prefill(self, batch: PrefillBatch) -> Attend:
        by_triton, form = self._triton.prefill(batch), self._form
        if not self._is_able:
            return by_triton
        tuning = self._tuning or hopper.TUNINGS[form.head_dim]
        steps = plan(batch, form.group, form.page_size, tuning.block_keys)

        def attend(
            queries: jax.Array, kv: jax.Array, pool: jax.Array, layer: jax.Array | int, spec: AttentionSpec
        ) -> tuple[jax.Array, jax.Array]:
            if not _says_yes(hopper.why_not(queries, pool, spec)):
                return by_triton(queries, kv, pool, layer, spec)
            pool = clear_tails(write_kv(pool, layer, batch, kv, spec.kv_scales), layer, steps)
            return hopper.hopper_attention(queries, pool, layer, steps, spec, tuning, interpret=self._interpret), pool

        return attend

    def decode(self, batch: DecodeBatch) -> Attend:
        return self._triton.decode(batch)


def _says_yes(reason: str | None) -> bool:
    """Whether there is no reason against the Hopper kernel; logs it where there is."""
    if reason is not None:
        log.info("attention by the Triton kernel, not the Hopper one: %s", reason)
    return reason is None


def _smallest(form: Form) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Queries and pool of this form, with one of everything else."""
    queries = jax.ShapeDtypeStruct((1, form.group, form.head_dim), form.query_dtype)
    return queries, jax.ShapeDtypeStruct((1, 1, form.page_size, 2, form.head_dim), form.pool_dtype)
