"""Reads config.json of a Hugging Face folder: which architectures are known, and what of them becomes a `ModelShape`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdjax.checkpoints.hf_rope import explicit_table, rope_parameters, rope_table
from pdjax.checkpoints.metadata import Metadata
from pdjax.models.rope import still_table
from pdjax.models.shape import NO_WINDOW, Experts, ModelShape

_SLIDING, _FULL = "sliding_attention", "full_attention"
_GEMMA_HEAD_DIM = 256


def read_shape(config: Metadata) -> ModelShape:
    """The shape of the model that `config` describes. Raises ValueError for an architecture or a setting that is not supported, naming it."""
    architectures = config.required("architectures", list)
    name = architectures[0] if architectures else None
    if name not in _READERS:
        raise ValueError(f"{config.where}: architecture {name!r} is not supported; supported are {', '.join(sorted(_READERS))}")
    if config.has("quantization_config"):
        method = config.section("quantization_config").values.get("quant_method")
        raise ValueError(f"{config.where}: weights quantized by {method!r} are not supported in this format; GGUF is one that is")
    shape = _READERS[name](config)
    if shape.num_heads % shape.num_kv_heads:
        raise ValueError(f"{config.where}: {shape.num_heads} query heads do not divide among {shape.num_kv_heads} key heads")
    for field, values in (("layer_types", shape.layer_windows), ("no_rope_layers", shape.layer_ropes)):
        if values and len(values) != shape.num_layers:
            raise ValueError(f"{config.where}: {field} has {len(values)} entries for {shape.num_layers} layers")
    return shape


def _common(
    config: Metadata, family: str, theta: float = 10000.0, is_tied: bool = False, head_dim: int | None = None, **changes: Any
) -> ModelShape:
    """What all configurations name alike; `theta`, `is_tied` and `head_dim` are what they mean by saying nothing."""
    config.refuse_unless("hidden_act", "silu", "silu")
    config.refuse_unless("attention_bias", False, False)
    config.refuse_unless("mlp_bias", False, False)
    return _dimensions(config, family, theta, is_tied, head_dim, **changes)


def _dimensions(config: Metadata, family: str, theta: float, is_tied: bool, head_dim: int | None, **changes: Any) -> ModelShape:
    embed_dim, num_heads = config.positive("hidden_size"), config.positive("num_attention_heads")
    shape = ModelShape(
        num_layers=config.positive("num_hidden_layers"),
        vocab_size=config.positive("vocab_size"),
        embed_dim=embed_dim,
        num_heads=num_heads,
        num_kv_heads=config.positive("num_key_value_heads") if config.has("num_key_value_heads") else num_heads,
        head_dim=config.positive("head_dim") if config.has("head_dim") else head_dim or embed_dim // num_heads,
        ffn_dim=config.positive("intermediate_size"),
        rope_theta=theta,
        norm_eps=config.optional("rms_norm_eps", 1e-6),
        max_context_tokens=config.positive("max_position_embeddings"),
        tied_embeddings=config.optional("tie_word_embeddings", is_tied),
        family=family,
    )
    if shape.head_dim % 2:
        raise ValueError(f"{config.where}: head_dim {shape.head_dim} is odd")
    if "rope_tables" not in changes:
        rope = rope_parameters(config, theta)
        table = rope_table(config, rope, shape.head_dim)
        shape = shape._replace(rope_theta=rope.required("rope_theta", float), rope_tables=() if table is None else (table,))
    return shape._replace(**changes)


def _layer_types(config: Metadata, default: Callable[[int], bool]) -> list[bool]:
    """Which layers have a window: as `layer_types` says, or `default` of the layer's index."""
    if not config.has("layer_types"):
        return [default(layer) for layer in range(config.positive("num_hidden_layers"))]
    types = config.required("layer_types", list)
    if unknown := [kind for kind in types if kind not in (_SLIDING, _FULL)]:
        raise ValueError(f"{config.where}: layer type {unknown[0]!r} is not supported; supported are {_SLIDING!r} and {_FULL!r}")
    return [kind == _SLIDING for kind in types]


def _windows(config: Metadata, are_sliding: list[bool], default: int | None = None) -> tuple[int, ...]:
    """`default`: the window where the configuration does not speak of one; null is none."""
    if not any(are_sliding) or (config.values.get("sliding_window", default) is None and not config.has("layer_types")):
        return ()
    window = config.positive("sliding_window") if config.has("sliding_window") or default is None else default
    return tuple(window if is_sliding else NO_WINDOW for is_sliding in are_sliding)


def _llama(config: Metadata) -> ModelShape:
    return _common(config, "llama")


def _smollm3(config: Metadata) -> ModelShape:
    config.refuse_unless("use_sliding_window", False, False)
    shape = _common(config, "llama", theta=2_000_000.0, is_tied=True)
    interval = config.optional("no_rope_layer_interval", 4)
    turn = [int((layer + 1) % interval != 0) for layer in range(shape.num_layers)]
    if config.has("no_rope_layers"):
        turn = [int(bool(value)) for value in config.required("no_rope_layers", list)]
    table = explicit_table(config, rope_parameters(config, shape.rope_theta), shape.head_dim)
    return shape._replace(rope_tables=(table, still_table(shape.head_dim)), layer_ropes=tuple(1 - each for each in turn))


def _mistral(config: Metadata) -> ModelShape:
    return _common(config, "llama", layer_windows=_every_layer_slides(config, default=4096))


