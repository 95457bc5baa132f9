"""Reads the metadata of a GGUF file: which architectures are known, and what of them becomes a `ModelShape`.

What llama.cpp writes into no key, because its code for the architecture knows it, stands here: patterns of windows, scales of scores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from pdjax.checkpoints.gguf_file import GgufFile
from pdjax.checkpoints.metadata import Metadata
from pdjax.models.rope import long_rope_magnitude, plain_frequencies, still_table, table_of, yarn_frequencies, yarn_magnitude
from pdjax.models.shape import NO_WINDOW, Experts, ModelShape, RopeTable

LARGEST_GEMMA_LAYERS = {"gemma2": 46, "gemma3": 62}
"""Layers of the models of 27 billion weights, whose scores are scaled by the embedding's share of a head instead of head_dim."""

GEMMA3_LOCAL_THETA = 10000.0

SMOLLM3_STILL_INTERVAL = 4
"""Of so many layers of SmolLM3 the last has no rotary embedding."""


class Header:
    """Metadata of one architecture, whose keys start with its name."""

    def __init__(self, file: GgufFile, architecture: str):
        self.file = file
        self.architecture = architecture
        self.metadata = Metadata(str(file.path), file.metadata, "metadata")

    def key(self, name: str) -> str:
        return f"{self.architecture}.{name}"

    def optional(self, name: str, default: Any) -> Any:
        return self.metadata.optional(self.key(name), default)

    def positive(self, name: str) -> int:
        return self.metadata.positive(self.key(name))

    def factors(self, tensor: str) -> np.ndarray | None:
        """A small tensor of rope factors, None where the file has none."""
        found = self.file.tensors.get(tensor)
        return None if found is None else found.read_rows(slice(0, 1))[0].astype(np.float64)


def read_shape(file: GgufFile) -> ModelShape:
    """The shape of the model in `file`. Raises ValueError for an architecture or a setting that is not supported, naming it."""
    architecture = Metadata(str(file.path), file.metadata, "metadata").required("general.architecture", str)
    if architecture not in _READERS:
        raise ValueError(f"{file.path}: architecture {architecture!r} is not supported; supported are {', '.join(map(repr, _READERS))}")
    header = Header(file, architecture)
    shape = _READERS[architecture](header, _dimensions(header))
    _check_heads(header, shape)
    return shape


