"""What a launch of the prefill kernel works on: the tiles, the references, and the traffic of one grid step."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pdjax.kernels.tpu import blocks
from pdjax.kernels.tpu.blocks import LANES, LoadWords, StoreWords
from pdjax.kernels.tpu.paging import Block, Into, Pages, Rows, Source, start_fetch, start_write, wait_fetch, wait_write
from pdjax.kernels.tpu.tuning import PrefillTuning


class Tiles(NamedTuple):
    """The tiles of a step: tile i has `lengths[i]` rows from row `rows[i]` on, at `positions[i]` and following of its sequence.

    No tile crosses a multiple of R rows. Tiles that are not in use have length 0; with them every block of R rows has a tile.
    """

    count: jax.Array  # int32[1], tiles in use
    sequences: jax.Array  # int32[tiles]
    positions: jax.Array  # int32[tiles]
    lengths: jax.Array  # int32[tiles]
    rows: jax.Array  # int32[tiles]


class Options(NamedTuple):
    """What changes the program. Scale and the scales of a quantised pool are not here: they are factors of queries and outputs."""

    soft_cap: float | None  # queries are scaled such that a score is `soft_cap * tanh(query . key)`, in base 2
    is_windowed: bool
    has_sinks: bool


class Scratch(NamedTuple):
    head_queries: jax.Ref  # [H, R, D], scaled and rotated, 0 in rows of other tiles
    new_kv: jax.Ref  # [D / lanes, R, 2 * K, lanes], keys and values on their way to the pool
    blocks: jax.Ref  # two blocks of the pool, [2, D / lanes, B, rows, lanes], see blocks.py
    keys: jax.Ref  # [K, B, D]
    values: jax.Ref  # [K, B, D in whole lanes], with ones behind the values
    scores: jax.Ref  # float32[K, G * R, B]
    acc: jax.Ref  # float32[K, G * R, W], W > D whole lanes: outputs, then sums of weights, the same in every lane or a part in each
    peak: jax.Ref  # float32[K, G * R, LANES], the same in every lane
    parity: jax.Ref  # SMEM int32[1]: which half of `blocks` the next block lies in
    read_sems: jax.Ref  # [2]
    write_sem: jax.Ref


class Span(NamedTuple):
    """Which blocks a tile sees: `first .. whole` on the lower edge, `whole .. edge` without a mask, `edge .. last` on the diagonal."""

    first: jax.Array
    whole: jax.Array
    edge: jax.Array
    last: jax.Array


class Access(NamedTuple):
    """How words of a block are loaded and stored."""

    load: LoadWords
    store: StoreWords

    @staticmethod
    def of(interpret: pltpu.InterpretParams | bool) -> Access:
        if interpret:
            return Access(blocks.load_words_interpreted, blocks.store_words_interpreted)
        return Access(blocks.load_words, blocks.store_words)


class Static(NamedTuple):
    """What does not change while a launch runs."""

    options: Options
    tuning: PrefillTuning
    pages_per_sequence: int
    access: Access


class Step(NamedTuple):
    """One grid step: what is static, and the references."""

    static: Static
    pages: Pages
    tiles: Tiles  # in SMEM
    refs: dict[str, jax.Ref]  # operands, scalars and output by name
    scratch: Scratch

    @property
    def options(self) -> Options:
        return self.static.options

    @property
    def tuning(self) -> PrefillTuning:
        return self.static.tuning

    @property
    def head_dim(self) -> int:
        return self.scratch.head_queries.shape[2]

    @property
    def num_kv_heads(self) -> int:
        return self.scratch.keys.shape[0]

    @property
    def group(self) -> int:
        """Query heads a KV head."""
        return self.scratch.head_queries.shape[0] // self.num_kv_heads

    @property
    def sums_on_mxu(self) -> bool:
        """Whether sums of weights come from columns of ones beside the values."""
        return self.head_dim % LANES != 0

    def end(self, tile: jax.Array) -> jax.Array:
        """The first position that the tile does not see."""
        return self.tiles.positions[tile] + self.tiles.lengths[tile]

    def within(self, tile: jax.Array) -> jax.Array:
        """Where in its block of R rows the tile begins."""
        return self.tiles.rows[tile] % self.tuning.tile_rows

    def owns(self, tile: jax.Array) -> jax.Array:
        """bool[1, R]: which rows of its block are the tile's."""
        row = jax.lax.broadcasted_iota(jnp.int32, (1, self.tuning.tile_rows), 1) - self.within(tile)
        return (row >= 0) & (row < self.tiles.lengths[tile])

    def span(self, tile: jax.Array) -> Span:
        block, position, end = self.tuning.block_tokens, self.tiles.positions[tile], self.end(tile)
        last, edge = pl.cdiv(end, block), (position + 1) // block
        if not self.options.is_windowed:
            return Span(jnp.int32(0), jnp.int32(0), edge, last)
        window = self.refs["window"][0]
        first = jnp.maximum(position - window + 1, 0) // block
        whole = jnp.clip(pl.cdiv(jnp.maximum(end - window, 0), block), first, last)
        return Span(first, whole, jnp.maximum(edge, whole), last)

    def into(self, half: jax.Array) -> Into:
        return Into(self.scratch.blocks.at[half], self.scratch.read_sems.at[half])

    def rows(self, tile: jax.Array) -> Rows:
        return Rows(self.tiles.sequences[tile], self.tiles.positions[tile], self.tiles.lengths[tile])

    def source(self, tile: jax.Array) -> Source:
        if "stored" in self.refs:
            return Source(self.refs["stored"], self.tiles.rows[tile], self.tuning.tile_rows)
        return Source(self.scratch.new_kv, self.within(tile), self.tuning.tile_rows)

    def start_write(self, tile: jax.Array) -> None:
        start_write(self.pages, self.rows(tile), self.source(tile), self.scratch.write_sem)

    def wait_write(self, tile: jax.Array) -> None:
        wait_write(self.rows(tile), self.source(tile), self.scratch.write_sem)

    def start_fetch(self, tile: jax.Array, block: jax.Array, half: jax.Array) -> None:
        start_fetch(self.pages, self.block(tile, block), self.into(half))

    def wait_fetch(self, tile: jax.Array, block: jax.Array, half: jax.Array) -> None:
        wait_fetch(self.pages, self.block(tile, block), self.into(half))

    def block(self, tile: jax.Array, index: jax.Array) -> Block:
        return Block(self.tiles.sequences[tile], index, self.end(tile))
