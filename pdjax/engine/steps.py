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
from pdjax.kernels.base import Attend, Attention, DecodeBatch, PrefillBatch, decode_batch, prefill_batch, row_owners
from pdjax.models.layers import Params, rotary_tables
from pdjax.models.model import Model, Step

SCORE_BLOCK_ROWS = 64
"""Rows of a prompt that are scored at a time. Their logits exist together: 13 MB with a vocabulary of 49,152."""

SCORE_LAYOUT = PackedLayout({"rows": Field((SCORE_BLOCK_ROWS,)), "targets": Field((SCORE_BLOCK_ROWS,))})

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


class Rows(NamedTuple):
    """What the layers need to know about the T token rows of a step; `pdjax.models.model.Step` with the attention still to be made."""

    cos: jax.Array
    sin: jax.Array
    batch: PrefillBatch | DecodeBatch


class Pieces(NamedTuple):
    """The programs of one step, to be run one after the other; `layers` once for each group of layers, in order.

    A step is not one program because of CPUs: unrolled, 30 layers take seconds to compile for each bucket, and scanned, each layer's
    weights are copied before they are used.
    """

    begin: Callable[..., tuple[jax.Array, Rows]]
    layers: Callable[[LayerParams, jax.Array, jax.Array, jax.Array, Rows], tuple[jax.Array, jax.Array]]
    """(weights of the group, its first layer, x [E, T], pool, rows) -> (x, pool)"""
    end: Callable[..., tuple[jax.Array, ...]]


def make_prefill(model: Model, attention: Attention, dims: StepDimensions, num_rows: int) -> Pieces:
    """The prefill step for `num_rows` tokens: begin(ends, packed), layers, end(ends, x, packed) -> (hidden, first hidden).

    Hidden states are those of the sampled rows, [E, max_prefill_seqs], and of the first of them alone, [E, 1].
    """
    layout = prefill_layout(dims, num_rows)

    def prefill_begin(ends_params: Params, packed: jax.Array) -> tuple[jax.Array, Rows]:
        host = layout.read(packed)
        batch = prefill_batch(host["tables"], host["first_rows"], host["starts"], host["lengths"], num_rows, dims.page_size)
        rows = Rows(*rotary_tables(row_owners(batch)[1], model.shape), batch)
        return model.ends(ends_params).embedded(host["tokens"]), rows

    def prefill_end(ends_params: Params, x: jax.Array, packed: jax.Array) -> tuple[jax.Array, jax.Array]:
        hidden = model.ends(ends_params).normed(x[:, layout.read(packed)["sampled_rows"]])
        return hidden, hidden[:, :1]

    return Pieces(prefill_begin, _layers(model, attention.prefill), prefill_end)


def make_decode(model: Model, attention: Attention, dims: StepDimensions, num_seqs: int) -> Pieces:
    """The decode step for `num_seqs` sequences: begin(ends, last_token, packed), layers, end(ends, x) -> hidden [E, num_seqs]."""
    layout = decode_layout(dims, num_seqs)

    def decode_begin(ends_params: Params, last_token: jax.Array, packed: jax.Array) -> tuple[jax.Array, Rows]:
        host = layout.read(packed)
        tokens = jnp.where(host["is_on_device"] > 0, last_token[host["slots"]], host["tokens"])
        batch = decode_batch(host["tables"], host["positions"], dims.page_size)
        rows = Rows(*rotary_tables(host["positions"], model.shape), batch)
        return model.ends(ends_params).embedded(tokens), rows

    def decode_end(ends_params: Params, x: jax.Array) -> jax.Array:
        return model.ends(ends_params).normed(x)

    return Pieces(decode_begin, _layers(model, attention.decode), decode_end)


def _layers(model: Model, attend: Callable[..., Attend]) -> Callable[..., tuple[jax.Array, jax.Array]]:
    def layers(
        params: LayerParams, first: jax.Array, x: jax.Array, pool: jax.Array, rows: Rows
    ) -> tuple[jax.Array, jax.Array]:
        step = Step(rows.cos, rows.sin, attend(rows.batch))
        if isinstance(params, dict):
            return model.scanned(params, x, pool, first, step)
        return model.unrolled(params, x, pool, first, step)

    return layers


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


def make_score(model: Model) -> Callable[..., tuple[jax.Array, jax.Array, jax.Array]]:
    """Build the program that scores one block of a prefill step's rows: (ends, rows [E, T], packed) -> `log_probabilities` of the
    targets, [SCORE_BLOCK_ROWS, ...]."""

    def score(ends_params: Params, rows: jax.Array, packed: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        host = SCORE_LAYOUT.read(packed)
        ends = model.ends(ends_params)
        return log_probabilities(ends.logits(ends.normed(rows[:, host["rows"]])), host["targets"])

    return score
