"""Tables of the compiled kernels and steps, on the terminal and as a page, from what the compiling processes wrote."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from pdjax.benchmarks.kernels_target import CHIPS

Record = dict[str, Any]

PREFILL, DECODE = "ragged_paged_attention", "paged_decode_attention"
PRODUCT, STEP = "product", "step"
GOAL_CHIP, MAX_SPILL_SHARE = "v6e", 0.02
MAX_BYTES_BESIDE = 1 << 20
BUNDLE_GOALS = {128: 3.0, 64: 3.5}
"""Bundles per 1,000 scores of bfloat16 prefill on v6e, by head_dim."""
STEP_GOALS = {1: 0.75, 4: 0.65}
"""Share of the rate of one large product in a prefill step on v6e, by width."""

_INTRO = """\
# The kernels as the compilers see them

Written by `scripts/kernel_report`; do not edit it by hand. TPU programs come from libtpu's compiler, GPU programs from XLA's CUDA compiler and ptxas, both without a device:
nothing here was timed. [kernels.md](kernels.md) says what the kernels do and why.
"""


class Grid(NamedTuple):
    """One table."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    note: str = ""


def assembled(records: Iterable[Record]) -> Record:
    """The report, of the records of all jobs."""
    found = list(records)
    tpu = [record for record in found if record["target"] in CHIPS]
    kernels = [record for record in tpu if record["kernel"] not in (PRODUCT, STEP)]
    steps = with_shares(kernels, [record for record in tpu if record["kernel"] in (PRODUCT, STEP)])
    gpu = [record for record in found if record["target"] not in CHIPS]
    return {"goals": goals(kernels, steps), "tpu": kernels, "steps": steps, "gpu": gpu}


def with_shares(kernels: Sequence[Record], products_and_steps: Iterable[Record]) -> list[Record]:
    """The steps of every chip, each with the cycles of its attention kernels and its share of the reference rate (prefill) or of the memory's
    bandwidth (decode)."""
    found = list(products_and_steps)
    references = {record["target"]: record for record in found if record["kernel"] == PRODUCT}
    steps = []
    for step in (record for record in found if record["kernel"] == STEP):
        main = {kernel["kernel"]: kernel for kernel in kernels if kernel["target"] == step["target"] and _is_main(kernel)}
        reference = references.get(step["target"], {}).get("reference_operations_per_cycle")
        if "reason" not in step and (reference is None or len(main) < len((PREFILL, DECODE))):
            step = step | {"reason": "without figures of the kernels and of the product that it is held against"}
        steps.append(step if "reason" in step else step | _shares(step, reference, main, CHIPS[step["target"]].bytes_per_cycle))
    return steps


def _is_main(kernel: Record) -> bool:
    return kernel["kernel"] in (PREFILL, DECODE) and kernel["head_dim"] == 128 and kernel["dtype"] == "bfloat16" and "reason" not in kernel


def _shares(step: Record, reference: float, kernels: dict[str, Record], bytes_per_cycle: float) -> Record:
    kind = step["work"][0]
    if kind == "prefill":
        kernel_cycles = _prefill_cycles(step, kernels[PREFILL])
    else:
        kernel = kernels[DECODE]
        kernel_cycles = step["kv_bytes"] / bytes_per_cycle * max(1.0, kernel["bundles_per_page"] / kernel["dma_cycles_per_page"])
    total = sum(step["cycles"].values()) + kernel_cycles
    least = step["operations"] / reference if kind == "prefill" else (step["weight_bytes"] + step["kv_bytes"]) / bytes_per_cycle
    return {"kernel_cycles": kernel_cycles, "total_cycles": total, "share": least / total}


def _prefill_cycles(step: Record, kernel: Record) -> float:
    """What scores take in the loop without masks; and for each tile the half of a block that it computes in vain, the masks of its last block,
    and what happens once a tile."""
    num_tiles = step["query_rows"] / kernel["query_rows"]
    a_tile = kernel["masked_bundles"] - kernel["bundles"] / 2 + kernel["tile_bundles"]
    return step["scores"] * kernel["bundles_per_1000_scores"] / 1000 + num_tiles * a_tile


