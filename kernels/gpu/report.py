"""Every GPU kernel compiled for every GPU at the sizes it is served with: the rows of the kernel report.

The shapes are those of an 8B Llama's layer: 32 query heads over 8 KV heads, pages of 16 tokens, a prefill step of 2,048 rows of 8
sequences or a decode step of 64 sequences, at up to 8,192 tokens of context.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pdjax.kernels.base import PLAIN, Attention, AttentionSpec, decode_batch, prefill_batch
from pdjax.kernels.gpu.attention import Form, HopperAttention, TritonAttention, form_of
from pdjax.kernels.gpu.targets import SM_90, TARGETS, CompiledProgram, KernelReport, Target, argument, compile_for
from pdjax.kernels.gpu.triton_attention import Tuning
from pdjax.kernels.gpu.tuning import Chip
from pdjax.kernels.pages import gpu as pages

_HEADS, _KV_HEADS, _PAGE_SIZE, _LAYERS, _PAGES, _TABLE_PAGES = 32, 8, 16, 4, 2048, 512
_PREFILL_ROWS, _PREFILL_SEQUENCES, _DECODE_SEQUENCES, _CHUNK_PAGES = 2048, 8, 64, 16
GROUP = _HEADS // _KV_HEADS
HEAD_DIMS, _USUAL = (64, 80, 96, 128, 256), (64, 128)
_OPTIONS = AttentionSpec(soft_cap=30.0, window=1024)


class Case(NamedTuple):
    """One kernel at one size. `pool` names the dtype of the pool; queries are bfloat16 unless it is float32."""

    target: Target
    kernel: str  # triton_prefill, triton_decode, hopper_prefill, or of PAGE_KERNELS
    head_dim: int
    pool: str
    has_options: bool = False  # with soft cap and window
    sizes: Sequence[int] | None = None  # of a Triton kernel, as `Tuning`; None: those of the table


class Row(NamedTuple):
    """A case and what the compiler made of it."""

    case: Case
    report: KernelReport


PAGE_KERNELS = {
    "gather_pages": pages.gather,
    "install_pages": pages.install,
    "gather_summed_pages": pages.gather_summed,
    "install_summed_pages": pages.install_summed,
}
_ENTRIES = {
    "triton_prefill": "ragged_paged_attention",
    "triton_decode": "ragged_paged_attention",
    "hopper_prefill": "hopper_prefill",
    **{name: name for name in PAGE_KERNELS},
}


def cases(targets: tuple[Target, ...] = TARGETS) -> Iterator[Case]:
    """Every entry of the tuning tables, pools of every width, the options where they cost most. int8 takes the sizes of fp8, whose entries it
    widens with less work: it stands in at the usual head dimensions."""
    for target in targets:
        for kernel in ("triton_prefill", "triton_decode"):
            for head_dim in HEAD_DIMS:
                yield from (Case(target, kernel, head_dim, pool) for pool in ("bfloat16", "float32", "float8_e4m3fn"))
                if head_dim in _USUAL:
                    yield Case(target, kernel, head_dim, "int8")
                if kernel == "triton_prefill" or head_dim in _USUAL:
                    yield Case(target, kernel, head_dim, "bfloat16", has_options=True)
        for kernel in PAGE_KERNELS:
            yield from (Case(target, kernel, 128, pool) for pool in ("bfloat16", "float8_e4m3fn"))
    if SM_90 in targets:
        for head_dim in _USUAL:
            yield from (Case(SM_90, "hopper_prefill", head_dim, "bfloat16", has_options) for has_options in (False, True))


def compiled(case: Case) -> CompiledProgram:
    """The case's program. Raises what the compiler raises."""
    if case.kernel in PAGE_KERNELS:
        return _moved(case)
    if case.kernel == "hopper_prefill":
        return _prefill(case, HopperAttention(_form(case)))
    attention = TritonAttention(Chip(case.target.name), _form(case), None if case.sizes is None else Tuning(*case.sizes))
    return _prefill(case, attention) if case.kernel == "triton_prefill" else _decode(case, attention)


def _moved(case: Case) -> CompiledProgram:
    numbers, move = argument(case.target, (_CHUNK_PAGES,), jnp.int32), PAGE_KERNELS[case.kernel]
    if case.kernel.startswith("gather"):
        return compile_for(case.target, move, _pool(case), numbers)
    chunk = argument(case.target, (_CHUNK_PAGES, _LAYERS, _PAGE_SIZE, 2 * _KV_HEADS, case.head_dim), case.pool)
    return compile_for(case.target, move, _pool(case), numbers, chunk, donate=(0,))


def row(case: Case) -> Row:
    return Row(case, compiled(case).kernel(_ENTRIES[case.kernel]))


def _pool(case: Case) -> jax.ShapeDtypeStruct:
    return argument(case.target, (_LAYERS, _PAGES, _PAGE_SIZE, 2 * _KV_HEADS, case.head_dim), case.pool)


def _form(case: Case) -> Form:
    queries, _, pool, *_ = _operands(case, 1)
    return form_of(queries, pool)


def _operands(case: Case, rows: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Queries, kv, pool, layer, KV scales or nothing."""
    dtype = jnp.float32 if case.pool == "float32" else jnp.bfloat16
    queries, kv = (argument(case.target, (rows, heads, case.head_dim), dtype) for heads in (_HEADS, 2 * _KV_HEADS))
    scales = (argument(case.target, (2 * _KV_HEADS,), jnp.float32),) if jnp.dtype(case.pool).itemsize == 1 else ()
    return queries, kv, _pool(case), argument(case.target, (), jnp.int32), *scales


def _spec(case: Case, scales: tuple[jax.Array, ...]) -> AttentionSpec:
    return (_OPTIONS if case.has_options else PLAIN)._replace(kv_scales=scales[0] if scales else None)


def _prefill(case: Case, attention: Attention) -> CompiledProgram:
    def program(
        tables: jax.Array, rows: jax.Array, queries: jax.Array, kv: jax.Array, pool: jax.Array, layer: jax.Array, *scales: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        batch = prefill_batch(tables, rows[0], rows[1], rows[2], len(queries), _PAGE_SIZE)
        return attention.prefill(batch)(queries, kv, pool, layer, _spec(case, scales))

    numbers = functools.partial(argument, case.target, dtype=jnp.int32)
    sequences = numbers((_PREFILL_SEQUENCES, _TABLE_PAGES)), numbers((3, _PREFILL_SEQUENCES))
    return compile_for(case.target, program, *sequences, *_operands(case, _PREFILL_ROWS), donate=(4,))


def _decode(case: Case, attention: Attention) -> CompiledProgram:
    def program(
        tables: jax.Array, positions: jax.Array, queries: jax.Array, kv: jax.Array, pool: jax.Array, layer: jax.Array, *scales: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        batch = decode_batch(tables, positions, _PAGE_SIZE)
        return attention.decode(batch)(queries, kv, pool, layer, _spec(case, scales))

    numbers = functools.partial(argument, case.target, dtype=jnp.int32)
    sequences = numbers((_DECODE_SEQUENCES, _TABLE_PAGES)), numbers((_DECODE_SEQUENCES,))
    return compile_for(case.target, program, *sequences, *_operands(case, _DECODE_SEQUENCES), donate=(4,))
