"""GGUF files of every architecture hold the model that a Hugging Face folder of it does; sentencepiece vocabularies cut text as they should."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from pdjax.api.tokenizer import Tokenizer
from pdjax.checkpoints import Checkpoint, open_checkpoint
from pdjax.checkpoints.gguf_file import GgufFile
from pdjax.checkpoints.gguf_shape import read_shape
from pdjax.checkpoints.hf import HfCheckpoint
from pdjax.checkpoints.sentencepiece import merges_of
from pdjax.models.shape import ModelShape
from tests.gguf_kit import open_tiny, tiny_metadata, tiny_tensors, write_gguf
from tests.model_kit import Golden, golden_tensors, read_golden, write_folder

ARCHITECTURES = {
    "llama": "llama",
    "llama3": "llama",
    "mixtral": "llama",
    "smollm3": "smollm3",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "phi3-long": "phi3",
    "qwen2-moe": "qwen2moe",
    "qwen3-moe": "qwen3moe",
}
_EXPERT = re.compile(r"(.*experts)\.(\d+)\.(.*)")


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows as llama.cpp orders those of q and k for the architectures llama and smollm3."""
    return rows.reshape(heads, 2, len(rows) // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def as_gguf(golden: Golden, architecture: str) -> dict[str, np.ndarray]:
    """The tensors of a golden, under the names that the gguf package's converter has for them."""
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[architecture], golden.config["num_hidden_layers"])
    stacks: dict[str, list[np.ndarray]] = {}
    tensors = {}
    for name, tensor in sorted(golden_tensors(golden).items()):
        if match := _EXPERT.fullmatch(name):
            stacks.setdefault(f"{match[1]}.{match[3]}", []).append(tensor)
            continue
        if architecture in ("llama", "smollm3") and (match := re.search(r"\.([qk])_proj", name)):
            tensor = interleaved(tensor, golden.config["num_attention_heads" if match[1] == "q" else "num_key_value_heads"])
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            tensor = tensor + np.float32(1)
        if name.endswith("shared_expert_gate.weight"):
            tensor = tensor[0]
        tensors[mapped(names, name)] = tensor
    return tensors | {mapped(names, name): np.stack(stack) for name, stack in stacks.items()}


def mapped(names: Any, name: str) -> str:
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return found


