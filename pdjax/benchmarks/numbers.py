"""How far narrow numbers move what a model says, and what they save.

A text runs through an engine as a prompt, in chunks, so that attention reads keys and values out of the pool; then the model answers
greedily, a token at a time, to the whole text and to parts of it. Every variant does the same, and is held against the base.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from pdjax.api.tokenizer import Tokenizer
from pdjax.benchmarks.report import SCHEMA_VERSION
from pdjax.checkpoints import Checkpoint, open_checkpoint
from pdjax.config.load import load_config
from pdjax.config.schema import Config, EngineConfig
from pdjax.engine.batch import DecodeSeq, PrefillSeq
from pdjax.engine.compilation import enable_compile_cache
from pdjax.engine.engine import Engine
from pdjax.protocol import Sampling

TEXT = Path(__file__).parent / "traces" / "numbers.txt"
CHUNK_TOKENS = 128
"""Of the prompt, in one step."""
SETTINGS = ("kv_dtype", "weights_dtype")
"""Those of `engine` whose every value is a variant unless others are asked for."""
NUM_ANSWERS = 4
"""To the whole text and to its first three, two and one quarters."""

_GREEDY = Sampling(max_tokens=1 << 20, temperature=0.0)


class NumbersSettings(NamedTuple):
    """`base`: overrides (`section.field=value`) of the quickstart that hold for all. `variants`: further ones, of each variant."""

    base: tuple[str, ...] = ()
    variants: tuple[tuple[str, ...], ...] = ()
    text: Path = TEXT
    tokens: int = 600
    answer_tokens: int = 64

    def check(self) -> None:
        """Raises ValueError for what cannot be measured, before anything is loaded."""
        if self.tokens < 2 * NUM_ANSWERS or self.answer_tokens < 1:
            raise ValueError(f"--tokens must be at least {2 * NUM_ANSWERS} and --answer 1, got {self.tokens} and {self.answer_tokens}")
        for overrides in ((), *self.variants):
            load_config(None, (*self.base, *overrides))


class Said(NamedTuple):
    """What an engine says to the text. Row i: `logprobs` of the text's token i + 1 behind the ones before it, and the `best` token instead.
    `answers`: to the whole text first."""

    logprobs: np.ndarray  # float32[tokens - 1]
    best: np.ndarray  # int32[tokens - 1]
    answers: list[list[int]]
    weight_bytes: int
    kv_bytes_per_token: int

    @property
    def perplexity(self) -> float:
        return math.exp(-float(np.mean(self.logprobs, dtype=np.float64)))


def default_variants(base: Config) -> tuple[tuple[str, ...], ...]:
    """Each value of each of `SETTINGS` that changes something, and the narrowest of all together."""
    variants = []
    for name in SETTINGS:
        now = {"kv_dtype": base.kv_dtype, "weights_dtype": base.weights_dtype}[name]
        values = [value for value in get_args(EngineConfig.model_fields[name].annotation) if value not in ("auto", now)]
        variants += [(f"engine.{name}={value}",) for value in values]
    return (*variants, tuple(f"engine.{name}=int8" for name in SETTINGS))


def run(settings: NumbersSettings, on_step: Callable[[str], None]) -> dict[str, Any]:
    """Measure the base and every variant. `on_step(name)` is called before each. Raises ValueError where the text is too short."""
    base = load_config(None, settings.base)
    if base.engine.compile_cache is not None:
        enable_compile_cache(base.engine.compile_cache)
    checkpoint = open_checkpoint(base.model.source)
    tokens = text_tokens(checkpoint, settings)
    weights: dict[str, dict[str, np.ndarray]] = {}
    said: list[Said] = []
    variants = ((), *settings.variants)
    for overrides in variants:
        on_step(name_of(overrides))
        config = load_config(None, (*settings.base, *overrides))
        if config.model.dtype not in weights:
            weights[config.model.dtype] = checkpoint.load_weights(np.dtype(config.model.dtype), lambda done, total: None)
        said.append(measure(checkpoint, weights[config.model.dtype], config, tokens, settings.answer_tokens))
    return {
        "schema_version": SCHEMA_VERSION,
        "benchmark": "numbers",
        "model": checkpoint.name,
        "platform": jax.default_backend(),
        "settings": settings._asdict() | {"text": settings.text.name, "model_dtype": base.model.dtype},
        "results": [{"variant": name_of(names)} | compared(own, said[0]) for names, own in zip(variants, said, strict=True)],
    }


def name_of(overrides: Sequence[str]) -> str:
    return ", ".join(override.removeprefix("engine.").replace("=", " ") for override in overrides) or "base"


def text_tokens(checkpoint: Checkpoint, settings: NumbersSettings) -> list[int]:
    data = checkpoint.tokenizer_data()
    tokens = [*data.first_ids, *Tokenizer(data).encode(settings.text.read_text(encoding="utf-8"))]
    if len(tokens) < settings.tokens:
        raise ValueError(f"{settings.text} has {len(tokens)} tokens, --tokens is {settings.tokens}")
    return tokens[: settings.tokens]


def measure(checkpoint: Checkpoint, weights: dict[str, np.ndarray], config: Config, tokens: list[int], answer_tokens: int) -> Said:
    """One engine of its own, on JAX's first device, for one sequence."""
    context = len(tokens) + answer_tokens
    pages = list(range(1, 1 - (-context // config.engine.page_size)))
    sizes = {"max_running": 1, "max_prefill_seqs": 1, "prefill_buckets": (CHUNK_TOKENS,), "decode_buckets": (1,), "transfer_buckets": (1,)}
    own = config.engine.model_copy(update={**sizes, "num_pages": max(4, len(pages) + 1)})
    shape = checkpoint.shape._replace(max_context_tokens=min(config.model.max_context_tokens, checkpoint.shape.max_context_tokens))
    engine = Engine(shape, weights, own, np.dtype(config.model.dtype))
    logprobs, best = _prefilled(engine, tokens, pages)
    # An answer to a part writes over the pages of what follows that part, which no smaller part needs.
    parts = [tokens[: len(tokens) * quarters // NUM_ANSWERS] for quarters in range(NUM_ANSWERS, 0, -1)]
    return Said(
        logprobs=logprobs,
        best=best,
        answers=[_answered(engine, part, pages, answer_tokens) for part in parts],
        weight_bytes=sum(leaf.nbytes for leaf in jax.tree.leaves(engine.weights)),
        kv_bytes_per_token=shape.kv_bytes_per_token(jnp.dtype(config.kv_dtype).itemsize),
    )


def _prefilled(engine: Engine, tokens: list[int], pages: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Log probabilities of the tokens but the first, and the best in their places."""
    logprobs, best = [], []
    for start in range(0, len(tokens), CHUNK_TOKENS):
        chunk, targets = tokens[start : start + CHUNK_TOKENS], tokens[start + 1 : start + 1 + CHUNK_TOKENS]
        seq = PrefillSeq(0, chunk, start, pages, _GREEDY, None, range(len(targets)), targets)
        step = engine.read(engine.launch_prefill([seq]))
        if step.prompt is not None:
            logprobs.append(step.prompt.logprobs)
            best.append(step.prompt.top_ids[:, 0])
    return np.concatenate(logprobs), np.concatenate(best)


def _answered(engine: Engine, tokens: list[int], pages: list[int], number: int) -> list[int]:
    """What follows `tokens`, whose KV is in the pool; that of the last of them is computed again."""
    answer: list[int] = []
    for index in range(number):
        token = answer[-1] if answer else tokens[-1]
        step = engine.launch_decode([DecodeSeq(0, token, len(tokens) + index - 1, pages, _GREEDY, index)])
        answer.append(int(engine.read(step).tokens[0]))
    return answer


def num_shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens before the first that differs."""
    differs = [index for index, (own, others) in enumerate(zip(one, other, strict=True)) if own != others]
    return differs[0] if differs else len(one)


def compared(own: Said, base: Said) -> dict[str, Any]:
    """Changes are of log probabilities of the text's tokens, without their sign, in nats. `same_best`: how many of the places have the same
    best token. `same_answer`: how many tokens of each greedy answer come before the first that differs, all together."""
    changes = np.abs(own.logprobs.astype(np.float64) - base.logprobs)
    return {
        "mean_change": float(changes.mean()),
        "max_change": float(changes.max()),
        "changes": [round(float(change), 6) for change in changes],
        "perplexity": own.perplexity,
        "same_best": int(np.sum(own.best == base.best)),
        "places": len(changes),
        "same_answer": sum(num_shared(*answers) for answers in zip(own.answers, base.answers, strict=True)),
        "answer_tokens": sum(map(len, own.answers)),
        "weight_bytes": own.weight_bytes,
        "kv_bytes_per_token": own.kv_bytes_per_token,
    }
