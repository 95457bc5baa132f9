"""Pages from prefill chips to decode chips of one TPU slice, by remote DMA over the interconnect (ICI).

One program runs on both ends of a mesh [2, chips]; chip c of prefill sends its part of a chunk to chip c of decode:

    prefill chip c                                      decode chip c
    chunk in HBM                                        landing slots in VMEM         chunk in HBM
    piece 0  ---- remote DMA -------------------------->  slot 0  ---- DMA ---------->  piece 0
    piece 1  ---- remote DMA -------------------------->  slot 1  ---- DMA ---------->  piece 1
    ...                                                   ...
    piece S  <--- waits for a credit: slot 0 is free ---  slot 0  ---- DMA ---------->  piece S

* The two meet at the barrier semaphore first: semaphores and landing slots of this program exist on a chip only while it runs there.
* A piece lands in VMEM, whose addresses the compiler fixes for all chips of the program. Results in HBM are allocated by each chip for
  itself, and two workers with different histories have them at different addresses.
* The receiver gives a credit for each slot that is needed again and none beyond, so no signal arrives after the sender has left.

A chip runs one program at a time: the push starts when both ends have finished what was launched before, and whoever is first waits.
`jax.device_put` makes no chip wait, and is what to use where steps are long; a push needs no runtime in between, and no buffer on a host.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, PartitionSpec

END, CHIP = "end", "chip"
_PREFILL, _DECODE = 0, 1
_SLOTS = 4
_MAX_PIECE_BYTES = 1 << 20
"""Four slots of this size: the interconnect brings 1 MiB in 10 to 20 us, long beside the few us of a round trip for a credit."""
_COLLECTIVE_ID = 7
"""Of the barrier semaphore; no other kernel of the project uses one."""


def why_no_push(prefill: Sequence[jax.Device], decode: Sequence[jax.Device]) -> str | None:
    """Why pages cannot be pushed from the prefill to the decode devices, in the order of their parts of a chunk; None where they can."""
    if len(prefill) != len(decode):
        return f"{len(prefill)} prefill devices and {len(decode)} decode devices"
    if set(prefill) & set(decode):
        return "prefill and decode share a device"
    platforms = sorted({device.platform for device in (*prefill, *decode)})
    if platforms != ["tpu"]:
        return f"not all on TPU: {', '.join(platforms)}"
    processes = {device.process_index for device in (*prefill, *decode)}
    if len(processes) > 1:
        return f"devices of {len(processes)} processes"
    slices = {device.slice_index for device in (*prefill, *decode)}
    return None if len(slices) == 1 else f"devices of {len(slices)} slices"


def can_push(prefill: jax.Device, decode: jax.Device) -> bool:
    """Whether both are chips of one TPU slice, driven by this process."""
    return why_no_push([prefill], [decode]) is None


def push_mesh(prefill: Sequence[jax.Device], decode: Sequence[jax.Device]) -> Mesh:
    """The mesh that `push` runs on: [2, chips]."""
    return Mesh(np.array([list(prefill), list(decode)]), (END, CHIP))


def push(chunks: jax.Array, mesh: Mesh, *, interpret: Any = False) -> jax.Array:
    """Every decode chip's part replaced by that of the prefill chip beside it in the mesh.

    Args:
        chunks: [2 * chips * n, layers, page_size, 2 * K, D], split over both axes of the mesh along its first: each chip has one chunk.
            Those of decode are not read.
        mesh: from `push_mesh`.

    Returns: the shape and split of `chunks`; what prefill chips hold of it is not defined.
    """
    parts = PartitionSpec((END, CHIP))
    push_part = functools.partial(_push_part, interpret=interpret)
    return jax.shard_map(push_part, mesh=mesh, in_specs=parts, out_specs=parts, check_vma=False)(chunks)


def _push_part(chunk: jax.Array, interpret: Any) -> jax.Array:
    """The program of one chip; chunk [n, layers, page_size, 2 * K, D]."""
    num_pages, num_layers, *page = chunk.shape
    layers = _piece_layers(chunk)
    pieces = chunk.reshape(num_pages * (num_layers // layers), layers, *page)
    slots = min(_SLOTS, len(pieces))
    pushed = pl.pallas_call(
        _kernel,
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        out_shape=jax.ShapeDtypeStruct(pieces.shape, pieces.dtype),
        scratch_shapes=[
            pltpu.VMEM((slots, *pieces.shape[1:]), pieces.dtype),
            pltpu.SemaphoreType.DMA((slots,)),
            pltpu.SemaphoreType.DMA((slots,)),
            pltpu.SemaphoreType.DMA((slots,)),
            pltpu.SemaphoreType.REGULAR,
        ],
        compiler_params=pltpu.CompilerParams(collective_id=_COLLECTIVE_ID),
        interpret=interpret,
        name="push_pages",
    )(pieces)
    return pushed.reshape(chunk.shape)


def _piece_layers(chunk: jax.Array) -> int:
    """Layers of a piece: the largest divisor of all of them that keeps it small enough, at least one."""
    _, num_layers, *page = chunk.shape
    page_bytes = chunk.dtype.itemsize * page[0] * page[1] * page[2]
    fitting = [layers for layers in range(1, num_layers + 1) if num_layers % layers == 0 and layers * page_bytes <= _MAX_PIECE_BYTES]
    return max(fitting, default=1)


def _kernel(
    source_hbm: Any, target_hbm: Any, landing_vmem: Any, left_sems: Any, arrived_sems: Any, drained_sems: Any, credit_sem: Any
) -> None:
    """source_hbm and target_hbm [pieces, layers, page_size, 2 * K, D]; landing_vmem [slots, ...] and a DMA semaphore a slot each for
    pieces that have left, arrived and been drained; credit_sem counts the slots that are free again."""
    end, chip = jax.lax.axis_index(END), jax.lax.axis_index(CHIP)
    peer = (1 - end, chip)
    num_pieces, num_slots = source_hbm.shape[0], landing_vmem.shape[0]

    def flight(piece: jax.Array | int) -> pltpu.AsyncCopyDescriptor:
        slot = jax.lax.rem(piece, num_slots)
        return pltpu.make_async_remote_copy(
            source_hbm.at[piece], landing_vmem.at[slot], left_sems.at[slot], arrived_sems.at[slot], peer, pltpu.DeviceIdType.MESH
        )

    def drain(piece: jax.Array | int) -> pltpu.AsyncCopyDescriptor:
        slot = jax.lax.rem(piece, num_slots)
        return pltpu.make_async_copy(landing_vmem.at[slot], target_hbm.at[piece], drained_sems.at[slot])

    def send(piece: jax.Array, _: None) -> None:
        @pl.when(piece >= num_slots)
        def _() -> None:
            pltpu.semaphore_wait(credit_sem, 1)
            flight(piece - num_slots).wait_send()

        flight(piece).start()

    def finish_drain(piece: jax.Array | int) -> None:
        drain(piece).wait()

        @pl.when(piece + num_slots < num_pieces)
        def _() -> None:
            pltpu.semaphore_signal(credit_sem, 1, device_id=peer, device_id_type=pltpu.DeviceIdType.MESH)

    def receive(piece: jax.Array, _: None) -> None:
        flight(piece).wait_recv()
        drain(piece).start()
        pl.when(piece > 0)(lambda: finish_drain(piece - 1))

    meeting_sem = pltpu.get_barrier_semaphore()
    pltpu.semaphore_signal(meeting_sem, 1, device_id=peer, device_id_type=pltpu.DeviceIdType.MESH)
    pltpu.semaphore_wait(meeting_sem, 1)

    @pl.when(end == _PREFILL)
    def _() -> None:
        jax.lax.fori_loop(0, num_pieces, send, None)
        jax.lax.fori_loop(num_pieces - num_slots, num_pieces, lambda piece, _: flight(piece).wait_send(), None)

    @pl.when(end == _DECODE)
    def _() -> None:
        jax.lax.fori_loop(0, num_pieces, receive, None)
        finish_drain(num_pieces - 1)
