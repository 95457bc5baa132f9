"""`python -m tests.mutants NAME SEED...`: run seeds with the fault in place until one does not hold; exit status 1 then."""

from __future__ import annotations

import sys

from tests.mutants import MUTANTS
from tests.mutants.base import install


def main(name: str, seeds: list[int]) -> int:
    install(next(mutant for mutant in MUTANTS if mutant.name == name))
    # Only now: the simulation imports what it simulates.
    from pdjax.simulation.runner import Failure, run_seed

    for seed in seeds:
        result = run_seed(seed)
        if isinstance(result, Failure):
            print(f"seed {seed}: {result.message}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], [int(seed) for seed in sys.argv[2:]]))