def _moving_pages(kernels: Iterable[Record]) -> list[Record]:
    """The kernels for pages that compiled for the chip of the goals."""
    own = [kernel for kernel in kernels if kernel["target"] == GOAL_CHIP and "reason" not in kernel]
    return [kernel for kernel in own if kernel["kernel"] not in (PREFILL, DECODE)]


def goals(kernels: Sequence[Record], steps: Iterable[Record]) -> list[Record]:
    """What was asked for, and whether it holds."""
    found = []
    for kernel in kernels:
        if kernel["target"] != GOAL_CHIP or kernel["dtype"] != "bfloat16" or "reason" in kernel:
            continue
        if kernel["kernel"] == PREFILL and kernel["head_dim"] in BUNDLE_GOALS:
            what = f"{GOAL_CHIP} prefill, head_dim {kernel['head_dim']}"
            found.append(_goal(f"{what}: bundles per 1,000 scores", kernel["bundles_per_1000_scores"], BUNDLE_GOALS[kernel["head_dim"]]))
            found.append(_goal(f"{what}: slots that spill or fill", max(kernel["spill"], kernel["fill"]), MAX_SPILL_SHARE))
        if kernel["kernel"] == DECODE:
            what = f"{GOAL_CHIP} decode, head_dim {kernel['head_dim']}: bundles a page, against the cycles of its bytes"
            found.append(_goal(what, kernel["bundles_per_page"], kernel["dma_cycles_per_page"]))
    if beside := [kernel["temp_bytes"] for kernel in _moving_pages(kernels)]:
        found.append(_goal(f"{GOAL_CHIP} pages: bytes beside pool and chunk, which would be a copy", max(beside), MAX_BYTES_BESIDE))
    for step in steps:
        if step["target"] == GOAL_CHIP and "reason" not in step and step["work"][0] == "prefill":
            width = step["tensor_parallel"]
            what = f"{GOAL_CHIP} prefill step of Llama-3-8B, {width} chip{'s' * (width > 1)}: share of one large product's rate"
            found.append(_goal(what, step["share"], STEP_GOALS[width], at_least=True))
            found.append(_goal(f"{what.partition(':')[0]}: copies of the pool", step["pool_copies"], 0))
    return found


def _goal(what: str, value: float, limit: float, at_least: bool = False) -> Record:
    return {"goal": what, "value": value, "limit": limit, "at_least": at_least, "holds": value >= limit if at_least else value <= limit}


def grids(report: Record) -> Iterator[Grid]:
    yield _goal_grid(report["goals"])
    for kernel, title in ((PREFILL, "TPU, prefill"), (DECODE, "TPU, decode")):
        yield _kernel_grid(title, [record for record in report["tpu"] if record["kernel"] == kernel])
    yield _page_grid([record for record in report["tpu"] if record["kernel"] not in (PREFILL, DECODE)])
    yield _step_grid(report["steps"])
    yield _gpu_grid(report["gpu"])


def _goal_grid(found: Sequence[Record]) -> Grid:
    rows = [
        (goal["goal"], f"{goal['value']:.3g}", f"{'at least' if goal['at_least'] else 'at most'} {goal['limit']:.3g}", "yes" if goal["holds"] else "MISSED")
        for goal in found
    ]
    return Grid("Goals", ("goal", "found", "asked", "holds"), rows)


def _kernel_grid(title: str, records: Sequence[Record]) -> Grid:
    columns = ("chip", "head_dim", "pool", "rows x block", "bundles / 1,000 scores", "MXU", "VALU", "EUP", "spill", "fill", "bundles / page", "cycles of its bytes")
    return Grid(title, columns, [_kernel_row(record) for record in records], "32 query heads over 8 KV heads, pages of 64 tokens; the figures are those of the hot loop.")


def _kernel_row(record: Record) -> tuple[str, ...]:
    head = (record["target"], str(record["head_dim"]), record["dtype"])
    if "reason" in record:
        return (*head, record["reason"], *[""] * 8)
    shares = (_percent(record[unit]) for unit in ("mxu", "valu", "eup", "spill", "fill"))
    page = (f"{record['bundles_per_page']:.0f}", f"{record['dma_cycles_per_page']:.0f}")
    return (*head, f"{record['rows']} x {record['block_tokens']}", f"{record['bundles_per_1000_scores']:.2f}", *shares, *page)


