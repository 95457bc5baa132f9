"""Pools of int8: where their scales come from, and that every way of KV works with them."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from pdjax.checkpoints import open_checkpoint
from pdjax.config.load import load_config
from pdjax.engine.engine import Engine
from pdjax.engine.kv_scales import KVScales, find_scales, made_up_tokens, read_scales, rounded_up, write_scales
from pdjax.engine.mesh import Placement, chips_for
from pdjax.engine.weights import place_weights
from pdjax.kernels.xla import XlaAttention
from pdjax.kv_scales import main
from pdjax.models.shape import ModelShape, weight_specs
from pdjax.worker.build import layout_of
from tests.engine_kit import SHAPE, SMALL_BLOCKS, WIDE, random_weights
from tests.model_kit import quick_compilation, read_golden
from tests.test_engine_mesh import ENGINE, PAGES, answered, prefilled

INT8 = ENGINE.model_copy(update={"kv_dtype": "int8"})
BIASED = SHAPE._replace(family="qwen2", num_heads=4, num_kv_heads=2, head_dim=4, max_context_tokens=64)


@pytest.fixture(scope="module", autouse=True)
def _quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with quick_compilation(tmp_path_factory.mktemp("compiled")):
        yield


@functools.cache
def engine_of(width: int, first_device: int = 0) -> Engine:
    devices = jax.devices()[first_device : first_device + width]
    return Engine(WIDE, random_weights(WIDE), INT8, jnp.float32, devices, XlaAttention(SMALL_BLOCKS))


def found(shape: ModelShape, weights: dict[str, np.ndarray], placement: Placement, by_layer: bool = True) -> KVScales:
    chips = chips_for(shape, placement)
    specs = {path.removeprefix("layers/"): spec.of_one_layer() for path, spec in weight_specs(shape).items() if spec.is_layered}
    return find_scales(shape, place_weights(shape, weights, jnp.dtype(jnp.float32), chips, by_layer), chips, specs)


def biased_weights(bias: np.ndarray) -> dict[str, np.ndarray]:
    """Whatever the token, the keys and values of layer l, before they turn, are bias[l]: float[2, 2 * K, D], keys first."""
    weights = random_weights(BIASED)
    queries = np.zeros((2, BIASED.num_heads * BIASED.head_dim))
    weights["layers/qkv"] *= 0
    weights["layers/qkv_bias"] = np.concatenate([queries, bias.reshape(2, -1)], axis=1).astype(np.float32)
    return weights


KEYS_AND_VALUES = np.array([
    [[3, 0, 4, 0], [0, 0.1, 0, 0], [-95, 1, 2, 3], [0, 0, 0, 0]],
    [[1, 6, -1, 8], [0, 0, 0, -7], [10.1, 0, 0, 0], [0, 0, 0, -10.2]],
])  # fmt: skip
SCALES = [[0.046875, 0.875, 0.0009765625, 1], [0.09375, 0.09375, 0.0625, 0.09375]]
"""By hand, 1.125 / 127 times the largest of each head, up to three bits; key 0, value 0, key 1, value 1. Layer 0: a pair (3, 4), of length
5 however it turns, gives 0.0443, up to 6/128; 95 gives 0.842, up to 7/8; 0.1 gives 7.26 / 8192, up to 8/8192; then zeros. Layer 1: (1, -1)
and (6, 8), of length 10, give 0.0886, up to 6/64; 10.1 gives 0.0895; 7 gives 0.0620, up to 4/64; 10.2 gives 0.0904."""


@pytest.mark.parametrize("by_layer", [True, False], ids=["layer by layer", "stacked"])
def test_scales_hold_the_largest_keys_and_values_of_each_head_with_a_margin(by_layer: bool) -> None:
    scales = found(BIASED, biased_weights(KEYS_AND_VALUES), jax.devices()[0], by_layer)
    np.testing.assert_array_equal(scales.values, SCALES)


def test_keys_that_are_not_finite_are_an_error_that_names_the_layer() -> None:
    bias = KEYS_AND_VALUES.copy()
    bias[1, 1, 3] = np.inf
    with pytest.raises(ValueError, match="keys or values of layer 1 are not finite"):
        found(BIASED, biased_weights(bias), jax.devices()[0])


def test_scales_are_rounded_up_to_three_significant_bits() -> None:
    values = np.array([0, 0.25, np.nextafter(np.float32(0.25), np.float32(1)), 0.2, 3, 7.01, 100], np.float32)
    rounded = rounded_up(values)
    assert rounded.dtype == np.float32
    np.testing.assert_array_equal(rounded, [1, 0.25, 0.3125, 0.21875, 3, 8, 112])


def test_made_up_prompts_are_the_same_everywhere_and_spread_over_the_vocabulary() -> None:
    assert made_up_tokens(49152)[:4].tolist() == [(n * 0x9E3779B97F4A7C15 % 2**64 >> 33) % 49152 for n in (1, 2, 3, 4)]
    assert set(made_up_tokens(61).tolist()) == set(range(61))


def test_engines_of_any_width_find_the_same_scales_and_give_each_other_their_pages() -> None:
    """WIDE has 2 KV heads: at width 4 chips hold copies, at width 2 one head each."""
    alone, prefill, decode = engine_of(1), engine_of(4), engine_of(2, 4)
    assert alone.kv_scales_digest() == prefill.kv_scales_digest() == decode.kv_scales_digest() != ""
    expected = answered(alone, prefilled(alone))
    assert len(set(expected)) > 3, "an answer that says something"
    first = prefilled(prefill)
    for start in range(0, len(PAGES), 4):
        pages = PAGES[start : start + 4]
        sent = np.asarray(prefill.gather(pages))
        assert sent.dtype == np.int8
        decode.install(pages, sent.copy())
        np.testing.assert_array_equal(np.asarray(decode.gather(pages)), sent)
    assert answered(decode, first) == expected


def test_what_slots_that_nobody_wrote_hold_does_not_matter() -> None:
    """int8 has no NaN; the largest and the smallest number stand in for it: as large as the largest real ones."""
    engine = engine_of(1)
    expected = answered(engine, prefilled(engine))
    extremes = np.random.default_rng(0).choice(np.array([-128, 127], np.int8), (4, 2, INT8.page_size, 4, WIDE.head_dim))
    for first in range(0, INT8.num_pages, 4):
        engine.install(list(range(first, first + 4)), extremes.copy())
    assert answered(engine, prefilled(engine)) == expected


def test_scales_come_from_the_file_that_is_named_and_what_they_do_not_hold_is_clamped(tmp_path: Path) -> None:
    path = tmp_path / "scales.json"
    values = np.array([[0.003, 0.1, 0.1, 0.1], [0.1, 0.1, 0.1, 0.1]], np.float32)
    write_scales(path, KVScales.of(values))
    config = INT8.model_copy(update={"kv_scales": str(path)})
    engine = Engine(WIDE, random_weights(WIDE), config, jnp.float32, jax.devices()[0], XlaAttention(SMALL_BLOCKS))
    assert engine.kv_scales_digest() == KVScales.of(values).digest != engine_of(1).kv_scales_digest()
    assert 0 <= prefilled(engine) < WIDE.vocab_size
    clamped = np.asarray(engine.gather(PAGES[:4]))[:, 0, :, 0]
    prefilled(engine_of(1))
    exact = np.asarray(engine_of(1).gather(PAGES[:4]))[:, 0, :, 0] * found(WIDE, random_weights(WIDE), jax.devices()[0]).values[0, 0]
    assert clamped.min() == -128 and clamped.max() == 127, "some keys are larger than 128 * 0.003"
    small = np.abs(exact) < 0.3
    assert small.any()
    np.testing.assert_allclose(clamped[small] * 0.003, exact[small], atol=0.05)


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "scales.json"
    scales = KVScales.of(np.random.default_rng(0).uniform(1e-6, 10, (WIDE.num_layers, 4)).astype(np.float32))
    write_scales(path, scales)
    back = read_scales(path, WIDE)
    np.testing.assert_array_equal(back.values, scales.values)
    assert back.digest == scales.digest
    changed = KVScales.of(np.nextafter(scales.values, np.float32(20)))
    assert changed.digest != scales.digest


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("[[1, 1, 1, 1]]", "holds 1 lists of 4 scales, the model needs 2 lists of 4"),
        ("[[1, 1], [1, 1, 1, 1]]", "holds 2 lists of 2, 4 scales, the model needs 2 lists of 4"),
        ("[]", "holds 0 lists of 0 scales"),
        ("[[1, 1, 1, 1], [1, 1, 1, 0]]", "holds the scale 0.0; scales are positive"),
        ("[[1, 1, 1, 1], [1, 1, 1, -2]]", r"holds the scale -2.0; scales are positive"),
        ("[[1, 1, 1, 1], [1, 1, 1, 1e39]]", r"holds the scale 1e\+39; scales are positive float32 numbers"),
        ('{"scales": 1}', "does not hold a list of lists of numbers"),
        ("[[1,", "does not hold a list of lists of numbers"),
    ],
)
def test_a_file_that_does_not_fit_the_model_is_refused_with_what_is_wrong(tmp_path: Path, content: str, text: str) -> None:
    path = tmp_path / "scales.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=f"scales.json {text}"):
        read_scales(path, WIDE)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A `model.source` of random weights."""
    path = tmp_path_factory.mktemp("toy") / "config.json"
    path.write_text(json.dumps({**read_golden("llama").config, "vocab_size": 300}))
    return f"random:{path}"


