"""What every attention implementation offers, and the description of a step that it works from.

Dimensions: T token rows of a step, S sequences of a step, H query heads, K KV heads, D head_dim, G = H / K query heads that share a
KV head, P pages in a page table.

The KV pool is one array `[layers, pages, page_size, 2 * K, D]`: entry 2i of the fourth axis is the key of KV head i, entry 2i + 1
its value. Page 0 is the null page: page tables are padded with it, and padding rows write there. Nothing in it, and nothing in a
slot past the end of a sequence, may reach a result, NaN included.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax

Attend = Callable[[jax.Array, jax.Array, jax.Array | int], jax.Array]
"""(queries [T, H, D], pool, layer) -> [T, H, D] in the dtype of the queries. Rows that belong to no sequence hold anything.

Keys and values of the step's own tokens are in the pool already. Scores are scaled by 1 / sqrt(D); arithmetic is float32.
"""


class PrefillBatch(NamedTuple):
    """Sequences laid end to end over the rows of a prefill step; sequence s takes rows `first_rows[s] .. first_rows[s] + lengths[s]`.

    Its row i sits at position `starts[s] + i` and sees every position of the sequence up to its own. Sequences with length 0 are
    padding and come last.
    """

    tables: jax.Array  # int32[S, P], padded with page 0
    first_rows: jax.Array  # int32[S], rising
    starts: jax.Array  # int32[S]
    lengths: jax.Array  # int32[S]


class DecodeBatch(NamedTuple):
    """One row a sequence; row s sees positions `0 .. visible[s]`, its own included. Padding rows point at page 0 with `visible` 1."""

    tables: jax.Array  # int32[S, P], padded with page 0
    visible: jax.Array  # int32[S], at least 1


class Attention(Protocol):
    """One implementation. Both methods are traced inside a step and do the work that all layers share.

    `num_rows` is T, the token rows of the prefill step, padding included.
    """

    name: str

    def prefill(self, batch: PrefillBatch, num_rows: int) -> Attend: ...

    def decode(self, batch: DecodeBatch) -> Attend: ...
