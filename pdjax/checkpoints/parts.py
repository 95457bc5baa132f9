"""How tensors of a file become weights of the abstract tree: which rows of which tensor go where, checked before anything is read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

_ALIGNMENT_BYTES = 64
_CHUNK_ROWS = 128  # a chunk of expanded rows stays in the L2 cache until it has been written to its place


class StoredTensor(Protocol):
    """A tensor of a file, of which rows are read one chunk at a time. A row runs along the innermost axis."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read_rows(self, rows: slice | np.ndarray) -> np.ndarray:
        """[number of rows, length of a row], of any floating dtype; `rows` counts over all axes but the innermost."""


class Part(NamedTuple):
    """Where one tensor of a file, or one entry of its first axis, goes: to `weights[path][index]`, from row `first` on.

    `index`: the leading axes of the weight, layer and expert. `entry`: which entry of the tensor, where it stacks several.
    `is_transposed`: its rows become columns. `rotary_heads`: set where its rows are permuted for interleaved rotary embedding.
    `added`: is added to every value.
    """

    tensor: str
    shape: tuple[int, ...]
    path: str
    index: tuple[int, ...] = ()
    first: int = 0
    entry: int | None = None
    is_transposed: bool = False
    rotary_heads: int | None = None
    added: float = 0.0


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialised C-contiguous array that starts at a multiple of 64 bytes."""
    num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.empty(num_bytes + _ALIGNMENT_BYTES, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT_BYTES
    return raw[start : start + num_bytes].view(dtype).reshape(shape)


def split_rotary_order(num_rows: int, num_heads: int) -> np.ndarray:
    """Which row of an interleaved-rotary matrix goes to each row of a split-rotary one. int64 [num_rows].

    llama.cpp pairs rows 2i and 2i + 1 of a head; `weight_specs` pairs i and i + head_dim / 2.
    """
    rows = np.arange(num_rows).reshape(num_heads, num_rows // num_heads // 2, 2)
    return rows.swapaxes(1, 2).reshape(num_rows)


def checked_parts(path: Path, tensors: Mapping[str, StoredTensor], expected: Iterable[Part], known_as: str) -> tuple[Part, ...]:
    """The parts of a model, each of which the file holds as it should be.

    Stops at the first that is not there, however many layers a damaged file claims to have. Raises ValueError naming file, tensor,
    expected and found shape, also for a tensor that nobody asks for; `known_as` is the model's kind.
    """
    parts = []
    for part in expected:
        if part.tensor not in tensors:
            raise ValueError(f"{path}: tensor {part.tensor} of shape {part.shape} is missing")
        if (found := tensors[part.tensor].shape) != part.shape:
            raise ValueError(f"{path}: tensor {part.tensor} should have shape {part.shape} but has {found}")
        parts.append(part)
    if unexpected := sorted(tensors.keys() - {part.tensor for part in parts}):
        raise ValueError(f"{path}: tensor {unexpected[0]} is not part of a {known_as} model as pdjax knows it")
    return tuple(parts)


class PartReader:
    """Reads weights out of a file's tensors, whose parts have been checked."""

    def __init__(self, tensors: Mapping[str, StoredTensor], parts: Iterable[Part]):
        self._tensors = tensors
        self._parts: dict[tuple[str, int | None], list[Part]] = defaultdict(list)
        for part in parts:
            self._parts[part.path, part.index[0] if part.index else None].append(part)

    def read_into(self, path: str, layer: int | None, target: np.ndarray) -> None:
        """Fill `target` with the weight `path`, or with its layer `layer`."""
        for part in self._parts[path, layer]:
            place(self._tensors[part.tensor], part, target[part.index[1:]])


def place(tensor: StoredTensor, part: Part, target: np.ndarray) -> None:
    """Write the rows of `tensor` that `part` speaks of to their place in `target`, [rows, columns] or [columns]."""
    shape = part.shape if part.entry is None else part.shape[1:]
    if len(shape) == 1:
        target.reshape(-1)[part.first : part.first + shape[0]] = _rows(tensor, part, slice(0, 1))[0]
        return
    num_rows = shape[0]
    base = 0 if part.entry is None else part.entry * num_rows
    order = None if part.rotary_heads is None else split_rotary_order(num_rows, part.rotary_heads)
    for start in range(0, num_rows, _CHUNK_ROWS):
        end = min(start + _CHUNK_ROWS, num_rows)
        chunk = _rows(tensor, part, slice(base + start, base + end) if order is None else base + order[start:end])
        where = slice(part.first + start, part.first + end)
        if part.is_transposed:
            target[:, where] = chunk.T
        else:
            target[where] = chunk


def _rows(tensor: StoredTensor, part: Part, rows: slice | np.ndarray) -> np.ndarray:
    values = tensor.read_rows(rows)
    return values + np.float32(part.added) if part.added else values
