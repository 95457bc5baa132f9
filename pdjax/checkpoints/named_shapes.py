"""Shapes of well-known models, by name, in the words of their config.json."""

from __future__ import annotations

from typing import Any

from pdjax.checkpoints.hf_config import read_shape
from pdjax.checkpoints.metadata import Metadata
from pdjax.models.shape import ModelShape


def _config(architecture: str, sizes: tuple[int, ...], **others: Any) -> dict[str, Any]:
    """`sizes`: vocabulary, embedding, MLP, layers, heads, key heads, longest context."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    sizes_by_name = dict(zip((*names, "max_position_embeddings"), sizes, strict=True))
    return {"architectures": [f"{architecture}ForCausalLM"], "rms_norm_eps": 1e-6} | sizes_by_name | others


_LLAMA31 = {
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
_LLAMA32 = _LLAMA31 | {"tie_word_embeddings": True, "rope_scaling": _LLAMA31["rope_scaling"] | {"factor": 32.0}}
_QWEN3 = {"head_dim": 128, "rope_theta": 1_000_000.0}

_CONFIGS = {
    "smollm2-135m": _config("Llama", (49152, 576, 1536, 30, 9, 3, 8192), rope_theta=100_000.0, tie_word_embeddings=True),
    "smollm2-1.7b": _config("Llama", (49152, 2048, 8192, 24, 32, 32, 8192), rope_theta=130_000.0, tie_word_embeddings=True),
    "smollm3-3b": _config("SmolLM3", (128256, 2048, 11008, 36, 16, 4, 65536), rope_theta=5_000_000.0),
    "llama-3.2-1b": _config("Llama", (128256, 2048, 8192, 16, 32, 8, 131072), **_LLAMA32, head_dim=64),
    "llama-3.2-3b": _config("Llama", (128256, 3072, 8192, 28, 24, 8, 131072), **_LLAMA32, head_dim=128),
    "llama-3-8b": _config("Llama", (128256, 4096, 14336, 32, 32, 8, 8192), rms_norm_eps=1e-5, rope_theta=500_000.0),
    "llama-3.1-8b": _config("Llama", (128256, 4096, 14336, 32, 32, 8, 131072), **_LLAMA31),
    "llama-3.1-70b": _config("Llama", (128256, 8192, 28672, 80, 64, 8, 131072), **_LLAMA31),
    "mistral-7b": _config("Mistral", (32000, 4096, 14336, 32, 32, 8, 32768), rms_norm_eps=1e-5, sliding_window=4096),
    "qwen2.5-0.5b": _config("Qwen2", (151936, 896, 4864, 24, 14, 2, 32768), rope_theta=1_000_000.0, tie_word_embeddings=True),
    "qwen2.5-7b": _config("Qwen2", (152064, 3584, 18944, 28, 28, 4, 32768), rope_theta=1_000_000.0),
    "qwen3-0.6b": _config("Qwen3", (151936, 1024, 3072, 28, 16, 8, 40960), **_QWEN3, tie_word_embeddings=True),
    "qwen3-8b": _config("Qwen3", (151936, 4096, 12288, 36, 32, 8, 40960), **_QWEN3),
    "gemma-2-2b": _config("Gemma2", (256000, 2304, 9216, 26, 8, 4, 8192), head_dim=256, query_pre_attn_scalar=256),
    "gemma-3-1b": _config("Gemma3", (262144, 1152, 6912, 26, 4, 1, 32768), head_dim=256, query_pre_attn_scalar=256, sliding_window=512),
    "phi-3-mini": _config("Phi3", (32064, 3072, 8192, 32, 32, 32, 4096), rms_norm_eps=1e-5, sliding_window=2047),
    "mixtral-8x7b": _config("Mixtral", (32000, 4096, 14336, 32, 32, 8, 32768), rms_norm_eps=1e-5, rope_theta=1_000_000.0),
    "qwen3-30b-a3b": _config(
        "Qwen3Moe",
        (151936, 2048, 6144, 48, 32, 4, 40960),
        **_QWEN3,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
    ),
    "qwen1.5-moe-a2.7b": _config(
        "Qwen2Moe",
        (151936, 2048, 5632, 24, 16, 16, 8192),
        rope_theta=1_000_000.0,
        num_experts=60,
        num_experts_per_tok=4,
        moe_intermediate_size=1408,
        shared_expert_intermediate_size=5632,
    ),
}

NAMES = tuple(_CONFIGS)


def named_shape(name: str) -> ModelShape:
    """The shape `name`. Raises ValueError for a name that is not known."""
    if name not in _CONFIGS:
        raise ValueError(f"model shape {name!r} is unknown; known: {', '.join(NAMES)}, or the path of a config.json")
    return read_shape(Metadata(f"model shape {name}", _CONFIGS[name]))
