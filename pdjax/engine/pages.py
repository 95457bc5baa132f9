"""Page numbers and chunks, on the host, brought to the size of a bucket. Chunks are `[n, layers, page_size, 2 * kv_heads, head_dim]`."""

from __future__ import annotations

import numpy as np


def padded_pages(pages: list[int], bucket: int) -> np.ndarray:
    """int32[bucket], padded with the null page."""
    padded = np.zeros(bucket, np.int32)
    padded[: len(pages)] = pages
    return padded


def padded_rows(kv: np.ndarray, bucket: int) -> np.ndarray:
    """The chunk with zero rows up to `bucket`."""
    padded = np.zeros((bucket, *kv.shape[1:]), kv.dtype)
    padded[: len(kv)] = kv
    return padded
