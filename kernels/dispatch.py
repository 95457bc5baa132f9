"""Chooses the attention implementation of a process: by platform, unless `PDJAX_ATTENTION` says otherwise.

A new implementation gets an entry in `_IMPLEMENTATIONS` and, where it is the best of a platform, one in `_BEST_OF_PLATFORM`.
"""

from __future__ import annotations

from collections.abc import Callable

from pdjax.kernels.base import Attention
from pdjax.kernels.reference import ReferenceAttention
from pdjax.kernels.xla import XlaAttention

_IMPLEMENTATIONS: dict[str, Callable[[], Attention]] = {"reference": ReferenceAttention, "xla": XlaAttention}
_BEST_OF_PLATFORM = {"cpu": "xla"}
_FALLBACK = "xla"


def choose_attention(platform: str, override: str | None = None) -> Attention:
    """The implementation named `override`, or the best one for `platform` (as in `jax.Device.platform`).

    Raises ValueError where `override` names none.
    """
    name = override or _BEST_OF_PLATFORM.get(platform, _FALLBACK)
    if name not in _IMPLEMENTATIONS:
        raise ValueError(f"attention {name!r} does not exist; choose one of {', '.join(sorted(_IMPLEMENTATIONS))}")
    return _IMPLEMENTATIONS[name]()
