"""The TPU kernels, compiled for a chip, and what their schedules say. A process of its own a chip:

    python -m pdjax.benchmarks.kernels_tpu CHIP DUMP OUT.json [--quick]

with `kernels_target.environment` set. Prints a line of progress a program.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from pdjax.benchmarks import kernels_step as step
from pdjax.benchmarks.kernels_target import CHIPS, Chip, devices, tracing_for
from pdjax.kernels.base import AttentionSpec, DecodeBatch, PrefillBatch
from pdjax.kernels.tpu.attention import PallasTpuAttention, unsupported
from pdjax.kernels.tpu.schedule import busiest, figures, loops, read_program
from pdjax.kernels.tpu.tuning import tunings_for

HEADS, KV_HEADS = 32, 8
POOLS = {64: ("bfloat16", "int8", "float8_e4m3fn"), 128: ("bfloat16", "int8", "float8_e4m3fn", "float32"), 256: ("bfloat16",)}
"""Dtypes of the pool, by head_dim."""
CHUNK_ROWS, CONTEXT, SEQUENCES = 2048, 8192, 8
PREFILL, DECODE = step.KERNELS
STEP_CHIPS = ("v5e", "v6e")
STEPS = (
    (1, step.Work("prefill", CHUNK_ROWS, CONTEXT)),
    (4, step.Work("prefill", CHUNK_ROWS, CONTEXT)),
    (1, step.Work("decode", 64, 1024)),
    (4, step.Work("decode", 64, 1024)),
)


class Case(NamedTuple):
    """One program with one attention kernel."""

    kernel: str
    head_dim: int
    dtype: str  # of the pool


def cases(is_quick: bool) -> Iterator[Case]:
    """Every program, or one a kernel."""
    for kernel in (PREFILL, DECODE):
        for head_dim, dtypes in {128: ("bfloat16",)}.items() if is_quick else POOLS.items():
            yield from (Case(kernel, head_dim, dtype) for dtype in dtypes)


def kernel_figures(chip: Chip, case: Case, dump: Path) -> dict[str, Any]:
    """Compile the case and read its schedule. `reason` says why there are no figures."""
    record = {"target": chip.name, **case._asdict()}
    pool, tables = _pool(chip, case), jax.ShapeDtypeStruct((SEQUENCES, CONTEXT // step.PAGE_SIZE), jnp.int32)
    tunings = tunings_for(chip.kernel_name, case.head_dim, jnp.dtype(case.dtype), HEADS)
    if reason := unsupported(pool, tables, tunings):
        return record | {"reason": reason}
    shutil.rmtree(dump, ignore_errors=True)
    try:
        with tracing_for(chip):
            compiled = _lowered(chip, case, PallasTpuAttention(tunings)).compile()
    except Exception as error:  # what the compiler raises, of many kinds, is the result
        return record | {"reason": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
    program = read_program(dump, case.kernel)
    loop = busiest(loops(program))
    tokens = tunings.prefill.block_tokens if case.kernel == PREFILL else tunings.decode.block_tokens
    rows = tunings.prefill.tile_rows if case.kernel == PREFILL else 1
    found = figures(program, loop, HEADS * rows * tokens)
    page_bytes = step.PAGE_SIZE * 2 * KV_HEADS * case.head_dim * jnp.dtype(case.dtype).itemsize
    return record | {
        "rows": rows,
        "block_tokens": tokens,
        **found._asdict(),
        "bundles_per_page": found.bundles * step.PAGE_SIZE / tokens,
        "dma_cycles_per_page": page_bytes / (chip.bandwidth_gbytes / chip.clock_ghz),
        "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
    }


def step_estimates(chip: Chip) -> Iterator[dict[str, Any]]:
    """Llama-3-8B's steps over one chip and over four, where the weights fit. The first record is the reference rate."""
    yield {"reference_operations_per_cycle": step.reference_rate(chip)}
    for tensor_parallel, work in STEPS:
        weights = step.layer_weights(step.LLAMA_3_8B) * 2 / tensor_parallel
        if weights > chip.memory_gib << 30:
            continue
        num_pages = work.rows * work.context // step.PAGE_SIZE if work.kind == "decode" else 1024
        try:
            yield step.estimate_step(chip, step.LLAMA_3_8B, tensor_parallel, work, num_pages)._asdict()
        except Exception as error:  # as above
            reason = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
            yield {"chip": chip.name, "tensor_parallel": tensor_parallel, "work": work, "reason": reason}


def main() -> None:
    chip, dump, out, is_quick = CHIPS[sys.argv[1]], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:] == ["--quick"]
    kernels = []
    for case in cases(is_quick):
        print(f"{chip.name} {case.kernel} head_dim {case.head_dim} {case.dtype}", flush=True)
        kernels.append(kernel_figures(chip, case, dump))
    steps = []
    for record in () if is_quick or chip.name not in STEP_CHIPS else step_estimates(chip):
        print(f"{chip.name} step {len(steps)}", flush=True)
        steps.append(record)
    out.write_text(json.dumps({"kernels": kernels, "steps": steps}))


def _pool(chip: Chip, case: Case) -> jax.ShapeDtypeStruct:
    return _abstract(chip, (2, 1024, step.PAGE_SIZE, 2 * KV_HEADS, case.head_dim), case.dtype)


def _abstract(chip: Chip, shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=SingleDeviceSharding(devices(chip)[0]))


def _lowered(chip: Chip, case: Case, attention: PallasTpuAttention) -> jax.stages.Lowered:
    """The attention of one layer, over a pool of two that is given away."""
    is_prefill = case.kernel == PREFILL
    rows = CHUNK_ROWS if is_prefill else SEQUENCES
    compute = "float32" if case.dtype == "float32" else "bfloat16"

    def numbers(*shape: int) -> jax.ShapeDtypeStruct:
        return _abstract(chip, shape, "int32")

    def attend(batch: PrefillBatch | DecodeBatch, pool: jax.Array, queries: jax.Array, kv: jax.Array, scales: jax.Array) -> Any:
        run = attention.prefill(batch) if isinstance(batch, PrefillBatch) else attention.decode(batch)
        spec = AttentionSpec(kv_scales=scales if pool.dtype.itemsize == 1 else None)
        return run(queries, kv, pool, jnp.int32(1), spec)

    tables = numbers(SEQUENCES, CONTEXT // step.PAGE_SIZE)
    if is_prefill:
        batch = PrefillBatch(tables, *[numbers(SEQUENCES)] * 3, numbers(rows), numbers(rows))
    else:
        batch = DecodeBatch(tables, *[numbers(rows)] * 3)
    arrays = (
        _pool(chip, case),
        _abstract(chip, (rows, HEADS, case.head_dim), compute),
        _abstract(chip, (rows, 2 * KV_HEADS, case.head_dim), compute),
        _abstract(chip, (2 * KV_HEADS,), "float32"),
    )
    return jax.jit(attend, donate_argnums=1).lower(batch, *arrays)


if __name__ == "__main__":
    main()
