"""GPU kernels through the real compilers, where the extra `aot` is installed: they compile, nothing spills, the pool is not copied."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from pdjax.kernels.gpu import targets
from pdjax.kernels.gpu.targets import SM_80, SM_90, SM_100, blocks_at_a_time

REASON = targets.missing()

PROGRAM = """
from pdjax.kernels.gpu.report import Case, compiled, row
from pdjax.kernels.gpu.targets import SM_80, SM_90, SM_100
for target, kernel, head_dim, pool in (
    (SM_80, "triton_prefill", 80, "bfloat16"),
    (SM_80, "triton_decode", 128, "float8_e4m3fn"),
    (SM_90, "triton_prefill", 128, "bfloat16"),
    (SM_90, "hopper_prefill", 128, "bfloat16"),
    (SM_100, "triton_prefill", 64, "bfloat16"),
    (SM_90, "gather_pages", 128, "bfloat16"),
    (SM_90, "gather_summed_pages", 128, "bfloat16"),
):
    report = row(Case(target, kernel, head_dim, pool)).report
    print(kernel, target.name, report.spill_stores, report.spill_loads, *sorted(report.matrix_instructions))
program = compiled(Case(SM_90, "install_pages", 128, "bfloat16")).executable
print("copies", sum(" copy(" in line for line in program.as_text().splitlines()), program.memory_analysis().temp_size_in_bytes < 2**20)
"""


@pytest.mark.skipif(REASON is not None, reason=REASON or "")
def test_kernels_compile_without_spills_and_use_the_matrix_instructions_of_their_chip() -> None:
    """In a process of its own, since the plugin would make it look for a GPU."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.stdout.splitlines() == [
        "triton_prefill sm_80 0 0 mma.sync",
        "triton_decode sm_80 0 0 mma.sync",
        "triton_prefill sm_90 0 0 wgmma",
        "hopper_prefill sm_90 0 0 wgmma",
        "triton_prefill sm_100 0 0 tcgen05.mma",
        "gather_pages sm_90 0 0",
        "gather_summed_pages sm_90 0 0",
        "copies 0 True",
    ], done.stderr


@pytest.mark.parametrize(
    ("target", "registers", "shared_memory", "threads", "blocks"),
    [
        # 65,536 registers: 4 warps of 128 x 32 registers four times; by shared memory often enough.
        (SM_80, 128, 16 << 10, 128, 4),
        # 227 KiB a block of 228 KiB.
        (SM_90, 64, 227 << 10, 256, 1),
        # 64 warps a multiprocessor.
        (SM_100, 16, 0, 1024, 2),
        (SM_80, 0, 0, 0, 0),
    ],
)
def test_blocks_at_a_time_are_bound_by_registers_shared_memory_or_warps(
    target: targets.Target, registers: int, shared_memory: int, threads: int, blocks: int
) -> None:
    assert blocks_at_a_time(target, registers, shared_memory, threads) == blocks


def test_what_is_missing_names_the_extra() -> None:
    assert REASON is None or re.fullmatch(r"[\w.]+ is not installed: pip install 'pdjax\[aot\]'", REASON)
