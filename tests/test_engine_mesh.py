"""Engines over several chips: the same tokens as one, whatever the width, and pages that move between widths."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pdjax.engine.batch import DecodeSeq, PrefillSeq
from pdjax.engine.engine import Engine
from pdjax.engine.mesh import TensorChips, chips_for
from pdjax.kernels.xla import XlaAttention
from pdjax.models.shape import ModelShape, WeightSpec, weight_specs
from pdjax.protocol import Sampling
from tests.engine_kit import CONFIG, GREEDY, MIXTURE, PROMPT, SHAPE, SMALL_BLOCKS, WIDE, WIDE_SHAPES, random_weights

pytestmark = pytest.mark.usefixtures("compiled_quickly")

PAGES = list(range(3, 15))
ENGINE = CONFIG.model_copy(update={"num_pages": 24, "decode_buckets": (1,), "max_running": 2, "prefill_buckets": (32,)})


@functools.cache
def engine_of(shape: ModelShape, width: int, first_device: int = 0) -> Engine:
    devices = jax.devices()[first_device : first_device + width]
    return Engine(shape, random_weights(shape), ENGINE, jnp.float32, devices, XlaAttention(SMALL_BLOCKS))


def prefilled(engine: Engine) -> int:
    """The first token of the answer to PROMPT, computed in two chunks, the second with a cached prefix that is no whole page."""
    engine.launch_prefill([PrefillSeq(0, PROMPT[:10], 0, PAGES, GREEDY, None)])
    step = engine.read(engine.launch_prefill([PrefillSeq(0, PROMPT[10:], 10, PAGES, GREEDY, 0)]))
    return int(step.tokens[0])


def answered(engine: Engine, first: int, number: int = 12) -> list[int]:
    tokens = [first]
    for i in range(number):
        seq = DecodeSeq(0, tokens[-1], len(PROMPT) + i, PAGES, GREEDY, i + 1)
        tokens.append(int(engine.read(engine.launch_decode([seq])).tokens[0]))
    return tokens


@pytest.mark.parametrize(("shape", "width"), [(WIDE, 2), *((shape, 4) for shape in WIDE_SHAPES.values())], ids=["llama, 2", *WIDE_SHAPES])
def test_several_chips_answer_as_one_does(shape: ModelShape, width: int) -> None:
    alone, together = engine_of(shape, 1), engine_of(shape, width)
    expected = answered(alone, prefilled(alone))
    assert len(set(expected)) > 3, "an answer that says something"
    assert answered(together, prefilled(together)) == expected


@pytest.mark.parametrize(("prefill_width", "decode_width"), [(4, 2), (2, 4), (1, 4), (4, 1)])
def test_pages_move_between_engines_of_different_width(prefill_width: int, decode_width: int) -> None:
    """WIDE has 2 KV heads: at width 4 each has a copy, which does not travel."""
    alone, prefill, decode = engine_of(WIDE, 1), engine_of(WIDE, prefill_width), engine_of(WIDE, decode_width, 4)
    expected = answered(alone, prefilled(alone))
    first = prefilled(prefill)
    for start in range(0, len(PAGES), 4):
        pages = PAGES[start : start + 4]
        on_device = prefill.gather(pages)
        assert on_device.shape[3] == 2 * WIDE.num_kv_heads
        through_host = start == 4
        decode.install(pages, np.asarray(on_device) if through_host else jax.device_put(on_device, decode.chunk_sharding))
    assert answered(decode, first) == expected


def test_sampling_and_log_probabilities_do_not_depend_on_the_width() -> None:
    sampling = Sampling(max_tokens=1000, temperature=0.8, top_k=20, top_p=0.9, seed=7, logprobs=3, frequency_penalty=0.5)
    steps = []
    for width in (1, 4):
        engine = engine_of(WIDE, width)
        engine.set_history(0, PROMPT, [])
        steps.append(engine.read(engine.launch_prefill([PrefillSeq(0, PROMPT, 0, PAGES, sampling, 0)])))
    np.testing.assert_array_equal(steps[0].tokens, steps[1].tokens)
    np.testing.assert_allclose(steps[0].top_logprobs[0, :3], steps[1].top_logprobs[0, :3], rtol=1e-4)


def test_each_chip_holds_its_share_and_nothing_compiles_after_warm_up() -> None:
    engine = Engine(WIDE, random_weights(WIDE), ENGINE, jnp.float32, jax.devices()[:4], XlaAttention(SMALL_BLOCKS))
    engine.warm_up(lambda *_: None)
    answered(engine, prefilled(engine), 2)
    engine.install(PAGES[:4], np.asarray(engine.gather(PAGES[:4])))
    assert engine.compilations_after_warm_up() == 0
    for key, compiled in engine.compiled_programs().items():
        if key.name == "decode_layers":
            # x, and of pool and weights a quarter: two layers with one of two heads, twice.
            pool_bytes = 2 * ENGINE.num_pages * ENGINE.page_size * 2 * 4 * WIDE.head_dim * 4
            assert compiled.memory_analysis().alias_size_in_bytes == pool_bytes // 4 + WIDE.embed_dim * 4


def test_rows_of_a_chip_lie_side_by_side_with_copies_of_what_chips_share() -> None:
    shape = SHAPE._replace(num_heads=4, num_kv_heads=2, head_dim=1)
    chips = chips_for(shape, jax.devices()[:4])
    assert isinstance(chips, TensorChips)
    qkv = chips.place(WeightSpec((8, 1), ("qkv", "embed")), np.array([[10], [11], [12], [13], [20], [21], [30], [31]], np.float32))
    per_chip = [np.asarray(part.data).reshape(-1).tolist() for part in sorted(qkv.addressable_shards, key=lambda part: part.device.id)]
    assert per_chip == [[10, 20, 30], [11, 20, 30], [12, 21, 31], [13, 21, 31]]
    gate_up = chips.place(WeightSpec((8, 1), ("gate_up", "embed")), np.arange(8, dtype=np.float32)[:, None])
    per_chip = [np.asarray(part.data).reshape(-1).tolist() for part in sorted(gate_up.addressable_shards, key=lambda part: part.device.id)]
    assert per_chip == [[0, 4], [1, 5], [2, 6], [3, 7]]


@pytest.mark.parametrize(
    ("shape", "width", "text"),
    [
        (SHAPE, 2, "tensor_parallel 2 does not divide 3 heads"),
        (WIDE._replace(num_kv_heads=4, num_heads=24, ffn_dim=48), 6, "tensor_parallel 6 does not divide 4 KV heads"),
        (WIDE._replace(ffn_dim=30), 4, "tensor_parallel 4 does not divide an MLP of 30"),
        (WIDE_SHAPES["experts split"]._replace(experts=MIXTURE._replace(num_experts=3, ffn_dim=6)), 4, "does not divide an expert of 6"),
    ],
)
def test_a_model_that_does_not_divide_is_refused_with_the_numbers(shape: ModelShape, width: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        chips_for(shape, jax.devices()[:width])


@pytest.mark.parametrize("shape", WIDE_SHAPES.values(), ids=WIDE_SHAPES)
def test_every_large_weight_is_split(shape: ModelShape) -> None:
    chips = chips_for(shape, jax.devices()[:4])
    for path, spec in weight_specs(shape).items():
        placed = chips.place(spec, np.zeros(spec.shape, np.float32))
        is_small = "norm" in path or path.endswith(("router", "shared_gate")) or (spec.axes[0] == "vocab" and spec.shape[0] % 4)
        assert placed.sharding.is_fully_replicated == is_small, path
