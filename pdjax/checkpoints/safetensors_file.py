"""Reads the header of a safetensors file and maps its tensors. A header is JSON; nothing in such a file is code."""

from __future__ import annotations

import json
import math
import mmap
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

_DTYPES = {"F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16)}
_MAX_HEADER_BYTES = 100_000_000


class MappedTensor:
    """One tensor as stored: rows along its innermost axis, [product of the other axes, length], a read-only view of the mapped file."""

    def __init__(self, shape: tuple[int, ...], rows_host: np.ndarray):
        self.shape = shape
        self._rows_host = rows_host

    def read_rows(self, rows: slice | np.ndarray) -> np.ndarray:
        return self._rows_host[rows]


def read_tensors(path: Path) -> dict[str, MappedTensor]:
    """The tensors of a file by name. The file stays mapped as long as one of them lives; nothing but the header is read.

    Raises ValueError naming the file and what is wrong with it: truncated, damaged, a tensor of a kind that is no floating number.
    """
    try:
        with path.open("rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        (header_bytes,) = struct.unpack_from("<Q", content)
        if header_bytes > min(_MAX_HEADER_BYTES, len(content) - 8):
            raise ValueError(f"its header of {header_bytes} bytes runs past the end, byte {len(content)}")
        header = json.loads(content[8 : 8 + header_bytes])
        if not isinstance(header, dict):
            raise ValueError(f"its header is a {type(header).__name__}, not an object")
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        return {name: _map_tensor(content, 8 + header_bytes, name, entry) for name, entry in entries.items()}
    except (struct.error, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise ValueError(f"{path} is not a readable safetensors file: {error}") from error


def _map_tensor(content: mmap.mmap, start: int, name: str, entry: Any) -> MappedTensor:
    match entry:
        case {"dtype": str(kind), "shape": [*shape], "data_offsets": [int(begin), int(end)]} if all(type(size) is int for size in shape):
            pass
        case _:
            raise ValueError(f"the entry of tensor {name} is {entry!s:.80}")
    if kind not in _DTYPES:
        raise ValueError(f"tensor {name} is stored as {kind}; supported are {', '.join(_DTYPES)}")
    dtype, shape = _DTYPES[kind], tuple(shape)
    if min(shape, default=0) < 1 or end - begin != math.prod(shape) * dtype.itemsize or begin < 0:
        raise ValueError(f"tensor {name} of shape {shape} as {kind} does not fit into bytes {begin} to {end}")
    if start + end > len(content):
        raise ValueError(f"it is truncated: tensor {name} ends at byte {start + end}, the file at byte {len(content)}")
    flat = np.frombuffer(content, np.uint8, end - begin, start + begin)
    return MappedTensor(shape, flat.view(dtype).reshape(-1, shape[-1]))
