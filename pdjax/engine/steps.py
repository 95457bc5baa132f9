"""The programs that run the model: a prefill step over ragged chunks and a decode step of one token a sequence.

Both return hidden states, not logits: what is sampled from them, and how, is the sampler's. A prefill step also returns the last layer's
output at every row; a program beside it, `make_score`, turns rows into log probabilities of the prompt where somebody asks for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pdjax.engine.batch import DecodeSeq, PrefillSeq
from pdjax.engine.packing import Field, PackedLayout
from pdjax.engine.sampling import log_probabilities
from pdjax.engine.weights import LayerParams
from pdjax.kernels.base import Attention, DecodeBatch, PrefillBatch
from pdjax.models.llama import Llama, Params, Step, rotary_tables

SCORE_BLOCK_ROWS = 64
"""Rows of a prompt that are scored at a time. Their logits exist together: 13 MB with a vocabulary of 49,152."""

SCORE_LAYOUT = PackedLayout({"rows": Field((SCORE_BLOCK_ROWS,)), "targets": Field((SCORE_BLOCK_ROWS,))})

RunLayers = Callable[[LayerParams, jax.Array, jax.Array, Step], tuple[jax.Array, jax.Array]]
"""(layers, x [T, E], pool, step) -> (x, pool): `Llama.scanned` with stacked weights or `Llama.unrolled` with each layer's."""


class StepDimensions(NamedTuple):
    """Static sizes that all steps of an engine share."""

    page_size: int
    table_pages: int
    max_prefill_seqs: int
    padding_slot: int


def prefill_layout(dims: StepDimensions, num_rows: int) -> PackedLayout:
    seqs = (dims.max_prefill_seqs,)
    return PackedLayout(
        {
            "tokens": Field((num_rows,)),
            "tables": Field((*seqs, dims.table_pages)),
            "first_rows": Field(seqs),
            "starts": Field(seqs),
            "lengths": Field(seqs),
            "sampled_rows": Field(seqs),
        }
    )


def pack_prefill(layout: PackedLayout, seqs: Sequence[PrefillSeq], sampled: list[int]) -> np.ndarray:
    """`sampled`: which of `seqs` are sampled from; their hidden states come first in the step's result, in this order."""
    flat, views = layout.new()
    row, last_rows = 0, []
    for i, seq in enumerate(seqs):
        views["tokens"][row : row + len(seq.tokens)] = seq.tokens
        views["tables"][i, : len(seq.pages)] = seq.pages
        views["first_rows"][i], views["starts"][i], views["lengths"][i] = row, seq.start, len(seq.tokens)
        row += len(seq.tokens)
        last_rows.append(row - 1)
    views["first_rows"][len(seqs) :] = row
    views["sampled_rows"][: len(sampled)] = [last_rows[i] for i in sampled]
    return flat


def decode_layout(dims: StepDimensions, num_seqs: int) -> PackedLayout:
    seqs = (num_seqs,)
    return PackedLayout(
        {
            "tokens": Field(seqs),
            "is_on_device": Field(seqs),
            "slots": Field(seqs),
            "positions": Field(seqs),
            "tables": Field((*seqs, dims.table_pages)),
        }
    )


def pack_decode(dims: StepDimensions, layout: PackedLayout, seqs: Sequence[DecodeSeq]) -> np.ndarray:
    flat, views = layout.new()
    views["slots"][len(seqs) :] = dims.padding_slot
    for i, seq in enumerate(seqs):
        views["tokens"][i] = seq.token or 0
        views["is_on_device"][i] = seq.token is None
        views["slots"][i], views["positions"][i] = seq.slot, seq.position
        views["tables"][i, : len(seq.pages)] = seq.pages
    return flat


