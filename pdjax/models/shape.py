"""What a model is, apart from its numbers: its dimensions and the one description of its weights that loading, sharding, conversion and
random initialisation are maps over. Imports no JAX: a router knows models by this module alone.

Dimensions, here and in every docstring of the engine: `layers`, `vocab`, `embed` (E), `heads` (H), `kv_heads` (K), `head_dim` (D),
`ffn` (F), `experts` (N); `qkv` = (H + 2K) * D.
"""

from __future__ import annotations

from typing import NamedTuple

NO_WINDOW = 1 << 30
"""The window of a layer that sees everything, in a model where other layers have one."""


class RopeTable(NamedTuple):
    """The angles of one rotary embedding: pair i of a head turns by `frequencies[i]` radians a position, and what turns is multiplied by
    `magnitude`. Fewer pairs than head_dim / 2: only the head's first rows turn.

    A model that is to see more than `short_context_tokens` turns by `long_frequencies` instead, where there are any.
    """

    frequencies: tuple[float, ...]
    magnitude: float = 1.0
    long_frequencies: tuple[float, ...] = ()
    short_context_tokens: int = 0


class Experts(NamedTuple):
    """The mixture of experts that stands in place of every layer's MLP.

    `are_normed`: the weights of the `num_active` experts of a token add up to 1. `shared_ffn_dim`: size of an expert that every token
    goes through, behind a gate of its own; 0: there is none.
    """

    num_experts: int
    num_active: int
    ffn_dim: int
    are_normed: bool
    shared_ffn_dim: int = 0


class ModelShape(NamedTuple):
    """Dimensions and constants of a decoder.

    `family`: which block computes a layer (`pdjax.models.registry`). What follows it is empty or None where a model has no use for it.
    """

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
    family: str = "llama"
    rope_tables: tuple[RopeTable, ...] = ()
    """Empty: one, which turns whole heads at the frequencies of `rope_theta`."""
    layer_ropes: tuple[int, ...] = ()
    """Which table each layer turns by. Empty: all by the first."""
    layer_windows: tuple[int, ...] = ()
    """How many positions each layer sees, its own included; `NO_WINDOW`: all. Empty: no layer has a window."""
    attention_scale: float | None = None
    """Factor of the scores; None: 1 / sqrt(head_dim)."""
    attention_soft_cap: float | None = None
    logits_soft_cap: float | None = None
    experts: Experts | None = None

    def kv_bytes_per_token(self, itemsize: int) -> int:
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * itemsize

    def is_long(self, table: RopeTable) -> bool:
        """Whether `table` turns by its long frequencies."""
        return bool(table.long_frequencies) and self.max_context_tokens > table.short_context_tokens

    def rope_variant(self) -> str:
        """What KV depends on beside the weights: the same model served for short and for long contexts may turn differently."""
        return ":long" if any(self.is_long(table) for table in self.rope_tables) else ""

    def windows(self) -> tuple[int, ...]:
        """`layer_windows`, or nothing where none of them is shorter than the longest context."""
        return self.layer_windows if min(self.layer_windows, default=NO_WINDOW) < self.max_context_tokens else ()


class WeightSpec(NamedTuple):
    """One weight: its shape and the logical name of each axis."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]

    @property
    def is_layered(self) -> bool:
        """Whether the first axis runs over layers."""
        return self.axes[0] == "layers"

    @property
    def is_projection(self) -> bool:
        """Whether it is one of the large matrices: no norm, bias or router, and no gate of a single row."""
        names = [name for name in self.axes if name not in ("layers", "experts")]
        return len(names) == 2 and not _PROJECTED.isdisjoint(names)

    @property
    def summed_axis(self) -> int:
        """Of a projection: the axis that products sum over."""
        return len(self.shape) - (2 if "experts" in self.axes else 1)

    def of_scales(self) -> WeightSpec:
        """One number for each of a projection's results: the weight without its summed axis."""
        axis = self.summed_axis
        return WeightSpec(self.shape[:axis] + self.shape[axis + 1 :], self.axes[:axis] + self.axes[axis + 1 :])

    def of_one_layer(self) -> WeightSpec:
        """A layered weight without its first axis."""
        assert self.is_layered, f"a weight with axes {self.axes}"
        return WeightSpec(self.shape[1:], self.axes[1:])

    def stacked(self, num_layers: int) -> WeightSpec:
        """The reverse."""
        return WeightSpec((num_layers, *self.shape), ("layers", *self.axes))


