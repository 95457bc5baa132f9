"""Static figures of the tuning tables: every entry compiled, and its neighbours, which have one size halved or doubled.

What is found lies beside the tables, in `kernels/tpu/tuning_figures.json` and `kernels/gpu/tuning_figures.json`; nothing reads it at run
time. An entry is changed by hand, in `tuning.py`, where its neighbour is better.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax.numpy as jnp

from pdjax import kernels
from pdjax.benchmarks import kernels_gpu, kernels_tpu
from pdjax.benchmarks.kernels_jobs import Job, Record
from pdjax.benchmarks.kernels_report import DECODE, PREFILL, Grid
from pdjax.benchmarks.kernels_target import CHIPS
from pdjax.kernels.gpu import report as gpu
from pdjax.kernels.gpu.targets import TARGETS
from pdjax.kernels.gpu.triton_attention import MIN_MATRIX_ROWS, Tuning
from pdjax.kernels.gpu.tuning import Chip, decode_tuning, prefill_tuning

_NOTE = "written by scripts/kernel_report --tune; do not edit"
_TPU_FIGURES = ("bundles_per_1000_scores", "mxu", "valu", "fill", "spill", "bundles_per_page", "dma_cycles_per_page", "temp_bytes")
_GPU_FIGURES = ("registers", "spill_stores", "spill_loads", "shared_memory", "blocks_at_a_time", "is_serialized")
_GPU_POOLS = ("bfloat16", "float32", "float8_e4m3fn")
_MIN_BLOCK_TOKENS, _MIN_TILE_ROWS = 128, 128
FOLDER = Path(next(iter(kernels.__path__)))


def jobs(targets: Sequence[str]) -> list[Job]:
    """For every entry of the targets' tables, the entry and then its neighbours."""
    found: list[Job] = []
    for target in targets:
        found += _gpu_jobs() if target == kernels_gpu.GROUP else _tpu_jobs(target)
    return found


def entries(found_jobs: Sequence[Job], records: Sequence[Record]) -> list[Record]:
    """A record a job, with the figures that sizes are compared by, or the `reason` why there are none. `is_chosen`: in the table."""
    found = []
    for job, record in zip(found_jobs, records, strict=True):
        figures, names = (record.get("report", {}), _GPU_FIGURES) if job.group == kernels_gpu.GROUP else (record, _TPU_FIGURES)
        pool = record["pool"] if job.group == kernels_gpu.GROUP else record["dtype"]
        shape = {"target": job.target, "kernel": record["kernel"], "head_dim": record["head_dim"], "pool": pool}
        kept = {"reason": record["reason"]} if "reason" in record else {name: figures[name] for name in names}
        found.append(shape | {"sizes": list(record["sizes"]), "is_chosen": tuple(record["sizes"]) == _chosen(job)} | kept)
    return found


def write(found: Sequence[Record], folder: Path = FOLDER) -> list[Path]:
    """Put the entries into the files beside the tables, in place of those of the same keys; returns the files."""
    by_folder: dict[str, list[Record]] = {}
    for entry in found:
        by_folder.setdefault("tpu" if entry["target"] in CHIPS else "gpu", []).append(entry)
    written = []
    for name, own in by_folder.items():
        path = folder / name / "tuning_figures.json"
        before = json.loads(path.read_text(encoding="utf-8"))["entries"] if path.exists() else []
        fresh = {_key(entry) for entry in own}
        kept = [entry for entry in before if _key(entry) not in fresh] + own
        lines = ",\n    ".join(json.dumps(entry) for entry in sorted(kept, key=lambda entry: (*_key(entry), not entry["is_chosen"])))
        path.write_text(f'{{\n  "note": "{_NOTE}",\n  "entries": [\n    {lines}\n  ]\n}}\n', encoding="utf-8")
        written.append(path)
    return written


def grid(found: Sequence[Record]) -> Grid:
    """The entries as a table."""
    columns = ("target", "kernel", "head_dim", "pool", "sizes", "in the table", "figures")
    rows = []
    for entry in found:
        shape = (entry["target"], entry["kernel"], str(entry["head_dim"]), entry["pool"], " x ".join(map(str, entry["sizes"])))
        names = _TPU_FIGURES if entry["target"] in CHIPS else _GPU_FIGURES
        figures = entry.get("reason") or ", ".join(f"{name} {entry[name]:.4g}" for name in names)
        rows.append((*shape, "yes" if entry["is_chosen"] else "", figures))
    return Grid("Sizes of the tuning tables and their neighbours", columns, rows)


def neighbours(sizes: Sequence[int], least: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """`sizes`, and then each of those that have a `least` above 0 halved, where that is not less than `least`, and doubled."""
    yield tuple(sizes)
    for place, (size, limit) in enumerate(zip(sizes, least, strict=True)):
        for other in (size // 2, size * 2) if limit else ():
            if other >= limit:
                yield (*sizes[:place], other, *sizes[place + 1 :])


def _tpu_jobs(target: str) -> Iterator[Job]:
    chip = CHIPS[target]
    for kernel in (PREFILL, DECODE):
        least = (_MIN_TILE_ROWS if kernel == PREFILL else 0, _MIN_BLOCK_TOKENS, 0)
        for head_dim in kernels_tpu.HEAD_DIMS:
            for dtype in kernels_tpu.DTYPES:
                case = kernels_tpu.table_case(chip, kernel, head_dim, dtype)
                assert case.sizes is not None, case
                for rows, block_tokens, limit in neighbours(case.sizes, least):
                    yield kernels_tpu.job(chip, case._replace(sizes=(rows, block_tokens, limit)))


def _gpu_jobs() -> Iterator[Job]:
    for target in TARGETS:
        for kernel in ("triton_prefill", "triton_decode"):
            for head_dim in gpu.HEAD_DIMS:
                for pool in _GPU_POOLS:
                    chosen = _table_sizes(target.name, kernel, head_dim, pool)
                    least = (MIN_MATRIX_ROWS if kernel == "triton_prefill" else 0, MIN_MATRIX_ROWS, 1, 1)
                    for sizes in neighbours(chosen, least):
                        yield kernels_gpu.job(gpu.Case(target, kernel, head_dim, pool, sizes=sizes))


def _table_sizes(target: str, kernel: str, head_dim: int, pool: str) -> Tuning:
    queries, stored = jnp.dtype("float32" if pool == "float32" else "bfloat16"), jnp.dtype(pool)
    if kernel == "triton_prefill":
        return prefill_tuning(Chip(target), queries, stored, head_dim)
    return decode_tuning(queries, stored, head_dim, gpu.GROUP)


def _chosen(job: Job) -> tuple[int, ...]:
    case = job.case
    if job.group == kernels_gpu.GROUP:
        return tuple(_table_sizes(job.target, case["kernel"], case["head_dim"], case["pool"]))
    sizes = kernels_tpu.table_case(CHIPS[job.target], case["kernel"], case["head_dim"], case["dtype"]).sizes
    assert sizes is not None, case
    return sizes


def _key(entry: Record) -> tuple[str, str, int, str]:
    return entry["target"], entry["kernel"], entry["head_dim"], entry["pool"]
