"""The GPU kernels, compiled for each kind of GPU, and what ptxas says of them. A process of its own, since CUDA's plugin changes JAX:

    python -m pdjax.benchmarks.kernels_gpu JOBS.json

`kernels_jobs` runs it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from pdjax.benchmarks.kernels_jobs import Job, Record, work_on
from pdjax.kernels.gpu.report import Case, cases, row
from pdjax.kernels.gpu.targets import TARGETS

GROUP = "gpu"
_SOURCES = ("kernels/base.py", "kernels/gpu", "kernels/pages")


def jobs() -> Iterator[Job]:
    """Every kernel for every GPU."""
    return map(job, cases())


def job(case: Case) -> Job:
    options = " with options" if case.has_options else ""
    sizes = " " + " x ".join(map(str, case.sizes)) if case.sizes is not None else ""
    name = f"{case.target.name} {case.kernel} head_dim {case.head_dim} {case.pool}{options}{sizes}"
    return Job(GROUP, case.target.name, name, case._asdict() | {"target": case.target.name}, _SOURCES)


def figures(case: Record) -> Record:
    """What a job of `job` finds. Raises what the compiler raises."""
    [target] = [target for target in TARGETS if target.name == case["target"]]
    return {"report": row(Case(**(case | {"target": target}))).report._asdict()}


if __name__ == "__main__":
    work_on(Path(sys.argv[1]), figures)
