"""How a weight is cut before it is stored, so that what a chip holds of it is one run of rows of each piece.

Chips that share a layer each hold some rows of q, of k and of v, or of gate and of up, which lie apart in one weight (`weight_specs`).
"""

from __future__ import annotations

from typing import NamedTuple

from pdjax.models.shape import ModelShape, WeightSpec


class Piece(NamedTuple):
    """Rows `start` to `stop` of a weight's axis `axis`. `role`: what they are; empty for a weight in one piece."""

    role: str
    axis: int
    start: int
    stop: int

    def of(self, spec: WeightSpec) -> WeightSpec:
        """The piece of a weight of `spec`, as a weight of its own."""
        return WeightSpec((*spec.shape[: self.axis], self.stop - self.start, *spec.shape[self.axis + 1 :]), spec.axes)

    def index(self) -> tuple[slice, ...]:
        """Where it lies in the weight."""
        return (*(slice(None) for _ in range(self.axis)), slice(self.start, self.stop))

    def path(self, path: str) -> str:
        """The piece's name, of the weight's."""
        return f"{path}.{self.role}" if self.role else path


def pieces_of(shape: ModelShape, spec: WeightSpec) -> tuple[Piece, ...]:
    """The pieces of a weight of one layer or of the ends, in the order in which they lie in it."""
    if "qkv" in spec.axes:
        axis, dim = spec.axes.index("qkv"), shape.head_dim
        return _pieces(axis, {"q": shape.num_heads * dim, "k": shape.num_kv_heads * dim, "v": shape.num_kv_heads * dim})
    if "gate_up" in spec.axes:
        axis = spec.axes.index("gate_up")
        half = spec.shape[axis] // 2
        return _pieces(axis, {"gate": half, "up": half})
    return (whole(spec),)


def whole(spec: WeightSpec) -> Piece:
    return Piece("", 0, 0, spec.shape[0])


def _pieces(axis: int, sizes: dict[str, int]) -> tuple[Piece, ...]:
    pieces, start = [], 0
    for role, size in sizes.items():
        pieces.append(Piece(role, axis, start, start + size))
        start += size
    return tuple(pieces)
