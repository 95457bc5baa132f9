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
"""Weights of layers that follow each other, stacked or layer by layer."""

_LAYERS = "layers/"


class LayerGroup(NamedTuple):
    """What one program runs: layers `first` and later."""

    first: np.int32
    params: LayerParams


class PlacedWeights(NamedTuple):
    """`layers`: all of them stacked, or layer by layer. On CPU the arrays alias the host arrays that they were made from, which nobody
    may write to any more."""

    ends: Params
    layers: LayerParams

    def groups(self, max_layers: int) -> list[LayerGroup]:
        """All layers in groups of equal size, of at most `max_layers` where they are not stacked."""
        if isinstance(self.layers, dict):
            return [LayerGroup(np.int32(0), self.layers)]
        size = max(size for size in range(1, max_layers + 1) if len(self.layers) % size == 0)
        return [LayerGroup(np.int32(first), self.layers[first : first + size]) for first in range(0, len(self.layers), size)]


def as_sharding(placement: Placement) -> jax.sharding.Sharding:
    return placement if isinstance(placement, jax.sharding.Sharding) else jax.sharding.SingleDeviceSharding(placement)


def place_weights(
    shape: ModelShape, weights: dict[str, np.ndarray], dtype: jnp.dtype, where: jax.sharding.Sharding, by_layer: bool
) -> PlacedWeights:
    """Put the weights, keyed by path, onto the device, the layers stacked or `by_layer`.

    Raises ValueError naming the weight where one is missing, unknown, or has another shape or dtype than the model.
    """
    _check(shape, weights, dtype)
    layered = {path.removeprefix(_LAYERS): array for path, array in weights.items() if path.startswith(_LAYERS)}
    ends = {path: array for path, array in weights.items() if not path.startswith(_LAYERS)}
    if not by_layer:
        return PlacedWeights(jax.device_put(ends, where), jax.device_put(layered, where))
    layers = ({name: array[layer] for name, array in layered.items()} for layer in range(shape.num_layers))
    return PlacedWeights(jax.device_put(ends, where), tuple(jax.device_put(layer, where) for layer in layers))


def _check(shape: ModelShape, weights: dict[str, np.ndarray], dtype: jnp.dtype) -> None:
    specs = weight_specs(shape)
    if specs.keys() != weights.keys():
        raise ValueError(f"weights missing: {sorted(specs.keys() - weights.keys())}, unknown: {sorted(weights.keys() - specs.keys())}")
    for path, spec in specs.items():
        array = weights[path]
        if array.shape != spec.shape or array.dtype != dtype:
            raise ValueError(f"weight {path} is {array.dtype}{list(array.shape)}, the model needs {np.dtype(dtype)}{list(spec.shape)}")
