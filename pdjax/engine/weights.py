"""Weights on the device, as the programs take them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from pdjax.engine.mesh import Chips
from pdjax.models.layers import Params
from pdjax.models.shape import ModelShape, weight_specs

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


class StreamedWeights:
    """Weights that are read when they are placed, one layer of one of them at a time, so that the host never holds more than that.

    `read_into(path, layer, target)` fills `target` with a weight or, where it is stacked, with its layer. `report` hears of each.
    """

    def __init__(
        self, shape: ModelShape, dtype: np.dtype, read_into: Callable[[str, int | None, np.ndarray], None], report: Callable[[int, int], None]
    ):
        self._dtype, self._read_into, self._report = dtype, read_into, report
        self._specs = weight_specs(shape)
        self._done = 0
        self._total = sum(spec.shape[0] if spec.is_layered else 1 for spec in self._specs.values())

    def read(self, path: str, layer: int | None) -> np.ndarray:
        """A fresh array, C-contiguous."""
        spec = self._specs[path]
        target = np.empty(spec.shape if layer is None else spec.shape[1:], self._dtype)
        self._read_into(path, layer, target)
        self._done += 1
        self._report(self._done, self._total)
        return target


Weights = dict[str, np.ndarray] | StreamedWeights
"""Weights on their way to the chips: on the host by path, or still in a checkpoint."""


def place_weights(shape: ModelShape, weights: Weights, dtype: jnp.dtype, chips: Chips, by_layer: bool) -> PlacedWeights:
    """Put the weights, keyed by path, onto the chips, the layers stacked or `by_layer`.

    Raises ValueError naming the weight where one is missing, unknown, or has another shape or dtype than the model.
    """
    read = weights.read if isinstance(weights, StreamedWeights) else _reader_of(shape, weights, dtype)
    specs = weight_specs(shape)
    layered = {path.removeprefix(_LAYERS): path for path, spec in specs.items() if spec.is_layered}
    ends = {path: chips.place(spec, read(path, None)) for path, spec in specs.items() if not spec.is_layered}

    def place_layer(path: str, layer: int) -> jax.Array:
        return chips.place(specs[path].of_one_layer(), read(path, layer))

    if not by_layer:
        return PlacedWeights(ends, {name: _stacked(partial(place_layer, path), shape.num_layers) for name, path in layered.items()})
    layers = range(shape.num_layers)
    return PlacedWeights(ends, tuple({name: place_layer(path, layer) for name, path in layered.items()} for layer in layers))


def _stacked(place_layer: Callable[[int], jax.Array], num_layers: int) -> jax.Array:
    """All layers of a weight in one array, put there one by one: at no time does anything hold them twice."""
    first = place_layer(0)
    shape, where = (num_layers, *first.shape), first.sharding
    if isinstance(where, NamedSharding):
        where = NamedSharding(where.mesh, PartitionSpec(None, *where.spec))
    stack = jax.jit(lambda: jnp.zeros(shape, first.dtype), out_shardings=where)()
    put = jax.jit(lambda stack, row, layer: stack.at[layer].set(row), donate_argnums=0, out_shardings=where)
    for layer in range(num_layers):
        row = first if layer == 0 else place_layer(layer)
        stack = put(stack, row, layer)
        row.block_until_ready()  # so that no more than one waits on the host
    return stack


def _reader_of(shape: ModelShape, weights: dict[str, np.ndarray], dtype: jnp.dtype) -> Callable[[str, int | None], np.ndarray]:
    _check(shape, weights, dtype)
    return lambda path, layer: weights[path] if layer is None else weights[path][layer]


def _check(shape: ModelShape, weights: dict[str, np.ndarray], dtype: jnp.dtype) -> None:
    specs = weight_specs(shape)
    if specs.keys() != weights.keys():
        raise ValueError(f"weights missing: {sorted(specs.keys() - weights.keys())}, unknown: {sorted(weights.keys() - specs.keys())}")
    for path, spec in specs.items():
        array = weights[path]
        if array.shape != spec.shape or array.dtype != dtype:
            raise ValueError(f"weight {path} is {array.dtype}{list(array.shape)}, the model needs {np.dtype(dtype)}{list(spec.shape)}")
