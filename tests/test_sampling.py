"""The sampler against distributions worked out by hand."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pdjax.engine.sampling import (
    SamplerRow,
    count_tokens,
    filter_threshold,
    greedy,
    log_probabilities,
    ordered_bits,
    pack_rows,
    sample,
    sampler_layout,
)
from pdjax.engine.state import HISTORY_CHUNK_TOKENS, History, extend_history
from pdjax.protocol import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, Sampling

pytestmark = pytest.mark.usefixtures("compiled_quickly")

VOCAB, SLOTS, ROWS = 150, 4, 3
PADDING_SLOT = SLOTS

CHI_SQUARE_1E_4 = {1: 15.14, 2: 18.42, 3: 21.11, 4: 23.51, 5: 25.74, 6: 27.86, 7: 29.88}
"""Critical values by degrees of freedom: a right sampler exceeds them once in 10,000 seeds, and the seeds here are fixed."""


def empty_history() -> History:
    return History(jnp.zeros((SLOTS + 1, VOCAB), bool), jnp.zeros((SLOTS + 1, VOCAB), jnp.int32))


@functools.cache
def compiled(num_rows: int) -> Callable[..., jax.Array]:
    layout = sampler_layout(num_rows)
    return jax.jit(lambda logits, history, packed: sample(logits, history, layout.read(packed)))


def draw(logits: np.ndarray, rows: list[SamplerRow], history: History | None = None) -> list[int]:
    """Sample row i of `logits` (one row serves all) for `rows[i]`; tokens that `logits` does not reach have no probability."""
    full = np.full((len(rows), VOCAB), -np.inf, np.float32)
    full[:, : np.shape(logits)[-1]] = logits
    packed = pack_rows(sampler_layout(len(rows)), rows, PADDING_SLOT)
    return np.asarray(compiled(len(rows))(full, history or empty_history(), packed)).tolist()


def one(logits: np.ndarray, history: History | None = None, slot: int = 0, index: int = 0, **sampling: object) -> int:
    return draw(logits, [SamplerRow(slot, Sampling(**{"max_tokens": 9, "temperature": 0.0, **sampling}), index)], history)[0]


def many(logits: np.ndarray, count: int = 4096, history: History | None = None, slot: int = 0, **sampling: object) -> np.ndarray:
    """How often each token comes when one seed draws for the indices 0 .. count."""
    rows = 512
    params = Sampling(**{"max_tokens": 9, "seed": 4711, **sampling})
    tokens: list[int] = []
    for first in range(0, count, rows):
        tokens += draw(logits, [SamplerRow(slot, params, first + i) for i in range(rows)], history)
    return np.bincount(tokens, minlength=VOCAB)


def assert_distribution(counts: np.ndarray, probabilities: list[float]) -> None:
    expected = np.zeros(VOCAB)
    expected[: len(probabilities)] = np.array(probabilities) * counts.sum()
    assert not counts[expected == 0].any(), f"tokens without probability came: {np.flatnonzero((expected == 0) & (counts > 0))}"
    is_possible = expected > 0
    assert expected[is_possible].min() >= 5, "too few draws for the test to say anything"
    statistic = float((((counts - expected) ** 2)[is_possible] / expected[is_possible]).sum())
    limit = CHI_SQUARE_1E_4[int(is_possible.sum()) - 1]
    assert statistic < limit, f"chi-square {statistic}: {counts[is_possible]} against {expected[is_possible]}"


HALVES = np.log([1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 16])


def test_plain_sampling_follows_the_softmax() -> None:
    assert_distribution(many(HALVES), [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 16])


def test_temperature_two_takes_square_roots() -> None:
    # Square roots of 16 : 9 : 4 : 1 are 4 : 3 : 2 : 1.
    assert_distribution(many(np.log([16.0, 9.0, 4.0, 1.0]), temperature=2.0), [0.4, 0.3, 0.2, 0.1])


def test_top_k_renormalises_the_k_best() -> None:
    assert_distribution(many(HALVES, top_k=2), [2 / 3, 1 / 3])


def test_top_k_keeps_all_that_tie_with_the_last() -> None:
    assert_distribution(many(HALVES, top_k=4), [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 16])


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    assert_distribution(many(HALVES, top_p=0.74), [2 / 3, 1 / 3])
    assert_distribution(many(HALVES, top_p=0.76), [4 / 7, 2 / 7, 1 / 7])


def test_top_p_counts_what_top_k_left() -> None:
    # Of 1/2, 1/4, 1/8 the first holds 4/7 = 0.571, the first two 6/7 = 0.857.
    assert_distribution(many(HALVES, top_k=3, top_p=0.8), [2 / 3, 1 / 3])
    assert many(HALVES, count=512, top_k=3, top_p=0.57)[0] == 512


def test_min_p_is_relative_to_the_best_token() -> None:
    assert_distribution(many(HALVES, min_p=0.2), [4 / 7, 2 / 7, 1 / 7])


def test_filters_see_the_distribution_after_temperature() -> None:
    # At temperature 2: 0.4, 0.3, 0.2, 0.1; without it the first token alone would hold 16/30 > 0.5.
    assert_distribution(many(np.log([16.0, 9.0, 4.0, 1.0]), temperature=2.0, top_p=0.5), [4 / 7, 3 / 7])


def test_logit_bias_shifts_before_everything_else() -> None:
    assert_distribution(many(np.log([0.5, 0.25, 0.25]), logit_bias={1: math.log(2), 2: -100.0}, top_k=2), [1 / 2, 1 / 2])


@pytest.mark.parametrize(
    "extreme", [{"top_p": 1e-9}, {"top_p": 0.0}, {"top_k": 1}, {"temperature": 1e-3}, {"min_p": 1.0}, {"top_k": 1, "temperature": 1e6}]
)
def test_extremes_leave_the_best_token(extreme: dict[str, float]) -> None:
    assert many([1.0, 1.2, 1.1], count=512, **extreme)[1] == 512


def test_a_huge_temperature_is_uniform_over_what_can_come() -> None:
    assert_distribution(many([-50.0, 0.0, 50.0, 10.0], temperature=1e8), [0.25] * 4)


def test_top_k_of_nearly_equal_logits_at_a_huge_temperature_is_exact() -> None:
    # The three differ by one unit in the last place: after division by 1e6 and exp they would be equal.
    values = [np.float32(10), np.nextafter(np.float32(10), np.float32(11)), np.nextafter(np.float32(10), np.float32(9))]
    assert many(values, count=512, top_k=1, temperature=1e6)[1] == 512


def test_a_token_without_probability_never_comes() -> None:
    logits = np.full(VOCAB, -np.inf)
    logits[77] = -1000.0
    assert many(logits, count=512, temperature=5.0, top_p=0.9, top_k=20)[77] == 512
    assert one(logits) == 77


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    assert one([1.0, 3.0, 3.0, 2.0]) == 1
    assert greedy(jnp.array([[1.0, 3.0, 3.0, 2.0]])).tolist() == [1]


def test_min_tokens_bars_stop_tokens_until_enough_have_come() -> None:
    stop = {"min_tokens": 3, "stop_token_ids": (0, 2)}
    assert [one([5.0, 1.0, 4.0], index=index, **stop) for index in range(5)] == [1, 1, 1, 0, 0]
    assert one([5.0, 1.0, 4.0], index=0, logit_bias={0: 100.0}, **stop) == 1


def test_every_row_gets_all_of_its_own_biases_and_stops() -> None:
    survivors = [3, 77, 148]
    rows = []
    for slot, survivor in enumerate(survivors):
        bias = {token: -1000.0 for token in range(VOCAB) if token not in (survivor, 149)}
        rows.append(SamplerRow(slot, Sampling(max_tokens=9, temperature=0.0, logit_bias=bias, min_tokens=9, stop_token_ids=(149,)), 0))
    assert draw(np.arange(VOCAB, dtype=np.float32), rows) == survivors


def test_the_layout_holds_the_most_biases_and_stops_that_requests_may_have() -> None:
    _, views = sampler_layout(ROWS).new()
    assert len(views["entry_ids"]) >= ROWS * (MAX_LOGIT_BIAS + MAX_STOP_TOKEN_IDS)


def history_of(slot: int, prompt: list[int], output: list[int]) -> History:
    def padded(tokens: list[int]) -> np.ndarray:
        return np.array(tokens + [VOCAB] * (HISTORY_CHUNK_TOKENS - len(tokens)), np.int32)

    dirty = History(jnp.ones((SLOTS + 1, VOCAB), bool), jnp.full((SLOTS + 1, VOCAB), 9, jnp.int32))
    return jax.jit(extend_history)(dirty, np.int32(slot), np.int32(0), padded(prompt), padded(output))


def test_history_forgets_the_last_request_and_adds_up() -> None:
    history = history_of(2, [1, 1, 3], [4, 4, 1])
    assert np.flatnonzero(history.in_prompt[2]).tolist() == [1, 3]
    assert {int(i): int(history.output_counts[2, i]) for i in np.flatnonzero(history.output_counts[2])} == {4: 2, 1: 1}
    assert bool(history.in_prompt[1].all()) and int(history.output_counts[1, 0]) == 9
    more = count_tokens(history, np.array([2, 3], np.int32), np.array([4, 5], np.int32))
    assert (int(more.output_counts[2, 4]), int(more.output_counts[3, 5])) == (3, 10)


def test_penalties_follow_their_definitions() -> None:
    history = history_of(1, [0], [1, 1])
    # Frequency: 3 - 2 * 0.6 = 1.8 < 2. Presence: 3 - 0.9 = 2.1 > 2, 3 - 1.1 = 1.9 < 2. Prompt tokens are none of their business.
    assert one([0.0, 3.0, 2.0], history, 1, frequency_penalty=0.4) == 1
    assert one([0.0, 3.0, 2.0], history, 1, frequency_penalty=0.6) == 2
    assert one([0.0, 3.0, 2.0], history, 1, presence_penalty=0.9) == 1
    assert one([0.0, 3.0, 2.0], history, 1, presence_penalty=1.1) == 2
    assert one([3.0, 0.0, 2.9], history, 1, presence_penalty=2.0, frequency_penalty=2.0) == 0
    # Repetition divides positive logits, multiplies negative ones, and counts the prompt: 3 / 1.4 = 2.14, 3 / 1.6 = 1.875.
    assert one([3.0, 0.0, 2.0], history, 1, repetition_penalty=1.4) == 0
    assert one([3.0, 0.0, 2.0], history, 1, repetition_penalty=1.6) == 2
    assert one([-1.0, -9.0, -1.5], history, 1, repetition_penalty=1.4) == 0
    assert one([-1.0, -9.0, -1.5], history, 1, repetition_penalty=1.6) == 2


def test_penalties_shape_the_distribution_that_is_drawn_from() -> None:
    history = history_of(0, [], [0, 0])
    assert_distribution(many(np.log([0.5, 0.25, 0.25]), history=history, frequency_penalty=math.log(2) / 2), [1 / 3, 1 / 3, 1 / 3])


def test_bias_comes_before_repetition() -> None:
    # (1 + 2) / 2 = 1.5 > 1.4; the other way round 1 / 2 + 2 = 2.5 > 1.6 as well, so the second line tells them apart.
    history = history_of(0, [0], [])
    assert one([1.0, 1.4], history, 0, logit_bias={0: 2.0}, repetition_penalty=2.0) == 0
    assert one([1.0, 1.6], history, 0, logit_bias={0: 2.0}, repetition_penalty=2.0) == 1


def test_a_row_neither_sees_nor_disturbs_its_neighbours() -> None:
    logits = np.random.default_rng(0).normal(size=VOCAB)
    history = history_of(1, [], [int(np.argmax(logits))] * 3)
    rows = [
        SamplerRow(0, Sampling(max_tokens=9, temperature=0.7, top_p=0.6, seed=5), 3),
        SamplerRow(1, Sampling(max_tokens=9, temperature=0.0, frequency_penalty=2.0, logit_bias={5: -3.0}), 4),
        SamplerRow(2, Sampling(max_tokens=9, temperature=1.3, top_k=7, min_p=0.01, seed=2**63 - 1), 0),
        SamplerRow(3, Sampling(max_tokens=9, temperature=0.0, min_tokens=2, stop_token_ids=(int(np.argmax(logits)),)), 1),
    ]
    alone = [draw(logits, [row], history)[0] for row in rows]
    assert draw(logits, rows, history) == alone
    assert draw(logits, rows[::-1], history) == alone[::-1]


def test_one_seed_draws_anew_at_every_index_and_the_same_each_time() -> None:
    params = Sampling(max_tokens=9, seed=3)
    flat = np.zeros(VOCAB)
    first = draw(flat, [SamplerRow(0, params, index) for index in range(40)])
    assert len(set(first)) > 25
    assert draw(flat, [SamplerRow(1, params, index) for index in range(40)]) == first


def test_logprobs_are_those_of_the_unmodified_distribution() -> None:
    logits = np.full((2, VOCAB), -1e9, np.float32)
    logits[0, :5], logits[1, 10:15] = HALVES + 3, HALVES[::-1]
    chosen, top_ids, top_logprobs = log_probabilities(jnp.asarray(logits), jnp.array([2, 14]))
    np.testing.assert_allclose(np.exp(chosen), [1 / 8, 1 / 2], rtol=1e-5)
    assert np.asarray(top_ids)[:, :3].tolist() == [[0, 1, 2], [14, 13, 12]]
    np.testing.assert_allclose(np.exp(top_logprobs)[:, :3], [[1 / 2, 1 / 4, 1 / 8]] * 2, rtol=1e-5)


def test_ordered_bits_keep_the_order_of_floats() -> None:
    tiny = np.finfo(np.float32).tiny
    values = np.array([-np.inf, -3e38, -1.5, -tiny, -0.0, 0.0, tiny, 1.5, 3e38, np.inf], np.float32)
    keys = np.asarray(ordered_bits(jnp.asarray(values))).astype(np.int64)
    assert keys[4] == keys[5]
    assert (np.diff(np.delete(keys, 4)) > 0).all()


@functools.cache
def compiled_filter() -> Callable[..., jax.Array]:
    def kept(logits: jax.Array, min_p: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
        keys = ordered_bits(logits)
        weights = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
        threshold = filter_threshold(keys, weights, {"min_p": min_p, "top_k": top_k, "top_p": top_p})
        return keys >= threshold[:, None]

    return jax.jit(kept)


def kept_by_sorting(logits: np.ndarray, min_p: float, top_k: int, top_p: float) -> np.ndarray:
    """The same by sorting, in float64; where top_p cuts within rounding of a token's edge there is no one answer (assume)."""
    weights = np.exp(logits.astype(np.float64) - logits.max())
    kept = weights >= min_p
    if 0 < top_k < len(logits):
        kept &= logits >= np.sort(logits)[-top_k]
    if top_p < 1:
        edges = np.unique(logits[kept])[::-1]
        mass = np.array([weights[kept & (logits >= edge)].sum() for edge in edges])
        assume(np.abs(mass / mass[-1] - top_p).min() > 1e-5)
        kept &= logits >= edges[np.argmax(mass >= top_p * mass[-1])]
    assume(min_p == 0 or np.abs(weights / min_p - 1).min() > 1e-5)
    return kept


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31),
    spread=st.sampled_from([1e-3, 0.5, 3.0, 30.0]),
    grid=st.sampled_from([0.0, 0.25]),
    min_p=st.sampled_from([0.0, 0.03, 0.5]),
    top_k=st.sampled_from([0, 1, 2, 17, VOCAB - 1, VOCAB, 10**6]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.01]),
)
def test_thresholds_keep_what_sorting_keeps(seed: int, spread: float, grid: float, min_p: float, top_k: int, top_p: float) -> None:
    logits = (np.random.default_rng(seed).normal(size=VOCAB) * spread).astype(np.float32)
    if grid:
        logits = (np.round(logits / grid) * grid).astype(np.float32)
    expected = kept_by_sorting(logits, min_p, top_k, top_p)
    kept = compiled_filter()(logits[None], np.float32([min_p]), np.int32([top_k]), np.float32([top_p]))[0]
    np.testing.assert_array_equal(kept, expected)


def test_only_what_argmax_answers_counts_as_plain_greedy() -> None:
    plain = Sampling(max_tokens=9, temperature=0.0, top_k=5, top_p=0.1, stop_token_ids=(1,), min_tokens=2)
    assert SamplerRow(0, plain, 2).is_plain_greedy
    assert not SamplerRow(0, plain, 1).is_plain_greedy
    for changes in (
        {"temperature": 0.1},
        {"logit_bias": {1: 1.0}},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"repetition_penalty": 0.9},
        {"logprobs": 0},
    ):
        assert not SamplerRow(0, Sampling(**{"max_tokens": 9, "temperature": 0.0, **changes}), 0).is_plain_greedy
