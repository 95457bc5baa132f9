"""Names that llama.cpp gives to weights, and where each of them goes in the abstract tree."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pdjax.checkpoints.parts import Part
from pdjax.models.shape import Experts, ModelShape

ROPE_TENSORS = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})
"""Read into the shape."""


class Naming(NamedTuple):
    """`are_rows_interleaved`: rows of q and k are permuted. `is_fused`: q, k and v are one tensor, and gate and up."""

    are_rows_interleaved: bool
    is_fused: bool

    @classmethod
    def of(cls, architecture: str) -> Naming:
        return cls(architecture in ("llama", "smollm3"), architecture == "phi3")


def parts_of(shape: ModelShape, naming: Naming) -> Iterator[Part]:
    """Every tensor that the model consists of."""
    embed = shape.embed_dim
    shift = -1.0 if shape.family in ("gemma2", "gemma3") else 0.0  # llama.cpp stores 1 + weight of these norms
    yield Part("token_embd.weight", (shape.vocab_size, embed), "embed")
    for layer in range(shape.num_layers):
        block = f"blk.{layer}."
        yield from _norms(shape, block, layer, shift)
        yield from _attention(shape, block, layer, naming)
        if shape.experts is None:
            yield from _mlp(block, shape.ffn_dim, embed, layer, naming.is_fused)
        else:
            yield from _experts(block, shape.experts, embed, layer)
    yield Part("output_norm.weight", (embed,), "final_norm", added=shift)
    if not shape.tied_embeddings:
        yield Part("output.weight", (shape.vocab_size, embed), "lm_head")


def _norms(shape: ModelShape, block: str, layer: int, shift: float) -> Iterator[Part]:
    names = {"attn_norm": "attn_norm", "ffn_norm": "mlp_norm"}
    if shape.family in ("gemma2", "gemma3"):
        names |= {"post_attention_norm": "attn_post_norm", "post_ffw_norm": "mlp_post_norm"}
    for name, weight in names.items():
        yield Part(f"{block}{name}.weight", (shape.embed_dim,), f"layers/{weight}", (layer,), added=shift)
    if shape.family in ("qwen3", "qwen3_moe", "gemma3"):
        for name in ("q_norm", "k_norm"):
            yield Part(f"{block}attn_{name}.weight", (shape.head_dim,), f"layers/{name}", (layer,), added=shift)


def _attention(shape: ModelShape, block: str, layer: int, naming: Naming) -> Iterator[Part]:
    embed, q_dim, kv_dim = shape.embed_dim, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    rows = {"q": (0, q_dim, shape.num_heads), "k": (q_dim, kv_dim, shape.num_kv_heads), "v": (q_dim + kv_dim, kv_dim, None)}
    if naming.is_fused:
        yield Part(f"{block}attn_qkv.weight", (q_dim + 2 * kv_dim, embed), "layers/qkv", (layer,))
    else:
        for name, (first, number, heads) in rows.items():
            heads = heads if naming.are_rows_interleaved else None
            yield Part(f"{block}attn_{name}.weight", (number, embed), "layers/qkv", (layer,), first, rotary_heads=heads)
    if shape.family in ("qwen2", "qwen2_moe"):
        for name, (first, number, _) in rows.items():
            yield Part(f"{block}attn_{name}.bias", (number,), "layers/qkv_bias", (layer,), first)
    yield Part(f"{block}attn_output.weight", (embed, q_dim), "layers/attn_out", (layer,))


def _mlp(block: str, ffn: int, embed: int, layer: int, is_fused: bool) -> Iterator[Part]:
    if is_fused:
        yield Part(f"{block}ffn_up.weight", (2 * ffn, embed), "layers/gate_up", (layer,))
    else:
        yield Part(f"{block}ffn_gate.weight", (ffn, embed), "layers/gate_up", (layer,))
        yield Part(f"{block}ffn_up.weight", (ffn, embed), "layers/gate_up", (layer,), ffn)
    yield Part(f"{block}ffn_down.weight", (embed, ffn), "layers/down", (layer,))


def _experts(block: str, experts: Experts, embed: int, layer: int) -> Iterator[Part]:
    number, ffn = experts.num_experts, experts.ffn_dim
    yield Part(f"{block}ffn_gate_inp.weight", (number, embed), "layers/router", (layer,))
    for name, shape, path, first in (
        ("gate", (number, ffn, embed), "layers/experts_gate_up", 0),
        ("up", (number, ffn, embed), "layers/experts_gate_up", ffn),
        ("down", (number, embed, ffn), "layers/experts_down", 0),
    ):
        for entry in range(number):
            yield Part(f"{block}ffn_{name}_exps.weight", shape, path, (layer, entry), first, entry, is_transposed=True)
    if shared := experts.shared_ffn_dim:
        yield Part(f"{block}ffn_gate_inp_shexp.weight", (embed,), "layers/shared_gate", (layer,))
        yield Part(f"{block}ffn_gate_shexp.weight", (shared, embed), "layers/shared_gate_up", (layer,))
        yield Part(f"{block}ffn_up_shexp.weight", (shared, embed), "layers/shared_gate_up", (layer,), shared)
        yield Part(f"{block}ffn_down_shexp.weight", (embed, shared), "layers/shared_down", (layer,))
