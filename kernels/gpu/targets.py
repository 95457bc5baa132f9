"""Ahead-of-time compilation for NVIDIA GPUs on a machine that has none, and what the compiler says about each kernel.

Needs the packages of the extra `aot`: the CUDA plugin of the same jax release and ptxas; no driver. `missing` says what is not there.
XLA lowers and assembles as it would on the device, then ptxas, run once more over the PTX it was given, reports registers and spills.
Mosaic GPU kernels are compiled by Mosaic inside the plugin and leave their PTX in a folder that the environment names, so compile for
one target at a time. Nothing here says how fast a kernel is.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

_PLUGIN = "jax_plugins.xla_cuda12"
_ASSEMBLER = "nvidia.cuda_nvcc"
_RUNTIME = "nvidia.cuda_runtime"  # Mosaic GPU asks for its version
_MOSAIC_FOLDER = "MOSAIC_GPU_DUMP_TO"


class Target(NamedTuple):
    """One kind of GPU, as its data sheet has it. Bytes per second and bytes where no unit is named."""

    name: str
    architecture: str  # as ptxas names it
    capability: tuple[int, int]
    description: str
    multiprocessors: int
    shared_memory_of_multiprocessor: int
    shared_memory_of_block: int  # that a block of threads may ask for
    bandwidth: int
    level_2_cache: int
    memory: int
    clock_ghz: float


SM_80 = Target("sm_80", "sm_80", (8, 0), "NVIDIA A100-SXM4-80GB", 108, 167936, 166912, 2_039_000_000_000, 41943040, 85_094_825_984, 1.41)
SM_90 = Target("sm_90", "sm_90a", (9, 0), "NVIDIA H100 80GB HBM3", 132, 233472, 232448, 3_352_320_000_000, 52428800, 84_942_979_072, 1.98)
SM_100 = Target("sm_100", "sm_100a", (10, 0), "NVIDIA B200", 148, 233472, 232448, 7_672_000_000_000, 132644864, 191_000_000_000, 1.965)
TARGETS = (SM_80, SM_90, SM_100)


class KernelReport(NamedTuple):
    """What the compiler made of one kernel."""

    target: str
    kernel: str
    registers: int  # of a thread
    spill_stores: int  # bytes of a thread
    spill_loads: int
    shared_memory: int  # bytes of a block of threads
    threads: int  # of a block
    blocks_at_a_time: int  # on a multiprocessor, by registers, shared memory and threads
    matrix_instructions: dict[str, int]  # by name: mma.sync, wgmma, tcgen05.mma
    asynchronous_copies: int
    is_serialized: bool  # whether ptxas found that asynchronous matrix products cannot overlap


class CompiledProgram(NamedTuple):
    """A program for a target. `kernels` has those of XLA too."""

    executable: jax.stages.Compiled
    kernels: tuple[KernelReport, ...]

    def kernel(self, name: str) -> KernelReport:
        """Raises KeyError where the program has no kernel whose name begins with `name`."""
        for report in self.kernels:
            if report.kernel.startswith(name):
                return report
        raise KeyError(f"no kernel {name!r} among {', '.join(report.kernel for report in self.kernels)}")


def missing() -> str | None:
    """Which package is not installed, None where all are."""
    for package in (_PLUGIN, _ASSEMBLER, _RUNTIME):
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            spec = None
        if spec is None:
            return f"{package} is not installed: pip install 'pdjax[aot]'"
    return None


@functools.cache
def device_of(target: Target) -> jax.Device:
    """A device to compile for; nothing can run on it."""
    [device] = topologies.get_topology_desc(
        platform="cuda", topology_name="1x1x1", topology="1x1x1", target_config=_config_text(target)
    ).devices
    return device


def argument(target: Target, shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> jax.ShapeDtypeStruct:
    """An argument of a program for `target`."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device_of(target)))


def compile_for(target: Target, function: Callable[..., Any], *arguments: Any, donate: tuple[int, ...] = ()) -> CompiledProgram:
    """`function` compiled for arguments made by `argument`, and a report on each of its kernels.

    Raises what the compiler raises, among it that a kernel needs more shared memory than there is.
    """
    with tempfile.TemporaryDirectory() as folder:
        options = {"xla_dump_to": folder, "xla_gpu_cuda_data_dir": str(_cuda_folder())}
        with _mosaic_dump(folder):
            executable = jax.jit(function, donate_argnums=donate).lower(*arguments).compile(compiler_options=options)
        launches = _launches(Path(folder))
        reports = [_report(target, path, launches) for path in sorted(Path(folder).glob("*.ptx"))]
    return CompiledProgram(executable, tuple(report for report in reports if report is not None))


@contextlib.contextmanager
def _mosaic_dump(folder: str) -> Iterator[None]:
    before = os.environ.get(_MOSAIC_FOLDER)
    os.environ[_MOSAIC_FOLDER] = folder
    yield
    del os.environ[_MOSAIC_FOLDER]
    if before is not None:
        os.environ[_MOSAIC_FOLDER] = before