def metadata_of(golden: Golden, architecture: str, shape: ModelShape) -> dict[str, object]:
    """As the gguf package's converter writes it."""
    values: dict[str, object] = {
        "block_count": shape.num_layers,
        "context_length": shape.max_context_tokens,
        "embedding_length": shape.embed_dim,
        "feed_forward_length": shape.ffn_dim,
        "attention.head_count": shape.num_heads,
        "attention.head_count_kv": shape.num_kv_heads,
        "attention.key_length": shape.head_dim,
        "attention.layer_norm_rms_epsilon": shape.norm_eps,
        "rope.freq_base": shape.rope_theta,
    }
    if shape.experts is not None:
        values |= {"expert_count": shape.experts.num_experts, "expert_used_count": shape.experts.num_active}
        values |= {"expert_feed_forward_length": shape.experts.ffn_dim, "expert_shared_feed_forward_length": shape.experts.shared_ffn_dim}
    if architecture in ("gemma2", "gemma3"):
        values["attention.sliding_window"] = 16
    if architecture == "gemma2":
        values |= {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0}
    if architecture == "gemma3":
        values |= {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    if architecture == "phi3":
        values |= {"rope.dimension_count": 6, "rope.scaling.original_context_length": 32}
    tokenizer = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.tokens": [f"t{i}" for i in range(128)]}
    return {f"{architecture}.{key}": value for key, value in values.items()} | tokenizer


def extra_tensors(name: str, golden: Golden) -> dict[str, np.ndarray]:
    if name == "phi3-long":
        rope = golden.config["rope_parameters"]
        return {f"rope_factors_{kind}.weight": np.array(rope[f"{kind}_factor"], np.float32) for kind in ("long", "short")}
    return {}


def both(tmp_path: Path, name: str) -> tuple[Checkpoint, Checkpoint]:
    """The model from its folder and from a GGUF file."""
    golden, architecture = read_golden(name), ARCHITECTURES[name]
    folder = HfCheckpoint(write_folder(tmp_path / "folder", golden.config, golden_tensors(golden)), name)
    tensors = as_gguf(golden, architecture) | extra_tensors(name, golden)
    path = write_gguf(tmp_path / "model.gguf", metadata_of(golden, architecture, folder.shape), tensors, architecture)
    return folder, open_checkpoint(str(path))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_gguf_file_holds_the_weights_that_a_folder_does(tmp_path: Path, name: str) -> None:
    folder, file = both(tmp_path, name)
    expected = folder.load_weights(np.dtype(np.float32), lambda done, total: None)
    found = file.load_weights(np.dtype(np.float32), lambda done, total: None)
    assert found.keys() == expected.keys()
    for path, weight in expected.items():
        np.testing.assert_allclose(found[path], weight, rtol=0, atol=2e-7, err_msg=path)  # Gemma's norms went over 1 + weight


@pytest.mark.parametrize("name", ["llama", "mixtral", "smollm3", "qwen3", "gemma3", "phi3-long", "qwen2-moe"])
def test_a_gguf_file_tells_the_shape_that_a_folder_does(tmp_path: Path, name: str) -> None:
    folder, file = both(tmp_path, name)
    expected, found = folder.shape, file.shape
    for wanted, table in zip(expected.rope_tables, found.rope_tables, strict=True):
        np.testing.assert_allclose(table.frequencies, wanted.frequencies, rtol=1e-6)
        np.testing.assert_allclose(table.long_frequencies, wanted.long_frequencies, rtol=1e-6)
        assert table.magnitude == pytest.approx(wanted.magnitude) and table.short_context_tokens == wanted.short_context_tokens
    if name == "smollm3":  # whose golden has a pattern of its own
        assert found.layer_ropes == (0, 0, 0)
        found = found._replace(layer_ropes=expected.layer_ropes)
    if name == "gemma3":  # whose golden has a pattern and a scale of its own
        assert found.layer_windows == (16,) * 4 and found.layer_ropes == (1,) * 4 and found.attention_scale == 16**-0.5
        found = found._replace(layer_windows=expected.layer_windows, layer_ropes=expected.layer_ropes, attention_scale=24**-0.5)
    assert found._replace(rope_tables=(), norm_eps=0, attention_scale=0) == expected._replace(rope_tables=(), norm_eps=0, attention_scale=0)


def test_every_fourth_layer_of_a_smollm3_file_does_not_turn(tmp_path: Path) -> None:
    """No key of the file says so: llama.cpp knows it of the architecture."""
    keys = {key.replace("llama.", "smollm3."): value for key, value in tiny_metadata().items()}
    path = write_gguf(tmp_path / "model.gguf", keys | {"smollm3.block_count": 9}, {}, "smollm3")
    shape = read_shape(GgufFile(path))
    assert shape.layer_ropes == (0, 0, 0, 1, 0, 0, 0, 1, 0)
    assert shape.rope_tables[0].frequencies == pytest.approx((1.0, 0.1, 0.01, 0.001))
    assert shape.rope_tables[1].frequencies == (0.0,) * 4


def test_factors_of_llama_3_1_slow_the_frequencies_down(tmp_path: Path) -> None:
    checkpoint = open_tiny(tmp_path, tiny_tensors() | {"rope_freqs.weight": np.array([1, 2, 4, 8], np.float32)})
    assert checkpoint.shape.rope_tables[0].frequencies == pytest.approx((1.0, 0.1 / 2, 0.01 / 4, 0.001 / 8))


def test_rope_factors_for_another_number_of_pairs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="3 rope factors for 4 pairs that turn"):
        open_tiny(tmp_path, tiny_tensors() | {"rope_freqs.weight": np.ones(3, np.float32)})


# ---- models in several files


