"""The command line of `python -m pdjax.bench kernels`."""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console

from pdjax.benchmarks import report

if TYPE_CHECKING:
    from pdjax.benchmarks.kernels_target import Chip

GPU = "gpu"
_AT_A_TIME = 2

DESCRIPTION = """\
Compile every attention kernel for every accelerator, on a machine that has none, and print what the compilers made of it: bundles per 1,000 scores,
use of slots, spills; registers and shared memory; and whole steps of Llama-3-8B by the compiler's estimate. Nothing runs.

Needs the extra `aot` (scripts/kernel_report installs it). Takes some minutes a chip.

Exit status: 0 when everything was compiled, 1 when a process failed, 2 on a bad command line. Goals that are missed are reported and do
not count."""


class Settings(NamedTuple):
    targets: tuple[str, ...]
    is_quick: bool
    json: Path | None
    page: Path | None


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "kernels",
        help="the kernels, compiled for TPUs and GPUs without one",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--targets", metavar="NAME,NAME,..", help="of v5e, v5p, v6e, tpu7x, gpu (default: all)")
    parser.add_argument("--quick", action="store_true", help="of TPUs one program a kernel, and no steps")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure to FILE")
    parser.add_argument("--page", type=Path, metavar="FILE.md", help="write the tables to FILE.md")
    parser.set_defaults(prepare=prepare, run=run)


def prepare(args: argparse.Namespace) -> Settings:
    """Raises ValueError for what cannot be compiled for here, and paths that cannot be written."""
    from pdjax.benchmarks.kernels_target import CHIPS, missing
    from pdjax.kernels.gpu.targets import missing as missing_for_gpu

    known = (*CHIPS, GPU)
    targets = known if args.targets is None else tuple(args.targets.split(","))
    if unknown := [target for target in targets if target not in known]:
        raise ValueError(f"--targets: {unknown[0]!r} is none of {', '.join(known)}")
    for problem in (missing() if set(targets) & set(CHIPS) else None, missing_for_gpu() if GPU in targets else None):
        if problem:
            raise ValueError(problem)
    for path in (args.json, args.page):
        if path is not None:
            report.check_output_path(path)
    return Settings(targets, args.quick, args.json, args.page)


def run(args: argparse.Namespace, settings: Settings) -> int:
    from pdjax.benchmarks import kernels_report
    from pdjax.benchmarks.kernels_target import CHIPS

    chips: dict[str, Any] = {}
    gpu: list[dict[str, Any]] = []
    failed = 0
    with tempfile.TemporaryDirectory() as folder:

        def figures(target: str) -> Any:
            return _gpu_figures(Path(folder)) if target == GPU else _tpu_figures(CHIPS[target], settings.is_quick, Path(folder))

        with concurrent.futures.ThreadPoolExecutor(_AT_A_TIME) as pool:
            all_found = list(pool.map(figures, settings.targets))
        for target, found in zip(settings.targets, all_found, strict=True):
            if found is None:
                failed += 1
            elif target == GPU:
                gpu = found
            else:
                chips[target] = found | {"bytes_per_cycle": CHIPS[target].bandwidth_gbytes / CHIPS[target].clock_ghz}
    kernels = [kernel for found in chips.values() for kernel in found["kernels"]]
    steps = kernels_report.with_shares(chips)
    whole = {"goals": kernels_report.goals(kernels, steps), "tpu": kernels, "steps": steps, "gpu": gpu}
    kernels_report.print_grids(Console(width=220), whole)
    if settings.json is not None:
        report.write_json(settings.json, {"schema_version": report.SCHEMA_VERSION, **whole})
    if settings.page is not None:
        kernels_report.write_page(settings.page, whole)
    return 1 if failed else 0


def _tpu_figures(chip: Chip, is_quick: bool, folder: Path) -> Any:
    from pdjax.benchmarks.kernels_target import environment

    dump, out = folder / f"dump-{chip.name}", folder / f"{chip.name}.json"
    variables = [f"{name}={value}" for name, value in environment(chip, dump).items()]
    arguments = [chip.name, str(dump), str(out), *(["--quick"] if is_quick else [])]
    return _compiled(["env", *variables, sys.executable, "-m", "pdjax.benchmarks.kernels_tpu", *arguments], out)


def _gpu_figures(folder: Path) -> Any:
    out = folder / "gpu.json"
    return _compiled(["env", "JAX_PLATFORMS=cpu", sys.executable, "-m", "pdjax.benchmarks.kernels_gpu", str(out)], out)


def _compiled(command: list[str], out: Path) -> Any:
    """What a compiling process has written; None where it failed. It prints its progress, and the compilers what they like to stderr."""
    console, said = Console(stderr=True), out.with_suffix(".log")
    with said.open("w") as errors, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            console.print(line.rstrip(), highlight=False)
    if process.returncode or not out.exists():
        end = said.read_text()[-2000:]
        console.print(f"{' '.join(command[-4:])} failed with status {process.returncode}:\n{end}", highlight=False, markup=False)
        return None
    return json.loads(out.read_text())
