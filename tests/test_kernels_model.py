"""A whole model through interpreted kernels, pages moved by kernels too, against the XLA path; and pages over several chips."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pdjax.engine import library
from pdjax.engine.engine import Engine
from pdjax.engine.mesh import chips_for
from pdjax.kernels.base import Attention
from pdjax.kernels.dispatch import PageMover
from pdjax.kernels.gpu.attention import Form, TritonAttention
from pdjax.kernels.gpu.triton_attention import Tuning
from pdjax.kernels.gpu.tuning import Chip
from pdjax.kernels.pages import gpu, tpu, xla
from pdjax.kernels.tpu.attention import PallasTpuAttention
from pdjax.kernels.tpu.tuning import DecodeTuning, PrefillTuning, Tunings
from pdjax.kernels.xla import XlaAttention
from pdjax.protocol import Sampling
from tests.engine_kit import CONFIG, SHAPE, generate, random_weights

MODEL = SHAPE._replace(head_dim=16)
ENGINE = CONFIG.model_copy(
    update={
        "page_size": 32,
        "num_pages": 12,
        "prefill_buckets": (32,),
        "decode_buckets": (1,),
        "transfer_buckets": (1, 4),
        "max_prefill_seqs": 1,
        "max_running": 2,
    }
)
INTERPRET = pltpu.InterpretParams()
GREEDY = Sampling(max_tokens=100, temperature=0.0)
PROMPT = [int(token) for token in np.random.default_rng(0).integers(0, MODEL.vocab_size, 40)]
PAGES = [7, 3, 9]


def tpu_attention() -> Attention:
    return PallasTpuAttention(Tunings(PrefillTuning(tile_rows=32, block_tokens=128), DecodeTuning(block_tokens=128)), INTERPRET)


def gpu_attention() -> Attention:
    form = Form(MODEL.num_heads // MODEL.num_kv_heads, MODEL.head_dim, ENGINE.page_size, jnp.dtype("float32"), jnp.dtype("float32"))
    return TritonAttention(Chip.SM_80, form, Tuning(16, 16, 4, 2), interpret=True)


TPU_PAGES = PageMover("pallas", *(functools.partial(function, interpret=INTERPRET) for function in (tpu.gather, tpu.install)))
GPU_PAGES = PageMover("triton", *(functools.partial(function, interpret=True) for function in (gpu.gather, gpu.install)))


@functools.cache
def expected_answer() -> tuple[list[int], np.ndarray]:
    """Of the XLA path, and the pages of its prompt."""
    engine = Engine(MODEL, random_weights(MODEL), ENGINE, jnp.float32, jax.devices()[0], XlaAttention())
    return generate(engine, 0, PROMPT, PAGES, 6, GREEDY), np.asarray(engine.gather(PAGES[:1]))


@pytest.mark.parametrize(("attention", "pages"), [(tpu_attention, TPU_PAGES), (gpu_attention, GPU_PAGES)], ids=["tpu", "gpu"])
def test_a_whole_model_answers_as_it_does_by_xla(attention: Callable[[], Attention], pages: PageMover, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdjax.engine.library.choose_pages", lambda setting, override: pages)
    monkeypatch.setitem(library._CPU_GROUPS, "decode_layers", 1)  # compiles one layer, not both
    engine = Engine(MODEL, random_weights(MODEL), ENGINE, jnp.float32, jax.devices()[0], attention())
    answer, page = expected_answer()
    assert generate(engine, 0, PROMPT, PAGES, 6, GREEDY) == answer and len(set(answer)) > 3
    chunk = np.asarray(engine.gather(PAGES[:1]))
    np.testing.assert_allclose(chunk, page, rtol=1e-4, atol=1e-4)  # float32 sums in another order, two layers deep
    engine.install([5], chunk)
    np.testing.assert_array_equal(np.asarray(engine.gather([5])), chunk)


@pytest.mark.parametrize(("pages", "width"), [(TPU_PAGES, 4), (GPU_PAGES, 2)], ids=["tpu", "gpu"])
def test_every_chip_moves_the_pages_of_its_own_heads(pages: PageMover, width: int) -> None:
    """With 2 KV heads, of which 4 chips hold two copies each."""
    chips = chips_for(SHAPE._replace(num_heads=4, num_kv_heads=2), jax.devices()[:width])
    rng = np.random.default_rng(width)
    kv, incoming = rng.normal(size=(2, 6, 4, 4, 8)).astype(np.float32), rng.normal(size=(3, 2, 4, 4, 8)).astype(np.float32)
    numbers = jnp.array([4, 1, 5], jnp.int32)
    pool = jax.device_put(chips.copied(jnp.asarray(kv)), chips.pool)
    gather, install = chips.over_pool_parts(pages.gather), chips.over_pool_parts(pages.install)
    chunk = jax.jit(lambda pool, numbers: chips.canonical(gather(pool, numbers)), out_shardings=chips.chunk)(pool, numbers)
    np.testing.assert_array_equal(chunk, xla.gather(jnp.asarray(kv), numbers))
    run = jax.jit(lambda pool, numbers, chunk: install(pool, numbers, chips.copied(chunk)), donate_argnums=0, out_shardings=chips.pool)
    installed = run(pool, numbers, jax.device_put(incoming, chips.chunk))
    np.testing.assert_array_equal(chips.canonical(installed), xla.install(jnp.asarray(kv), numbers, jnp.asarray(incoming)))