def test_a_model_in_several_files_is_read_as_one(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    whole = open_tiny(tmp_path, tensors).load_weights(np.dtype(np.float32), lambda done, total: None)
    names = sorted(tensors)
    paths = [tmp_path / f"split-{i:05}-of-00002.gguf" for i in (1, 2)]
    write_gguf(paths[0], tiny_metadata() | {"split.count": 2}, {name: tensors[name] for name in names[:9]})
    write_gguf(paths[1], {"split.count": 2}, {name: tensors[name] for name in names[9:]})
    first = open_checkpoint(str(paths[0]))
    for path, weight in first.load_weights(np.dtype(np.float32), lambda done, total: None).items():
        np.testing.assert_array_equal(weight, whole[path])
    with pytest.raises(ValueError, match=r"split-00002-of-00002\.gguf is file 2 of 2; name the first, split-00001-of-00002\.gguf"):
        open_checkpoint(str(paths[1]))
    write_gguf(paths[1], {"split.count": 2}, {name: tensors[name] + 1 for name in names[9:]})
    assert open_checkpoint(str(paths[0])).fingerprint != first.fingerprint
    paths[1].unlink()
    with pytest.raises(FileNotFoundError, match=r"split-00002-of-00002\.gguf: there is no such file"):
        open_checkpoint(str(paths[0]))


# ---- sentencepiece vocabularies


def test_merges_are_ordered_by_the_score_of_what_they_make() -> None:
    tokens = ["a", "b", "c", "ab", "bc", "abc"]
    assert merges_of(tokens, [0, 0, 0, -2, -1, -3]) == [("b", "c"), ("a", "b"), ("ab", "c"), ("a", "bc")]


SPACE = "\u2581"
PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), SPACE, "t", "h", "e", "th", "he", f"{SPACE}t", f"{SPACE}the"]
PIECES += [f"{SPACE}th", "<tool>"]


def sentencepiece(tmp_path: Path, **changes: object) -> Tokenizer:
    kinds = [2, 3, 3, *[6] * 256, *[1] * 9, 4]
    scores = [0.0] * (len(PIECES) - 10) + [-9.0, -9.0, -9.0, -9.0, -2.0, -1.0, -3.0, -5.0, -4.0, 0.0]
    tensors = {"token_embd.weight": np.zeros((len(PIECES), 32), np.float32)}
    settings = {
        "tokenizer__ggml__model": "llama",
        "tokenizer__ggml__tokens": PIECES,
        "tokenizer__ggml__token_type": kinds,
        "tokenizer__ggml__scores": scores,
        "tokenizer__ggml__bos_token_id": 1,
        "tokenizer__ggml__eos_token_id": 2,
    }
    return Tokenizer(open_tiny(tmp_path, tiny_tensors() | tensors, **(settings | changes)).tokenizer_data())


def test_a_sentencepiece_vocabulary_cuts_text_by_scores(tmp_path: Path) -> None:
    tokenizer = sentencepiece(tmp_path)
    for text, pieces in (
        ("the", [f"{SPACE}the"]),  # he, then ▁t, then both
        ("th", [f"{SPACE}th"]),  # th, then ▁ with it: better than ▁t, behind which h would be left
        ("het", [SPACE, "he", "t"]),
        ("ethe", [SPACE, "e", "t", "he"]),  # he before th, which then has no h
    ):
        assert [PIECES[i] for i in tokenizer.encode(text)] == pieces
    assert tokenizer.first_ids == (1,)


def test_text_goes_through_a_sentencepiece_vocabulary_and_back(tmp_path: Path) -> None:
    tokenizer = sentencepiece(tmp_path)
    assert tokenizer.decode(tokenizer.encode("the é\n<tool></s>")) == " the é\n<tool></s>"
    assert tokenizer.decode(tokenizer.encode("the</s>"), skip_special_tokens=True) == " the"
    assert tokenizer.token_bytes(PIECES.index("<0x0A>")) == b"\n"


def test_scores_that_do_not_fit_the_tokens_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.ggml\.scores has 1 entries for 269 tokens"):
        sentencepiece(tmp_path, tokenizer__ggml__scores=[0.5])
    with pytest.raises(ValueError, match=r"unknown_token_id 300 is outside the vocabulary of 269"):
        sentencepiece(tmp_path, tokenizer__ggml__unknown_token_id=300)
