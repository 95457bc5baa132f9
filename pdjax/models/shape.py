"""What a model is, apart from its numbers: its dimensions and the one description of its weights that loading, sharding and
random initialisation are maps over.

Dimensions, here and in every docstring of the engine: `layers`, `vocab`, `embed` (E), `heads` (H), `kv_heads` (K), `head_dim` (D),
`ffn` (F); `qkv` = (H + 2K) * D.
"""

from __future__ import annotations

from typing import NamedTuple


class ModelShape(NamedTuple):
    """Dimensions and constants of a Llama-like model."""

    num_layers: int
    vocab_size: int
    embed_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_dim: int
    rope_theta: float
    norm_eps: float
    max_context_tokens: int
    tied_embeddings: bool

    def kv_bytes_per_token(self, itemsize: int) -> int:
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * itemsize


class WeightSpec(NamedTuple):
    """One weight: its shape and the logical name of each axis."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]


def weight_specs(shape: ModelShape) -> dict[str, WeightSpec]:
    """Describe every weight once, by path. Matrices are stored [out, in]; layers are stacked on a leading axis.

    `layers/qkv` holds the rows of q, k and v in this order, `layers/gate_up` those of gate and up. Rotary embedding pairs
    row i of a head with row i + head_dim / 2. `lm_head` exists only where embeddings are not tied.
    """
    layers, embed, ffn = shape.num_layers, shape.embed_dim, shape.ffn_dim
    q_dim, kv_dim = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    specs = {
        "embed": WeightSpec((shape.vocab_size, embed), ("vocab", "embed")),
        "layers/attn_norm": WeightSpec((layers, embed), ("layers", "embed")),
        "layers/qkv": WeightSpec((layers, q_dim + 2 * kv_dim, embed), ("layers", "qkv", "embed")),
        "layers/attn_out": WeightSpec((layers, embed, q_dim), ("layers", "embed", "heads")),
        "layers/mlp_norm": WeightSpec((layers, embed), ("layers", "embed")),
        "layers/gate_up": WeightSpec((layers, 2 * ffn, embed), ("layers", "ffn", "embed")),
        "layers/down": WeightSpec((layers, embed, ffn), ("layers", "embed", "ffn")),
        "final_norm": WeightSpec((embed,), ("embed",)),
    }
    if not shape.tied_embeddings:
        specs["lm_head"] = WeightSpec((shape.vocab_size, embed), ("vocab", "embed"))
    return specs
