"""Names that Hugging Face checkpoints give to weights, and where each of them goes in the abstract tree."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pdjax.checkpoints.parts import Part
from pdjax.models.shape import Experts, ModelShape

_MIXTRAL_EXPERT = {"gate": "w1", "up": "w3", "down": "w2"}
_QWEN_EXPERT = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


class Naming(NamedTuple):
    """`prefix` stands before the names of the decoder, `head` before `lm_head`. `is_fused`: q, k and v are one tensor, and gate and up."""

    prefix: str = "model."
    head: str = ""
    is_fused: bool = False


def parts_of(shape: ModelShape, naming: Naming) -> Iterator[Part]:
    """Every tensor that the model consists of."""
    embed = shape.embed_dim
    yield Part(f"{naming.prefix}embed_tokens.weight", (shape.vocab_size, embed), "embed")
    for layer in range(shape.num_layers):
        block = f"{naming.prefix}layers.{layer}."
        yield from _norms(shape, block, layer)
        yield from _attention(shape, block, layer, naming.is_fused)
        if shape.experts is None:
            yield from _mlp(block + "mlp.", "layers/", shape.ffn_dim, embed, layer, naming.is_fused)
        elif shape.family == "mixtral":
            yield from _experts(block + "block_sparse_moe.", shape.experts, embed, layer, _MIXTRAL_EXPERT)
        else:
            yield from _experts(block + "mlp.", shape.experts, embed, layer, _QWEN_EXPERT)
            yield from _shared_expert(block + "mlp.", shape.experts, embed, layer)
    yield Part(f"{naming.prefix}norm.weight", (embed,), "final_norm")
    if not shape.tied_embeddings:
        yield Part(f"{naming.head}lm_head.weight", (shape.vocab_size, embed), "lm_head")


def _norms(shape: ModelShape, block: str, layer: int) -> Iterator[Part]:
    names = {"input_layernorm": "attn_norm", "post_attention_layernorm": "mlp_norm"}
    if shape.family in ("gemma2", "gemma3"):
        names = {
            "input_layernorm": "attn_norm",
            "post_attention_layernorm": "attn_post_norm",
            "pre_feedforward_layernorm": "mlp_norm",
            "post_feedforward_layernorm": "mlp_post_norm",
        }
    for name, weight in names.items():
        yield Part(f"{block}{name}.weight", (shape.embed_dim,), f"layers/{weight}", (layer,))
    if shape.family in ("qwen3", "qwen3_moe", "gemma3"):
        for name in ("q_norm", "k_norm"):
            yield Part(f"{block}self_attn.{name}.weight", (shape.head_dim,), f"layers/{name}", (layer,))


def _attention(shape: ModelShape, block: str, layer: int, is_fused: bool) -> Iterator[Part]:
    embed, q_dim, kv_dim = shape.embed_dim, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    if is_fused:
        yield Part(f"{block}self_attn.qkv_proj.weight", (q_dim + 2 * kv_dim, embed), "layers/qkv", (layer,))
    else:
        for name, first, rows in (("q", 0, q_dim), ("k", q_dim, kv_dim), ("v", q_dim + kv_dim, kv_dim)):
            yield Part(f"{block}self_attn.{name}_proj.weight", (rows, embed), "layers/qkv", (layer,), first)
            if shape.family in ("qwen2", "qwen2_moe"):
                yield Part(f"{block}self_attn.{name}_proj.bias", (rows,), "layers/qkv_bias", (layer,), first)
    yield Part(f"{block}self_attn.o_proj.weight", (embed, q_dim), "layers/attn_out", (layer,))


def _mlp(block: str, path: str, ffn: int, embed: int, layer: int, is_fused: bool) -> Iterator[Part]:
    if is_fused:
        yield Part(f"{block}gate_up_proj.weight", (2 * ffn, embed), f"{path}gate_up", (layer,))
    else:
        yield Part(f"{block}gate_proj.weight", (ffn, embed), f"{path}gate_up", (layer,))
        yield Part(f"{block}up_proj.weight", (ffn, embed), f"{path}gate_up", (layer,), ffn)
    yield Part(f"{block}down_proj.weight", (embed, ffn), f"{path}down", (layer,))


def _experts(block: str, experts: Experts, embed: int, layer: int, names: dict[str, str]) -> Iterator[Part]:
    ffn = experts.ffn_dim
    yield Part(f"{block}gate.weight", (experts.num_experts, embed), "layers/router", (layer,))
    for number in range(experts.num_experts):
        expert, index = f"{block}experts.{number}.", (layer, number)
        yield Part(f"{expert}{names['gate']}.weight", (ffn, embed), "layers/experts_gate_up", index, is_transposed=True)
        yield Part(f"{expert}{names['up']}.weight", (ffn, embed), "layers/experts_gate_up", index, ffn, is_transposed=True)
        yield Part(f"{expert}{names['down']}.weight", (embed, ffn), "layers/experts_down", index, is_transposed=True)


def _shared_expert(block: str, experts: Experts, embed: int, layer: int) -> Iterator[Part]:
    if experts.shared_ffn_dim:
        yield from _mlp(f"{block}shared_expert.", "layers/shared_", experts.shared_ffn_dim, embed, layer, is_fused=False)
        yield Part(f"{block}shared_expert_gate.weight", (1, embed), "layers/shared_gate", (layer,))
