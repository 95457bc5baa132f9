"""TPU kernels in interpret mode against the reference: unused slots hold NaN, pages lie in any order, races between DMAs are detected.

A launch is compiled once for each set of shapes and options; examples differ in lengths, contents and windows only, so they stay cheap.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import tpu as pltpu

from pdjax.kernels.base import PLAIN, Attention, AttentionSpec, DecodeBatch, PrefillBatch, as_stored, decode_batch, prefill_batch
from pdjax.kernels.heads import Heads, attend_heads
from pdjax.kernels.reference import ReferenceAttention
from pdjax.kernels.tpu import schedule
from pdjax.kernels.tpu.attend import SLACK
from pdjax.kernels.tpu.attention import PallasTpuAttention, cut, unsupported
from pdjax.kernels.tpu.tuning import DecodeTuning, PrefillTuning, Tunings

_INTERPRET = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise", dma_execution_mode="on_wait")
_TILE_ROWS, _BLOCK_TOKENS = 32, 128
_TUNINGS = Tunings(PrefillTuning(tile_rows=_TILE_ROWS, block_tokens=_BLOCK_TOKENS), DecodeTuning(block_tokens=_BLOCK_TOKENS))
_LAYER = 1

_TOLERANCE = {
    "float32": 5e-6,  # a few roundings of float32 at values of about 1
    "float8_e4m3fn": 3e-4,  # magnitudes below 2 ** -6 read as 0, times scales of 0.01, in keys and values
    # Queries and weights are rounded to 8 bits for the matrix unit, 2 ** -9 each; outputs of up to 4 have a last place of 2 ** -6.
    "bfloat16": 2.5e-2,
}


@dataclasses.dataclass(frozen=True)
class _Case:
    """Shapes and dtypes of a launch."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    stored: str = "float32"
    computed: str = "float32"
    page_size: int = 32
    num_sequences: int = 3
    num_rows: int = 40
    max_positions: int = 320

    @property
    def tolerance(self) -> float:
        return _TOLERANCE[self.stored if self.stored in _TOLERANCE else self.computed]

    @property
    def pages_per_sequence(self) -> int:
        return self.max_positions // self.page_size

    @property
    def num_pages(self) -> int:
        return 1 + self.num_sequences * self.pages_per_sequence

    def tables(self, ends: Sequence[int], rng: np.random.Generator) -> np.ndarray:
        """Page tables of sequences that hold `ends[s]` positions: pages in any order, padded with the null page."""
        pages = 1 + rng.permutation(self.num_pages - 1).reshape(self.num_sequences, self.pages_per_sequence)
        num_held = -(-np.asarray(ends) // self.page_size)
        return np.where(np.arange(self.pages_per_sequence) < num_held[:, None], pages, 0).astype(np.int32)

    def pool(self, tables: np.ndarray, held: Sequence[int], rng: np.random.Generator, kv_scales: jax.Array | None) -> jax.Array:
        """A pool in which the first `held[s]` positions of each sequence hold numbers, all else NaN (int8, which has none: 127)."""
        pool = np.full((2, self.num_pages, self.page_size, 2 * self.num_kv_heads, self.head_dim), np.nan, np.float32)
        for table, num_held in zip(tables, held, strict=True):
            for position in range(num_held):
                pool[_LAYER, table[position // self.page_size], position % self.page_size] = self.kv(1, rng)[0]
        stored = as_stored(jnp.asarray(pool), jnp.dtype(self.stored), kv_scales)
        return jnp.where(jnp.isnan(pool), jnp.asarray(127 if self.stored == "int8" else np.nan, self.stored), stored)

    def kv(self, num_rows: int, rng: np.random.Generator) -> np.ndarray:
        return rng.normal(size=(num_rows, 2 * self.num_kv_heads, self.head_dim)).astype(np.float32)

    def queries(self, num_rows: int, rng: np.random.Generator) -> jax.Array:
        return jnp.asarray(rng.normal(size=(num_rows, self.num_heads, self.head_dim)), self.computed)


class _Launch:
    """Kernel and reference for one case and one set of options, each compiled once. `window` is traced."""

    def __init__(self, case: _Case, spec: AttentionSpec = PLAIN):
        self.case = case
        self._spec = spec
        kernel = PallasTpuAttention(_TUNINGS, _INTERPRET)
        self._prefill = [jax.jit(_attend(attention, "prefill", spec)) for attention in (kernel, ReferenceAttention())]
        self._decode = [jax.jit(_attend(attention, "decode", spec)) for attention in (kernel, ReferenceAttention())]

    def check_prefill(
        self, starts: Sequence[int], lengths: Sequence[int], seed: int, window: int = 1, scale_of_queries: float = 1.0
    ) -> None:
        case, rng = self.case, np.random.default_rng(seed)
        ends = np.add(starts, lengths)
        tables = case.tables(ends, rng)
        first_rows = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        arrays = [jnp.asarray(array, jnp.int32) for array in (tables, first_rows, starts, lengths)]
        batch = prefill_batch(*arrays, case.num_rows, case.page_size)
        pool = case.pool(tables, starts, rng, self._spec.kv_scales)
        self._check(self._prefill, batch, pool, sum(lengths), window, rng, scale_of_queries)

    def check_decode(self, visible: Sequence[int], num_padding: int, seed: int, window: int = 1) -> None:
        case, rng = self.case, np.random.default_rng(seed)
        held = [length - 1 for length in visible]
        tables = np.pad(case.tables(visible, rng), ((0, num_padding), (0, 0)))
        batch = decode_batch(jnp.asarray(tables), jnp.asarray([*held, *[0] * num_padding], jnp.int32), case.page_size)
        pool = case.pool(tables[: len(visible)], held, rng, self._spec.kv_scales)
        self._check(self._decode, batch, pool, len(visible), window, rng)

    def _check(
        self,
        attends: Sequence[jax.stages.Wrapped],
        batch: PrefillBatch | DecodeBatch,
        pool: jax.Array,
        num_real: int,
        window: int,
        rng: np.random.Generator,
        scale_of_queries: float = 1.0,
    ) -> None:
        tolerance = self.case.tolerance * scale_of_queries  # a score of x is a float32 of about x * 2 ** -22, and a weight no better
        num_rows = len(batch.pages)
        queries, kv = self.case.queries(num_rows, rng) * scale_of_queries, jnp.asarray(self.case.kv(num_rows, rng), self.case.computed)
        (out, pool_out), (expected, pool_expected) = (attend(batch, queries, kv, pool, jnp.int32(window)) for attend in attends)
        assert interpreter.races is None or not interpreter.races.races_found
        np.testing.assert_allclose(_numbers(out)[:num_real], _numbers(expected)[:num_real], atol=tolerance, rtol=0)
        np.testing.assert_array_equal(_numbers(pool_out)[:, 1:], _numbers(pool_expected)[:, 1:])  # page 0 may hold anything


def _attend(attention: Attention, method: str, spec: AttentionSpec) -> jax.stages.Wrapped:
    begin = {"prefill": attention.prefill, "decode": attention.decode}[method]

    def attend(
        batch: PrefillBatch | DecodeBatch, queries: jax.Array, kv: jax.Array, pool: jax.Array, window: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        traced = spec if spec.window is None else spec._replace(window=window)
        return begin(batch)(queries, kv, pool, _LAYER, traced)

    return attend


def _numbers(array: jax.Array) -> np.ndarray:
    return np.asarray(array.astype(jnp.float32))


_PLAIN = _Launch(_Case(num_heads=4, num_kv_heads=2, head_dim=128))
_SINKS = jnp.linspace(-2.0, 3.0, 6)
_ODD_HEADS = _Launch(
    _Case(num_heads=6, num_kv_heads=3, head_dim=64, stored="bfloat16", computed="bfloat16", page_size=16),
    AttentionSpec(scale=0.3, soft_cap=5.0, window=1, sinks=_SINKS),
)

_starts_and_lengths = st.lists(st.tuples(st.sampled_from([0, 0, 5, 16, 100, 127, 128, 230]), st.integers(0, 13)), min_size=3, max_size=3)


@settings(max_examples=8, deadline=None, derandomize=True)
@given(sequences=_starts_and_lengths, seed=st.integers(0, 99))
def test_any_mix_of_chunks_and_single_rows_equals_the_reference(sequences: list[tuple[int, int]], seed: int) -> None:
    starts, lengths = zip(*sorted(sequences, key=lambda sequence: sequence[1] == 0), strict=True)  # empty sequences come last
    _PLAIN.check_prefill(starts, lengths, seed)


@pytest.mark.parametrize(("starts", "lengths"), [((0, 0, 0), (0, 0, 0)), ((0, 0, 0), (40, 0, 0)), ((250, 3, 0), (38, 1, 1))])
def test_empty_long_and_unaligned_chunks_equal_the_reference(starts: tuple[int, ...], lengths: tuple[int, ...]) -> None:
    _PLAIN.check_prefill(starts, lengths, seed=1)


@settings(max_examples=4, deadline=None, derandomize=True)
@given(window=st.sampled_from([1, 2, 17, 128, 129, 1000]), seed=st.integers(0, 99))
def test_odd_head_counts_window_soft_cap_and_sinks_together_equal_the_reference(window: int, seed: int) -> None:
    _ODD_HEADS.check_prefill((131, 0, 9), (20, 13, 1), seed, window)


def test_int8_pages_with_scales_equal_the_reference() -> None:
    scales = jnp.linspace(0.02, 0.05, 4)
    case = _Case(num_heads=4, num_kv_heads=2, head_dim=80, stored="int8", page_size=8)
    _Launch(case, AttentionSpec(kv_scales=scales)).check_prefill((0, 130, 0), (20, 13, 0), seed=2)


def test_fp8_pages_and_wide_heads_equal_the_reference() -> None:
    """Scales put the largest entries near 448, the largest e4m3; what reads as 0 is then below 2e-4."""
    case = _Case(num_heads=4, num_kv_heads=2, head_dim=256, stored="float8_e4m3fn", page_size=16)
    spec = AttentionSpec(kv_scales=jnp.full(4, 0.01))
    _Launch(case, spec).check_prefill((0, 130, 0), (20, 13, 0), seed=3)


@pytest.mark.parametrize("factor", [20.0, 400.0])
def test_scores_far_apart_lose_nothing_to_peaks_that_seldom_move(factor: float) -> None:
    """Standard deviations of the scores of half the slack, and of ten times it: peaks stay for some blocks, and move far for others."""
    assert factor / math.log(2) < SLACK / 2 or factor / math.log(2) > 5 * SLACK
    _PLAIN.check_prefill((200, 0, 5), (20, 9, 4), seed=4, scale_of_queries=factor)


@settings(max_examples=4, deadline=None, derandomize=True)
@given(visible=st.lists(st.sampled_from([1, 2, 16, 17, 128, 129, 256, 300]), min_size=3, max_size=3), seed=st.integers(0, 99))
def test_a_decode_step_equals_the_reference(visible: list[int], seed: int) -> None:
    _PLAIN.check_decode(visible, num_padding=1, seed=seed)


@settings(max_examples=3, deadline=None, derandomize=True)
@given(window=st.sampled_from([1, 100, 1000]), seed=st.integers(0, 99))
def test_a_decode_step_with_every_option_equals_the_reference(window: int, seed: int) -> None:
    _ODD_HEADS.check_decode((1, 140, 250), num_padding=1, seed=seed, window=window)


def test_a_decode_step_over_int8_pages_equals_the_reference() -> None:
    case = _Case(num_heads=4, num_kv_heads=2, head_dim=96, stored="int8", num_sequences=2)
    _Launch(case, AttentionSpec(kv_scales=jnp.full(4, 0.03))).check_decode((129, 40), num_padding=1, seed=5)


_cut = jax.jit(cut, static_argnums=1)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(sequences=st.lists(st.tuples(st.integers(0, 70), st.integers(0, 50)), min_size=4, max_size=4), tile_rows=st.sampled_from([8, 32]))
def test_tiles_cover_every_row_once_and_every_block_of_rows(sequences: list[tuple[int, int]], tile_rows: int) -> None:
    starts, lengths = (np.asarray(column, np.int32) for column in zip(*sorted(sequences, key=lambda s: s[1] == 0), strict=True))
    first_rows = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int32)
    rows = np.zeros(200, np.int32)
    tiles = jax.device_get(_cut(PrefillBatch(np.zeros((4, 1), np.int32), first_rows, starts, lengths, rows, rows), tile_rows))
    covered: list[tuple[int, int, int]] = []
    for i in range(int(tiles.count[0])):
        sequence, position, length, row = (int(column[i]) for column in tiles[1:])
        assert length > 0
        assert row // tile_rows == (row + length - 1) // tile_rows
        covered += [(sequence, position + k, row + k) for k in range(length)]
    expected = [
        (s, start + k, first + k) for s, (start, n, first) in enumerate(zip(starts, lengths, first_rows, strict=True)) for k in range(n)
    ]
    assert covered == expected
    assert not np.any(tiles.lengths[int(tiles.count[0]) :])
    blocks = list(tiles.rows // tile_rows)
    assert blocks == sorted(blocks) and set(blocks) == set(range(len(rows) // tile_rows + (len(rows) % tile_rows > 0)))


@pytest.mark.parametrize(
    ("case", "pairs", "kv_scales"),
    [
        (_Case(num_heads=4, num_kv_heads=2, head_dim=128), 64, None),
        (_Case(num_heads=6, num_kv_heads=3, head_dim=64, stored="bfloat16", computed="bfloat16", page_size=16), 16, None),
        (_Case(num_heads=2, num_kv_heads=1, head_dim=256, stored="bfloat16", computed="bfloat16", page_size=16), 128, None),
        (_Case(num_heads=4, num_kv_heads=2, head_dim=80, stored="int8", page_size=8), 40, 0.03),
    ],
)
def test_heads_as_projected_are_rotated_and_attend_as_the_reference_does(case: _Case, pairs: int, kv_scales: float | None) -> None:
    """Two sequences meet inside one block of rows; padding rows hold NaN."""
    starts, lengths, rng = (130, 0, 0), (9, 26, 0), np.random.default_rng(6)
    num_real, num_heads = sum(lengths), case.num_heads + 2 * case.num_kv_heads
    spec = AttentionSpec(kv_scales=None if kv_scales is None else jnp.full(2 * case.num_kv_heads, kv_scales))
    tables = case.tables(np.add(starts, lengths), rng)
    arrays = [jnp.asarray(array, jnp.int32) for array in (tables, (0, 9, 35), starts, lengths)]
    batch = prefill_batch(*arrays, case.num_rows, case.page_size)
    projected = rng.normal(size=(num_heads, case.head_dim, case.num_rows)).astype(np.float32)
    projected[:, :, num_real:] = np.nan
    angles = rng.uniform(0, 7, size=(pairs, case.num_rows)).astype(np.float32)
    heads = Heads(jnp.asarray(projected, case.computed), jnp.cos(angles), jnp.sin(angles))
    pool = case.pool(tables, starts, rng, spec.kv_scales)
    kernel = PallasTpuAttention(_TUNINGS, _INTERPRET)
    (out, pool_out), (expected, pool_expected) = (
        jax.jit(lambda heads, pool, attention=attention: attend_heads(attention.prefill(batch), heads, pool, _LAYER, spec))(heads, pool)
        for attention in (kernel, ReferenceAttention())
    )
    assert interpreter.races is None or not interpreter.races.races_found
    np.testing.assert_allclose(_numbers(out)[..., :num_real], _numbers(expected)[..., :num_real], atol=case.tolerance, rtol=0)
    assert not np.any(_numbers(out)[..., num_real:])
    # A product with a cosine may be fused into a sum or not, so a rotated key may round to its neighbour.
    last_place = {"float32": 2e-6, "bfloat16": 2.0**-6, "int8": 1.0}[case.stored]
    np.testing.assert_allclose(_numbers(pool_out)[:, 1:], _numbers(pool_expected)[:, 1:], atol=last_place, rtol=0)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"dtype": "float16"}, "float16"),
        ({"shape": (2, 9, 16, 6, 128), "dtype": "int8"}, "3 KV heads"),
        ({"shape": (2, 9, 16, 4, 192)}, "head_dim 192"),
        ({"shape": (2, 9, 16, 4, 72)}, "head_dim 72"),
        ({"shape": (2, 9, 24, 4, 128)}, "24"),
        ({"tables": (512, 512)}, "262144"),
    ],
)
def test_what_no_kernel_supports_is_told_with_its_value(changes: dict[str, object], named: str) -> None:
    shape, dtype, tables = ({"shape": (2, 9, 16, 4, 128), "dtype": "bfloat16", "tables": (8, 64)} | changes).values()
    reason = unsupported(jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(tables, jnp.int32), Tunings())
    assert reason is not None and named in reason
    assert unsupported(jax.ShapeDtypeStruct((2, 9, 16, 4, 128), "bfloat16"), jax.ShapeDtypeStruct((8, 64), jnp.int32), Tunings()) is None


_BUNDLES = """\
LB: loop body
     0   :  { %1 = a }
   0x1 LB: > { %2 = b }
   0x2   : > { %3 = sbr.rel target = $region3 }
   0x3   :  {}
   0x4 LB: >> { %4 = vmatmul }
   0x5   : >> { %5 = vmatmul }
   0x6 PF: > { %6 = c }
   0x7   :  { %7 = d }
"""
_USE = """\
== CAPACITY:
MXU, XLU, VALU, VPOP, EUP, VLOAD, VLOAD:FILL, VSTORE, VSTORE:SPILL, SALU
    2     2     4     2     1     3     3     2     2     2
== UTILIZATION:
0 0 0 0 0 0 0 0 0 0
0 0 0 0 0 0 0 0 0 1
0 0 0 0 0 0 0 0 0 1
0 0 0 0 0 0 0 0 0 0
2 0 3 0 1 0 0 0 0 0
1 0 1 0 0 3 3 0 0 0
0 0 0 0 0 0 0 0 0 1
0 0 0 0 0 0 0 0 0 0
"""


def test_the_schedule_of_a_loop_leaves_out_the_loops_inside_it(tmp_path: Path) -> None:
    (tmp_path / "1-mine.1-71-final_bundles.txt").write_text(_BUNDLES)
    (tmp_path / "1-mine.1-69-final_hlo-static-per-bundle-utilization.txt").write_text(_USE)
    program = schedule.read_program(tmp_path, "mine")
    outer, inner = schedule.loops(program)
    assert (outer.bundles, outer.slots.salu, outer.slots.mxu) == (4, 3, 0)
    assert schedule.busiest([outer, inner]) == inner
    short = inner._replace(bundles=1, slots=inner.slots._replace(mxu=1))  # busier for each bundle, and not where the work is
    assert schedule.busiest([outer, inner, short]) == inner
    figures = schedule.figures(program, inner, scores=4000)
    assert figures.bundles_per_1000_scores == 0.5
    assert (figures.mxu, figures.valu, figures.eup, figures.fill) == (0.75, 0.5, 0.5, 0.5)


def test_a_dump_without_the_kernel_is_told_by_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="absent"):
        schedule.read_program(tmp_path, "absent")