def _page_grid(records: Sequence[Record]) -> Grid:
    columns = ("chip", "kernel", "head_dim", "pool", "bundles / page", "cycles of its bytes", "VALU", "bytes beside pool and chunk")
    rows = []
    for record in records:
        head = (record["target"], record["kernel"], str(record["head_dim"]), record["dtype"])
        if "reason" in record:
            rows.append((*head, record["reason"], "", "", ""))
            continue
        page = (f"{record['bundles_per_page']:.0f}", f"{record['dma_cycles_per_page']:.0f}", _percent(record["valu"]))
        rows.append((*head, *page, f"{record['temp_bytes']:,}"))
    return Grid("TPU, pages", columns, rows, "8 KV heads, pages of 64 tokens, of one layer; its bytes come in and go out.")


def _step_grid(steps: Sequence[Record]) -> Grid:
    parts = ("projections", "MLP", "attention", "rest")
    columns = ("chip", "chips", "step", "context", *parts, "kernel", "total, 10^6 cycles", "share", "collectives, overlapped", "GiB a chip", "pool copies")
    rows = []
    for step in steps:
        kind, num_rows, context = step["work"]
        head = (step["target"], str(step["tensor_parallel"]), f"{kind}, {num_rows:,} rows", f"{context:,}")
        if "reason" in step:
            rows.append((*head, step["reason"], *[""] * 9))
            continue
        cycles = (f"{step['cycles'].get(part, 0) / 1e6:.1f}" for part in parts)
        rest = (f"{step['kernel_cycles'] / 1e6:.1f}", f"{step['total_cycles'] / 1e6:.1f}", _percent(step["share"]))
        collectives = f"{step['num_collectives']}, {step['num_overlapped']}"
        rows.append((*head, *cycles, *rest, collectives, f"{step['memory_bytes'] / 2**30:.1f}", str(step["pool_copies"])))
    note = (
        "All layers of Llama-3-8B in bfloat16, by the compiler's own estimate in cycles of one chip; `attention` is what XLA does around the kernel, the kernel is counted from "
        "its schedule. Collectives are those of one layer; XLA gives no cycles for them, so the share counts none. Share: of the rate of one large matrix product (prefill), or of the time that the "
        "bytes of weights and KV need (decode)."
    )
    return Grid("Steps of a model", columns, rows, note)


def _gpu_grid(records: Sequence[Record]) -> Grid:
    columns = ("target", "kernel", "head_dim", "pool", "options", "registers", "spill bytes", "shared memory", "threads", "blocks at a time", "matrix instructions")
    rows = []
    for record in records:
        head = (record["target"], record["kernel"], str(record["head_dim"]), record["pool"], "yes" if record["has_options"] else "")
        if "reason" in record:
            rows.append((*head, record["reason"], *[""] * 5))
            continue
        found = record["report"]
        spills = f"{found['spill_stores']} + {found['spill_loads']}"
        products = ", ".join(f"{name} {count}" for name, count in found["matrix_instructions"].items())
        rows.append(
            (*head, str(found["registers"]), spills, f"{found['shared_memory']:,}", str(found["threads"]), str(found["blocks_at_a_time"]), products)
        )
    return Grid("GPU", columns, rows)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.1 or share == 0 else f"{100 * share:.1f} %"


def print_grids(console: Console, found: Iterable[Grid]) -> None:
    for grid in found:
        table = Table(title=grid.title, title_justify="left")
        for column in grid.columns:
            table.add_column(column)
        for row in grid.rows:
            table.add_row(*row)
        console.print(table)


def write_page(path: Path, report: Record) -> None:
    lines = [_INTRO]
    for grid in grids(report):
        lines += [f"## {grid.title}", ""] + ([grid.note, ""] if grid.note else [])
        lines += [_line(grid.columns), _line(["---"] * len(grid.columns)), *map(_line, grid.rows), ""]
    path.write_text("\n".join(lines), encoding="utf-8")


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
