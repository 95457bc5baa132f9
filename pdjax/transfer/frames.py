"""One chunk as bytes, and back. No I/O and no threads here.

Neither side holds more than one chunk in this form: what is sent is a view of the chunk's own host buffer, and what arrives is written straight
into the buffer that becomes the received array.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import xxhash

from pdjax.protocol import ChunkHead, Layout
from pdjax.transfer.rooms import FailureKind, RoomFault
from pdjax.transfer.sender import OutboundChunk


class PageForm(NamedTuple):
    """The form of one page of KV, as both peers have agreed on it."""

    shape: tuple[int, int, int, int]  # layers, page_size, 2 * kv_heads, head_dim
    dtype: np.dtype

    @classmethod
    def of(cls, layout: Layout) -> PageForm:
        shape = (layout.num_layers, layout.page_size, 2 * layout.num_kv_heads, layout.head_dim)
        return cls(shape, jnp.dtype(layout.kv_dtype))

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class HostChunk(NamedTuple):
    """A chunk in host memory, ready to leave. `payload` is a view: it keeps the array's buffer alive and must not outlive the send."""

    head: ChunkHead
    payload: memoryview


def to_host(chunk: OutboundChunk, page: PageForm, address: str) -> HostChunk:
    """Copy the counting rows of a chunk to the host (on CPU: look at them in place) and take their checksum. `address`: where they are read.

    Waits until the array is computed; raises what its computation raised.
    """
    rows = np.asarray(chunk.kv)[: chunk.num_pages]
    assert rows.shape[1:] == page.shape and rows.dtype == page.dtype, f"chunk of {rows.dtype}{rows.shape}, pages are {page}"
    payload = memoryview(np.ascontiguousarray(rows).reshape(-1).view(np.uint8)).toreadonly()
    checksum = xxhash.xxh3_64_intdigest(payload)
    return HostChunk(ChunkHead(chunk.first_page, chunk.num_pages, payload.nbytes, checksum, address), payload)


class ChunkBuffer:
    """One chunk on arrival: `[n, *page shape]` on the host, of which the first `head.num_pages` rows are being filled.

    `n` is the smallest of the engine's sizes that holds them, so that no new shape reaches a compiled program; rows behind stay zero.
    """

    def __init__(self, head: ChunkHead, page: PageForm, page_buckets: tuple[int, ...]) -> None:
        num_rows = next((size for size in page_buckets if size >= head.num_pages), 0)
        if not 1 <= head.num_pages <= num_rows:
            raise RoomFault(FailureKind.PROTOCOL, f"chunk of {head.num_pages} pages, 1 to {page_buckets[-1]} are taken")
        if head.num_bytes != head.num_pages * page.num_bytes:
            wanted = head.num_pages * page.num_bytes
            raise RoomFault(FailureKind.PROTOCOL, f"chunk of {head.num_pages} pages announces {head.num_bytes} bytes, it has {wanted}")
        self.head = head
        self.rows_host = np.zeros((num_rows, *page.shape), page.dtype)
        self._view = memoryview(self.rows_host.reshape(-1).view(np.uint8))
        self._filled_bytes = 0

    @property
    def is_full(self) -> bool:
        return self._filled_bytes == self.head.num_bytes

    @property
    def rest(self) -> memoryview:
        """Where the next bytes go: as many as are missing, to be followed by `filled`."""
        return self._view[self._filled_bytes : self.head.num_bytes]

    def filled(self, num_bytes: int) -> None:
        """The first `num_bytes` of `rest` have been written."""
        assert 0 < num_bytes <= self.head.num_bytes - self._filled_bytes, f"{num_bytes} bytes beyond {self.head.num_bytes}"
        self._filled_bytes += num_bytes

    def verify(self) -> None:
        """Raises RoomFault where the bytes are not those that were sent."""
        assert self.is_full, f"{self._filled_bytes} of {self.head.num_bytes} bytes are here"
        checksum = xxhash.xxh3_64_intdigest(self._view[: self.head.num_bytes])
        if checksum != self.head.checksum:
            raise RoomFault(
                FailureKind.DAMAGED,
                f"pages {self.head.first_page} to {self.head.first_page + self.head.num_pages - 1} arrived damaged: "
                f"checksum {checksum:#018x}, sent {self.head.checksum:#018x}",
            )
