"""Hugging Face folders: where every number ends up, what configurations mean, and what is refused before anything large is read."""

from __future__ import annotations

import json
import pickle
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdjax.checkpoints import open_checkpoint
from pdjax.checkpoints.hf import HfCheckpoint
from pdjax.checkpoints.hf_config import read_shape
from pdjax.checkpoints.metadata import Metadata
from pdjax.checkpoints.safetensors_file import read_tensors
from pdjax.models.shape import NO_WINDOW, ModelShape, weight_specs
from tests.model_kit import Golden, golden_tensors, read_golden, write_folder, write_safetensors

LAYER = "model.layers.1."


def load(folder: Path, dtype: type = np.float32) -> dict[str, np.ndarray]:
    return HfCheckpoint(folder, "x").load_weights(np.dtype(dtype), lambda done, total: None)


def shape_of(config: dict[str, Any]) -> ModelShape:
    return read_shape(Metadata("config.json", config))


def golden_folder(folder: Path, name: str, **changes: Any) -> tuple[Golden, Path]:
    golden = read_golden(name)
    return golden, write_folder(folder / name, golden.config | changes, golden_tensors(golden))


# ---- where every number ends up


def test_the_rows_of_a_qwen_layer_end_up_in_their_places(tmp_path: Path) -> None:
    golden, folder = golden_folder(tmp_path, "qwen2")
    stored, weights = golden_tensors(golden), load(folder)
    for name, path in (("weight", "qkv"), ("bias", "qkv_bias")):
        parts = [stored[f"{LAYER}self_attn.{each}_proj.{name}"] for each in "qkv"]
        np.testing.assert_array_equal(weights[f"layers/{path}"][1], np.concatenate(parts))
    mlp = [stored[f"{LAYER}mlp.{each}_proj.weight"] for each in ("gate", "up")]
    np.testing.assert_array_equal(weights["layers/gate_up"][1], np.concatenate(mlp))
    for name, path in (("mlp.down_proj", "down"), ("self_attn.o_proj", "attn_out"), ("input_layernorm", "attn_norm")):
        np.testing.assert_array_equal(weights[f"layers/{path}"][1], stored[f"{LAYER}{name}.weight"])
    np.testing.assert_array_equal(weights["layers/mlp_norm"][1], stored[f"{LAYER}post_attention_layernorm.weight"])
    np.testing.assert_array_equal(weights["lm_head"], stored["lm_head.weight"])
    np.testing.assert_array_equal(weights["embed"], stored["model.embed_tokens.weight"])


def test_matrices_of_experts_are_stored_the_way_grouped_products_take_them(tmp_path: Path) -> None:
    golden, folder = golden_folder(tmp_path, "mixtral")
    stored, weights = golden_tensors(golden), load(folder)
    for expert in range(4):
        gate, up, down = (stored[f"{LAYER}block_sparse_moe.experts.{expert}.{each}.weight"] for each in ("w1", "w3", "w2"))
        np.testing.assert_array_equal(weights["layers/experts_gate_up"][1, expert], np.concatenate([gate, up]).T)
        np.testing.assert_array_equal(weights["layers/experts_down"][1, expert], down.T)
    np.testing.assert_array_equal(weights["layers/router"][1], stored[f"{LAYER}block_sparse_moe.gate.weight"])


def test_norms_of_gemma_are_kept_as_they_are_stored(tmp_path: Path) -> None:
    golden, folder = golden_folder(tmp_path, "gemma3")
    stored, weights = golden_tensors(golden), load(folder)
    names = {"post_attention_layernorm": "attn_post_norm", "pre_feedforward_layernorm": "mlp_norm", "self_attn.k_norm": "k_norm"}
    for name, path in names.items():
        np.testing.assert_array_equal(weights[f"layers/{path}"][1], stored[f"{LAYER}{name}.weight"])