def test_the_command_writes_a_file_that_workers_agree_on(toy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "scales.json"
    assert main([str(target), "--set", f"model.source={toy}"]) == 0
    assert read_scales(target, open_checkpoint(toy).shape).digest in capsys.readouterr().out
    assert main([str(target), "--set", f"model.source={toy}"]) == 2
    assert f"{target} is there already" in capsys.readouterr().err


def test_workers_with_different_scales_refuse_each_other_and_name_both(toy: str) -> None:
    checkpoint, config = open_checkpoint(toy), load_config(None, ["engine.kv_dtype=int8", f"model.source={toy}"])
    layout = layout_of(checkpoint, config, engine_of(1))
    assert (layout.kv_dtype, layout.kv_scales) == ("int8", engine_of(1).kv_scales_digest())
    assert layout.mismatch(layout_of(checkpoint, config, engine_of(4))) is None
    other = msgspec.structs.replace(layout, kv_scales="xxh3:0")
    assert layout.mismatch(other) == f"kv_scales {layout.kv_scales!r} here, 'xxh3:0' there"


def test_pools_of_floats_have_no_scales() -> None:
    engine = Engine(WIDE, random_weights(WIDE), ENGINE, jnp.float32, jax.devices()[0], XlaAttention(SMALL_BLOCKS))
    assert engine.kv_scales_digest() == ""


def test_a_file_of_scales_is_for_int8_only() -> None:
    config = ENGINE.model_copy(update={"kv_scales": "scales.json"})
    with pytest.raises(ValueError, match="engine.kv_scales is for pools of int8, engine.kv_dtype makes it float32"):
        Engine(WIDE, {}, config, jnp.float32, jax.devices()[0])