def _every_layer_slides(config: Metadata, default: int | None = None) -> tuple[int, ...]:
    return _windows(config, _layer_types(config, lambda layer: True), default)


def _qwen2(config: Metadata) -> ModelShape:
    return _common(config, "qwen2", layer_windows=_qwen_windows(config))


def _qwen_windows(config: Metadata) -> tuple[int, ...]:
    if not config.optional("use_sliding_window", False):
        return ()
    first = config.optional("max_window_layers", 28)
    return _windows(config, _layer_types(config, lambda layer: layer >= first))


def _qwen3(config: Metadata) -> ModelShape:
    return _common(config, "qwen3", head_dim=128, layer_windows=_qwen_windows(config))


def _phi3(config: Metadata) -> ModelShape:
    return _common(config, "llama", layer_windows=_every_layer_slides(config))


def _gemma(config: Metadata, family: str, **changes: Any) -> ModelShape:
    activation = "hidden_activation" if config.has("hidden_activation") else "hidden_act"
    config.refuse_unless(activation, "gelu_pytorch_tanh", "gelu_pytorch_tanh")
    config.refuse_unless("attention_bias", False, False)
    config.refuse_unless("use_bidirectional_attention", False, False)
    scale = config.optional("query_pre_attn_scalar", 256.0) ** -0.5
    return _dimensions(config, family, 10000.0, True, _GEMMA_HEAD_DIM, attention_scale=scale, **changes)


def _gemma2(config: Metadata) -> ModelShape:
    return _gemma(
        config,
        "gemma2",
        attention_soft_cap=_cap(config, "attn_logit_softcapping", 50.0),
        logits_soft_cap=_cap(config, "final_logit_softcapping", 30.0),
        layer_windows=_windows(config, _layer_types(config, lambda layer: layer % 2 == 0), 4096),
    )


def _cap(config: Metadata, key: str, default: float | None) -> float | None:
    """A null is none; the key's absence is the default."""
    if key in config.values:
        return config.required(key, float) if config.has(key) else None
    return default


def _gemma3(config: Metadata) -> ModelShape:
    pattern = config.optional("sliding_window_pattern", 6)
    are_sliding = _layer_types(config, lambda layer: (layer + 1) % pattern != 0)
    head_dim = config.positive("head_dim") if config.has("head_dim") else _GEMMA_HEAD_DIM
    ropes = (rope_parameters(config, 1_000_000.0, "rope_theta", _FULL), rope_parameters(config, 10000.0, "rope_local_base_freq", _SLIDING))
    return _gemma(
        config,
        "gemma3",
        attention_soft_cap=_cap(config, "attn_logit_softcapping", None),
        logits_soft_cap=_cap(config, "final_logit_softcapping", None),
        layer_windows=_windows(config, are_sliding, 4096),
        rope_theta=ropes[0].required("rope_theta", float),
        rope_tables=tuple(explicit_table(config, rope, head_dim) for rope in ropes),
        layer_ropes=tuple(int(is_sliding) for is_sliding in are_sliding),
    )


def _gemma3_with_vision(config: Metadata) -> ModelShape:
    """The language model inside; its configuration says only what differs from Gemma 3 4B's."""
    text = config.section("text_config")
    defaults = {"vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131_072}
    return _gemma3(Metadata(text.where, defaults | dict(text.values)))


def _mixtral(config: Metadata) -> ModelShape:
    experts = Experts(
        config.optional("num_local_experts", 8), config.optional("num_experts_per_tok", 2), config.positive("intermediate_size"), True
    )
    theta = 1_000_000.0
    return _common(config, "mixtral", theta, layer_windows=_every_layer_slides(config), experts=_checked(config, experts))


def _qwen3_moe(config: Metadata) -> ModelShape:
    return _common(config, "qwen3_moe", layer_windows=_qwen_windows(config), experts=_qwen_experts(config))


def _qwen2_moe(config: Metadata) -> ModelShape:
    config.refuse_unless("qkv_bias", True, True)
    config.refuse_unless("use_sliding_window", False, False)
    experts = _qwen_experts(config)._replace(shared_ffn_dim=config.positive("shared_expert_intermediate_size"))
    return _common(config, "qwen2_moe", experts=experts)


def _qwen_experts(config: Metadata) -> Experts:
    """Raises ValueError where some layers have experts and others none: all layers run one program."""
    config.refuse_unless("decoder_sparse_step", 1, 1)
    config.refuse_unless("mlp_only_layers", [], [])
    number = "num_experts" if config.has("num_experts") else "num_local_experts"
    experts = Experts(
        config.positive(number),
        config.positive("num_experts_per_tok"),
        config.positive("moe_intermediate_size"),
        config.optional("norm_topk_prob", False),
    )
    return _checked(config, experts)


def _checked(config: Metadata, experts: Experts) -> Experts:
    if not 1 <= experts.num_active <= experts.num_experts:
        raise ValueError(f"{config.where}: num_experts_per_tok {experts.num_active} of {experts.num_experts} experts")
    return experts


_READERS: dict[str, Callable[[Metadata], ModelShape]] = {
    "LlamaForCausalLM": _llama,
    "SmolLM3ForCausalLM": _smollm3,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
    "Gemma3ForConditionalGeneration": _gemma3_with_vision,
    "Phi3ForCausalLM": _phi3,
    "MixtralForCausalLM": _mixtral,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "Qwen2MoeForCausalLM": _qwen2_moe,
}