def test_the_language_model_inside_a_gemma_with_vision_is_found(tmp_path: Path) -> None:
    golden = read_golden("gemma3")
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": golden.config, "eos_token_id": [1, 106]}
    tensors = {f"language_model.{name}": tensor for name, tensor in golden_tensors(golden).items()}
    tensors["vision_tower.embeddings.weight"] = np.zeros((2, 2), np.float32)
    checkpoint = HfCheckpoint(write_folder(tmp_path, config, tensors), "x")
    assert checkpoint.shape == shape_of(golden.config) and checkpoint.eos_token_ids == (1, 106)
    weights = checkpoint.load_weights(np.dtype(np.float32), lambda done, total: None)
    np.testing.assert_array_equal(weights["embed"], golden_tensors(golden)["model.embed_tokens.weight"])


def test_shards_are_read_as_one_model(tmp_path: Path) -> None:
    golden, folder = golden_folder(tmp_path, "llama")
    sharded = load(write_folder(tmp_path / "sharded", golden.config, golden_tensors(golden), shards=3))
    for path, weight in load(folder).items():
        np.testing.assert_array_equal(sharded[path], weight)


def test_every_weight_of_every_golden_is_filled(tmp_path: Path) -> None:
    for name in ("smollm3", "gemma2", "qwen2-moe", "qwen3-moe", "phi3-long"):
        golden, folder = golden_folder(tmp_path, name)
        weights = load(folder)
        assert {path: weight.shape for path, weight in weights.items()} == {
            path: spec.shape for path, spec in weight_specs(shape_of(golden.config)).items()
        }
        values = np.concatenate([weight.reshape(-1) for weight in weights.values()])
        assert sorted(values.tolist()) == sorted(np.concatenate([each.reshape(-1) for each in golden_tensors(golden).values()]).tolist())


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_is_read_exactly(tmp_path: Path, stored: type) -> None:
    golden = read_golden("phi3-short")
    halves = {name: tensor.astype(stored) for name, tensor in golden_tensors(golden).items()}
    folder = write_folder(tmp_path, golden.config, halves)
    qkv = halves[f"{LAYER}self_attn.qkv_proj.weight"]
    np.testing.assert_array_equal(load(folder)["layers/qkv"][1], qkv.astype(np.float32))
    np.testing.assert_array_equal(load(folder, stored)["layers/qkv"][1], qkv)


@pytest.mark.parametrize("name", ["b", "bb", "bbb", "bbbb"])
def test_tensors_that_start_anywhere_are_read(tmp_path: Path, name: str) -> None:
    matrix = np.arange(6, dtype=np.float32).reshape(2, 3)
    halves = {"c": np.array([1.5, -2.0], ml_dtypes.bfloat16), "d": np.array([0.25], np.float16)}
    found = read_tensors(write_safetensors(tmp_path / "odd.safetensors", {name: matrix} | halves, alignment=1))
    np.testing.assert_array_equal(found[name].read_rows(slice(0, 2)), matrix)
    target = np.empty(2, np.float32)
    target[:] = found["c"].read_rows(slice(0, 1))[0]
    assert target.tolist() == [1.5, -2.0] and found["d"].read_rows(slice(0, 1)).tolist() == [[0.25]]


