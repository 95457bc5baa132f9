"""The GPU kernels, compiled for each kind of GPU, and what ptxas says of them. A process of its own, since CUDA's plugin changes JAX:

    python -m pdjax.benchmarks.kernels_gpu OUT.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pdjax.kernels.gpu.report import Case, cases, row


def figures(case: Case) -> dict[str, Any]:
    """The case and its figures, or the `reason` why there are none."""
    described = case._asdict() | {"target": case.target.name}
    try:
        return described | {"report": row(case).report._asdict()}
    except Exception as error:  # what the compiler raises, of many kinds, is the result
        return described | {"reason": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}


def main() -> None:
    records = []
    for case in cases():
        print(" ".join(map(str, case[1:])), case.target.name, flush=True)
        records.append(figures(case))
    Path(sys.argv[1]).write_text(json.dumps(records, default=str))


if __name__ == "__main__":
    main()
