"""Pages pushed between chips: the kernel and the mover on interpreted TPUs, in a process with 8 virtual devices."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import NamedTuple

import jax
import pytest
from jax.sharding import SingleDeviceSharding

from pdjax.kernels.ici_push import can_push, why_no_push
from pdjax.transfer.device_put import DevicePutMover
from pdjax.transfer.push import mover_between, paired

PRELUDE = """
import jax, numpy as np, jax.numpy as jnp
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding
from pdjax.kernels import ici_push
from pdjax.transfer.push import PushMover, paired
ici_push._MAX_PIECE_BYTES = 1  # a layer of a page a piece
devices, params = jax.devices(), pltpu.InterpretParams(detect_races=True)
"""

KERNEL = """
n, chips = 3, 2
mesh = ici_push.push_mesh(devices[:chips], devices[chips : 2 * chips])
chunks = np.random.default_rng(0).normal(size=(2 * chips * n, 3, 2, 2, 8)).astype(np.float32)
chunks[chips * n :] = np.nan
split = NamedSharding(mesh, P((ici_push.END, ici_push.CHIP)))
pushed = jax.jit(lambda x: ici_push.push(x, mesh, interpret=params))(jax.device_put(chunks, split))
np.testing.assert_array_equal(np.asarray(pushed)[chips * n :], chunks[: chips * n])
assert not interpreter.races.races_found
print("pushed")
"""

MOVER = """
page = (2, 2, 4, 8)
rows = np.random.default_rng(0).normal(size=(3, *page)).astype(jnp.bfloat16)
heads = P(None, None, None, "tensor")
prefill, decode = (NamedSharding(Mesh(np.array(part), ("tensor",)), heads) for part in (devices[:2], devices[5:7]))
mover = PushMover(paired(prefill, decode, page), decode, interpret=params)
for _ in range(2):
    moved = mover.start(jax.device_put(rows, prefill))
    mover.wait(moved)
    assert moved.sharding == decode and moved.devices() == set(devices[5:7]), moved.sharding
    np.testing.assert_array_equal(np.asarray(moved), rows)
one = SingleDeviceSharding(devices[0]), SingleDeviceSharding(devices[3])
mover = PushMover(paired(*one, page), one[1], interpret=params)
np.testing.assert_array_equal(np.asarray(mover.start(jax.device_put(rows, one[0]))), rows)
print("pushed")
"""


@pytest.mark.parametrize("program", [KERNEL, MOVER], ids=["kernel", "mover"])
def test_what_prefill_chips_push_arrives_whole_and_without_a_race(program: str) -> None:
    """More pieces than landing slots, so that slots are used again; NaN in what decode brings."""
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", PRELUDE + program], env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.stdout.strip() == "pushed", done.stderr


class FakeChip(NamedTuple):
    platform: str = "tpu"
    process_index: int = 0
    slice_index: int = 0
    id: int = 0


@pytest.mark.parametrize(
    ("prefill", "decode", "reason"),
    [
        ([FakeChip(id=0)], [FakeChip(id=1)], None),
        ([FakeChip(id=0)], [FakeChip(id=1), FakeChip(id=2)], "1 prefill devices and 2 decode devices"),
        ([FakeChip(id=0)], [FakeChip(id=0)], "prefill and decode share a device"),
        ([FakeChip(id=0)], [FakeChip("cpu", id=1)], "not all on TPU: cpu, tpu"),
        ([FakeChip(id=0)], [FakeChip(slice_index=1, id=1)], "devices of 2 slices"),
        ([FakeChip(id=0)], [FakeChip(process_index=1, id=1)], "devices of 2 processes"),
    ],
)
def test_a_push_needs_chips_of_one_slice(prefill: list[FakeChip], decode: list[FakeChip], reason: str | None) -> None:
    assert why_no_push(prefill, decode) == reason
    if len(decode) == 1:
        assert can_push(prefill[0], decode[0]) is (reason is None)


def test_elsewhere_device_put_moves_the_chunks() -> None:
    here = SingleDeviceSharding(jax.devices()[0])
    assert paired(here, here, (1, 4, 2, 8)) == [(jax.devices()[0], jax.devices()[0])]
    assert isinstance(mover_between(here, here, (1, 4, 2, 8)), DevicePutMover)