def test_an_output_matrix_beside_tied_embeddings_and_old_rotary_tables_are_left_out(tmp_path: Path) -> None:
    golden = read_golden("llama3")
    extra = {"lm_head.weight": np.ones((128, 32), np.float32), f"{LAYER}self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    assert "lm_head" not in load(write_folder(tmp_path, golden.config, golden_tensors(golden) | extra))


def test_loading_holds_no_second_copy_of_the_weights(tmp_path: Path) -> None:
    config = read_golden("llama").config | {"vocab_size": 20_000, "hidden_size": 64}
    rng = np.random.default_rng(0)
    tensors = {"model.norm.weight": (64,), "model.embed_tokens.weight": (20_000, 64), "lm_head.weight": (20_000, 64)}
    for layer in range(3):
        rows = {"q_proj": (64, 64), "k_proj": (32, 64), "v_proj": (32, 64), "o_proj": (64, 64)}
        tensors |= {f"model.layers.{layer}.self_attn.{name}.weight": shape for name, shape in rows.items()}
        mlp = {"gate_proj": (48, 64), "up_proj": (48, 64), "down_proj": (64, 48)}
        tensors |= {f"model.layers.{layer}.mlp.{name}.weight": shape for name, shape in mlp.items()}
        tensors |= {f"model.layers.{layer}.{name}.weight": (64,) for name in ("input_layernorm", "post_attention_layernorm")}
    del config["head_dim"]
    folder = write_folder(tmp_path, config, {name: rng.standard_normal(shape, np.float32) for name, shape in tensors.items()})
    tracemalloc.start()
    try:
        weights = load(folder)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < sum(weight.nbytes for weight in weights.values()) + (1 << 20)


def test_a_folder_that_differs_in_one_weight_has_another_fingerprint(tmp_path: Path) -> None:
    golden, folder = golden_folder(tmp_path, "llama")
    tensors = golden_tensors(golden)
    same = write_folder(tmp_path / "same", golden.config, tensors)
    tensors["model.norm.weight"][5] += 1
    other = write_folder(tmp_path / "other", golden.config, tensors)
    assert HfCheckpoint(folder, "a").fingerprint == HfCheckpoint(same, "b").fingerprint != HfCheckpoint(other, "c").fingerprint


# ---- what configurations mean


def old_form(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """As transformers 4 wrote it: no `rope_parameters`, no `layer_types`."""
    return {key: value for key, value in config.items() if key not in ("rope_parameters", "layer_types")} | changes


OLD_LONG_ROPE = {"type": "longrope", "short_factor": [1.0, 1.1, 1.25], "long_factor": [1.5, 2.0, 4.0]}
OLD_LLAMA3_ROPE = {
    **{"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 32,
}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {"rope_theta": 10000.0}),
        ("llama3", {"rope_theta": 10000.0, "rope_scaling": OLD_LLAMA3_ROPE}),
        ("gemma2", {"rope_theta": 10000.0}),
        ("phi3-long", {"rope_theta": 10000.0, "partial_rotary_factor": 0.75, "rope_scaling": OLD_LONG_ROPE}),
        ("mistral", {"rope_theta": 10000}),
        ("qwen2", {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}}),
        ("qwen3-moe", {}),
    ],
)
def test_configurations_of_both_forms_mean_the_same(name: str, changes: dict[str, Any]) -> None:
    config = read_golden(name).config
    assert shape_of(old_form(config, **changes)) == shape_of(config)


