"""The embedded model through the engine, and weights, caches and roles around it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pdjax.checkpoints import open_checkpoint
from pdjax.config.schema import EngineConfig
from pdjax.engine.batch import DecodeSeq, PrefillSeq
from pdjax.engine.engine import Engine
from pdjax.engine.mesh import OneChip
from pdjax.engine.steps import StepDimensions, decode_layout, make_decode, pack_decode
from pdjax.engine.weights import PlacedWeights, place_weights
from pdjax.kernels.reference import ReferenceAttention
from pdjax.models.model import Model
from pdjax.models.shape import weight_specs
from pdjax.protocol import Sampling
from tests.engine_kit import SHAPE, random_weights

CAPITAL_PROMPT = [
    *(1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2, 198),
    *(1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198),
]
CAPITAL_ANSWER = [504, 3575, 282, 4649, 314, 7042, 30, 2]
"""What transformers answers to "What is the capital of France?" under greedy decoding: "The capital of France is Paris."."""


@pytest.mark.parametrize("chunks", [(37,), (16, 16, 5)])
def test_the_embedded_model_answers_as_transformers_does(chunks: tuple[int, ...]) -> None:
    checkpoint = open_checkpoint("embedded:smollm2-135m-instruct")
    weights = checkpoint.load_weights(np.dtype(np.float32), lambda done, total: None)
    config = EngineConfig(num_pages=16, prefill_buckets=(16, 64), decode_buckets=(1, 16))
    engine = Engine(checkpoint.shape._replace(max_context_tokens=256), weights, config)
    sampling, pages, start = Sampling(max_tokens=8, temperature=0.0), [7, 3, 9], 0
    for length in chunks:
        is_last = start + length == len(CAPITAL_PROMPT)
        tokens = CAPITAL_PROMPT[start : start + length]
        handle, start = engine.launch_prefill([PrefillSeq(0, tokens, start, pages, sampling, 0 if is_last else None)]), start + length
    handles = [handle]
    for index in range(1, len(CAPITAL_ANSWER)):
        handles.append(engine.launch_decode([DecodeSeq(0, None, len(CAPITAL_PROMPT) + index - 1, pages, sampling, index)]))
    assert [int(engine.read(step).tokens[0]) for step in handles] == CAPITAL_ANSWER


def aligned(shape: tuple[int, ...]) -> np.ndarray:
    num_bytes = 4 * int(np.prod(shape))
    raw = np.zeros(num_bytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + num_bytes].view(np.float32).reshape(shape)


def test_weights_on_cpu_are_views_of_the_host_arrays() -> None:
    shape = SHAPE._replace(embed_dim=16, ffn_dim=16)  # so that every layer's slice is a multiple of 64 bytes
    weights = {path: aligned(spec.shape) for path, spec in weight_specs(shape).items()}
    placed = place_weights(shape, weights, jnp.dtype(jnp.float32), OneChip(shape, jax.devices()[0]), by_layer=True)
    assert placed.ends["embed"].unsafe_buffer_pointer() == weights["embed"].ctypes.data
    assert len(placed.layers) == shape.num_layers
    for layer, params in enumerate(placed.layers):
        for name, array in params.items():
            host = weights[f"layers/{name}"]
            assert array.unsafe_buffer_pointer() == host[layer].ctypes.data, f"layer {layer} of {name} is a copy"


@pytest.mark.parametrize(("num_layers", "limit", "firsts"), [(30, 5, range(0, 30, 5)), (7, 5, range(7)), (4, 5, [0]), (8, 3, [0, 2, 4, 6])])
def test_layers_run_in_groups_of_the_largest_equal_size_within_the_limit(num_layers: int, limit: int, firsts: list[int]) -> None:
    groups = PlacedWeights({}, tuple({"qkv": np.array(layer)} for layer in range(num_layers))).groups(limit)
    assert [int(group.first) for group in groups] == list(firsts)
    assert [int(params["qkv"]) for group in groups for params in group.params] == list(range(num_layers))


def test_stacked_layers_under_a_scan_compute_what_single_ones_do() -> None:
    chips, weights = OneChip(SHAPE, jax.devices()[0]), random_weights()
    dims = StepDimensions(page_size=4, table_pages=8, max_prefill_seqs=1, padding_slot=1)
    pieces = make_decode(Model(SHAPE, jnp.dtype(jnp.float32)), ReferenceAttention(), dims, 1)
    packed = pack_decode(dims, decode_layout(dims, 1), [DecodeSeq(0, 5, 6, [1, 2], Sampling(max_tokens=1), 0)])
    results = []
    for by_layer in (False, True):
        placed = place_weights(SHAPE, weights, jnp.dtype(jnp.float32), chips, by_layer)
        x, rows = pieces.begin(placed.ends, jnp.zeros(2, jnp.int32), packed)
        pool = jnp.zeros((SHAPE.num_layers, 4, dims.page_size, 2 * SHAPE.num_kv_heads, SHAPE.head_dim))
        for group in placed.groups(1):
            x, pool = jax.jit(pieces.layers)(group.params, group.first, x, pool, rows)
        results.append((x, pool))
    (stacked_x, stacked_pool), (single_x, single_pool) = results
    assert float(jnp.abs(single_pool[1]).max()) > 0
    np.testing.assert_allclose(stacked_x, single_x, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(stacked_pool, single_pool, rtol=1e-5, atol=1e-5)


def test_missing_and_unknown_weights_are_named() -> None:
    weights = random_weights()
    weights["layers/bias"] = weights.pop("layers/down")
    with pytest.raises(ValueError, match=r"missing: \['layers/down'\], unknown: \['layers/bias'\]"):
        place_weights(SHAPE, weights, jnp.dtype(jnp.float32), OneChip(SHAPE, jax.devices()[0]), by_layer=False)


WARM_START = """
import sys
import jax
from pdjax.engine.compilation import Programs, enable_compile_cache
from tests.engine_kit import CONFIG, make_engine

