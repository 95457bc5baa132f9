"""The memory that a worker takes: worked out by hand, compared with the arrays that an engine makes, and refused where it is too much."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml

from pdjax import serve
from pdjax.checkpoints.named_shapes import named_shape
from pdjax.config.load import ConfigError, load_config
from pdjax.config.schema import Config
from pdjax.engine.compilation import ProgramKey
from pdjax.engine.library import Library
from pdjax.engine.steps import SCORE_BLOCK_ROWS
from pdjax.kernels.xla import XlaAttention
from pdjax.models.shape import Experts, ModelShape, weight_specs
from pdjax.observe.progress import NullProgress
from pdjax.worker import memory_plan
from pdjax.worker.main import run_worker
from pdjax.worker.memory_plan import plan_memory
from tests.engine_kit import SHAPE, random_weights

ROOT = Path(__file__).parent.parent
TOY = SHAPE._replace(num_heads=8, num_kv_heads=2, vocab_size=64)
"""Two layers, embed 24, heads of 8, an MLP of 32."""

SHAPES = {
    "llama": TOY,
    "tied": TOY._replace(num_kv_heads=8, tied_embeddings=True),
    "qwen2, a vocabulary that does not divide": TOY._replace(family="qwen2", vocab_size=61),
    "experts on chips of their own": TOY._replace(family="mixtral", experts=Experts(4, 2, 16, True)),
    "experts split": TOY._replace(family="qwen3_moe", experts=Experts(3, 2, 16, True)),
    "experts with a shared one": TOY._replace(family="qwen2_moe", experts=Experts(4, 2, 16, True, 8)),
}


def config_of(**sections: dict[str, object]) -> Config:
    defaults: dict[str, dict[str, object]] = {
        "engine": {
            "page_size": 4,
            "num_pages": 10,
            "max_running": 3,
            "max_prefill_seqs": 2,
            "prefill_buckets": (8, 32),
            "decode_buckets": (1, 4),
            "transfer_buckets": (1, 4),
        },
        "scheduler": {"max_step_tokens": 32, "max_held_pages": 5},
        "transfer": {"max_chunks_in_flight": 2},
    }
    names = {*defaults, *sections}
    return Config.model_validate({name: {**defaults.get(name, {}), **sections.get(name, {})} for name in names})


def test_what_one_chip_holds_is_what_the_hand_works_out() -> None:
    plan = plan_memory(TOY, config_of(), "prefill")
    layer = 24 + (8 + 2 * 2) * 8 * 24 + 24 * 64 + 24 + 64 * 24 + 24 * 32
    assert plan.weights == 4 * (64 * 24 + 2 * layer + 24 + 64 * 24) == 61_920
    page = 4 * 2 * 2 * 2 * 8 * 4  # tokens, layers, K and V, heads, numbers, bytes
    assert plan.pool == 10 * page == 10_240
    assert (plan.num_pages, plan.pool_tokens) == (10, 36)  # page 0 is never given out
    assert plan.transit == (3 * 2 * 4 + 5) * page
    assert plan.state == 4 * 64 * 5
    # 32 tokens through attention: four streams and one in float32; q, k, v three times; queries and result twice in float32; scores.
    assert plan.activations == 32 * (24 * 5 * 4 + 8 * (3 * 12 * 4 + 4 * 8 * 4)) + 32 * 256 * 8 * 4 == 347_136
    assert plan.total == 61_920 + 10_240 + plan.transit + plan.state + plan.activations


def test_a_tpu_pads_narrow_heads_in_the_pool_to_128_numbers_and_a_gpu_does_not() -> None:
    on_gpu, on_tpu = (plan_memory(TOY, config_of(worker={"chip": chip}), "prefill") for chip in ("h100", "v6e"))
    assert (on_gpu.pool, on_tpu.pool) == (10_240, 10_240 * 128 // 8)
    assert on_tpu.transit == on_gpu.transit * 16
    wide = plan_memory(TOY._replace(head_dim=128), config_of(worker={"chip": "v6e"}), "prefill")
    assert wide.pool == on_tpu.pool


def test_four_chips_hold_a_quarter_each_and_copies_of_the_two_kv_heads() -> None:
    plan = plan_memory(TOY, config_of(decode={"tensor_parallel": 4}), "decode")
    layer = 24 + (8 + 2 * 4) // 4 * 8 * 24 + 24 * 16 + 24 + 16 * 24 + 24 * 8
    assert plan.weights == 4 * (16 * 24 + 2 * layer + 24 + 16 * 24) == 17_376
    assert plan.pool == 10_240 * 2 // 4
    assert plan.transit == 3 * 2 * 4 * 1024  # every head once, on every chip
    split = plan_memory(TOY._replace(num_kv_heads=4), config_of(decode={"tensor_parallel": 4}), "decode")
    assert split.transit == 3 * 2 * 4 * 2048 // 4


def test_a_sequence_never_has_more_pages_on_their_way_than_its_context() -> None:
    assert plan_memory(TOY, config_of(model={"max_context_tokens": 18}), "decode").transit == 3 * 5 * 1024


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_weights_and_pool_are_planned_to_the_byte(shape: ModelShape, width: int) -> None:
    config = config_of(prefill={"tensor_parallel": width})
    library = Library(shape, random_weights(shape), config.engine, jnp.dtype("float32"), jax.devices()[:width], XlaAttention())
    device = jax.devices()[0]

    def on_chip(tree: object) -> int:
        shards = [shard for array in jax.tree.leaves(tree) for shard in array.addressable_shards]
        return sum(shard.data.nbytes for shard in shards if shard.device == device)

    plan, state = plan_memory(shape, config, "prefill"), library.new_state()
    assert plan.weights == on_chip((library.weights.ends, library.weights.layers))
    assert plan.pool == on_chip(state.pool)
    assert plan.state == on_chip(state.history)


@pytest.mark.parametrize("width", [1, 4])
def test_activations_are_estimated_above_what_the_compiler_reports_and_not_far_above(width: int) -> None:
    shape = TOY._replace(embed_dim=256, num_kv_heads=4, head_dim=32, ffn_dim=512, vocab_size=512)
    config = config_of(engine={"prefill_buckets": (256,), "num_pages": 64}, prefill={"tensor_parallel": width})
    library = Library(shape, random_weights(shape), config.engine, jnp.dtype("float32"), jax.devices()[:width], XlaAttention())
    reported = library.lowered()[ProgramKey("prefill_layers", 256)]().compile().memory_analysis().temp_size_in_bytes
    assert reported <= plan_memory(shape, config, "prefill").activations <= 4 * reported


def test_the_blocks_of_prompts_are_the_engines() -> None:
    assert memory_plan.SCORE_BLOCK_ROWS == SCORE_BLOCK_ROWS


def test_bfloat16_and_float8_take_half_and_a_quarter() -> None:
    wide = plan_memory(TOY, config_of(), "decode")
    narrow = plan_memory(TOY, config_of(model={"dtype": "bfloat16"}, engine={"kv_dtype": "float8_e4m3fn"}), "decode")
    assert (narrow.weights, narrow.pool) == (wide.weights // 2, wide.pool // 4)


def test_a_model_that_does_not_fit_is_refused_with_both_numbers() -> None:
    shape = named_shape("llama-3.1-8b")
    config = config_of(worker={"chip": "v5e"}, model={"dtype": "bfloat16"})
    assert sum(np.prod(spec.shape) for spec in weight_specs(shape).values()) == 8_030_261_248
    with pytest.raises(ValueError, match=r"needs 16\.07 GiB on each of its 1 chips \(weights 14\.96, .* get 15\.20 GiB of the 16 GiB of a v5e"):
        plan_memory(shape, config_of(worker={"chip": "v5e"}, model={"dtype": "bfloat16"}, engine={"num_pages": 2000}), "decode").check("decode")
    plan_memory(shape, config_of(worker={"chip": "v6e"}, model={"dtype": "bfloat16"}), "decode").check("decode")
    assert plan_memory(shape, config, "decode").lines()[-1].startswith("headroom")


def test_an_unknown_chip_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"worker\.chip must be one of 'v4', 'v5e', .*, got \"?'?v5'?\"?"):
        load_config(None, ["worker.chip=v5"])


def test_a_worker_refuses_what_does_not_fit_before_it_loads_anything() -> None:
    config = config_of(worker={"chip": "v5e"}, model={"source": "random:llama-3.1-70b", "dtype": "bfloat16"})
    with pytest.raises(ValueError, match=r"a decode worker needs 13\d\.\d\d GiB on each of its 1 chips"):
        run_worker(config, "decode", NullProgress())


def checked(*words: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = serve.main(["--check", *words])
    return status, out.getvalue(), err.getvalue()


@pytest.mark.parametrize("file", sorted(path.name for path in (ROOT / "configs").glob("*.yaml")))
def test_every_configuration_passes_its_check_and_tells_its_memory(file: str) -> None:
    words = ["--config", f"configs/{file}"]
    if yaml.safe_load((ROOT / "configs" / file).read_text())["transfer" if file == "notebook.yaml" else "model"].get("kind") == "device_put":
        words += ["--set", "transfer.kind=tcp"]  # for the Python API alone, which is one process
    status, out, err = checked(*words)
    assert (status, err) == (0, "")
    assert yaml.safe_load(out), "what is printed is a configuration, too"
    assert "#   weights" in out
    if file not in ("quickstart.yaml", "notebook.yaml"):
        headrooms = [float(line.split()[2]) for line in out.splitlines() if line.startswith("#   headroom")]
        assert headrooms and min(headrooms) > 1, "GiB"


def test_check_refuses_what_does_not_fit_before_it_prints_anything() -> None:
    status, out, err = checked("--config", "configs/v5e-8.yaml", "--set", "engine.num_pages=9000")
    assert (status, out) == (2, "")
    assert err.startswith("error: a prefill worker needs ") and err.count("\n") == 1


def test_check_refuses_a_model_that_cannot_be_split() -> None:
    status, _, err = checked("--config", "configs/v5e-8.yaml", "--set", "decode.tensor_parallel=3")
    assert (status, err) == (2, "error: tensor_parallel 3 does not divide 32 heads, 8 KV heads, an MLP of 14336\n")


def test_a_model_that_is_not_here_is_not_planned_and_says_so() -> None:
    status, out, _ = checked("--model", "nobody/nothing")
    assert status == 0
    assert out.endswith("# memory: not planned: model source 'nobody/nothing' is not on this machine; it is fetched when it is served\n")
