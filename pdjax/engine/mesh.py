"""The chips of one engine: one, or several that share every layer between them (tensor parallel, after Megatron-LM, arXiv:1909.08053).

Each chip holds some query heads with the KV heads that they need, their part of the pool, and a part of each MLP, or some of the experts of a
mixture. It runs the block that a single chip would run, on a model with fewer heads, and adds its partial result to those of the others
behind attention and behind the MLP. Activations are the same on every chip. Embedding and vocabulary product are split by vocabulary, and
how is left to the compiler.

Where there are more chips than KV heads, neighbouring chips hold copies of a head. What leaves the pool holds every head once, so that
engines of different width exchange pages.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from pdjax.engine.split import check_split, num_pool_heads, split_axis
from pdjax.models.layers import ALONE, Chip
from pdjax.models.pieces import Piece
from pdjax.models.shape import ModelShape, WeightSpec
from pdjax.models.stored import Weight, map_parts

Placement = jax.Device | Sequence[jax.Device]

Layers = Callable[..., tuple[jax.Array, jax.Array]]
"""(weights of a group of layers, its first layer, x [E, T], pool, rows) -> (x, pool)"""

MovePages = Callable[..., jax.Array]
"""(pool, page numbers) -> chunk, or (pool, page numbers, chunk) -> pool; the heads of pool and chunk are those of one chip, or of all."""

MODEL_AXIS = "model"
"""Of the mesh: the chips that share every layer. The other axis of a worker's chips, "data", is no mesh's: ranks run apart."""


class Chips(abc.ABC):
    """Where the arrays of one engine lie, and what one chip sees of the model.

    `replicated`: activations and small state. `pool`; `chunk`: gathered pages, every head once. `local_shape`: the model with the heads of
    one chip. `num_pool_heads`: KV heads of the whole pool, copies included. `chip`: for `Model`.
    """

    replicated: Sharding
    pool: Sharding
    chunk: Sharding
    local_shape: ModelShape
    num_pool_heads: int
    chip: Chip

    @property
    def platform(self) -> str:
        return next(iter(self.replicated.device_set)).platform

    @abc.abstractmethod
    def place(self, spec: WeightSpec, array: np.ndarray) -> jax.Array:
        """Bring a weight to the chips. On CPU the result may alias `array`."""

    @abc.abstractmethod
    def where(self, spec: WeightSpec, piece: Piece) -> Sharding:
        """Where a piece of a weight lies that `joiner` is given: on each chip what that chip needs of it."""

    @abc.abstractmethod
    def joiner(self, spec: WeightSpec, pieces: Sequence[Piece]) -> Callable[..., jax.Array]:
        """What makes of a weight's pieces, in order, what `place` makes of the weight. To be called for each layer anew."""

    @abc.abstractmethod
    def copied_weight(self, weight: jax.Array) -> jax.Array:
        """A weight that `Chips` of the same model and width, but other devices, have placed."""

    @abc.abstractmethod
    def abstract(self, spec: WeightSpec, dtype: jnp.dtype) -> jax.ShapeDtypeStruct:
        """What `place` would make."""

    @abc.abstractmethod
    def over_chips(self, layers: Layers, specs: dict[str, WeightSpec]) -> Layers:
        """What runs `layers` on every chip. `specs`: of one layer's weights, by name."""

    @abc.abstractmethod
    def over_pool_parts(self, move: MovePages) -> MovePages:
        """What runs `move` on every chip's part of the pool: kernels cannot be split over chips by the compiler."""

    @abc.abstractmethod
    def canonical(self, pages: jax.Array) -> jax.Array:
        """[..., 2 * num_pool_heads, D] -> [..., 2 * K, D]: each head once."""

    @abc.abstractmethod
    def copied(self, pages: jax.Array) -> jax.Array:
        """[..., 2 * K, D] -> [..., 2 * num_pool_heads, D]: each head as often as chips need it."""


def chips_for(shape: ModelShape, placement: Placement) -> Chips:
    """Raises ValueError where the model cannot be split over so many chips."""
    devices = [placement] if isinstance(placement, jax.Device) else list(placement)
    return OneChip(shape, devices[0]) if len(devices) == 1 else TensorChips(shape, devices)


