"""Chooses the attention implementation of an engine: by its device and shapes, unless `PDJAX_ATTENTION` says otherwise.

    cpu     XlaAttention
    tpu     PallasTpuAttention
    gpu     HopperAttention on compute capability 9.0, TritonAttention from 8.0 on

What no kernel supports runs in XLA, and one line of the log says why.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import jax
from jax.experimental.pallas import tpu as pltpu

from pdjax.kernels.base import Attention
from pdjax.kernels.gpu import attention as gpu
from pdjax.kernels.reference import ReferenceAttention
from pdjax.kernels.tpu import attention as tpu
from pdjax.kernels.tpu.tuning import tunings_for
from pdjax.kernels.xla import XlaAttention

log = logging.getLogger(__name__)

_NAMES = ("pallas", "reference", "xla")
_TPU_CHIPS = {
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "7x",
}
"""The chip as tuning tables know it, by `jax.Device.device_kind`."""
_INTERPRETED_CHIP = "v6e"


class Setting(NamedTuple):
    """What attention is chosen for: a device and, as one chip sees them, queries [T, H, D], pool [layers, pages, page_size, 2 * K, D] and page
    tables int32[S, P]."""

    device: jax.Device
    queries: jax.ShapeDtypeStruct
    pool: jax.ShapeDtypeStruct
    tables: jax.ShapeDtypeStruct


def choose_attention(setting: Setting, override: str | None = None) -> Attention:
    """The implementation that `override` forces ("pallas", "reference" or "xla"), or the best one. On a CPU, "pallas" interprets the TPU
    kernels, which is for tests.

    Raises ValueError where `override` names none, or forces kernels on what they do not support.
    """
    if override not in (None, *_NAMES):
        raise ValueError(f"attention {override!r} does not exist; choose one of {', '.join(_NAMES)}")
    if override == "reference":
        return ReferenceAttention()
    if override == "xla" or (override is None and setting.device.platform == "cpu"):
        return XlaAttention()
    chosen = _tpu_attention(setting) if setting.device.platform in ("tpu", "cpu") else _gpu_attention(setting)
    if not isinstance(chosen, str):
        return chosen
    if override == "pallas":
        raise ValueError(f"no attention kernel for {setting.device.device_kind}: {chosen}")
    log.warning("attention runs in XLA on %s: %s", setting.device.device_kind, chosen)
    return XlaAttention()


def _tpu_attention(setting: Setting) -> Attention | str:
    """The kernels, or why there are none."""
    is_interpreted = setting.device.platform == "cpu"
    chip = _INTERPRETED_CHIP if is_interpreted else _TPU_CHIPS.get(setting.device.device_kind, setting.device.device_kind)
    _, num_heads, head_dim = setting.queries.shape
    tunings = tunings_for(chip, head_dim, setting.pool.dtype, num_heads)
    return tpu.unsupported(setting.pool, setting.tables, tunings) or tpu.PallasTpuAttention(
        tunings, pltpu.InterpretParams() if is_interpreted else False
    )


def _gpu_attention(setting: Setting) -> Attention | str:
    """The kernels, or why there are none."""
    capability = str(setting.device.compute_capability)
    reason = gpu.why_no_gpu(capability) or gpu.why_not(setting.queries, setting.pool)
    return reason or gpu.attention_for(capability, gpu.form_of(setting.queries, setting.pool))
