"""Which modules compute which family. What a family's weights are says `pdjax.models.shape`."""

from __future__ import annotations

from typing import NamedTuple

from flax import nnx

from pdjax.models import gemma, gemma2, gemma3, layers, llama, mixtral, qwen2, qwen2_moe, qwen3, qwen3_moe
from pdjax.models.shape import ModelShape


class Family(NamedTuple):
    """`block`: one layer, `(x, pool, LayerStep) -> (x, pool)`. `ends`: as `pdjax.models.layers.Ends`."""

    block: type[nnx.Module]
    ends: type[nnx.Module] = layers.Ends


_FAMILIES = {
    "llama": Family(llama.Block),
    "qwen2": Family(qwen2.Block),
    "qwen3": Family(qwen3.Block),
    "gemma2": Family(gemma2.Block, gemma.Ends),
    "gemma3": Family(gemma3.Block, gemma.Ends),
    "mixtral": Family(mixtral.Block),
    "qwen2_moe": Family(qwen2_moe.Block),
    "qwen3_moe": Family(qwen3_moe.Block),
}


def family_of(shape: ModelShape) -> Family:
    return _FAMILIES[shape.family]
