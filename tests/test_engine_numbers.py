"""Narrower KV: how far log probabilities move, and that both sides have to agree."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pdjax.config.load import ConfigError, load_config
from pdjax.engine.batch import DecodeSeq, PrefillSeq
from pdjax.engine.engine import Engine
from pdjax.kernels.xla import XlaAttention
from tests.engine_kit import CONFIG, SHAPE, SMALL_BLOCKS, greedy_with_logprobs, random_weights

PROMPT = [int(token) for token in np.random.default_rng(3).integers(0, SHAPE.vocab_size, 30)]
PAGES = list(range(2, 12))


def last_logprobs(kv_dtype: str) -> dict[int, float]:
    """Of the best tokens behind the prompt and one more token, whose keys and values all come out of the pool."""
    config = CONFIG.model_copy(update={"kv_dtype": kv_dtype, "decode_buckets": (1,), "prefill_buckets": (32,), "transfer_buckets": (4,)})
    engine = Engine(SHAPE, random_weights(), config, jnp.float32, jax.devices()[0], XlaAttention(SMALL_BLOCKS))
    engine.launch_prefill([PrefillSeq(0, PROMPT, 0, PAGES, greedy_with_logprobs(), None)])
    moved = np.asarray(engine.gather(PAGES[:4]))
    assert moved.dtype == jnp.dtype("float32" if kv_dtype == "auto" else kv_dtype)
    engine.install(PAGES[:4], moved)
    step = engine.read(engine.launch_decode([DecodeSeq(0, 7, len(PROMPT), PAGES, greedy_with_logprobs(), 1)]))
    assert step.top_ids is not None and step.top_logprobs is not None
    return dict(zip(step.top_ids[0].tolist(), step.top_logprobs[0].tolist(), strict=True))


@pytest.mark.parametrize(("kv_dtype", "largest"), [("bfloat16", 0.05), ("float8_e4m3fn", 0.6), ("int8", 0.3)])
def test_narrower_kv_moves_log_probabilities_by_about_its_rounding(kv_dtype: str, largest: float) -> None:
    """Rounding to 8 or 4 bits of significand is a relative error of 2^-9 or 2^-5 at most in every key and value; to int8, an error of at most
    1.4 / 254 of the largest of its head."""
    exact, narrow = last_logprobs("auto"), last_logprobs(kv_dtype)
    shared = exact.keys() & narrow.keys()
    assert len(shared) >= 15
    errors = [abs(exact[token] - narrow[token]) for token in shared]
    assert 0 < max(errors) < largest


def test_the_pool_and_the_wire_have_the_dtype_that_was_asked_for() -> None:
    assert load_config(None, []).kv_dtype == "float32"
    assert load_config(None, ["model.dtype=bfloat16"]).kv_dtype == "bfloat16"
    assert load_config(None, ["engine.kv_dtype=float8_e4m3fn"]).kv_dtype == "float8_e4m3fn"
    assert load_config(None, ["engine.kv_dtype=int8"]).kv_dtype == "int8"
    with pytest.raises(ConfigError, match="engine.kv_dtype"):
        load_config(None, ["engine.kv_dtype=int4"])
