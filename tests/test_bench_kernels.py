"""The report on compiled kernels: what is read out of a compiled step, what the goals say, and, where the compilers are, the real thing."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pdjax.bench import build_parser
from pdjax.benchmarks import kernels_report, kernels_step
from pdjax.benchmarks.kernels_step import LLAMA_3_8B, Work, layer_weights
from pdjax.benchmarks.kernels_target import CHIPS, environment

ROOT = Path(__file__).parent.parent
COMPILERS = ROOT / ".venv-aot" / "bin" / "python"

PROGRAM = """\
HloModule layers
%body.1 (arg.1: (s32[])) -> (s32[]) {
  %fusion.1 = bf16[8,8] fusion(%x), metadata={op_name="jit(layers)/while/body/dot_general"}, backend_config={"estimated_cycles":"100"}
  %fusion.2 = bf16[8,8] fusion(%x), metadata={op_name="jit(layers)/while/body/mlp/dot_general"}, backend_config={"estimated_cycles":"300"}
  %copy.3 = bf16[8,8] copy(%x), metadata={op_name="jit(layers)/while/body/attention/transpose"}, backend_config={"estimated_cycles":"20"}
  %all-reduce-start.4 = bf16[8,8] all-reduce-start(%fusion.2)
  %all-reduce.5 = bf16[8,8] all-reduce(%fusion.2)
  ROOT %tuple.1 = (s32[]) tuple(%i)
}
ENTRY %main.9 (p: bf16[8,8]) -> bf16[8,8] {
  %fusion.9 = s32[4] fusion(%p), metadata={op_name="jit(layers)/gather"}, backend_config={"estimated_cycles":"7"}
  %while.2 = (s32[]) while(%t), condition=%cond.1, body=%body.1
}
"""


def test_cycles_of_the_loop_over_layers_count_once_a_layer_and_each_lands_in_its_part() -> None:
    cycles, collectives = kernels_step._cycles_by_part(PROGRAM, 10)
    assert cycles == {"projections": 1000, "MLP": 3000, "attention": 200, "rest": 7}
    assert collectives == {"started": 1, "waited": 1}


def test_operations_and_scores_are_those_of_the_model() -> None:
    # A layer of Llama-3-8B: 4096 x (4096 + 2 x 1024 + 4096) of attention, 3 x 4096 x 14336 of the MLP.
    assert layer_weights(LLAMA_3_8B) == 32 * (4096 * (4096 + 2048 + 4096) + 3 * 4096 * 14336)
    work = Work("prefill", 2, 3)  # rows at positions 1 and 2 see 2 and 3 positions
    assert kernels_step._scores(LLAMA_3_8B, work) == 32 * 32 * 5
    assert kernels_step._scores(LLAMA_3_8B, Work("decode", 2, 3)) == 32 * 32 * 6
    assert kernels_step._operations(LLAMA_3_8B, work) == 4 * layer_weights(LLAMA_3_8B) + 4 * 128 * 32 * 32 * 5


def kernel(**changes: Any) -> dict[str, Any]:
    figures = {"bundles": 100, "bundles_per_1000_scores": 2.9, "mxu": 0.6, "valu": 0.8, "eup": 0.1, "vload": 0.1, "vstore": 0.1, "fill": 0.0, "spill": 0.0}
    shape = {"target": "v6e", "kernel": "ragged_paged_attention", "head_dim": 128, "dtype": "bfloat16", "rows": 128, "block_tokens": 512}
    a_tile = {"query_rows": 128 * 32, "masked_bundles": 150, "tile_bundles": 400}
    return {**shape, **figures, **a_tile, "bundles_per_page": 100.0, "dma_cycles_per_page": 280.0, "temp_bytes": 0, **changes}


def step(**changes: Any) -> dict[str, Any]:
    counts = {"operations": 8e9, "scores": 1e6, "query_rows": 0.0}
    sizes = {"weight_bytes": 0.0, "kv_bytes": 0.0, "memory_bytes": 1 << 30, "pool_copies": 0}
    work = {"target": "v6e", "kernel": "step", "tensor_parallel": 1, "work": ["prefill", 2048, 8192], "num_collectives": 0, "num_overlapped": 0}
    return {**work, **counts, **sizes, "cycles": {"MLP": 7000, "rest": 100}, **changes}


PRODUCT = {"target": "v6e", "kernel": "product", "reference_operations_per_cycle": 1e6}
PAGES = kernel(kernel="gather_pages", bundles_per_1000_scores=None, bundles_per_page=35, temp_bytes=1234)
DECODE = kernel(kernel="paged_decode_attention", bundles_per_page=560.0)  # twice what its bytes take: bound by bundles


def test_the_share_of_a_step_counts_the_kernel_by_its_schedule() -> None:
    [with_share] = kernels_report.with_shares([kernel(), DECODE], [PRODUCT, step()])
    assert with_share["kernel_cycles"] == pytest.approx(2900)  # 10^6 scores at 2.9 bundles a thousand
    assert with_share["share"] == pytest.approx(8000 / 10000)
    [with_share] = kernels_report.with_shares([kernel(), DECODE], [PRODUCT, step(query_rows=2 * 128 * 32.0)])  # two tiles
    assert with_share["kernel_cycles"] == pytest.approx(2900 + 2 * (150 - 50 + 400))  # a block with masks, half of it counted, and the rest


def test_a_decode_step_is_held_against_the_bytes_it_reads() -> None:
    a_cycle = CHIPS["v6e"].bytes_per_cycle
    work = step(work=["decode", 64, 1024], kv_bytes=2000 * a_cycle, weight_bytes=1000 * a_cycle, cycles={"MLP": 1000})
    [with_share] = kernels_report.with_shares([kernel(), DECODE], [PRODUCT, work])
    assert with_share["kernel_cycles"] == pytest.approx(4000)
    assert with_share["share"] == pytest.approx(3000 / 5000)


def test_a_step_whose_kernel_or_product_failed_says_so_and_those_of_other_chips_do_not() -> None:
    failed = kernel(kernel="paged_decode_attention", reason="RuntimeError: no")
    other = kernel(target="v5e"), DECODE | {"target": "v5e"}, PRODUCT | {"target": "v5e"}, step(target="v5e")
    report = kernels_report.assembled([kernel(), failed, PRODUCT, step(), *other, {"target": "sm_80", "kernel": "triton_prefill"}])
    assert [("reason" in record, "share" in record) for record in report["steps"]] == [(True, False), (False, True)]
    assert len(report["tpu"]) == 4 and len(report["gpu"]) == 1


def test_goals_name_what_is_missed() -> None:
    steps = [step(share=0.7), step(share=0.66, tensor_parallel=4, pool_copies=1)]
    kernels = [kernel(bundles_per_1000_scores=3.1), kernel(head_dim=64, spill=0.03), kernel(target="v5e", spill=0.5), PAGES]
    found = kernels_report.goals(kernels, steps)
    assert {goal["goal"]: goal["holds"] for goal in found} == {
        "v6e prefill, head_dim 128: bundles per 1,000 scores": False,
        "v6e prefill, head_dim 128: slots that spill or fill": True,
        "v6e prefill, head_dim 64: bundles per 1,000 scores": True,
        "v6e prefill, head_dim 64: slots that spill or fill": False,
        "v6e pages: bytes beside pool and chunk, which would be a copy": True,
        "v6e prefill step of Llama-3-8B, 1 chip: share of one large product's rate": False,
        "v6e prefill step of Llama-3-8B, 1 chip: copies of the pool": True,
        "v6e prefill step of Llama-3-8B, 4 chips: share of one large product's rate": True,
        "v6e prefill step of Llama-3-8B, 4 chips: copies of the pool": False,
    }


def test_the_page_shows_figures_and_reasons(tmp_path: Path) -> None:
    gpu = {"target": "sm_80", "kernel": "triton_prefill", "head_dim": 64, "pool": "int8", "has_options": False, "reason": "RuntimeError: no"}
    tpu = [kernel(), kernel(dtype="int8", reason="pages of int8"), PAGES, PAGES | {"reason": "ValueError: pages"}]
    report = {"goals": kernels_report.goals(tpu, []), "tpu": tpu, "steps": [step(kernel_cycles=1, total_cycles=2, share=0.5)], "gpu": [gpu]}
    kernels_report.write_page(tmp_path / "page.md", report)
    page = (tmp_path / "page.md").read_text()
    assert "| v6e | 128 | bfloat16 | 128 x 512 | 2.90 | 60 % |" in page
    assert "| v6e | gather_pages | 128 | bfloat16 | 35 | 280 | 80 % | 1,234 |" in page and "ValueError: pages" in page
    assert "pages of int8" in page and "RuntimeError: no" in page
    with Console(width=250, record=True, quiet=True) as console:
        kernels_report.print_grids(console, kernels_report.grids(report))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--targets", "v6e,v9"], "'v9' is none of"),
        (["--targets", "", "--json", "/nowhere/x.json"], "'' is none of"),
    ],
)
def test_what_cannot_be_compiled_or_written_is_refused_before_anything_starts(arguments: list[str], text: str) -> None:
    args = build_parser().parse_args(["kernels", *arguments])
    with pytest.raises(ValueError, match=text):
        args.prepare(args)


def test_each_chip_gets_an_environment_of_its_own(tmp_path: Path) -> None:
    settings = [environment(chip, tmp_path) for chip in CHIPS.values()]
    assert len({setting["TPU_ACCELERATOR_TYPE"] for setting in settings}) == len(CHIPS)
    assert all(str(tmp_path) in setting["LIBTPU_INIT_ARGS"] for setting in settings)


@pytest.mark.skipif(not COMPILERS.exists(), reason="the compilers are not installed: scripts/kernel_report --install")
def test_the_kernels_compile_for_a_tpu_and_meet_the_goals(tmp_path: Path) -> None:
    output = ["--json", str(tmp_path / "out.json"), "--cache", str(tmp_path / "cache")]
    command = [str(ROOT / "scripts" / "kernel_report"), "--targets", "v6e", "--quick", *output]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["schema_version"] == 1 and len(report["tpu"]) == 3
    assert {"target", "kernel", "head_dim", "bundles_per_1000_scores", "mxu", "valu", "spill"} <= report["tpu"][0].keys()
    assert all("reason" not in record for record in report["tpu"])
    missed = [goal for goal in report["goals"] if not goal["holds"]]
    assert not missed