class OneChip(Chips):
    """Everything on one device, as it is."""

    def __init__(self, shape: ModelShape, device: jax.Device):
        self.replicated = self.pool = self.chunk = SingleDeviceSharding(device)
        self.local_shape = shape
        self.num_pool_heads = shape.num_kv_heads
        self.chip = ALONE

    def place(self, spec: WeightSpec, array: np.ndarray) -> jax.Array:
        return jax.device_put(array, self.replicated)

    def where(self, spec: WeightSpec, piece: Piece) -> Sharding:
        return self.replicated

    def joiner(self, spec: WeightSpec, pieces: Sequence[Piece]) -> Callable[..., jax.Array]:
        if len(pieces) == 1:
            return _itself
        return jax.jit(lambda *arrays: jnp.concatenate(arrays, pieces[0].axis), out_shardings=self.replicated)

    def copied_weight(self, weight: jax.Array) -> jax.Array:
        return jax.device_put(weight, self.replicated)

    def abstract(self, spec: WeightSpec, dtype: jnp.dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(spec.shape, dtype, sharding=self.replicated)

    def over_chips(self, layers: Layers, specs: dict[str, WeightSpec]) -> Layers:
        return layers

    def over_pool_parts(self, move: MovePages) -> MovePages:
        return move

    def canonical(self, pages: jax.Array) -> jax.Array:
        return pages

    def copied(self, pages: jax.Array) -> jax.Array:
        return pages


class TensorChips(Chips):
    """A mesh of one axis.

    A weight is split along one of its logical axes. Where a chip's part of that axis comes in pieces (its rows of q, k and v), the pieces are
    laid side by side first, so that an even split gives each chip its own.
    """

    def __init__(self, shape: ModelShape, devices: Sequence[jax.Device]):
        number = len(devices)
        check_split(shape, number)
        self._shape, self._number = shape, number
        self._mesh = Mesh(np.array(devices), (MODEL_AXIS,))
        is_one_process = len({device.process_index for device in devices}) == 1
        self.num_pool_heads = num_pool_heads(shape, number)
        self._copies = self.num_pool_heads // shape.num_kv_heads
        self.local_shape = shape._replace(num_heads=shape.num_heads // number, num_kv_heads=self.num_pool_heads // number)
        self.replicated = self._sharding(PartitionSpec())
        self.pool = self._sharding(_split(3, 5))
        # Chips of several processes: whole on each chip, since one process sends and receives pages for all of them.
        self.chunk = self.pool if self._copies == 1 and is_one_process else self.replicated
        self.chip = Chip(partial(jax.lax.psum, axis_name=MODEL_AXIS), partial(jax.lax.axis_index, MODEL_AXIS))

    def place(self, spec: WeightSpec, array: np.ndarray) -> jax.Array:
        axis = split_axis(spec, self._number)
        if axis is not None and spec.axes[axis] in ("qkv", "gate_up"):
            array = np.take(array, self._order(spec.axes[axis], spec.shape[axis]), axis)
        return put(array, self._sharding(self._partition(spec)))

    def where(self, spec: WeightSpec, piece: Piece) -> Sharding:
        axis, groups = split_axis(spec, self._number), self._num_groups(piece)
        if axis is None or groups == self._number:
            return self._sharding(self._partition(spec))
        by_head = Mesh(self._mesh.devices.reshape(groups, -1), (MODEL_AXIS, "copies"))
        return NamedSharding(by_head, self._partition(spec))

    def joiner(self, spec: WeightSpec, pieces: Sequence[Piece]) -> Callable[..., jax.Array]:
        if len(pieces) == 1:
            return _itself
        axis, is_split_there = pieces[0].axis, pieces[0].axis == split_axis(spec, self._number)

        def join(*arrays: jax.Array) -> jax.Array:
            if not is_split_there:
                return jnp.concatenate(arrays, axis)
            parts = [self._by_chip(array, axis, self._num_groups(piece)) for array, piece in zip(arrays, pieces, strict=True)]
            joined = jnp.concatenate(parts, axis + 1)
            return joined.reshape(*joined.shape[:axis], -1, *joined.shape[axis + 2 :])

        return jax.jit(join, out_shardings=self._sharding(self._partition(spec)))

    def _num_groups(self, piece: Piece) -> int:
        """How many chips, or groups of chips that hold copies, have rows of a piece of their own."""
        return self._number // self._copies if piece.role in ("k", "v") else self._number

    def _by_chip(self, array: jax.Array, axis: int, groups: int) -> jax.Array:
        """[..., rows, ...] -> [..., chips, rows of a chip, ...]"""
        grouped = array.reshape(*array.shape[:axis], groups, -1, *array.shape[axis + 1 :])
        return jnp.repeat(grouped, self._number // groups, axis)

    def copied_weight(self, weight: jax.Array) -> jax.Array:
        assert isinstance(weight.sharding, NamedSharding), f"a weight that lies as {weight.sharding}"
        return jax.device_put(weight, self._sharding(weight.sharding.spec))

    def abstract(self, spec: WeightSpec, dtype: jnp.dtype) -> jax.ShapeDtypeStruct:
        axis, shape = split_axis(spec, self._number), list(spec.shape)
        if axis is not None and spec.axes[axis] == "qkv":
            shape[axis] = len(self._order("qkv", shape[axis]))
        return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=self._sharding(self._partition(spec)))

    def over_chips(self, layers: Layers, specs: dict[str, WeightSpec]) -> Layers:
        def run(params: Any, first: jax.Array, x: jax.Array, pool: jax.Array, rows: Any) -> tuple[jax.Array, jax.Array]:
            whole, split_pool = PartitionSpec(), _split(3, 5)
            in_specs = (self._partitions(params, specs), whole, whole, split_pool, whole)
            over_mesh = jax.shard_map(layers, mesh=self._mesh, in_specs=in_specs, out_specs=(whole, split_pool), check_vma=False)
            return over_mesh(params, first, x, pool, rows)

        return run

    def over_pool_parts(self, move: MovePages) -> MovePages:
        def run(pool: jax.Array, pages: jax.Array, *chunk: jax.Array) -> jax.Array:
            part = _split(3, 5)
            in_specs = (part, PartitionSpec(), *(part for _ in chunk))
            return jax.shard_map(move, mesh=self._mesh, in_specs=in_specs, out_specs=part, check_vma=False)(pool, pages, *chunk)

        return run

    def canonical(self, pages: jax.Array) -> jax.Array:
        if self._copies == 1:
            return pages
        *front, heads, head_dim = pages.shape
        by_copy = pages.reshape(*front, heads // (2 * self._copies), self._copies, 2, head_dim)
        return by_copy[..., 0, :, :].reshape(*front, heads // self._copies, head_dim)

    def copied(self, pages: jax.Array) -> jax.Array:
        if self._copies == 1:
            return pages
        *front, heads, head_dim = pages.shape
        by_head = jnp.repeat(pages.reshape(*front, heads // 2, 2, head_dim), self._copies, axis=-3)
        return by_head.reshape(*front, heads * self._copies, head_dim)

    def _sharding(self, partition: PartitionSpec) -> NamedSharding:
        return NamedSharding(self._mesh, partition)

    def _partitions(self, params: Any, specs: dict[str, WeightSpec]) -> Any:
        """Of the weights of a group of layers, stacked or layer by layer."""
        if isinstance(params, dict):
            return {name: self._partition_of(weight, specs[name].stacked(len(weight))) for name, weight in params.items()}
        return tuple({name: self._partition_of(weight, specs[name]) for name, weight in layer.items()} for layer in params)

    def _partition_of(self, weight: Weight, spec: WeightSpec) -> Any:
        return map_parts(lambda _, spec: self._partition(spec), weight, spec)

    def _partition(self, spec: WeightSpec) -> PartitionSpec:
        axis = split_axis(spec, self._number)
        return PartitionSpec() if axis is None else _split(axis, len(spec.shape))

    def _order(self, name: str, size: int) -> np.ndarray:
        """Which row of a weight comes where, so that the rows of each chip lie side by side. Rows of KV heads come as often as needed."""
        if name == "gate_up":
            return np.arange(size).reshape(2, self._number, -1).swapaxes(0, 1).reshape(-1)
        heads, kv_heads, dim = self._shape.num_heads, self._shape.num_kv_heads, self._shape.head_dim
        rows = np.arange(size).reshape(heads + 2 * kv_heads, dim)
        queries = rows[:heads].reshape(self._number, -1, dim)
        keys, values = (np.repeat(part, self._copies, axis=0).reshape(self._number, -1, dim) for part in np.split(rows[heads:], 2))
        return np.concatenate([queries, keys, values], axis=1).reshape(-1)


def _itself(array: jax.Array) -> jax.Array:
    return array


def put(array: np.ndarray | jax.Array, sharding: Sharding) -> jax.Array:
    """Bring an array to chips. Where they belong to several processes, each has the same host array and brings what its own chips hold."""
    if sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: np.asarray(array[index]))


def _split(axis: int, num_axes: int) -> PartitionSpec:
    return PartitionSpec(*(MODEL_AXIS if i == axis else None for i in range(num_axes)))
