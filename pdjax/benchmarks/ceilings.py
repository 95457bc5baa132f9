"""What the machine can do at best: the matrix product and memory bandwidth that prefill and decode are held against.

Measured in one process with JAX on its default device, in float32 at full precision, the arithmetic of the quickstart model.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pdjax.benchmarks.report import SCHEMA_VERSION, quantile

Clock = Callable[[], float]

QUICKSTART_PROMPT_TOKENS = 512
QUICKSTART_GFLOP_PER_TOKEN = 0.212
"""Of SmolLM2-135M outside attention: 2 x 106 million matrix weights; embeddings are looked up and logits are taken of one token only."""
QUICKSTART_WEIGHT_BYTES = 540_000_000
"""All weights in float32, read once a decode step."""


class CeilingSettings(NamedTuple):
    """`matmul_size`: rows and columns of the matrices. `read_bytes`: size of the array that is read, far above every cache.

    `matvec_rows`: rows of that array in the matrix-vector product. `repeats`: timed runs of each, after one that compiles.
    """

    matmul_size: int = 2048
    read_bytes: int = QUICKSTART_WEIGHT_BYTES
    matvec_rows: int = 2304
    repeats: int = 10


class Timing(NamedTuple):
    best_s: float
    median_s: float


def run(settings: CeilingSettings, on_step: Callable[[str], None], clock: Clock = time.perf_counter) -> dict[str, Any]:
    """Measure and report. `on_step(name)` is called before each of the three measurements."""
    on_step("matrix product")
    matmul = _rates(2 * settings.matmul_size**3 / 1e9, _time_matmul(settings, clock))
    on_step("sum")
    read_sum = _rates(settings.read_bytes / 1e9, _time_sum(settings, clock))
    on_step("matrix-vector product")
    matvec_columns = settings.read_bytes // 4 // settings.matvec_rows
    read_matvec = _rates(4 * settings.matvec_rows * matvec_columns / 1e9, _time_matvec(settings, matvec_columns, clock))
    return {
        "schema_version": SCHEMA_VERSION,
        "benchmark": "ceilings",
        "device": _device(),
        "settings": settings._asdict(),
        "matmul_gflop_per_s": matmul,
        "read_sum_gb_per_s": read_sum,
        "read_matvec_gb_per_s": read_matvec,
        "floors": floors(matmul["best"], max(read_sum["best"], read_matvec["best"])),
    }


def floors(gflop_per_s: float, gb_per_s: float) -> dict[str, float]:
    """The shortest possible times of the quickstart model's two steps, in seconds."""
    return {
        "prefill_512_tokens_s": QUICKSTART_PROMPT_TOKENS * QUICKSTART_GFLOP_PER_TOKEN / gflop_per_s,
        "read_540_mb_s": QUICKSTART_WEIGHT_BYTES / 1e9 / gb_per_s,
    }


def time_best_and_median(step: Callable[[], jax.Array], repeats: int, clock: Clock) -> Timing:
    """Time `step` to the end of its computation, `repeats` times after one untimed call. Reads the clock twice a timed call."""
    step().block_until_ready()
    times_s = []
    for _ in range(repeats):
        start_s = clock()
        step().block_until_ready()
        times_s.append(clock() - start_s)
    return Timing(min(times_s), quantile(times_s, 0.5))


def _time_matmul(settings: CeilingSettings, clock: Clock) -> Timing:
    matrix = jnp.ones((settings.matmul_size, settings.matmul_size), jnp.float32)
    product = jax.jit(lambda a: jnp.matmul(a, a, precision=jax.lax.Precision.HIGHEST))
    return time_best_and_median(lambda: product(matrix), settings.repeats, clock)


def _time_sum(settings: CeilingSettings, clock: Clock) -> Timing:
    values = jnp.ones((settings.read_bytes // 4,), jnp.float32)
    total = jax.jit(jnp.sum)
    return time_best_and_median(lambda: total(values), settings.repeats, clock)


def _time_matvec(settings: CeilingSettings, columns: int, clock: Clock) -> Timing:
    vector = jnp.ones((1, settings.matvec_rows), jnp.float32)
    matrix = jnp.ones((settings.matvec_rows, columns), jnp.float32)
    product = jax.jit(lambda v, m: jnp.matmul(v, m, precision=jax.lax.Precision.HIGHEST))
    return time_best_and_median(lambda: product(vector, matrix), settings.repeats, clock)


def _rates(amount: float, timing: Timing) -> dict[str, float]:
    """`amount` per second, at the best and at the median time."""
    return {"best": amount / timing.best_s, "median": amount / timing.median_s}


def _device() -> dict[str, Any]:
    device = jax.devices()[0]
    return {"platform": device.platform, "kind": device.device_kind, "cpu_cores": len(os.sched_getaffinity(0)), "jax": jax.__version__}
