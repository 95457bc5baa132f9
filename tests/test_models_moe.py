"""Routing by hand, and both ways of multiplying groups of rows against one row at a time."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdjax.models.moe import expert_mlps_in_groups, expert_mlps_in_tiles, route
from pdjax.models.shape import Experts

NUM_EXPERTS, EMBED, FFN = 5, 6, 4


def weights() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.standard_normal((NUM_EXPERTS, EMBED, 2 * FFN), np.float32), rng.standard_normal((NUM_EXPERTS, FFN, EMBED), np.float32)


def one_row(row: np.ndarray, gate_up: np.ndarray, down: np.ndarray) -> np.ndarray:
    gate, up = np.split(row @ gate_up, 2)
    return (gate / (1 + np.exp(-gate)) * up) @ down


@pytest.mark.parametrize("compute", [expert_mlps_in_groups, expert_mlps_in_tiles])
@settings(max_examples=40, deadline=None)
@given(cuts=st.lists(st.integers(0, 12), min_size=NUM_EXPERTS, max_size=NUM_EXPERTS))
def test_each_expert_multiplies_its_own_rows_and_rows_behind_the_last_are_zero(compute: object, cuts: list[int]) -> None:
    ends = np.sort(np.array(cuts))
    rows = np.random.default_rng(1).standard_normal((12, EMBED), np.float32)
    gate_up, down = weights()
    expected = np.zeros_like(rows)
    for index in range(ends[-1]):
        expert = int(np.searchsorted(ends, index, side="right"))
        expected[index] = one_row(rows[index], gate_up[expert], down[expert])
    found = jax.jit(compute)(rows, gate_up, down, jnp.asarray(np.diff(ends, prepend=0), jnp.int32))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_rows", [1, 4, 37, 400])
def test_tiles_of_every_size_compute_what_groups_do(num_rows: int) -> None:
    rng = np.random.default_rng(num_rows)
    rows = rng.standard_normal((num_rows, EMBED), np.float32)
    sizes = jnp.asarray(np.bincount(rng.integers(0, NUM_EXPERTS, num_rows), minlength=NUM_EXPERTS), jnp.int32)
    tiles, groups = (jax.jit(compute)(rows, *weights(), sizes) for compute in (expert_mlps_in_tiles, expert_mlps_in_groups))
    np.testing.assert_allclose(tiles, groups, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("are_normed", "shares"), [(False, [0.5, 0.3]), (True, [0.625, 0.375])])
def test_a_row_goes_to_its_best_experts_by_their_probabilities(are_normed: bool, shares: list[float]) -> None:
    logits = jnp.log(jnp.array([[0.3, 0.1], [0.2, 0.2], [0.5, 0.7]]))
    found, chosen = route(logits, Experts(3, 2, FFN, are_normed))
    assert chosen.tolist() == [[2, 0], [2, 1]]
    np.testing.assert_allclose(found[0], shares, rtol=1e-6)