def make_prefill(model: Llama, attention: Attention, dims: StepDimensions, num_rows: int) -> Callable[..., tuple[jax.Array, ...]]:
    """Build the prefill step for `num_rows` tokens: (ends, stacked layers, pool, packed) -> (pool, hidden, first hidden, rows).

    Hidden states are those of the sampled rows, [max_prefill_seqs, E], and of the first of them alone, [1, E]. `rows`: output of the last
    layer, [num_rows, E], not yet normed.
    """
    layout = prefill_layout(dims, num_rows)

    def prefill(ends_params: Params, layers: Params, pool: jax.Array, packed: jax.Array) -> tuple[jax.Array, ...]:
        host = layout.read(packed)
        batch = PrefillBatch(host["tables"], host["first_rows"], host["starts"], host["lengths"])
        sequences, positions, is_real = _row_owners(batch, num_rows)
        pages = jnp.where(is_real, batch.tables[sequences, positions // dims.page_size], 0)
        cos, sin = rotary_tables(positions, model.shape)
        step = Step(cos, sin, pages, positions % dims.page_size, attention.prefill(batch, num_rows))
        ends = model.ends(ends_params)
        x, pool = model.scanned(layers, ends.embedded(host["tokens"]), pool, step)
        hidden = ends.normed(x[host["sampled_rows"]])
        return pool, hidden, hidden[:1], x

    return prefill


def pack_scores(seqs: Sequence[PrefillSeq]) -> list[np.ndarray]:
    """What a step's sequences want scored, in blocks; rows behind the last are padding."""
    rows: list[int] = []
    targets: list[int] = []
    first = 0
    for seq in seqs:
        rows.extend(first + row for row in seq.scored)
        targets.extend(seq.targets)
        first += len(seq.tokens)
    assert len(rows) == len(targets), f"{len(rows)} rows are scored against {len(targets)} tokens"
    blocks = []
    for start in range(0, len(rows), SCORE_BLOCK_ROWS):
        flat, views = SCORE_LAYOUT.new()
        for name, values in (("rows", rows), ("targets", targets)):
            block = values[start : start + SCORE_BLOCK_ROWS]
            views[name][: len(block)] = block
        blocks.append(flat)
    return blocks


def make_score(model: Llama) -> Callable[..., tuple[jax.Array, jax.Array, jax.Array]]:
    """Build the program that scores one block of a prefill step's rows: (ends, rows [T, E], packed) -> `log_probabilities` of the
    targets, [SCORE_BLOCK_ROWS, ...]."""

    def score(ends_params: Params, rows: jax.Array, packed: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        host = SCORE_LAYOUT.read(packed)
        ends = model.ends(ends_params)
        return log_probabilities(ends.logits(ends.normed(rows[host["rows"]])), host["targets"])

    return score


def _row_owners(batch: PrefillBatch, num_rows: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """For each row: its sequence, its position (0 for padding rows), and whether it belongs to a sequence at all."""
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    ends = batch.first_rows + batch.lengths
    sequences = jnp.minimum(jnp.searchsorted(ends, rows, side="right", method="compare_all"), ends.shape[0] - 1)
    is_real = rows < ends[-1]
    return sequences, jnp.where(is_real, batch.starts[sequences] + rows - batch.first_rows[sequences], 0), is_real


def make_decode(
    model: Llama, attention: Attention, dims: StepDimensions, num_seqs: int, run_layers: RunLayers
) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Build the decode step for `num_seqs` sequences: (ends, layers, pool, last_token, packed) -> (pool, hidden)."""
    layout = decode_layout(dims, num_seqs)

    def decode(
        ends_params: Params, layers: LayerParams, pool: jax.Array, last_token: jax.Array, packed: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        host = layout.read(packed)
        positions, tables = host["positions"], host["tables"]
        tokens = jnp.where(host["is_on_device"] > 0, last_token[host["slots"]], host["tokens"])
        pages = tables[jnp.arange(num_seqs), positions // dims.page_size]
        cos, sin = rotary_tables(positions, model.shape)
        step = Step(cos, sin, pages, positions % dims.page_size, attention.decode(DecodeBatch(tables, positions + 1)))
        ends = model.ends(ends_params)
        x, pool = run_layers(layers, ends.embedded(tokens), pool, step)
        return pool, ends.normed(x)

    return decode
