"""One int32 array a call instead of a dozen: every host array that a program takes costs a conversion and a transfer of its own."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Field(NamedTuple):
    """A part of a packed array: its shape and whether its 4-byte words are int32, uint32 or float32."""

    shape: tuple[int, ...]
    dtype: type[np.generic] = np.int32


class PackedLayout:
    """Named fields, one behind the other, in one int32 array. The host writes through views, a program reads with bitcasts."""

    def __init__(self, fields: dict[str, Field]):
        self._fields: dict[str, tuple[int, int, Field]] = {}
        end = 0
        for name, field in fields.items():
            start, end = end, end + math.prod(field.shape)
            self._fields[name] = (start, end, field)
        self.size = end

    def abstract(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.size,), jnp.int32)

    def new(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """A fresh zeroed array and writable views of its fields. An array is handed to one call only: that call may still be reading it
        after it has returned."""
        flat = np.zeros(self.size, np.int32)
        views = {name: flat[start:end].view(field.dtype).reshape(field.shape) for name, (start, end, field) in self._fields.items()}
        return flat, views

    def read(self, flat: jax.Array) -> dict[str, jax.Array]:
        """The fields of a packed array, inside a program."""
        return {
            name: jax.lax.bitcast_convert_type(flat[start:end].reshape(field.shape), field.dtype)
            for name, (start, end, field) in self._fields.items()
        }
