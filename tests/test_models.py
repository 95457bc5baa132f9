"""Every family against transformers: small random models, through pages, chunks and both kinds of step."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pdjax.checkpoints import open_checkpoint
from pdjax.checkpoints.base import weight_units
from pdjax.checkpoints.hf import HfCheckpoint
from pdjax.checkpoints.hf_config import read_shape
from pdjax.checkpoints.metadata import Metadata
from pdjax.config.schema import EngineConfig
from pdjax.engine.batch import DecodeSeq, PrefillSeq, StepOutput
from pdjax.engine.engine import Engine
from pdjax.engine.mesh import chips_for
from pdjax.engine.steps import Pieces, StepDimensions, decode_layout, make_decode, pack_decode
from pdjax.engine.weights import StreamedWeights, place_weights
from pdjax.kernels.reference import ReferenceAttention
from pdjax.kernels.xla import Tuning, XlaAttention
from pdjax.models.model import Model
from pdjax.models.shape import ModelShape, weight_specs
from pdjax.protocol import Sampling
from tests.model_kit import GOLDENS, Golden, golden_tensors, read_golden, write_folder

pytestmark = pytest.mark.usefixtures("compiled_quickly")

TOLERANCE = 1e-4
"""Of log probabilities, the smallest of which are around -20. Both sides compute in float32, in different orders. Measured: at most
5.4e-5."""

CONFIG = EngineConfig(
    page_size=4,
    num_pages=24,
    max_running=1,
    max_prefill_seqs=1,
    prefill_buckets=(24,),
    decode_buckets=(1,),
    transfer_buckets=(1,),
    compile_cache=None,
)
BLOCKS = Tuning(query_tile=8, prefill_kv_block=16, decode_kv_block=8)
CHUNKS = (23, 17)
PAGES = [21, 3, 17, 5, 20, 1, 9, 14, 2, 22, 8, 11, 4, 19, 6, 13, 7, 10]
CONTEXT_TOKENS = 128
NAMES = sorted(path.stem for path in GOLDENS.glob("*.json"))


def load(golden: Golden, folder: Path) -> tuple[ModelShape, dict[str, np.ndarray]]:
    checkpoint = HfCheckpoint(write_folder(folder, golden.config, golden_tensors(golden)), golden.name)
    weights = checkpoint.load_weights(np.dtype(np.float32), lambda done, total: None)
    return checkpoint.shape._replace(max_context_tokens=CONTEXT_TOKENS), weights


def prefill(engine: Engine, golden: Golden, sampling: Sampling) -> tuple[list[float], StepOutput]:
    """The prompt in two chunks: log probabilities of its tokens but the first, and the last step."""
    start, logprobs, output = 0, [], None
    for length in CHUNKS:
        end = start + length
        scored = range(min(length, len(golden.prompt) - 1 - start))
        targets = golden.prompt[start + 1 : start + 1 + len(scored)]
        index = 0 if end == len(golden.prompt) else None
        seq = PrefillSeq(0, golden.prompt[start:end], start, PAGES, sampling, index, scored, targets)
        output, start = engine.read(engine.launch_prefill([seq])), end
        assert output.prompt is not None
        logprobs += output.prompt.logprobs.tolist()
    assert output is not None
    return logprobs, output


def check_best(output: StepOutput, best: list[tuple[int, float]]) -> None:
    """The step's best log probabilities are the golden's; near ties may change places."""
    assert output.top_ids is not None and output.top_logprobs is not None
    found = dict(zip(output.top_ids[0].tolist(), output.top_logprobs[0].tolist(), strict=True))
    np.testing.assert_allclose(sorted(found.values()), sorted(value for _, value in best), rtol=0, atol=TOLERANCE)
    for token, value in best[:10]:
        assert found[token] == pytest.approx(value, abs=TOLERANCE)


def test_every_family_has_a_golden() -> None:
    families = {read_golden(name).config["architectures"][0].removesuffix("ForCausalLM") for name in NAMES}
    expected = {"Llama", "SmolLM3", "Mistral", "Qwen2", "Qwen3", "Gemma2", "Gemma3", "Phi3", "Mixtral", "Qwen3Moe", "Qwen2Moe"}
    assert families == expected and len(NAMES) == 13


@pytest.mark.parametrize("name", NAMES)
def test_a_family_computes_what_transformers_does(name: str, tmp_path: Path) -> None:
    golden = read_golden(name)
    engine = Engine(*load(golden, tmp_path), CONFIG, attention=XlaAttention(BLOCKS))
    sampling = Sampling(max_tokens=100, temperature=0.0, logprobs=20)
    prompt_logprobs, output = prefill(engine, golden, sampling)
    np.testing.assert_allclose(prompt_logprobs, golden.prompt_logprobs, rtol=0, atol=TOLERANCE)
    answer = []
    for index, best in enumerate(golden.tops):
        check_best(output, best)
        answer.append(int(output.tokens[0]))
        position = len(golden.prompt) + index
        output = engine.read(engine.launch_decode([DecodeSeq(0, None, position, PAGES, sampling, index + 1)]))
    assert answer == golden.answer and len(answer) == 32


def decode_pieces(shape: ModelShape, dtype: jnp.dtype) -> tuple[Pieces, StepDimensions]:
    dims = StepDimensions(page_size=4, table_pages=8, max_prefill_seqs=1, padding_slot=1)
    return make_decode(Model(shape, dtype), ReferenceAttention(), dims, 1), dims


@pytest.mark.parametrize("name", ["gemma3", "qwen2-moe"])
def test_layers_that_differ_compute_the_same_stacked_under_a_scan_and_one_by_one(name: str, tmp_path: Path) -> None:
    golden = read_golden(name)
    checkpoint = HfCheckpoint(write_folder(tmp_path, golden.config, golden_tensors(golden)), name)
    shape, dtype = checkpoint.shape, np.dtype(np.float32)
    pieces, dims = decode_pieces(shape, dtype)
    packed = pack_decode(dims, decode_layout(dims, 1), [DecodeSeq(0, 5, 23, [1, 2, 3, 4, 5, 6], Sampling(max_tokens=1), 0)])
    pool = np.random.default_rng(0).standard_normal((shape.num_layers, 8, 4, 2 * shape.num_kv_heads, shape.head_dim), np.float32)
    results, reports = [], []
    for by_layer in (False, True):
        source = StreamedWeights(shape, dtype, checkpoint.read_into, lambda done, total: reports.append((done, total)))
        placed = place_weights(shape, source, dtype, chips_for(shape, jax.devices()[0]), by_layer)
        x, rows = pieces.begin(placed.ends, jnp.zeros(2, jnp.int32), packed)
        for group in placed.groups(shape.num_layers):
            results.append(jax.jit(pieces.layers)(group.params, group.first, x, jnp.asarray(pool), rows))
    (stacked_x, stacked_pool), (single_x, single_pool) = results
    assert float(jnp.abs(single_pool - pool).max()) > 0.1
    np.testing.assert_allclose(stacked_x, single_x, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(stacked_pool, single_pool, rtol=1e-5, atol=1e-5)
    units = len(weight_units(shape))
    assert reports == [(i, units) for i in range(1, units + 1)] * 2


@pytest.mark.parametrize("name", NAMES)
def test_activations_keep_the_dtype_of_the_weights(name: str) -> None:
    shape = read_shape(Metadata(name, read_golden(name).config))
    dtype = jnp.dtype(jnp.bfloat16)
    pieces, dims = decode_pieces(shape, dtype)
    weights = {path: jax.ShapeDtypeStruct(spec.shape, dtype) for path, spec in weight_specs(shape).items()}
    ends = {path: weight for path, weight in weights.items() if not path.startswith("layers/")}
    layers = {path.removeprefix("layers/"): weight for path, weight in weights.items() if path.startswith("layers/")}
    packed = decode_layout(dims, 1).abstract()
    x, rows = jax.eval_shape(pieces.begin, ends, jax.ShapeDtypeStruct((2,), jnp.int32), packed)
    pool = jax.ShapeDtypeStruct((shape.num_layers, 8, 4, 2 * shape.num_kv_heads, shape.head_dim), dtype)
    out, _ = jax.eval_shape(pieces.layers, layers, jax.ShapeDtypeStruct((), jnp.int32), x, pool, rows)
    hidden = jax.eval_shape(pieces.end, ends, out)
    assert x.dtype == out.dtype == hidden.dtype == dtype and x.shape == out.shape


def test_streamed_weights_are_on_the_host_a_layer_at_a_time(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8, "vocab_size": 300}
    (tmp_path / "config.json").write_text(json.dumps(read_golden("llama").config | sizes | {"head_dim": 64}))
    checkpoint, dtype = open_checkpoint(f"random:{tmp_path}/config.json"), np.dtype(np.float32)
    source = StreamedWeights(checkpoint.shape, dtype, checkpoint.read_into, lambda done, total: None)
    tracemalloc.start()
    try:
        placed = place_weights(checkpoint.shape, source, dtype, chips_for(checkpoint.shape, jax.devices()[0]), by_layer=False)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    total_bytes = sum(array.nbytes for array in (*placed.ends.values(), *placed.layers.values()))
    assert total_bytes > 30e6 and peak_bytes < total_bytes / 2  # drawing a layer takes several times its size
    expected = np.empty((2048, 256), np.float32)
    checkpoint.read_into("layers/gate_up", 7, expected)
    np.testing.assert_array_equal(placed.layers["gate_up"][7], expected)
