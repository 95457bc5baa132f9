"""Expands rows of GGUF's number formats to float32.

The formats of the models that pdjax is run with most are expanded here, whole chunks at a time; the gguf package's own expansion goes
in steps of 16 rows and takes several times as long. All others are left to that package.
"""

from __future__ import annotations

import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

_Kind = GGMLQuantizationType

_EXPANDABLE = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "TQ1_0", "TQ2_0"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS", "MXFP4", "NVFP4"),
)
SUPPORTED_KINDS = frozenset(kind for kind in _Kind if kind.name in _EXPANDABLE)
"""All that the installed gguf package can expand."""

_Q4_1 = np.dtype([("scale", "<f2"), ("minimum", "<f2"), ("nibbles", "u1", 16)])
_Q8_0 = np.dtype([("scale", "<f2"), ("values", "i1", 32)])


def _expand_q4_1(rows: np.ndarray) -> np.ndarray:
    """Blocks of 32: value i is the low nibble of byte i for i < 16, else the high nibble of byte i - 16, times scale plus minimum."""
    blocks = rows.view(_Q4_1)
    out = np.empty((*blocks.shape, 2, 16), np.float32)
    np.bitwise_and(blocks["nibbles"], 15, out=out[..., 0, :], casting="unsafe")
    np.right_shift(blocks["nibbles"], 4, out=out[..., 1, :], casting="unsafe")
    out *= blocks["scale"].astype(np.float32)[..., None, None]
    out += blocks["minimum"].astype(np.float32)[..., None, None]
    return out.reshape(rows.shape[0], -1)


def _expand_q8_0(rows: np.ndarray) -> np.ndarray:
    """Blocks of 32: signed bytes times scale."""
    blocks = rows.view(_Q8_0)
    return (blocks["values"] * blocks["scale"].astype(np.float32)[..., None]).reshape(rows.shape[0], -1)


_EXPANDERS = {_Kind.Q4_1: _expand_q4_1, _Kind.Q8_0: _expand_q8_0}


def expand_rows(rows: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """uint8 [rows, bytes of a row] of format `kind`, one of SUPPORTED_KINDS, to float32 [rows, columns]."""
    assert kind in SUPPORTED_KINDS, kind
    expander = _EXPANDERS.get(kind)
    return dequantize(rows, kind) if expander is None else expander(rows)
