"""Chooses the implementations of attention and of moving pages for an engine: by its device and shapes, unless `PDJAX_ATTENTION` says
otherwise.

    cpu     CpuAttention where the extra `cpu` is installed, else XlaAttention        pages/xla.py
    tpu     PallasTpuAttention                                                        pages/tpu.py
    gpu     HopperAttention on compute capability 9.0, TritonAttention from 8.0 on    pages/gpu.py

What no kernel supports runs in XLA, and one line of the log says why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
from jax.experimental.layout import Format, Layout
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Sharding

from pdjax.kernels.base import Attention
from pdjax.kernels.cpu import attention as cpu
from pdjax.kernels.cpu import is_installed
from pdjax.kernels.gpu import attention as gpu
from pdjax.kernels.pages import gpu as gpu_pages
from pdjax.kernels.pages import tpu as tpu_pages
from pdjax.kernels.pages import xla as xla_pages
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


class PageMover(NamedTuple):
    """Pages out of and into the pool of one chip. Both are traced. `gather(pool, pages)`: pages int32[n] of every layer as one chunk
    [n, layers, page_size, 2 * K, D]. `install(pool, pages, chunk)`: the pool, taken over, with row i of the chunk in page `pages[i]`; only
    page 0 may be named more than once."""

    name: str
    gather: Callable[[jax.Array, jax.Array], jax.Array]
    install: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


XLA_PAGES = PageMover("xla", xla_pages.gather, xla_pages.install)


def choose_attention(setting: Setting, override: str | None = None) -> Attention:
    """The implementation that `override` forces ("pallas", "reference" or "xla"), or the best one. On a CPU, "pallas" interprets the TPU
    kernels, which is for tests.

    Raises ValueError where `override` names none, or forces kernels on what they do not support.
    """
    if override not in (None, *_NAMES):
        raise ValueError(f"attention {override!r} does not exist; choose one of {', '.join(_NAMES)}")
    if override == "reference":
        return ReferenceAttention()
    if override == "xla":
        return XlaAttention()
    if override is None and setting.device.platform == "cpu":
        return _cpu_attention(setting)
    chosen = _tpu_attention(setting) if setting.device.platform in ("tpu", "cpu") else _gpu_attention(setting)
    if not isinstance(chosen, str):
        return chosen
    if override == "pallas":
        raise ValueError(f"no attention kernel for {setting.device.device_kind}: {chosen}")
    log.warning("attention runs in XLA on %s: %s", setting.device.device_kind, chosen)
    return XlaAttention()


def choose_pages(setting: Setting, override: str | None = None) -> PageMover:
    """What moves pages on the setting's device. `override` as for `choose_attention`, but that what no kernel can move always moves in XLA."""
    platform = setting.device.platform
    if override in ("reference", "xla") or (override is None and platform == "cpu"):
        return XLA_PAGES
    if platform in ("tpu", "cpu"):
        interpret = pltpu.InterpretParams() if platform == "cpu" else False
        reason = tpu_pages.why_not(setting.pool)
        mover = PageMover("pallas", partial(tpu_pages.gather, interpret=interpret), partial(tpu_pages.install, interpret=interpret))
    else:
        reason = gpu.why_no_gpu(str(setting.device.compute_capability)) or gpu_pages.why_not(setting.pool)
        mover = PageMover("triton", gpu_pages.gather, gpu_pages.install)
    if reason is None:
        return mover
    log.warning("pages move in XLA on %s: %s", setting.device.device_kind, reason)
    return XLA_PAGES


def pool_format(sharding: Sharding, platform: str) -> Sharding | Format:
    """How a pool lies on its chips, with the layout that kernels take it in.

    Where head_dim is below 128, XLA for TPU would lay the pages of a pool side by side in the lanes of a register, and copy the whole pool
    ahead of every kernel and back behind it. So the order of the axes is told: head_dim last, padded to 128.
    """
    return Format(Layout(major_to_minor=(0, 1, 2, 3, 4)), sharding) if platform == "tpu" else sharding


def _cpu_attention(setting: Setting) -> Attention:
    reason = cpu.why_not(setting.pool) if is_installed() else "numba is not installed; it comes with the extra `cpu`"
    if reason is None:
        return cpu.CpuAttention()
    log.warning("decode attention runs in XLA: %s", reason)
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
