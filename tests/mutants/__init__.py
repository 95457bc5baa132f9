"""Small faults for the schedulers and the router's policy; the simulation has to find each. See docs/simulation.md."""

from tests.mutants import decode, memory, prefill, router
from tests.mutants.base import Mutant

MUTANTS = (*prefill.MUTANTS, *decode.MUTANTS, *memory.MUTANTS, *router.MUTANTS)

__all__ = ["MUTANTS", "Mutant"]
