"""Reads the schedule that the TPU compiler made of a kernel: bundles, use of slots and spills, by region of the program.

With `LIBTPU_INIT_ARGS="--xla_jf_dump_to=DIR --xla_jf_dump_llo_text=true"` the compiler leaves two files a kernel in DIR: the program, one
VLIW bundle a line, and how many slots of each unit every bundle uses. Nothing here needs a TPU, or JAX.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_BUNDLE = re.compile(r"^\s*(0x[0-9a-f]+|0)\s+([A-Z]{2})?\s*: (>*)")
_LOOP_BODY, _EMPTY = "LB", ":  {}"


class Slots(NamedTuple):
    """Slots of each unit: those that a bundle has, or those that a region uses."""

    mxu: int
    xlu: int
    valu: int
    vpop: int
    eup: int
    vload: int
    fill: int
    vstore: int
    spill: int
    salu: int


class Bundle(NamedTuple):
    depth: int  # of loops around it
    label: str  # "LB" begins the body of a loop
    slots: Slots


class Region(NamedTuple):
    """The body of one loop without the loops inside it."""

    first: int  # address of the body's first bundle
    depth: int
    bundles: int  # of a trip in which every conditional body runs: an upper bound
    slots: Slots  # used by such a trip


class Figures(NamedTuple):
    """What a loop costs for each trip, by the schedule; shares are of the slots there are."""

    bundles: int
    bundles_per_1000_scores: float
    mxu: float
    valu: float
    eup: float
    vload: float
    vstore: float
    fill: float
    spill: float


class Program(NamedTuple):
    capacity: Slots
    bundles: tuple[Bundle, ...]


def read_program(dump: Path, kernel: str) -> Program:
    """The schedule of the kernel named `kernel` (`pallas_call(name=...)`) in a dump folder.

    Raises FileNotFoundError where the folder has no such kernel, ValueError where the two files do not belong together.
    """
    text = _newest(dump, f"*-{kernel}*-final_bundles.txt")
    use = _newest(dump, f"*-{kernel}*-final_hlo-static-per-bundle-utilization.txt")
    capacity, slots = _read_slots(use)
    lines = _read_bundles(text)
    if len(lines) != len(slots):
        raise ValueError(f"{text.name} has {len(lines)} bundles, {use.name} {len(slots)}")
    return Program(capacity, tuple(Bundle(*line, used) for line, used in zip(lines, slots, strict=True)))


def loops(program: Program) -> list[Region]:
    """Every loop of the program in the order of their addresses, an outer loop without its inner ones."""
    found: list[list[int]] = []
    open_loops: list[list[int]] = []
    for address, bundle in enumerate(program.bundles):
        del open_loops[bundle.depth :]
        if bundle.label == _LOOP_BODY or len(open_loops) < bundle.depth:
            del open_loops[max(0, bundle.depth - 1) :]
            found.append([])
            open_loops.append(found[-1])
        if open_loops:
            open_loops[-1].append(address)
    return [_region(program, addresses) for addresses in found if addresses]


def figures(program: Program, loop: Region, scores: int) -> Figures:
    """`scores`: attention scores that one trip of the loop computes, all heads together."""
    shares = {
        name: getattr(loop.slots, name) / (getattr(program.capacity, name) * loop.bundles)
        for name in ("mxu", "valu", "eup", "vload", "vstore", "fill", "spill")
    }
    return Figures(loop.bundles, 1000 * loop.bundles / scores, **shares)


def busiest(regions: Sequence[Region]) -> Region:
    """The loop in which the matrix unit has most to do for each bundle, of those that do most: not one that ends a tile."""
    most = max(region.slots.mxu for region in regions)
    return max((region for region in regions if 2 * region.slots.mxu >= most), key=lambda region: region.slots.mxu / region.bundles)


def masked(regions: Sequence[Region]) -> Region:
    """The loop that comes next after the busiest one: blocks with masks."""
    hot = busiest(regions)
    return busiest([region for region in regions if region != hot])


def once_a_tile(regions: Sequence[Region], num_kv_heads: int) -> int:
    """Bundles of a tile outside its loops over blocks: of the grid step, and of loops without products, which run once for each KV head."""
    depth = busiest(regions).depth
    around = sum(region.bundles for region in regions if region.depth < depth)
    return around + num_kv_heads * sum(region.bundles for region in regions if region.depth == depth and not region.slots.mxu)


def _newest(dump: Path, pattern: str) -> Path:
    paths = [path for path in dump.glob(pattern) if "schedule-analysis" not in path.name]
    if not paths:
        raise FileNotFoundError(f"no {pattern} in {dump}")
    return max(paths, key=lambda path: path.stat().st_mtime_ns)


def _read_slots(path: Path) -> tuple[Slots, list[Slots]]:
    rows = [line.split() for line in path.read_text().splitlines() if line.strip() and line.strip()[0].isdigit()]
    parsed = [Slots(*map(int, row)) for row in rows]
    return parsed[0], parsed[1:]


def _read_bundles(path: Path) -> list[tuple[int, str]]:
    """Depth and label. Empty bundles are printed without their depth: they have that of the one before."""
    result: list[tuple[int, str]] = []
    for line in path.read_text().splitlines():
        match = _BUNDLE.match(line)
        if match is None:
            continue
        depth = result[-1][0] if _EMPTY in line and result else len(match[3])
        result.append((depth, match[2] or ""))
    return result


def _region(program: Program, addresses: Sequence[int]) -> Region:
    used = Slots(*map(sum, zip(*(program.bundles[address].slots for address in addresses), strict=True)))
    return Region(addresses[0], program.bundles[addresses[0]].depth, len(addresses), used)
