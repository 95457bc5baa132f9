"""The Hopper attention kernel in Mosaic GPU's interpreter: barriers, copies by page and masks are simulated, matrix products are JAX's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

from pdjax.kernels.base import PLAIN, AttentionSpec
from pdjax.kernels.gpu import hopper_attention as hopper
from pdjax.kernels.gpu.attention import Form, HopperAttention
from pdjax.kernels.gpu.hopper_layout import clear_tails, plan
from pdjax.kernels.reference import ReferenceAttention
from tests.attention_kit import Case, Sizes, random_case, run_prefill

SIZES = Sizes(rows=16, seqs=2, heads=3, kv_heads=1, head_dim=64, page_size=16, table_pages=20)
FORM = Form(3, 64, 16, jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.bfloat16))
HOPPER = HopperAttention(FORM, hopper.Tuning(64, 2), interpret=InterpretGPUParams(detect_races=True))
TOLERANCE = 2 * 2**-8
"""Weights and the result are rounded to bfloat16 once each; both are about 1 or less."""


def narrow(case: Case) -> Case:
    queries, kv, pool = (values.astype(jnp.bfloat16) for values in (case.queries, case.kv, case.pool))
    return case._replace(queries=queries, kv=kv, pool=pool)


def test_prefill_equals_the_reference_without_a_race() -> None:
    """A window that leaves out the first of five blocks of 64 keys and cuts the second; the third and fourth, which every row sees
    whole; the diagonal in the fifth. Four blocks through a ring of two, pages that end in NaN, page tables that end in a page of NaN."""
    spec = AttentionSpec(soft_cap=0.7, window=np.int32(180))
    case = narrow(random_case(7, [290, 3], [10, 4], SIZES))
    expected = run_prefill(ReferenceAttention(), case, 1, spec).astype(np.float32)
    got = run_prefill(HOPPER, case, 1, spec).astype(np.float32)
    np.testing.assert_allclose(got, expected, rtol=TOLERANCE, atol=TOLERANCE)
    assert not interpreter.get_races().races_found


def test_slots_past_the_end_of_a_sequence_are_cleared_and_nothing_else() -> None:
    case = random_case(3, [5, 30], [10, 3], SIZES)
    cleared = np.asarray(clear_tails(jnp.asarray(case.full), 1, plan(case.batch, 3, 16, 64)))
    tables = np.asarray(case.batch.tables)
    expected = case.full.copy()
    expected[1, tables[0, 0], 15:] = 0  # 15 positions: one slot of the first page is left
    expected[1, tables[1, 2], 1:] = 0  # 33 positions
    np.testing.assert_array_equal(cleared, expected)


def test_page_tables_are_padded_with_the_last_page_of_the_sequence_to_whole_blocks() -> None:
    case = random_case(3, [5, 30], [10, 3], SIZES)
    first, second = np.asarray(plan(case.batch, 3, 16, 128).tables)
    tables = np.asarray(case.batch.tables)
    assert len(first) == 24 and set(first) == {tables[0, 0]}
    assert second.tolist() == [*tables[1, :3], *[tables[1, 2]] * 21]


def test_rows_know_their_place_in_the_tiles() -> None:
    case = random_case(3, [5, 30], [10, 3], SIZES)
    planned = plan(case.batch, 32, 16, 64)  # tiles of 4 rows
    rows, places = np.asarray(planned.rows), np.asarray(planned.places)
    assert sorted(rows[rows >= 0].tolist()) == list(range(13))
    np.testing.assert_array_equal(rows.reshape(-1)[places[:13]], np.arange(13))


def test_what_the_kernel_does_not_do_has_a_reason() -> None:
    def reason(head_dim: int = 64, page_size: int = 16, dtype: jnp.dtype = jnp.bfloat16, spec: AttentionSpec = PLAIN) -> str | None:
        queries = jax.ShapeDtypeStruct((32, 8, head_dim), dtype)
        return hopper.why_not(queries, jax.ShapeDtypeStruct((2, 10, page_size, 4, head_dim), dtype), spec)

    assert reason() is None and reason(head_dim=128, page_size=128) is None
    assert "head_dim 96" in reason(head_dim=96)
    assert "page_size 4 " in reason(page_size=4)
    assert "page_size 24 " in reason(page_size=24)
    assert "float32" in reason(dtype=jnp.float32)
    assert reason(spec=AttentionSpec(sinks=np.zeros(8, np.float32))) == "attention sinks"


@pytest.mark.parametrize(
    ("form", "spec", "reason"),
    [
        (FORM._replace(page_size=256), PLAIN, "page_size 256 is no multiple of 8 that divides 128"),
        (FORM, AttentionSpec(sinks=np.zeros(3, np.float32)), "attention sinks"),
    ],
)
def test_what_it_does_not_do_is_left_to_the_triton_kernel_and_said(
    form: Form, spec: AttentionSpec, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = SIZES._replace(page_size=form.page_size)
    case = narrow(random_case(3, [5, 30], [10, 3], sizes))
    with caplog.at_level("INFO"):
        attention = HopperAttention(form, interpret=InterpretGPUParams())
        attended, pool = jax.eval_shape(lambda *args: attention.prefill(case.batch)(*args, 0, spec), case.queries, case.kv, case.pool)
    assert attended.shape == case.queries.shape and pool.shape == case.pool.shape
    assert f"not the Hopper one: {reason}" in caplog.text


def test_a_tuning_that_cannot_be_names_the_sizes() -> None:
    for block_keys, stages, page_size, message in ((64, 1, 16, "stages 1"), (96, 2, 16, "block_keys 96"), (64, 2, 4, "page_size 4")):
        with pytest.raises(ValueError, match=message):
            hopper.Tuning(block_keys, stages).check(page_size)