def test_the_old_form_of_gemma_3_means_the_pattern_and_two_tables() -> None:
    config = read_golden("gemma3").config | {"num_hidden_layers": 7}
    changes = {"rope_theta": 100000.0, "rope_local_base_freq": 10000.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    shape = shape_of(old_form(config, **changes))
    assert shape.layer_windows == (16, 16, 16, 16, 16, NO_WINDOW, 16) and shape.layer_ropes == (1, 1, 1, 1, 1, 0, 1)
    assert shape.rope_tables[0].frequencies[:1] == (0.125,) and shape.rope_tables[1].frequencies[:1] == (1.0,)


def test_every_fourth_layer_of_a_smollm3_does_not_turn() -> None:
    config = {key: value for key, value in read_golden("smollm3").config.items() if key != "no_rope_layers"}
    shape = shape_of(config | {"num_hidden_layers": 8, "layer_types": None})
    assert shape.layer_ropes == (0, 0, 0, 1) * 2 and set(shape.rope_tables[1].frequencies) == {0.0}


def test_a_window_as_long_as_the_context_is_none() -> None:
    shape = shape_of(read_golden("mistral").config | {"sliding_window": 128})
    assert shape.windows() == () and shape._replace(max_context_tokens=129).windows() == (128,) * 3


def test_a_mistral_that_does_not_speak_of_a_window_has_one_and_null_is_none() -> None:
    config = read_golden("mistral").config | {"max_position_embeddings": 8192}
    silent = {key: value for key, value in config.items() if key != "sliding_window"}
    assert shape_of(silent).windows() == (4096,) * 3 and shape_of(config | {"sliding_window": None}).windows() == ()


@pytest.mark.parametrize(("name", "expected"), [("qwen3", 128), ("gemma2", 256), ("gemma3", 256), ("mistral", 8)])
def test_heads_that_a_configuration_does_not_speak_of_have_the_size_that_transformers_gives_them(name: str, expected: int) -> None:
    shape = shape_of({key: value for key, value in read_golden(name).config.items() if key != "head_dim"})
    assert shape.head_dim == expected
    assert all(2 * len(table.frequencies) == expected for table in shape.rope_tables)


def test_long_frequencies_are_taken_where_contexts_may_get_long() -> None:
    shape = shape_of(read_golden("phi3-short").config)
    assert shape.max_context_tokens == 256 and shape.rope_variant() == ":long"
    assert shape._replace(max_context_tokens=128).rope_variant() == ""


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama", {"architectures": ["OPTForCausalLM"]}, "architecture 'OPTForCausalLM' is not supported; supported are Gemma2ForCausalLM"),
        ("llama", {"architectures": []}, "architecture None is not supported"),
        ("llama", {"hidden_act": "relu"}, "hidden_act 'relu' is not supported; supported is 'silu'"),
        ("llama", {"attention_bias": True}, "attention_bias True is not supported"),
        ("llama", {"hidden_size": "wide"}, "field hidden_size should be of type int but is 'wide'"),
        ("llama", {"num_hidden_layers": 0}, "field num_hidden_layers should be positive but is 0"),
        ("llama", {"vocab_size": True}, "field vocab_size should be of type int but is True"),
        ("llama", {"num_key_value_heads": 3}, "4 query heads do not divide among 3 key heads"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "weights quantized by 'gptq' are not supported"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1.0}},
            "rope_type 'dynamic' is not supported; supported are default",
        ),
        (
            "llama3",
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1.0}},
            "rope_parameters: field factor should be of type float",
        ),
        (
            "phi3-long",
            {"partial_rotary_factor": 0.5, "rope_parameters": {"rope_theta": 1.0, "rope_type": "longrope"}},
            "field short_factor",
        ),
        ("gemma2", {"layer_types": ["full_attention"]}, None),
        ("gemma2", {"layer_types": ["sliding_attention"]}, "layer_types has 1 entries for 4 layers"),
        ("gemma2", {"layer_types": ["chunked_attention"] * 4}, "layer type 'chunked_attention' is not supported"),
        ("qwen3-moe", {"decoder_sparse_step": 2}, "decoder_sparse_step 2 is not supported; supported is 1"),
        ("qwen2-moe", {"mlp_only_layers": [0]}, r"mlp_only_layers \[0\] is not supported"),
        ("qwen3-moe", {"num_experts_per_tok": 9}, "num_experts_per_tok 9 of 8 experts"),
    ],
)
def test_a_configuration_that_cannot_be_served_is_named(name: str, changes: dict[str, Any], message: str | None) -> None:
    config = read_golden(name).config | changes
    if message is None:
        assert shape_of(config).windows() == ()
        return
    with pytest.raises(ValueError, match=message):
        shape_of(config)


# ---- what is refused


def test_a_missing_an_unexpected_and_a_misshapen_tensor_are_named(tmp_path: Path) -> None:
    golden = read_golden("llama")
    for change, message in (
        ({f"{LAYER}mlp.up_proj.weight": None}, r"tensor model\.layers\.1\.mlp\.up_proj\.weight of shape \(48, 32\) is missing"),
        ({f"{LAYER}self_attn.q_proj.bias": np.zeros(32, np.float32)}, r"q_proj\.bias is not part of a LlamaForCausalLM model"),
        (
            {f"{LAYER}self_attn.k_proj.weight": np.zeros((8, 32), np.float32)},
            r"k_proj\.weight should have shape \(16, 32\) but has \(8, 32\)",
        ),
    ):
        tensors = golden_tensors(golden) | change
        folder = write_folder(tmp_path, golden.config, {name: tensor for name, tensor in tensors.items() if tensor is not None})
        with pytest.raises(ValueError, match=message):
            open_checkpoint(str(folder))