enable_compile_cache(sys.argv[1])
events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
small = {"prefill_buckets": (4,), "decode_buckets": (1,), "max_running": 1, "transfer_buckets": (1,), "max_prefill_seqs": 1}
make_engine(CONFIG.model_copy(update=small)).warm_up(lambda done, total, name: None)
print(events.count("/jax/compilation_cache/cache_hits"), events.count("/jax/compilation_cache/cache_misses"))
"""


def test_a_second_start_finds_every_program_in_the_compile_cache(tmp_path: Path) -> None:
    counts = []
    for _ in range(2):
        command = [sys.executable, "-c", WARM_START, str(tmp_path / "cache")]
        root = Path(__file__).parent.parent
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120, check=True)
        counts.append(tuple(int(number) for number in done.stdout.split()))
    (hits, misses), warm = counts
    assert hits == 0 and misses >= 8
    assert warm == (misses, 0)


TWO_DEVICES = """
import jax
from pdjax.engine.batch import DecodeSeq
from pdjax.protocol import Sampling
from tests.engine_kit import CONFIG, generate, make_engine, prefill_chunks

sampling, prompt, pages = Sampling(max_tokens=9, temperature=0.0), list(range(10)), [3, 1, 2, 4]
prefill, decode = make_engine(device_index=0), make_engine(device_index=1)
whole = generate(prefill, 0, prompt, pages, 6, sampling)
prefill_chunks(prefill, 0, prompt, pages, [10], sampling)
sent = prefill.gather(pages[:3])
received = jax.device_put(sent, jax.devices()[1])
assert received.devices() == {jax.devices()[1]}
for chunk in (received, sent):
    decode.install([9, 8, 7], chunk)
    handles = [decode.launch_decode([DecodeSeq(0, whole[0] if i == 0 else None, 10 + i, [9, 8, 7, 6], sampling, i + 1)]) for i in range(5)]
    assert whole[:1] + [int(decode.read(handle).tokens[0]) for handle in handles] == whole
assert decode.gather([9]).devices() == {jax.devices()[1]}
print("same")
"""


def test_prefill_and_decode_on_two_devices_of_one_process_agree() -> None:
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    command, root = [sys.executable, "-c", TWO_DEVICES], Path(__file__).parent.parent
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "same\n", done.stderr