def _dimensions(header: Header) -> ModelShape:
    metadata = header.metadata
    embed_dim = header.positive("embedding_length")
    num_heads = header.positive("attention.head_count")
    shape = ModelShape(
        num_layers=header.positive("block_count"),
        vocab_size=len(metadata.required("tokenizer.ggml.tokens", list)),
        embed_dim=embed_dim,
        num_heads=num_heads,
        num_kv_heads=header.optional("attention.head_count_kv", num_heads),
        head_dim=header.optional("attention.key_length", embed_dim // num_heads),
        ffn_dim=header.positive("feed_forward_length"),
        rope_theta=header.optional("rope.freq_base", 10000.0),
        norm_eps=metadata.required(header.key("attention.layer_norm_rms_epsilon"), float),
        max_context_tokens=header.positive("context_length"),
        tied_embeddings="output.weight" not in header.file.tensors,
    )
    table = _rope_table(header, shape)
    return shape if table is None else shape._replace(rope_tables=(table,))


def _rope_table(header: Header, shape: ModelShape) -> RopeTable | None:
    rotary_dim = header.optional("rope.dimension_count", shape.head_dim)
    if rotary_dim > shape.head_dim or rotary_dim % 2 or rotary_dim < 2:
        key = header.key("rope.dimension_count")
        raise ValueError(f"{header.file.path}: {key} {rotary_dim} should be even and at most head_dim {shape.head_dim}")
    frequencies = plain_frequencies(shape.rope_theta, rotary_dim)
    short, long = header.factors("rope_factors_short.weight"), header.factors("rope_factors_long.weight")
    factors = header.factors("rope_freqs.weight")
    for found in (short, long, factors):
        if found is not None and len(found) != len(frequencies):
            raise ValueError(f"{header.file.path}: {len(found)} rope factors for {len(frequencies)} pairs that turn")
    if short is not None and long is not None:
        original = header.positive("rope.scaling.original_context_length")
        magnitude = header.optional("rope.scaling.attn_factor", long_rope_magnitude(shape.max_context_tokens / original, original))
        return RopeTable(tuple((frequencies / short).tolist()), magnitude, tuple((frequencies / long).tolist()), original)
    if factors is not None:
        return table_of(frequencies / factors)
    return _scaled_table(header, shape, frequencies)


def _scaled_table(header: Header, shape: ModelShape, frequencies: np.ndarray) -> RopeTable | None:
    kind = header.optional("rope.scaling.type", "none")
    if kind == "none":
        return None if 2 * len(frequencies) == shape.head_dim else table_of(frequencies)
    factor = header.optional("rope.scaling.factor", 1.0)
    if kind == "linear":
        return table_of(frequencies / factor)
    if kind == "yarn":
        original = header.positive("rope.scaling.original_context_length")
        return table_of(yarn_frequencies(frequencies, shape.rope_theta, factor, original), yarn_magnitude(factor))
    raise ValueError(
        f"{header.file.path}: {header.key('rope.scaling.type')} {kind!r} is not supported; supported are 'none', 'linear' and 'yarn'"
    )


def _check_heads(header: Header, shape: ModelShape) -> None:
    if shape.num_kv_heads < 1 or shape.num_heads % shape.num_kv_heads:
        raise ValueError(f"{header.file.path}: {shape.num_heads} query heads do not divide among {shape.num_kv_heads} key heads")
    if shape.head_dim < 2 or shape.head_dim % 2:
        raise ValueError(f"{header.file.path}: head_dim {shape.head_dim} should be even")


def _llama(header: Header, shape: ModelShape) -> ModelShape:
    """Llama, Mistral and SmolLM2; with experts it is Mixtral."""
    if not header.optional("expert_count", 0):
        return shape
    return shape._replace(family="mixtral", experts=_experts(header, shape.ffn_dim, are_normed=True))


def _smollm3(header: Header, shape: ModelShape) -> ModelShape:
    are_still = [(layer + 1) % SMOLLM3_STILL_INTERVAL == 0 for layer in range(shape.num_layers)]
    tables = (_first_table(shape), still_table(shape.head_dim))
    return shape._replace(rope_tables=tables, layer_ropes=tuple(int(is_still) for is_still in are_still))


def _first_table(shape: ModelShape) -> RopeTable:
    """The plain one too, which a model with one table does without."""
    return shape.rope_tables[0] if shape.rope_tables else table_of(plain_frequencies(shape.rope_theta, shape.head_dim))


def _experts(header: Header, ffn_dim: int, are_normed: bool) -> Experts:
    experts = Experts(header.positive("expert_count"), header.positive("expert_used_count"), ffn_dim, are_normed)
    if experts.num_active > experts.num_experts:
        raise ValueError(f"{header.file.path}: {header.key('expert_used_count')} {experts.num_active} of {experts.num_experts} experts")
    return experts


def _family(name: str) -> Callable[[Header, ModelShape], ModelShape]:
    return lambda header, shape: shape._replace(family=name)


def _qwen3_moe(header: Header, shape: ModelShape) -> ModelShape:
    experts = _experts(header, header.positive("expert_feed_forward_length"), are_normed=header.optional("expert_weights_norm", True))
    return shape._replace(family="qwen3_moe", experts=experts)


def _qwen2_moe(header: Header, shape: ModelShape) -> ModelShape:
    experts = _experts(header, header.positive("expert_feed_forward_length"), are_normed=header.optional("expert_weights_norm", False))
    shared = header.positive("expert_shared_feed_forward_length")
    return shape._replace(family="qwen2_moe", experts=experts._replace(shared_ffn_dim=shared))


def _phi3(header: Header, shape: ModelShape) -> ModelShape:
    window = header.optional("attention.sliding_window", 0)
    return shape._replace(layer_windows=(window,) * shape.num_layers if window else ())


def _gemma2(header: Header, shape: ModelShape) -> ModelShape:
    window = header.optional("attention.sliding_window", 4096)
    return shape._replace(
        family="gemma2",
        attention_scale=_gemma_scale("gemma2", shape),
        attention_soft_cap=header.optional("attn_logit_softcapping", 50.0),
        logits_soft_cap=header.optional("final_logit_softcapping", 30.0),
        layer_windows=tuple(window if layer % 2 == 0 else NO_WINDOW for layer in range(shape.num_layers)),
    )


def _gemma3(header: Header, shape: ModelShape) -> ModelShape:
    window = header.optional("attention.sliding_window", 1024)
    are_sliding = [(layer + 1) % 6 != 0 for layer in range(shape.num_layers)]
    local = table_of(plain_frequencies(header.optional("rope.freq_base_swa", GEMMA3_LOCAL_THETA), shape.head_dim))
    return shape._replace(
        family="gemma3",
        attention_scale=_gemma_scale("gemma3", shape),
        layer_windows=tuple(window if is_sliding else NO_WINDOW for is_sliding in are_sliding),
        rope_tables=(_first_table(shape), local),
        layer_ropes=tuple(int(is_sliding) for is_sliding in are_sliding),
    )


def _gemma_scale(family: str, shape: ModelShape) -> float:
    is_largest = shape.num_layers == LARGEST_GEMMA_LAYERS[family]
    return float((shape.embed_dim // shape.num_heads if is_largest else shape.head_dim) ** -0.5)


_READERS: Mapping[str, Callable[[Header, ModelShape], ModelShape]] = {
    "llama": _llama,
    "smollm3": _smollm3,
    "qwen2": _family("qwen2"),
    "qwen3": _family("qwen3"),
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "qwen2moe": _qwen2_moe,
    "qwen3moe": _qwen3_moe,
}