def _cuda_folder() -> Path:
    spec = importlib.util.find_spec(_ASSEMBLER)
    assert spec is not None and spec.submodule_search_locations, f"{_ASSEMBLER} is not installed"
    return Path(spec.submodule_search_locations[0])


def _config_text(target: Target) -> str:
    """XLA's GpuTargetConfigProto as text."""
    major, minor = target.capability
    return f"""gpu_device_info {{
        threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 fpus_per_core: 128
        shared_memory_per_block: 49152 shared_memory_per_block_optin: {target.shared_memory_of_block}
        shared_memory_per_core: {target.shared_memory_of_multiprocessor} core_count: {target.multiprocessors}
        block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
        memory_bandwidth: {target.bandwidth} l2_cache_size: {target.level_2_cache} clock_rate_ghz: {target.clock_ghz}
        device_memory_size: {target.memory} registers_per_core_limit: 65536 registers_per_block_limit: 65536
        cuda_compute_capability {{ major: {major} minor: {minor} }}
    }}
    platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} runtime_version {{ major: 12 minor: 9 }}
    device_description_str: "{target.description}" """


class _Launch(NamedTuple):
    threads: int
    shared_memory: int


_LAUNCH = re.compile(r"(\w+) +grid: \[[\d, ]+\] threads: \[(\d+), (\d+), (\d+)\] +shared_memory: (\d+) bytes")
_MOSAIC_SHARED = re.compile(r"dynamic_shared_memory_size %c(\d+)_i32")
_MOSAIC_THREADS = re.compile(r"\.maxntid (\d+), (\d+), (\d+)")
_MOSAIC_LOG = ".mlir-passes.log"
_ENTRY = re.compile(r"\.entry (\w+)\(")
_USED = re.compile(r"Used (\d+) registers")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_STATIC_SHARED = re.compile(r"(\d+) bytes smem")
_MATRIX = {"mma.sync": r"\bmma\.sync", "wgmma": r"wgmma\.mma_async", "tcgen05.mma": r"tcgen05\.mma"}
_SERIALIZED = "wgmma.mma_async instructions are serialized"


def _launches(folder: Path) -> dict[str, _Launch]:
    """The launches of a program by the name of their kernel, from XLA's list of what it runs."""
    text = "\n".join(path.read_text() for path in folder.glob("*.thunk_sequence.txt"))
    return {name: _Launch(int(x) * int(y) * int(z), int(shared)) for name, x, y, z, shared in _LAUNCH.findall(text)}


def _mosaic_launch(path: Path, text: str) -> _Launch:
    """The launch of a kernel that XLA does not list: from the passes that Mosaic ran over it."""
    threads = _MOSAIC_THREADS.search(text)
    log = path.with_suffix(_MOSAIC_LOG)
    if threads is None or not log.exists():
        return _Launch(0, 0)
    with log.open() as lines:  # a hundred megabytes; what is sought is near the beginning
        shared = next(match for line in lines if (match := _MOSAIC_SHARED.search(line)))
    return _Launch(int(threads[1]) * int(threads[2]) * int(threads[3]), int(shared[1]))


def _report(target: Target, path: Path, launches: dict[str, _Launch]) -> KernelReport | None:
    text = path.read_text()
    entry = _ENTRY.search(text)
    if entry is None:  # a module of constants
        return None
    said = _assembler_report(target, path)
    used, spills, static = _USED.search(said), _SPILLS.search(said), _STATIC_SHARED.search(said)
    assert used is not None and spills is not None, f"ptxas says nothing of registers: {said}"
    launch = launches.get(entry[1]) or _mosaic_launch(path, text)
    shared = launch.shared_memory + (int(static[1]) if static else 0)
    registers = int(used[1])
    return KernelReport(
        target.name,
        entry[1],
        registers,
        int(spills[1]),
        int(spills[2]),
        shared,
        launch.threads,
        blocks_at_a_time(target, registers, shared, launch.threads),
        {name: count for name, pattern in _MATRIX.items() if (count := len(re.findall(pattern, text)))},
        len(re.findall(r"cp\.async\.(?:cg|ca|bulk)", text)),
        _SERIALIZED in said,
    )


def _assembler_report(target: Target, path: Path) -> str:
    """What ptxas says of a kernel: Mosaic's own, which may be of another version, has left it beside the PTX."""
    beside = path.with_suffix(".ptxas")
    if beside.exists():
        return beside.read_text()
    command = [str(_cuda_folder() / "bin" / "ptxas"), "-v", f"--gpu-name={target.architecture}", "-o", "/dev/null", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def blocks_at_a_time(target: Target, registers: int, shared_memory: int, threads: int) -> int:
    """Blocks of threads that a multiprocessor holds.

    Registers are given out by 256 a warp, shared memory by 128 bytes and 1 KiB of the system's own a block.
    """
    if not threads:
        return 0
    warps = -(-threads // 32)
    by_registers = 65536 // (warps * -(-registers * 32 // 256) * 256)
    by_shared = target.shared_memory_of_multiprocessor // (-(-shared_memory // 128) * 128 + 1024)
    return min(by_registers, by_shared, 64 // warps, 32)