_PROJECTED = frozenset(("vocab", "qkv", "heads", "gate_up", "ffn"))


class _Parts(NamedTuple):
    """What a family's layers hold beyond `attn_norm`, `qkv`, `attn_out` and `mlp_norm`."""

    qkv_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False


_FAMILIES = {
    "llama": _Parts(),
    "qwen2": _Parts(qkv_bias=True),
    "qwen3": _Parts(qk_norm=True),
    "gemma2": _Parts(post_norms=True),
    "gemma3": _Parts(post_norms=True, qk_norm=True),
    "mixtral": _Parts(),
    "qwen2_moe": _Parts(qkv_bias=True),
    "qwen3_moe": _Parts(qk_norm=True),
}


def weight_specs(shape: ModelShape) -> dict[str, WeightSpec]:
    """Describe every weight once, by path. Matrices are stored [out, in], those of experts [in, out], as grouped products take them;
    layers are stacked on a leading axis.

    `layers/qkv` holds the rows of q, k and v in this order, `layers/gate_up` those of gate and up. Rotary embedding pairs row i of
    a head with row i + n, where n is the number of pairs that turn. `lm_head` exists only where embeddings are not tied.
    """
    layers, embed = shape.num_layers, shape.embed_dim
    specs = {
        "embed": WeightSpec((shape.vocab_size, embed), ("vocab", "embed")),
        **{f"layers/{name}": WeightSpec((layers, *one.shape), ("layers", *one.axes)) for name, one in _layer_specs(shape).items()},
        "final_norm": WeightSpec((embed,), ("embed",)),
    }
    if not shape.tied_embeddings:
        specs["lm_head"] = WeightSpec((shape.vocab_size, embed), ("vocab", "embed"))
    return specs


def _layer_specs(shape: ModelShape) -> dict[str, WeightSpec]:
    """The weights of one layer."""
    parts, embed = _FAMILIES[shape.family], shape.embed_dim
    q_dim, kv_dim = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    norm = WeightSpec((embed,), ("embed",))
    specs = {
        "attn_norm": norm,
        "qkv": WeightSpec((q_dim + 2 * kv_dim, embed), ("qkv", "embed")),
        "attn_out": WeightSpec((embed, q_dim), ("embed", "heads")),
        "mlp_norm": norm,
    }
    if parts.qkv_bias:
        specs["qkv_bias"] = WeightSpec((q_dim + 2 * kv_dim,), ("qkv",))
    if parts.qk_norm:
        specs |= {name: WeightSpec((shape.head_dim,), ("head_dim",)) for name in ("q_norm", "k_norm")}
    if parts.post_norms:
        specs |= {"attn_post_norm": norm, "mlp_post_norm": norm}
    return specs | (_mlp_specs(embed, shape.ffn_dim) if shape.experts is None else _expert_specs(embed, shape.experts))


def _mlp_specs(embed: int, ffn: int) -> dict[str, WeightSpec]:
    return {"gate_up": WeightSpec((2 * ffn, embed), ("gate_up", "embed")), "down": WeightSpec((embed, ffn), ("embed", "ffn"))}


def _expert_specs(embed: int, experts: Experts) -> dict[str, WeightSpec]:
    number, ffn = experts.num_experts, experts.ffn_dim
    specs = {
        "router": WeightSpec((number, embed), ("routes", "embed")),
        "experts_gate_up": WeightSpec((number, embed, 2 * ffn), ("experts", "embed", "gate_up")),
        "experts_down": WeightSpec((number, ffn, embed), ("experts", "ffn", "embed")),
    }
    if experts.shared_ffn_dim:
        shared = _mlp_specs(embed, experts.shared_ffn_dim)
        specs |= {f"shared_{name}": spec for name, spec in shared.items()}
        specs["shared_gate"] = WeightSpec((1, embed), ("one", "embed"))
    return specs
