"""One chunk as frames on a byte stream, and back. No I/O and no threads here.

Neither side holds more than one chunk in this form: frames are views of the chunk's own host buffer, and arriving frames are written
straight into the buffer that becomes the received array.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import jax.numpy as jnp
import msgspec
import numpy as np
import xxhash

from pdjax.protocol import KV_FRAME_BYTES, Accepted, ChunkData, ChunkHead, ChunkLast, ChunkOffer, Layout, Refused, SendFailed
from pdjax.transfer.rooms import FailureKind, RoomFault
from pdjax.transfer.sender import OutboundChunk


class DataView(msgspec.Struct, frozen=True, tag="data"):
    """A `ChunkData` on arrival: the payload stays where the message lies instead of being copied out of it."""

    payload: memoryview


ArrivingFrame = Accepted | Refused | ChunkHead | DataView | ChunkOffer | ChunkLast | SendFailed


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


def to_host(chunk: OutboundChunk, page: PageForm) -> HostChunk:
    """Copy the counting rows of a chunk to the host (on CPU: look at them in place) and take their checksum.

    Waits until the array is computed; raises what its computation raised.
    """
    rows = np.asarray(chunk.kv)[: chunk.num_pages]
    assert rows.shape[1:] == page.shape and rows.dtype == page.dtype, f"chunk of {rows.dtype}{rows.shape}, pages are {page}"
    payload = memoryview(np.ascontiguousarray(rows).reshape(-1).view(np.uint8)).toreadonly()
    checksum = xxhash.xxh3_64_intdigest(payload)
    return HostChunk(ChunkHead(chunk.first_page, chunk.num_pages, payload.nbytes, checksum), payload)


def data_frames(payload: memoryview) -> Iterator[ChunkData]:
    for start in range(0, payload.nbytes, KV_FRAME_BYTES):
        # The encoder takes a view where the type says bytes; the copy into the message is the only one.
        yield ChunkData(payload[start : start + KV_FRAME_BYTES])  # type: ignore[arg-type]


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

    def write(self, payload: memoryview) -> None:
        """Raises RoomFault on a frame that is empty or exceeds what was announced."""
        end = self._filled_bytes + payload.nbytes
        if not self._filled_bytes < end <= self.head.num_bytes:
            raise RoomFault(
                FailureKind.PROTOCOL,
                f"data frame of {payload.nbytes} bytes after {self._filled_bytes} of {self.head.num_bytes} announced",
            )
        self._view[self._filled_bytes : end] = payload
        self._filled_bytes = end

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
