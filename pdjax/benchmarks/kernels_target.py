"""TPUs to compile for on a machine that has none, with libtpu's own compiler (extra `aot`).

libtpu reads its settings once, when it is first used, and serves one kind of chip a process: each kind gets a process of its own, with
`environment` around it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh


class Chip(NamedTuple):
    """One kind of TPU. Bandwidth of its memory as the data sheet has it; the clock follows from its peak rate and its matrix units."""

    name: str
    topology: str
    accelerator: str
    clock_ghz: float
    bandwidth_gbytes: float
    memory_gib: int
    kernel_name: str  # as the tuning tables of the kernels know it

    @property
    def bytes_per_cycle(self) -> float:
        """Of its memory."""
        return self.bandwidth_gbytes / self.clock_ghz


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v5e", "v5e:2x2", "v5litepod-4", 1.5, 819, 16, "v5e"),
        Chip("v5p", "v5p:2x2x1", "v5p-8", 1.75, 2765, 95, "v5p"),
        Chip("v6e", "v6e:2x2", "v6e-4", 1.75, 1640, 32, "v6e"),
        Chip("tpu7x", "tpu7x:2x2x1", "tpu7x-8", 1.9, 7380, 96, "7x"),
    )
}


def missing() -> str | None:
    """Which package is not installed, None where all are."""
    return None if importlib.util.find_spec("libtpu") else "libtpu is not installed: pip install 'pdjax[aot]'"


def environment(chip: Chip, dump: Path) -> dict[str, str]:
    """What a process that compiles for `chip` needs to find. `dump`: where the compiler leaves the schedules of kernels."""
    return {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": chip.accelerator,
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # nothing runs on a device, so processes need not take turns
        "LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true",
    }


@functools.cache
def devices(chip: Chip) -> Sequence[jax.Device]:
    """The chips of a small slice, the same ones every time."""
    return topologies.get_topology_desc(platform="tpu", topology_name=chip.topology).devices


@contextlib.contextmanager
def tracing_for(chip: Chip) -> Iterator[None]:
    """Kernels that are traced inside are told that they will run on `chip`."""
    with jax.sharding.use_abstract_mesh(Mesh(np.array(devices(chip)[:1]), ("chip",)).abstract_mesh):
        yield