def test_a_configuration_with_countless_layers_is_refused_at_the_first_that_is_not_there(tmp_path: Path) -> None:
    _, folder = golden_folder(tmp_path, "llama", num_hidden_layers=4_000_000_000)
    with pytest.raises(ValueError, match=r"model\.layers\.3\.input_layernorm\.weight of shape \(32,\) is missing"):
        open_checkpoint(str(folder))


def test_missing_files_are_named(tmp_path: Path) -> None:
    golden = read_golden("llama")
    with pytest.raises(FileNotFoundError, match=r"config\.json: there is no such file"):
        open_checkpoint(str(tmp_path))
    folder = write_folder(tmp_path / "sharded", golden.config, golden_tensors(golden), shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model-00002-of-00002\.safetensors: there is no such file"):
        open_checkpoint(str(folder))
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../secret.safetensors"}}')
    with pytest.raises(ValueError, match=r"names '\.\./secret\.safetensors', which is no file of its folder"):
        open_checkpoint(str(folder))


class Trap:
    """Unpickling it is seen."""

    def __reduce__(self) -> tuple[Any, ...]:
        return sys.exit, ("unpickled",)


def test_pickled_weights_and_code_are_never_run(tmp_path: Path) -> None:
    golden, folder = golden_folder(tmp_path, "llama", auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"})
    (folder / "modeling_evil.py").write_text("raise SystemExit('ran')")
    assert HfCheckpoint(folder, "x").shape.num_layers == 3
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(ValueError, match=r"pickled weights \(pytorch_model\.bin\), which could run code; only safetensors are read"):
        open_checkpoint(str(folder))
    with pytest.raises(ValueError, match="pickled, which could run code"):
        open_checkpoint(str(folder / "pytorch_model.bin"))


def test_a_weight_file_truncated_anywhere_is_refused_by_name(tmp_path: Path) -> None:
    _, folder = golden_folder(tmp_path, "llama")
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for length in (*range(1, 5000, 61), *range(5000, len(whole), 9973), len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"model\.safetensors is not a readable safetensors file"):
            open_checkpoint(str(folder))
    file.write_bytes(b"")
    with pytest.raises(ValueError, match=r"model\.safetensors is not a readable"):
        open_checkpoint(str(folder))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, 3500), value=st.integers(0, 255))
def test_a_damaged_header_is_a_value_error_or_a_readable_file(tmp_path: Path, position: int, value: int) -> None:
    golden = read_golden("llama")
    folder = tmp_path / "damaged"
    if not folder.exists():
        write_folder(folder, golden.config, golden_tensors(golden))
        (tmp_path / "whole").write_bytes((folder / "model.safetensors").read_bytes())
    damaged = bytearray((tmp_path / "whole").read_bytes())
    damaged[position] = value
    (folder / "model.safetensors").write_bytes(damaged)
    try:
        open_checkpoint(str(folder))
    except ValueError as error:
        assert "damaged" in str(error)


def test_integers_in_a_weight_file_are_refused_by_name(tmp_path: Path) -> None:
    golden, folder = golden_folder(tmp_path, "llama")
    write_safetensors(folder / "model.safetensors", golden_tensors(golden) | {"model.norm.weight": np.zeros(32, np.int8)})
    with pytest.raises(ValueError, match=r"tensor model\.norm\.weight is stored as I8; supported are F64, F32, F16, BF16"):
        open_checkpoint(str(folder))


@pytest.mark.parametrize("content", ["", "[1]", "{", '{"a": 1e999', "\udcff"])
def test_a_damaged_configuration_is_refused_by_name(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=r"config\.json (is not readable JSON|holds a list)"):
        open_checkpoint(str(tmp_path))


def test_what_ends_an_answer_is_read_from_the_generation_configuration_first(tmp_path: Path) -> None:
    _, folder = golden_folder(tmp_path, "llama", eos_token_id=2)
    assert HfCheckpoint(folder, "x").eos_token_ids == (2,)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7, 5]}))
    assert HfCheckpoint(folder, "x").eos_token_ids == (5, 7)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": "end"}))
    with pytest.raises(ValueError, match="eos_token_id should be a token id or several but is 'end'"):
        HfCheckpoint(folder, "x")
