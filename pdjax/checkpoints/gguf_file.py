"""Reads the header of a GGUF file and maps its tensors.

`gguf.GGUFReader` makes several numpy objects for every token and merge of the vocabulary, which takes seconds and every process would
pay them; this reader walks the same bytes once with `struct`. Constants and block formats still come from the gguf package.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGUF_MAGIC, GGMLQuantizationType, GGUFValueType

from pdjax.checkpoints.expand import expand_rows

Value = int | float | bool | str | list

_VERSIONS = (2, 3)
_SCALARS = {
    GGUFValueType.UINT8: "<B",
    GGUFValueType.INT8: "<b",
    GGUFValueType.UINT16: "<H",
    GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT64: "<d",
    GGUFValueType.BOOL: "<?",
}


def _scalar_form(kind: int) -> str:
    if kind not in _SCALARS:
        raise ValueError(f"a metadata value is of kind {kind}, which is no number here")
    return _SCALARS[kind]


class GgufTensor(NamedTuple):
    """One tensor as stored. `shape` runs from the outermost axis to the innermost (reversed from the file's order).

    `rows_host`: uint8 [product of shape[:-1], bytes of one innermost row], a read-only view of the mapped file.
    """

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    rows_host: np.ndarray

    def read_rows(self, rows: slice | np.ndarray) -> np.ndarray:
        """These rows as float32."""
        return expand_rows(self.rows_host[rows], self.kind)


class GgufFile:
    """`metadata` by key and `tensors` by name. The file stays mapped as long as a tensor's view lives; nothing is read ahead.

    Raises ValueError naming the file and what is wrong with it: not GGUF, truncated, a tensor of an unknown kind.
    """

    def __init__(self, path: Path):
        self.path = path
        self.metadata: dict[str, Value] = {}
        self.tensors: dict[str, GgufTensor] = {}
        try:
            with path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._at = 0
            self._read_header()
        except (struct.error, UnicodeDecodeError, ValueError) as error:
            raise ValueError(f"{path} is not a readable GGUF file: {error}") from error

    def _read_header(self) -> None:
        num_tensors, num_keys = self._read_start()
        for _ in range(num_keys):
            key = self._read_string()
            self.metadata[key] = self._read_value(self._scalar("<I"))
        infos = [self._read_tensor_info() for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"general.alignment is {alignment!r}, which is no positive integer")
        start = -(-self._at // alignment) * alignment
        for info in infos:
            self.tensors[info[0]] = self._map_tensor(start, *info)

    def _read_start(self) -> tuple[int, int]:
        if (magic := self._scalar("<I")) != GGUF_MAGIC:
            raise ValueError(f"it starts with {magic:#010x}, not {GGUF_MAGIC:#010x}")
        if (version := self._scalar("<I")) not in _VERSIONS:
            raise ValueError(f"it has format version {version}, known are {_VERSIONS}")
        return self._scalar("<Q"), self._scalar("<Q")

    def _scalar(self, form: str) -> int | float | bool:
        (value,) = struct.unpack_from(form, self._bytes, self._at)
        self._at += struct.calcsize(form)
        return value

    def _read_string(self) -> str:
        end = self._at + 8 + struct.unpack_from("<Q", self._bytes, self._at)[0]
        if end > len(self._bytes):
            raise ValueError(f"a string at byte {self._at} runs past the end, byte {len(self._bytes)}")
        text = self._bytes[self._at + 8 : end].decode()
        self._at = end
        return text

    def _read_value(self, kind: int) -> Value:
        if kind == GGUFValueType.STRING:
            return self._read_string()
        if kind != GGUFValueType.ARRAY:
            return self._scalar(_scalar_form(kind))
        item_kind, length = self._scalar("<I"), self._scalar("<Q")
        if item_kind == GGUFValueType.STRING:
            return [self._read_string() for _ in range(length)]
        form = f"<{length}{_scalar_form(item_kind)[1]}"
        values = struct.unpack_from(form, self._bytes, self._at)
        self._at += struct.calcsize(form)
        return list(values)

    def _read_tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._read_string()
        innermost_first = [self._scalar("<Q") for _ in range(self._scalar("<I"))]
        return name, tuple(reversed(innermost_first)), self._scalar("<I"), self._scalar("<Q")

    def _map_tensor(self, start: int, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
        if kind not in iter(GGMLQuantizationType):
            raise ValueError(f"tensor {name} is of unknown kind {kind}")
        block_len, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        if not shape or 0 in shape or shape[-1] % block_len:
            raise ValueError(f"tensor {name} of shape {shape} does not divide into blocks of {block_len}")
        num_rows, row_bytes = math.prod(shape[:-1]), shape[-1] // block_len * block_bytes
        end = start + offset + num_rows * row_bytes
        if end > len(self._bytes):
            raise ValueError(f"it is truncated: tensor {name} ends at byte {end}, the file at byte {len(self._bytes)}")
        flat = np.frombuffer(self._bytes, np.uint8, num_rows * row_bytes, start + offset)
        return GgufTensor(name, GGMLQuantizationType(kind), shape, flat.reshape(num_rows, row_bytes))
