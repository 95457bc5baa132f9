"""Weights on the device, as the programs take them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from pdjax.engine.mesh import Chips
from pdjax.models.layers import Params
from pdjax.models.model import KV_SCALES
from pdjax.models.pieces import pieces_of
from pdjax.models.shape import ModelShape, WeightSpec, weight_specs
from pdjax.models.stored import StoredWeight, Weight, map_parts, stored

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

    def of_model(self) -> PlacedWeights:
        """Without what an engine has added for its pool."""
        if isinstance(self.layers, dict):
            return self._replace(layers=_without_scales(self.layers))
        return self._replace(layers=tuple(_without_scales(layer) for layer in self.layers))


def _without_scales(layer: Params) -> Params:
    return {name: weight for name, weight in layer.items() if name != KV_SCALES}


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


Restore = Callable[[int | None, Mapping[str, Sharding]], dict[str, jax.Array]]
"""(a layer, or None for what is not stacked; where pieces of its weights belong, by their paths) -> the pieces, on their devices"""


class RestoredWeights:
    """Weights of which devices read their own parts, one layer at a time. The host holds no more than parts of that layer on their way.

    `report` hears of each layer.
    """

    def __init__(self, shape: ModelShape, restore: Restore, report: Callable[[int, int], None]):
        self._num_layers, self._restore, self._report = shape.num_layers, restore, report
        self._specs = {path: spec.of_one_layer() if spec.is_layered else spec for path, spec in weight_specs(shape).items()}
        self._pieces = {path: pieces_of(shape, spec) for path, spec in self._specs.items()}
        self._done = 0

    def reader(self, chips: Chips) -> Callable[[int | None], Params]:
        """What brings a layer to the chips, or what is not stacked, by name."""
        joiners = {path: chips.joiner(spec, self._pieces[path]) for path, spec in self._specs.items()}

        def read(layer: int | None) -> Params:
            paths = [path for path in self._specs if path.startswith(_LAYERS) == (layer is not None)]
            where = {piece.path(path): chips.where(self._specs[path], piece) for path in paths for piece in self._pieces[path]}
            found = self._restore(layer, where)
            self._done += 1
            self._report(self._done, 1 + self._num_layers)
            return {
                path.removeprefix(_LAYERS): joiners[path](*(found[piece.path(path)] for piece in self._pieces[path])) for path in paths
            }

        return read


Weights = dict[str, np.ndarray] | StreamedWeights | RestoredWeights | PlacedWeights
"""Weights on their way to the chips: on the host by path, still in a checkpoint, read layer by layer or by each device for itself, or on the
chips of another engine of the same width."""


def place_weights(
    shape: ModelShape, weights: Weights, dtype: jnp.dtype, chips: Chips, by_layer: bool, stored_dtype: jnp.dtype | None = None
) -> PlacedWeights:
    """Put the weights, keyed by path, onto the chips, the layers stacked or `by_layer`.

    Where `stored_dtype` is another than `dtype`, projections are stored as that, each rounded on the host just before it goes to its chips.
    Raises ValueError naming the weight where one is missing, unknown, has another shape or dtype than the model, or cannot be stored so.
    """
    if isinstance(weights, PlacedWeights):
        return jax.tree.map(chips.copied_weight, weights.of_model())
    if isinstance(weights, RestoredWeights):
        assert stored_dtype in (None, dtype), f"weights are rounded to {stored_dtype} on the host, where these do not come by"
        return _restored(weights.reader(chips), shape.num_layers, by_layer)
    read = weights.read if isinstance(weights, StreamedWeights) else _reader_of(shape, weights, dtype)
    specs = weight_specs(shape)
    layered = {path.removeprefix(_LAYERS): path for path, spec in specs.items() if spec.is_layered}

    def place(path: str, layer: int | None) -> Weight:
        spec = specs[path] if layer is None else specs[path].of_one_layer()
        weight: Any = read(path, layer)
        if spec.is_projection and stored_dtype not in (None, dtype):
            weight = _stored(path, weight, spec, stored_dtype, chips)
        return map_parts(lambda part, spec: chips.place(spec, part), weight, spec)

    ends = {path: place(path, None) for path, spec in specs.items() if not spec.is_layered}

    if not by_layer:
        return PlacedWeights(ends, {name: _stacked(partial(place, path), shape.num_layers) for name, path in layered.items()})
    layers = range(shape.num_layers)
    return PlacedWeights(ends, tuple({name: place(path, layer) for name, path in layered.items()} for layer in layers))


def _restored(read: Callable[[int | None], Params], num_layers: int, by_layer: bool) -> PlacedWeights:
    ends = read(None)
    if by_layer:
        return PlacedWeights(ends, tuple(read(layer) for layer in range(num_layers)))
    return PlacedWeights(ends, _stacked(read, num_layers))


def _stored(path: str, array: np.ndarray, spec: WeightSpec, dtype: jnp.dtype, chips: Chips) -> StoredWeight:
    try:
        return stored(array, spec, dtype, chips.platform == "cpu")
    except ValueError as error:
        raise ValueError(f"weight {path}: {error}") from error


def _stacked(place: Callable[[int], Any], num_layers: int) -> Any:
    """All layers of a weight, or of several, in one array each, put there one by one: at no time does anything hold them twice."""
    first = place(0)
    where = jax.tree.map(_stacked_sharding, first)
    zeros = partial(jax.tree.map, lambda part: jnp.zeros((num_layers, *part.shape), part.dtype), first)
    stack = jax.jit(zeros, out_shardings=where)()
    put = jax.jit(
        lambda stack, row, layer: jax.tree.map(lambda all_rows, own: all_rows.at[layer].set(own), stack, row),
        donate_argnums=0,
        out_shardings=where,
    )
    for layer in range(num_layers):
        row = first if layer == 0 else place(layer)
        stack = put(stack, row, layer)
        jax.block_until_ready(row)  # so that no more than one waits on the host
    return stack


def _stacked_sharding(part: jax.Array) -> Sharding:
    where = part.sharding
    return NamedSharding(where.mesh, PartitionSpec(None, *where.spec)) if isinstance(where, NamedSharding) else where


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
