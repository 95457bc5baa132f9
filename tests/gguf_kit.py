"""A llama so small that its checkpoint can be written in a test and checked number by number."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from pdjax.checkpoints import Checkpoint, open_checkpoint
from pdjax.models.shape import ModelShape

TINY = ModelShape(
    num_layers=2,
    vocab_size=5,
    embed_dim=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn_dim=64,
    rope_theta=10000.0,
    norm_eps=0.25,
    max_context_tokens=77,
    tied_embeddings=True,
)


def tiny_metadata() -> dict[str, object]:
    return {
        "llama.block_count": 2,
        "llama.context_length": 77,
        "llama.embedding_length": 32,
        "llama.feed_forward_length": 64,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 0.25,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": ["<end>", "a", "b", "ab", "<tool>"],
        "tokenizer.ggml.token_type": [3, 1, 1, 1, 4],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 0,
    }


def tiny_tensors() -> dict[str, np.ndarray]:
    """Random float32 tensors of a tiny llama, in the file's [out, in] layout."""
    rng = np.random.default_rng(7)
    shapes = {"token_embd.weight": (5, 32), "output_norm.weight": (32,)}
    for layer in range(2):
        rows = {"attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32), "attn_output": (32, 32)}
        rows |= {"ffn_gate": (64, 32), "ffn_up": (64, 32), "ffn_down": (32, 64), "attn_norm": (32,), "ffn_norm": (32,)}
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in rows.items()}
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def write_gguf(path: Path, metadata: dict[str, object], tensors: dict[str, np.ndarray], architecture: str = "llama") -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}[type(value)]
        add(key, value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def open_tiny(path: Path, tensors: dict[str, np.ndarray] | None = None, architecture: str = "llama", **changes: object) -> Checkpoint:
    """A tiny checkpoint; in `changes` a key's dots are written as double underscores, and None takes the key out."""
    metadata = tiny_metadata() | {key.replace("__", "."): value for key, value in changes.items()}
    metadata = {key: value for key, value in metadata.items() if value is not None}
    written = write_gguf(path / "tiny.gguf", metadata, tiny_tensors() if tensors is None else tensors, architecture)
    return open_checkpoint(str(written))
