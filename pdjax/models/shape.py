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
    """Describe every weight once, by path. Matrices are stored [in, out]; layers are stacked on a leading axis.

    `layers/qkv` holds the columns of q, k and v in this order, `layers/gate_up` those of gate and up. Rotary embedding pairs
    column i of a head with column i + head_dim / 2. `lm_head` exists only where embeddings are not tied.
    """
    layers, embed, ffn = shape.num_layers, shape.embed_dim, shape.ffn_dim
    q_dim, kv_dim = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    specs = {
        "embed": WeightSpec((shape.vocab_size, embed), ("vocab", "embed")),
        "layers/attn_norm": WeightSpec((layers, embed), ("layers", "embed")),
        "layers/qkv": WeightSpec((layers, embed, q_dim + 2 * kv_dim), ("layers", "embed", "qkv")),
        "layers/attn_out": WeightSpec((layers, q_dim, embed), ("layers", "heads", "embed")),
        "layers/mlp_norm": WeightSpec((layers, embed), ("layers", "embed")),
        "layers/gate_up": WeightSpec((layers, embed, 2 * ffn), ("layers", "embed", "ffn")),
        "layers/down": WeightSpec((layers, ffn, embed), ("layers", "ffn", "embed")),
        "final_norm": WeightSpec((embed,), ("embed",)),
    }
    if not shape.tied_embeddings:
        specs["lm_head"] = WeightSpec((embed, shape.vocab_size), ("embed", "vocab"))
    return specs
