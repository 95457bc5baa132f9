"""The TPU kernels, compiled for a chip, and what their schedules say; and whole steps. A process of its own a chip:

    python -m pdjax.benchmarks.kernels_tpu CHIP JOBS.json DUMP

with `kernels_target.environment` set; `kernels_jobs` runs it.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format
from jax.sharding import SingleDeviceSharding

from pdjax.benchmarks import kernels_step as step
from pdjax.benchmarks.kernels_jobs import Job, Record, work_on
from pdjax.benchmarks.kernels_report import DECODE, PREFILL, PRODUCT, STEP
from pdjax.benchmarks.kernels_target import CHIPS, Chip, devices, tracing_for
from pdjax.kernels.base import AttentionSpec, DecodeBatch, PrefillBatch
from pdjax.kernels.dispatch import pool_format
from pdjax.kernels.pages import tpu as pages
from pdjax.kernels.tpu.attention import PallasTpuAttention, unsupported
from pdjax.kernels.tpu.schedule import Program, Region, busiest, figures, loops, masked, once_a_tile, read_program
from pdjax.kernels.tpu.tuning import DecodeTuning, PrefillTuning, Tunings, tunings_for

HEADS, KV_HEADS = 32, 8
HEAD_DIMS = (64, 128, 256)
DTYPES = ("bfloat16", "int8", "float8_e4m3fn", "float32")
"""Of the pool."""
CHUNK_ROWS, CONTEXT, SEQUENCES, LAYERS, CHUNK_PAGES = 2048, 8192, 8, 2, 16
PAGE_KERNELS = {
    "gather_pages": pages.gather,
    "install_pages": pages.install,
    "gather_summed_pages": pages.gather_summed,
    "install_summed_pages": pages.install_summed,
}
STEP_CHIPS = ("v5e", "v6e")
STEPS = tuple((width, work) for work in (step.Work("prefill", CHUNK_ROWS, CONTEXT), step.Work("decode", 64, 1024)) for width in (1, 4))

_KERNEL_SOURCES = ("kernels/base.py", "kernels/heads.py", "kernels/dispatch.py", "benchmarks/kernels_tpu.py", "benchmarks/kernels_target.py")
_ATTENTION_SOURCES = ("kernels/tpu/[!t]*.py",)  # all but the tuning table: a case names its sizes
_PAGE_SOURCES = ("kernels/pages", "kernels/tpu/schedule.py")
_STEP_SOURCES = ("benchmarks/kernels_step.py", "kernels", "models", "engine")


class Case(NamedTuple):
    """One program with one kernel. `sizes`: of a block of attention: rows of a tile (1 for decode), positions of a block, limit of VMEM in
    bytes. Pages have none."""

    kernel: str
    head_dim: int
    dtype: str  # of the pool
    sizes: tuple[int, int, int] | None = None

    def __str__(self) -> str:
        sizes = f" {self.sizes[0]} x {self.sizes[1]}" if self.sizes else ""
        return f"{self.kernel} head_dim {self.head_dim} {self.dtype}{sizes}"


def table_case(chip: Chip, kernel: str, head_dim: int, dtype: str) -> Case:
    """Attention in the sizes of the tuning table."""
    prefill, decode = tunings_for(chip.kernel_name, head_dim, jnp.dtype(dtype), HEADS)
    rows, tuning = (prefill.tile_rows, prefill) if kernel == PREFILL else (1, decode)
    return Case(kernel, head_dim, dtype, (rows, tuning.block_tokens, tuning.vmem_limit_bytes))


def cases(chip: Chip, is_quick: bool) -> Iterator[Case]:
    """Both attention kernels with every entry of the tuning table, and those for pages with every width that they differ for; or one of each
    attention kernel, and one for pages with narrow heads, whose pool XLA would copy unless told how it lies."""
    if is_quick:
        yield from (table_case(chip, kernel, 128, "bfloat16") for kernel in (PREFILL, DECODE))
        yield Case("install_pages", 64, "bfloat16")
        return
    for kernel in (PREFILL, DECODE):
        yield from (table_case(chip, kernel, head_dim, dtype) for head_dim in HEAD_DIMS for dtype in DTYPES)
    for kernel in PAGE_KERNELS:
        yield from (Case(kernel, head_dim, dtype) for head_dim, dtype in ((64, "bfloat16"), (128, "bfloat16"), (128, "int8")))


def job(chip: Chip, case: Case) -> Job:
    sources = (*_KERNEL_SOURCES, *(_PAGE_SOURCES if case.kernel in PAGE_KERNELS else _ATTENTION_SOURCES))
    return Job(chip.name, chip.name, f"{chip.name} {case}", case._asdict(), sources)


def jobs(chip: Chip, is_quick: bool) -> Iterator[Job]:
    """Every kernel, and where the chip has some, the reference rate and the steps."""
    yield from (job(chip, case) for case in cases(chip, is_quick))
    if is_quick or chip.name not in STEP_CHIPS:
        return
    yield Job(chip.name, chip.name, f"{chip.name} one large product", {"kernel": PRODUCT}, _STEP_SOURCES[:1])
    for width, work in STEPS:
        if step.layer_weights(step.LLAMA_3_8B) * 2 / width > chip.memory_gib << 30:
            continue  # the weights do not fit
        case = {"kernel": STEP, "tensor_parallel": width, "work": list(work)}
        yield Job(chip.name, chip.name, f"{chip.name} {work.kind} step of Llama-3-8B, {width} chips", case, _STEP_SOURCES)


def result(chip: Chip, case: Record, dump: Path) -> Record:
    """What a job of `jobs` finds. Raises what the compiler raises, and ValueError for what no kernel supports."""
    if case["kernel"] == PRODUCT:
        return {"reference_operations_per_cycle": step.reference_rate(chip)}
    if case["kernel"] == STEP:
        work = step.Work(*case["work"])
        num_pages = work.rows * work.context // step.PAGE_SIZE if work.kind == "decode" else 1024
        return step.estimate_step(chip, step.LLAMA_3_8B, case["tensor_parallel"], work, num_pages)._asdict()
    shutil.rmtree(dump, ignore_errors=True)
    known = Case(**case)
    return page_figures(chip, known, dump) if known.kernel in PAGE_KERNELS else attention_figures(chip, known, dump)


def attention_figures(chip: Chip, case: Case, dump: Path) -> Record:
    """Compile the case and read its schedule."""
    assert case.sizes is not None, case
    rows, block_tokens, limit = case.sizes
    tunings = Tunings(PrefillTuning(max(rows, step.PAGE_SIZE), block_tokens, limit), DecodeTuning(block_tokens, limit))
    tables = jax.ShapeDtypeStruct((SEQUENCES, CONTEXT // step.PAGE_SIZE), jnp.int32)
    if reason := unsupported(_pool(chip, case), tables, tunings):
        raise ValueError(reason)
    with tracing_for(chip):
        compiled = _lowered(chip, case, PallasTpuAttention(tunings)).compile()
    program = read_program(dump, case.kernel)
    regions = loops(program)
    found = figures(program, busiest(regions), HEADS * rows * block_tokens)
    a_tile = {"masked_bundles": masked(regions).bundles, "tile_bundles": once_a_tile(regions, KV_HEADS)} if case.kernel == PREFILL else {}
    return {
        "query_rows": HEADS * rows,
        **a_tile,
        "rows": rows,
        "block_tokens": block_tokens,
        **found._asdict(),
        "bundles_per_page": found.bundles * step.PAGE_SIZE / block_tokens,
        **_page_bound(chip, case, 1),
        "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
    }


def page_figures(chip: Chip, case: Case, dump: Path) -> Record:
    """As `attention_figures`. Its loop moves one layer of a page."""
    pool, numbers = _pool(chip, case), _abstract(chip, (CHUNK_PAGES,), "int32")
    arguments = [pool, numbers]
    is_install = case.kernel.startswith("install")
    if is_install:
        arguments.append(_abstract(chip, (CHUNK_PAGES, LAYERS, *pool.shape[2:]), case.dtype))
    out: Any = _pool_format(chip) if is_install else SingleDeviceSharding(devices(chip)[0])
    if "summed" in case.kernel:
        out = (out, SingleDeviceSharding(devices(chip)[0]))
    with tracing_for(chip):
        run = jax.jit(PAGE_KERNELS[case.kernel], donate_argnums=0 if is_install else (), out_shardings=out)
        compiled = run.lower(*arguments).compile()
    program = read_program(dump, case.kernel)
    found = figures(program, _innermost(program), 1)
    return {
        **found._asdict(),
        "bundles_per_1000_scores": None,
        "bundles_per_page": found.bundles,
        **_page_bound(chip, case, 2),
        "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
    }


def _innermost(program: Program) -> Region:
    return max(loops(program), key=lambda region: (region.depth, region.bundles))


def _page_bound(chip: Chip, case: Case, passes: int) -> dict[str, float]:
    """Cycles that a page of one layer needs to pass `passes` times between HBM and the chip."""
    page_bytes = step.PAGE_SIZE * 2 * KV_HEADS * case.head_dim * jnp.dtype(case.dtype).itemsize
    return {"dma_cycles_per_page": passes * page_bytes / chip.bytes_per_cycle}


def main() -> None:
    chip, todo, dump = CHIPS[sys.argv[1]], Path(sys.argv[2]), Path(sys.argv[3])
    work_on(todo, lambda case: result(chip, case, dump))


def _pool(chip: Chip, case: Case) -> jax.ShapeDtypeStruct:
    shape = (LAYERS, 1024, step.PAGE_SIZE, 2 * KV_HEADS, case.head_dim)
    return jax.ShapeDtypeStruct(shape, jnp.dtype(case.dtype), sharding=_pool_format(chip))


def _pool_format(chip: Chip) -> Format:
    return pool_format(SingleDeviceSharding(devices(chip)[0]), "tpu")


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
    out = (SingleDeviceSharding(devices(chip)[0]), _pool_format(chip))
    return jax.jit(attend, donate_argnums=1, out_shardings=out).lower(batch, *arrays)


if __name__ == "__main__":
    main()
