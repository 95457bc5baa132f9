"""Checkpoints of the `llama` architecture in GGUF files, as llama.cpp writes them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from pdjax.checkpoints.base import Checkpoint, Report, TokenizerData
from pdjax.checkpoints.expand import SUPPORTED_KINDS, expand_rows
from pdjax.checkpoints.gguf_file import GgufFile, GgufTensor
from pdjax.models.shape import ModelShape, weight_specs

_Kind = TypeVar("_Kind", int, float, str, list)

_CONTROL_TOKEN = 3
_USER_DEFINED_TOKEN = 4
_ALIGNMENT_BYTES = 64
_CHUNK_ROWS = 128  # a chunk of expanded rows stays in the L2 cache until it has been written to its place


class _Part(NamedTuple):
    """Where one tensor of the file goes: to `weights[path][layer]`, from row `first_row` on.

    `rotary_heads` is set where rows are permuted for interleaved rotary embedding.
    """

    tensor: str
    shape: tuple[int, ...]
    path: str
    layer: int | None = None
    first_row: int = 0
    rotary_heads: int | None = None


def sha256_of(path: Path) -> str:
    """SHA-256 of the file's bytes, in hex; read in blocks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialised C-contiguous array that starts at a multiple of 64 bytes."""
    num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.empty(num_bytes + _ALIGNMENT_BYTES, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT_BYTES
    return raw[start : start + num_bytes].view(dtype).reshape(shape)


def split_rotary_order(num_rows: int, num_heads: int) -> np.ndarray:
    """Which row of an interleaved-rotary matrix goes to each row of a split-rotary one. int64 [num_rows].

    llama.cpp pairs rows 2i and 2i + 1 of a head; `weight_specs` pairs i and i + head_dim / 2.
    """
    rows = np.arange(num_rows).reshape(num_heads, num_rows // num_heads // 2, 2)
    return rows.swapaxes(1, 2).reshape(num_rows)


class GgufCheckpoint(Checkpoint):
    """A llama model in one GGUF file. `fingerprint` is the SHA-256 of the file.

    Raises ValueError at construction naming what is wrong: another architecture, a missing or unexpected tensor, a wrong shape.
    """

    def __init__(self, path: Path, name: str, fingerprint: str):
        self.name = name
        self.fingerprint = fingerprint
        self._file = GgufFile(path)
        self.shape = _read_shape(self._file)
        self._parts = _check_tensors(self._file, self.shape)
        ids = (self._file.metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot"))
        self.eos_token_ids = tuple(dict.fromkeys(token for token in ids if token is not None))

    def tokenizer_data(self) -> TokenizerData:
        return _read_tokenizer(self._file)

    def load_weights(self, dtype: np.dtype, report: Report) -> dict[str, np.ndarray]:
        dtype = np.dtype(dtype)
        weights = {path: aligned_empty(spec.shape, dtype) for path, spec in weight_specs(self.shape).items()}
        for done, part in enumerate(self._parts, start=1):
            target = weights[part.path] if part.layer is None else weights[part.path][part.layer]
            _place(self._file.tensors[part.tensor], part, target)
            report(done, len(self._parts))
        return weights


def _place(tensor: GgufTensor, part: _Part, target: np.ndarray) -> None:
    """Expand `tensor` into its rows of `target`, [rows, columns] or [columns]."""
    rows = tensor.rows_host
    target = np.atleast_2d(target)[part.first_row :]
    order = None if part.rotary_heads is None else split_rotary_order(rows.shape[0], part.rotary_heads)
    for start in range(0, rows.shape[0], _CHUNK_ROWS):
        end = min(start + _CHUNK_ROWS, rows.shape[0])
        chunk = rows[start:end] if order is None else rows[order[start:end]]
        target[start:end] = expand_rows(chunk, tensor.kind)


def _parts_of(shape: ModelShape) -> Iterator[_Part]:
    embed, ffn = shape.embed_dim, shape.ffn_dim
    q_dim, kv_dim = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    yield _Part("token_embd.weight", (shape.vocab_size, embed), "embed")
    for layer in range(shape.num_layers):
        block = f"blk.{layer}."
        yield _Part(f"{block}attn_norm.weight", (embed,), "layers/attn_norm", layer)
        yield _Part(f"{block}attn_q.weight", (q_dim, embed), "layers/qkv", layer, rotary_heads=shape.num_heads)
        yield _Part(f"{block}attn_k.weight", (kv_dim, embed), "layers/qkv", layer, q_dim, rotary_heads=shape.num_kv_heads)
        yield _Part(f"{block}attn_v.weight", (kv_dim, embed), "layers/qkv", layer, q_dim + kv_dim)
        yield _Part(f"{block}attn_output.weight", (embed, q_dim), "layers/attn_out", layer)
        yield _Part(f"{block}ffn_norm.weight", (embed,), "layers/mlp_norm", layer)
        yield _Part(f"{block}ffn_gate.weight", (ffn, embed), "layers/gate_up", layer)
        yield _Part(f"{block}ffn_up.weight", (ffn, embed), "layers/gate_up", layer, ffn)
        yield _Part(f"{block}ffn_down.weight", (embed, ffn), "layers/down", layer)
    yield _Part("output_norm.weight", (embed,), "final_norm")
    if not shape.tied_embeddings:
        yield _Part("output.weight", (shape.vocab_size, embed), "lm_head")


def _check_tensors(file: GgufFile, shape: ModelShape) -> tuple[_Part, ...]:
    """The parts of the model, each of which the file holds as it should be. Stops at the first that is not there, however many
    layers a damaged file claims to have."""
    parts = []
    for part in _parts_of(shape):
        if part.tensor not in file.tensors:
            raise ValueError(f"{file.path}: tensor {part.tensor} of shape {part.shape} is missing")
        tensor = file.tensors[part.tensor]
        if tensor.shape != part.shape:
            raise ValueError(f"{file.path}: tensor {part.tensor} should have shape {part.shape} but has {tensor.shape}")
        if tensor.kind not in SUPPORTED_KINDS:
            supported = ", ".join(sorted(kind.name for kind in SUPPORTED_KINDS))
            raise ValueError(f"{file.path}: tensor {part.tensor} is stored as {tensor.kind.name}; supported are {supported}")
        parts.append(part)
    if unexpected := sorted(file.tensors.keys() - {part.tensor for part in parts}):
        raise ValueError(f"{file.path}: tensor {unexpected[0]} is not part of a llama model as pdjax knows it")
    return tuple(parts)


def _required(file: GgufFile, key: str, kind: type[_Kind]) -> _Kind:
    value = file.metadata.get(key)
    if not isinstance(value, kind):
        raise ValueError(f"{file.path}: metadata {key} should be of type {kind.__name__} but is {value!r:.80}")
    return value


def _optional(file: GgufFile, key: str, default: _Kind) -> _Kind:
    return _required(file, key, type(default)) if key in file.metadata else default


def _read_shape(file: GgufFile) -> ModelShape:
    architecture = _required(file, "general.architecture", str)
    if architecture != "llama":
        raise ValueError(f"{file.path}: architecture {architecture!r} is not supported; supported is 'llama'")
    scaling = _optional(file, "llama.rope.scaling.type", "none")
    if scaling != "none":
        raise ValueError(f"{file.path}: llama.rope.scaling.type {scaling!r} is not supported; supported is 'none'")
    embed_dim = _required(file, "llama.embedding_length", int)
    num_heads = _required(file, "llama.attention.head_count", int)
    shape = ModelShape(
        num_layers=_required(file, "llama.block_count", int),
        vocab_size=len(_required(file, "tokenizer.ggml.tokens", list)),
        embed_dim=embed_dim,
        num_heads=num_heads,
        num_kv_heads=_optional(file, "llama.attention.head_count_kv", num_heads),
        head_dim=_optional(file, "llama.attention.key_length", embed_dim // max(num_heads, 1)),
        ffn_dim=_required(file, "llama.feed_forward_length", int),
        rope_theta=_optional(file, "llama.rope.freq_base", 10000.0),
        norm_eps=_required(file, "llama.attention.layer_norm_rms_epsilon", float),
        max_context_tokens=_required(file, "llama.context_length", int),
        tied_embeddings="output.weight" not in file.tensors,
    )
    _check_heads(file, shape)
    return shape


def _check_heads(file: GgufFile, shape: ModelShape) -> None:
    if shape.num_kv_heads < 1 or shape.num_heads < 1 or shape.num_heads % shape.num_kv_heads:
        raise ValueError(f"{file.path}: {shape.num_heads} query heads do not divide among {shape.num_kv_heads} key heads")
    rotary_dim = _optional(file, "llama.rope.dimension_count", shape.head_dim)
    if rotary_dim != shape.head_dim or rotary_dim % 2:
        raise ValueError(f"{file.path}: llama.rope.dimension_count {rotary_dim} should be even and equal head_dim {shape.head_dim}")


def _read_tokenizer(file: GgufFile) -> TokenizerData:
    model = _required(file, "tokenizer.ggml.model", str)
    if model != "gpt2":
        raise ValueError(f"{file.path}: tokenizer.ggml.model {model!r} is not supported; supported is 'gpt2' (byte-level BPE)")
    if file.metadata.get("tokenizer.ggml.add_bos_token", False):
        raise ValueError(f"{file.path}: tokenizer.ggml.add_bos_token is not supported")
    tokens = tuple(_required(file, "tokenizer.ggml.tokens", list))
    kinds = _required(file, "tokenizer.ggml.token_type", list)
    if len(kinds) != len(tokens):
        raise ValueError(f"{file.path}: tokenizer.ggml.token_type has {len(kinds)} entries for {len(tokens)} tokens")
    return TokenizerData(
        tokens=tokens,
        merges=tuple(_required(file, "tokenizer.ggml.merges", list)),
        special_ids=frozenset(i for i, kind in enumerate(kinds) if kind == _CONTROL_TOKEN),
        added_ids=frozenset(i for i, kind in enumerate(kinds) if kind == _USER_DEFINED_TOKEN),
        pre_tokenizer=_required(file, "tokenizer.ggml.pre", str),
        chat_template=_optional(file, "tokenizer.chat_template", "") or None,
        bos_token_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=file.metadata.get("tokenizer.ggml.eos_token_id"),
    )
