"""Weights on the device, as the programs take them."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pdjax.models.llama import Params
from pdjax.models.shape import ModelShape, weight_specs

Placement = jax.Device | jax.sharding.Sharding

LayerParams = Params | tuple[Params, ...]
"""The layers' weights, stacked or layer by layer."""

_LAYERS = "layers/"


class PlacedWeights(NamedTuple):
    """`by_layer` repeats `stacked` layer by layer, for unrolled programs; empty where there is none.

    On CPU all of them alias the host arrays that they were made from, which nobody may write to any more.
    """

    ends: Params
    stacked: Params
    by_layer: tuple[Params, ...]


def as_sharding(placement: Placement) -> jax.sharding.Sharding:
    return placement if isinstance(placement, jax.sharding.Sharding) else jax.sharding.SingleDeviceSharding(placement)


def place_weights(
    shape: ModelShape, weights: dict[str, np.ndarray], dtype: jnp.dtype, where: jax.sharding.Sharding, by_layer: bool
) -> PlacedWeights:
    """Put the weights, keyed by path, onto the device. `by_layer` also makes the per-layer arrays.

    Raises ValueError naming the weight where one is missing, unknown, or has another shape or dtype than the model.
    """
    _check(shape, weights, dtype)
    layered = {path.removeprefix(_LAYERS): array for path, array in weights.items() if path.startswith(_LAYERS)}
    ends = {path: array for path, array in weights.items() if not path.startswith(_LAYERS)}
    layers = range(shape.num_layers if by_layer else 0)
    return PlacedWeights(
        ends=jax.device_put(ends, where),
        stacked=jax.device_put(layered, where),
        by_layer=tuple(jax.device_put({name: array[layer] for name, array in layered.items()}, where) for layer in layers),
    )


def _check(shape: ModelShape, weights: dict[str, np.ndarray], dtype: jnp.dtype) -> None:
    specs = weight_specs(shape)
    if specs.keys() != weights.keys():
        raise ValueError(f"weights missing: {sorted(specs.keys() - weights.keys())}, unknown: {sorted(weights.keys() - specs.keys())}")
    for path, spec in specs.items():
        array = weights[path]
        if array.shape != spec.shape or array.dtype != dtype:
            raise ValueError(f"weight {path} is {array.dtype}{list(array.shape)}, the model needs {np.dtype(dtype)}{list(spec.shape)}")
