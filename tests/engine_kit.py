"""A small random model, an oracle for it without pages, chunks or buckets, and short ways to drive an engine."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pdjax.config.schema import EngineConfig
from pdjax.engine.batch import DecodeSeq, PrefillSeq, StepOutput
from pdjax.engine.engine import Engine
from pdjax.kernels.xla import Tuning, XlaAttention
from pdjax.models.shape import Experts, ModelShape, weight_specs
from pdjax.protocol import Sampling

SHAPE = ModelShape(
    num_layers=2,
    vocab_size=61,
    embed_dim=24,
    num_heads=3,
    num_kv_heads=1,
    head_dim=8,
    ffn_dim=32,
    rope_theta=10000.0,
    norm_eps=1e-5,
    max_context_tokens=128,
    tied_embeddings=False,
)
WIDE = SHAPE._replace(num_heads=8, num_kv_heads=2, vocab_size=64)
MIXTURE = Experts(num_experts=4, num_active=2, ffn_dim=16, are_normed=True)
WIDE_SHAPES = {
    "llama": WIDE,
    "tied, with as many KV heads as heads": WIDE._replace(num_kv_heads=8, tied_embeddings=True),
    "qwen2, a vocabulary that does not divide": WIDE._replace(family="qwen2", vocab_size=61),
    "gemma2": WIDE._replace(family="gemma2", attention_soft_cap=5.0, logits_soft_cap=3.0, layer_windows=(8, 1 << 30)),
    "experts on chips of their own": WIDE._replace(family="mixtral", experts=MIXTURE),
    "experts split": WIDE._replace(family="qwen3_moe", experts=MIXTURE._replace(num_experts=3)),
    "experts with a shared one": WIDE._replace(family="qwen2_moe", experts=MIXTURE._replace(shared_ffn_dim=8)),
}
"""Models that four chips can share, one for each way of sharing."""
GREEDY = Sampling(max_tokens=1000, temperature=0.0)
PROMPT = [int(token) for token in np.random.default_rng(0).integers(0, 61, 23)]
CONFIG = EngineConfig(
    page_size=4,
    num_pages=160,
    max_running=16,
    max_prefill_seqs=3,
    prefill_buckets=(4, 8, 32),
    decode_buckets=(1, 4, 16),
    transfer_buckets=(1, 4),
    compile_cache=None,
)
SMALL_BLOCKS = Tuning(large_query_tile=16, query_tile=8, prefill_kv_block=16, decode_kv_block=8)
"""So that contexts of some dozen tokens cross several tiles and blocks."""


def random_weights(shape: ModelShape = SHAPE, seed: int = 0) -> dict[str, np.ndarray]:
    """Large enough for attention and MLP to matter: the greedy answer of a prompt depends on all of it."""
    rng = np.random.default_rng(seed)
    weights = {}
    for path, spec in weight_specs(shape).items():
        values = rng.normal(size=spec.shape)
        if path.endswith("norm"):
            values = 1 + 0.1 * values
        elif path != "embed":
            values = 1.5 * values / np.sqrt(spec.shape[-1])
        weights[path] = values.astype(np.float32)
    return weights


def make_engine(config: EngineConfig = CONFIG, shape: ModelShape = SHAPE, device_index: int = 0) -> Engine:
    device = jax.devices()[device_index]
    return Engine(shape, random_weights(shape), config, jnp.float32, device, XlaAttention(SMALL_BLOCKS))


def greedy_with_logprobs(**changes: object) -> Sampling:
    return Sampling(**{"max_tokens": 1000, "temperature": 0.0, "logprobs": 20, **changes})


def dense_logprobs(weights: dict[str, np.ndarray], tokens: list[int], shape: ModelShape = SHAPE) -> np.ndarray:
    """Log probabilities after every token, float64[n, vocab]: the architecture in plain numpy, whole rows, in float64."""
    w = {path: array.astype(np.float64) for path, array in weights.items()}
    heads, kv_heads, dim, n = shape.num_heads, shape.num_kv_heads, shape.head_dim, len(tokens)
    angles = np.arange(n)[:, None] / shape.rope_theta ** (np.arange(0, dim, 2) / dim)
    turn = np.exp(1j * angles)[:, None]

    def norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + shape.norm_eps) * scale

    def rotated(x: np.ndarray) -> np.ndarray:
        turned = (x[..., : dim // 2] + 1j * x[..., dim // 2 :]) * turn
        return np.concatenate([turned.real, turned.imag], -1)

    x = w["embed"][tokens]
    for layer in range(shape.num_layers):
        h = (norm(x, w["layers/attn_norm"][layer]) @ w["layers/qkv"][layer].T).reshape(n, heads + 2 * kv_heads, dim)
        q, k, v = rotated(h[:, :heads]), rotated(h[:, heads : heads + kv_heads]), h[:, heads + kv_heads :]
        k, v = np.repeat(k, heads // kv_heads, 1), np.repeat(v, heads // kv_heads, 1)
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(dim)
        scores[:, np.triu(np.ones((n, n), bool), 1)] = -np.inf
        probs = np.exp(scores - scores.max(-1, keepdims=True))
        attended = np.einsum("hqk,khd->qhd", probs / probs.sum(-1, keepdims=True), v).reshape(n, -1)
        x = x + attended @ w["layers/attn_out"][layer].T
        gate, up = np.split(norm(x, w["layers/mlp_norm"][layer]) @ w["layers/gate_up"][layer].T, 2, -1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w["layers/down"][layer].T
    logits = norm(x, w["final_norm"]) @ (w["embed"] if shape.tied_embeddings else w["lm_head"]).T
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def prefill_chunks(engine: Engine, slot: int, prompt: list[int], pages: list[int], chunks: list[int], sampling: Sampling) -> StepOutput:
    """Prefill a prompt in chunks of these lengths, alone; returns the last step's output."""
    start = 0
    for length in chunks:
        is_last = start + length == len(prompt)
        seq = PrefillSeq(slot, prompt[start : start + length], start, pages, sampling, 0 if is_last else None)
        handle, start = engine.launch_prefill([seq]), start + length
    return engine.read(handle)


def generate(engine: Engine, slot: int, prompt: list[int], pages: list[int], num_tokens: int, sampling: Sampling) -> list[int]:
    """Prefill in one go or in the largest chunks, then decode alone; each step is launched before the one before it is read."""
    largest = engine.config.prefill_buckets[-1]
    chunks = [min(largest, len(prompt) - start) for start in range(0, len(prompt), largest)]
    tokens = [int(prefill_chunks(engine, slot, prompt, pages, chunks, sampling).tokens[0])]
    handles = [engine.launch_decode([DecodeSeq(slot, None, len(prompt) + i, pages, sampling, i + 1)]) for i in range(num_tokens - 1)]
    return tokens + [int(engine.read(handle).tokens[0]) for handle in handles]


def poison_pool(engine: Engine) -> None:
    """NaN into every slot of every page, the null page included."""
    rows = engine.config.transfer_buckets[-1]
    chunk = np.full((rows, SHAPE.num_layers, engine.config.page_size, 2 * SHAPE.num_kv_heads, SHAPE.head_dim), np.nan, np.float32)
    for first in range(0, engine.config.num_pages, rows):
        pages = list(range(first, min(first + rows, engine.config.num_pages)))
        engine.install(pages, chunk[: len(pages)])
