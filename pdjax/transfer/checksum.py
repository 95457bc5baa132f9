"""The checksum of a chunk (`pdjax.kernels.pages.checksum`), compiled for where the chunk is."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Sharding

from pdjax.kernels.pages.checksum import chunk_checksum
from pdjax.transfer.frames import PageForm


class ChecksumPrograms:
    """`chunk_checksum` compiled for chunks of one form. Any thread may call.

    Compiles for `row_buckets` at once; a chunk of another size, from a worker with other buckets, costs a compilation at its first use.
    """

    def __init__(self, page: PageForm, row_buckets: tuple[int, ...], sharding: Sharding) -> None:
        self._page = page
        self._sharding = sharding
        self._compiled = {num_rows: self._compile(num_rows) for num_rows in row_buckets}

    def spec(self, num_rows: int) -> jax.ShapeDtypeStruct:
        """The form of a chunk of `num_rows` pages on this device."""
        return jax.ShapeDtypeStruct((num_rows, *self._page.shape), self._page.dtype, sharding=self._sharding)

    def checksum(self, kv: jax.Array) -> int:
        """64 bits. Waits for `kv`; raises what its computation or its copy raised."""
        num_rows = kv.shape[0]
        program = self._compiled.get(num_rows)
        if program is None:
            program = self._compiled[num_rows] = self._compile(num_rows)
        low, high = np.asarray(program(kv)).tolist()
        return high << 32 | low

    def _compile(self, num_rows: int) -> jax.stages.Compiled:
        return jax.jit(chunk_checksum).lower(self.spec(num_rows)).compile()
