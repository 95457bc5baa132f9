"""Makes tests/goldens/models/*.json: what transformers computes with small random models, one of each family, in float32.

Needs an environment of its own: `pip install torch "transformers>=5.24" safetensors`. It takes nothing from pdjax, so that the two can be
compared.

    python scripts/make_model_goldens.py [NAME ...]

A golden holds the model's config.json, the names and shapes of its tensors as transformers saves them, a prompt, the 32 tokens of the
greedy answer with the 20 best log probabilities of each, and the log probability of every token of the prompt but the first. The weights
are not stored: both sides draw them by name, as `draw` says. Seeds are tried until no two best logits come closer than 0.02 at any
step: there, rounding would decide the token.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors import safe_open
from safetensors.numpy import save_file

OUTPUT = Path(__file__).resolve().parent.parent / "tests" / "goldens" / "models"
PROMPT_TOKENS, ANSWER_TOKENS, TOP = 40, 32, 20
MIN_MARGIN = 0.02
MIN_DIFFERENT = {"gemma3": 8}  # tokens of an answer; others 13, but this one soon repeats itself with any seed
MAX_SEEDS = 200

SMALL = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.25],
    "long_factor": [1.5, 2.0, 4.0],
}
SLIDING, FULL = "sliding_attention", "full_attention"
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1, "mlp_only_layers": []}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 16, "num_hidden_layers": 4}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True, "head_dim": 16}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 1, 0], "layer_types": [FULL] * 3}),
    "mistral": ("Mistral", {"sliding_window": 16, "head_dim": 16}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1, "rope_parameters": YARN_ROPE}),
    "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "gemma2": ("Gemma2", GEMMA | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0}),
    "gemma3": (
        "Gemma3",
        GEMMA
        | {
            "layer_types": [SLIDING, SLIDING, FULL, SLIDING],
            "rope_parameters": {
                FULL: {"rope_type": "linear", "rope_theta": 100000.0, "factor": 8.0},
                SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "phi3-long": ("Phi3", {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 32}),
    "phi3-short": (
        "Phi3",
        {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 128, "max_position_embeddings": 256, "sliding_window": 16},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen3-moe": ("Qwen3Moe", EXPERTS | {"num_experts": 8, "norm_topk_prob": True, "head_dim": 16}),
    "qwen2-moe": ("Qwen2Moe", EXPERTS | {"num_experts": 6, "norm_topk_prob": False, "shared_expert_intermediate_size": 40}),
}


def draw(name: str, shape: tuple[int, ...], seed: int, is_gemma: bool) -> np.ndarray:
    """The tensor `name`, float32. Large enough for every part to matter: the answer depends on all of it."""
    values = np.random.default_rng(zlib.crc32(f"{seed}:{name}".encode())).standard_normal(shape)
    if name.endswith("norm.weight"):
        values = 0.1 * values + (1 if not is_gemma else 2 if "post_" in name else 0)
    elif len(shape) == 1:
        values = 0.3 * values
    elif name.endswith("embed_tokens.weight"):
        values = 2 * values / np.sqrt(shape[1]) if is_gemma else values
    else:
        values = 1.5 * values / np.sqrt(shape[1])
    return values.astype(np.float32)


def saved_form(prefix: str, settings: dict[str, Any], folder: Path) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """config.json, and the name and shape of every tensor, as transformers writes them."""
    config_name = f"{prefix}TextConfig" if prefix == "Gemma3" else f"{prefix}Config"
    config = getattr(transformers, config_name)(**(SMALL | settings))
    getattr(transformers, f"{prefix}ForCausalLM")(config).save_pretrained(folder)
    with safe_open(folder / "model.safetensors", "np") as file:
        return json.loads((folder / "config.json").read_text()), {name: file.get_slice(name).get_shape() for name in sorted(file.keys())}


@torch.inference_mode()
def answer(model: torch.nn.Module, prompt: list[int]) -> dict[str, Any] | None:
    """Whole sequences, without a cache. None where two logits nearly tie."""
    ids, tops, margin = list(prompt), [], float("inf")
    for _ in range(ANSWER_TOKENS):
        logprobs = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)
        best = logprobs[-1].topk(TOP)
        margin = min(margin, float(best.values[0] - best.values[1]))
        if margin < MIN_MARGIN:
            return None
        tops.append([[int(i), round(float(value), 6)] for i, value in zip(best.indices, best.values, strict=True)])
        ids.append(tops[-1][0][0])
    scored = [round(float(logprobs[i, prompt[i + 1]]), 6) for i in range(len(prompt) - 1)]
    return {"margin": margin, "prompt": prompt, "answer": ids[len(prompt) :], "tops": tops, "prompt_logprobs": scored}


def make(name: str) -> dict[str, Any]:
    prefix, settings = CASES[name]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        config, tensors = saved_form(prefix, settings, folder)
        for seed in range(MAX_SEEDS):
            save_file({each: draw(each, tuple(shape), seed, "gemma" in name) for each, shape in tensors.items()}, folder / "model.safetensors")
            model, report = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
            )
            assert not any(report.values()), report
            prompt = np.random.default_rng(seed).integers(3, SMALL["vocab_size"], PROMPT_TOKENS).tolist()
            result = answer(model.eval(), prompt)
            if result is not None and len(set(result["answer"])) >= MIN_DIFFERENT.get(name, 13):
                print(f"{name}: seed {seed}, margin {result.pop('margin'):.4f}, {len(set(result['answer']))} different tokens", flush=True)
                return {"made_with": transformers.__version__, "seed": seed, "config": config, "tensors": tensors} | result
    raise SystemExit(f"{name}: no seed of {MAX_SEEDS} is free of near ties")


def main() -> None:
    transformers.utils.logging.disable_progress_bar()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which to make; default: all of {', '.join(CASES)}")
    for name in parser.parse_args().names or CASES:
        rows = ",\n".join(f"{json.dumps(key)}: {json.dumps(value, separators=(',', ':'))}" for key, value in make(name).items())
        (OUTPUT / f"{name}.json").write_text(f"{{{rows}}}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
