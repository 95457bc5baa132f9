"""The command line of `python -m pdjax.bench kernels`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console

from pdjax.benchmarks import report

if TYPE_CHECKING:
    from pdjax.benchmarks.kernels_jobs import Job

GPU = "gpu"
_CACHE = Path("~/.cache/pdjax/kernels")

DESCRIPTION = """\
Compile every kernel for every accelerator, on a machine that has none, and print what the compilers made of it: bundles per 1,000 scores, use
of slots, spills; registers and shared memory; and whole steps of Llama-3-8B by the compiler's estimate. Nothing runs.

Needs the extra `aot` (scripts/kernel_report installs it). All targets take about 50 minutes on two cores. Each result is kept until the
kernel's source or a compiler changes: what was interrupted goes on, and a second run takes seconds.

--tune compiles, for each entry of the tuning tables, the entry and its neighbours, with one size halved or doubled, and writes their figures
to tuning_figures.json beside the tables.

Exit status: 0 when everything was compiled, 1 when a program failed (its row says why; of --tune only entries of the table count), 2 on a bad
command line. Goals that are missed are reported and do not count."""


class Settings(NamedTuple):
    targets: tuple[str, ...]
    is_quick: bool
    is_tuning: bool
    only: tuple[str, ...]
    cache: Path
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
    parser.add_argument("--quick", action="store_true", help="of TPUs three programs, and no steps")
    parser.add_argument("--tune", action="store_true", help="the entries of the tuning tables and their neighbours")
    parser.add_argument("--only", metavar="TEXT,TEXT,..", help="only programs whose name has all of these, such as 'head_dim 128,int8'")
    parser.add_argument("--cache", type=Path, default=_CACHE, metavar="DIR", help="where results are kept (default: %(default)s)")
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
    only = () if args.only is None else tuple(args.only.split(","))
    return Settings(targets, args.quick, args.tune, only, args.cache.expanduser(), args.json, args.page)


def run(args: argparse.Namespace, settings: Settings) -> int:
    from pdjax.benchmarks import kernels_report, kernels_tune
    from pdjax.benchmarks.kernels_jobs import Results, run_jobs

    known = kernels_tune.jobs(settings.targets) if settings.is_tuning else _jobs(settings)
    jobs = [job for job in known if all(text in job.name for text in settings.only)]
    records = run_jobs(jobs, Results(settings.cache), command, _say)
    if settings.is_tuning:
        entries = kernels_tune.entries(jobs, records)
        for path in kernels_tune.write(entries):
            _say(f"wrote {path}")
        whole = {"tuning": entries}
        kernels_report.print_grids(Console(width=220), [kernels_tune.grid(entries)])
        failed = sum(entry["is_chosen"] and "reason" in entry for entry in entries)
    else:
        whole = kernels_report.assembled(records)
        kernels_report.print_grids(Console(width=220), kernels_report.grids(whole))
        if settings.page is not None:
            kernels_report.write_page(settings.page, whole)
        failed = sum("reason" in record for record in records)
    if settings.json is not None:
        report.write_json(settings.json, {"schema_version": report.SCHEMA_VERSION, **whole})
    if failed:
        _say(f"{failed} of {len(records)} programs failed; the tables say why")
    return 1 if failed else 0


def command(group: str, todo: Path, work: Path) -> list[str]:
    """A process for a chip, with the environment that its compiler reads once, or for all GPUs."""
    from pdjax.benchmarks.kernels_target import CHIPS, environment

    if group not in CHIPS:
        return ["env", "JAX_PLATFORMS=cpu", sys.executable, "-m", "pdjax.benchmarks.kernels_gpu", str(todo)]
    dump = work / "dump"
    variables = [f"{name}={value}" for name, value in environment(CHIPS[group], dump).items()]
    return ["env", *variables, sys.executable, "-m", "pdjax.benchmarks.kernels_tpu", group, str(todo), str(dump)]


def _jobs(settings: Settings) -> list[Job]:
    from pdjax.benchmarks import kernels_gpu, kernels_tpu
    from pdjax.benchmarks.kernels_target import CHIPS

    found: list[Job] = []
    for target in settings.targets:
        found += kernels_gpu.jobs() if target == GPU else kernels_tpu.jobs(CHIPS[target], settings.is_quick)
    return found


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
