"""Weights in Orbax checkpoints: one for the ends of a model and one for each layer, so that writing them can be taken up where it stopped.
Beside each lie the checksums of its weights.

The only module of this package that imports JAX; whoever only needs to know a model's shape and tokenizer does without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import jax
import msgspec
import numpy as np
import orbax.checkpoint as ocp
import xxhash

from pdjax.models.shape import ModelShape, WeightSpec, weight_specs


class WeightStore:
    """The weights of a model of `shape` under one folder, as arrays of `dtype`."""

    def __init__(self, folder: Path, shape: ModelShape, dtype: np.dtype):
        self._folder = folder.resolve()
        self._specs = weight_specs(shape)
        self._dtype = dtype
        self.units: tuple[int | None, ...] = (None, *range(shape.num_layers))

    def unit_specs(self, layer: int | None) -> dict[str, WeightSpec]:
        """What belongs to the ends (None) or to a layer, by path, without the axis of layers."""
        if layer is None:
            return {path: spec for path, spec in self._specs.items() if not spec.is_layered}
        return {path: WeightSpec(spec.shape[1:], spec.axes[1:]) for path, spec in self._specs.items() if spec.is_layered}

    def is_written(self, layer: int | None) -> bool:
        """Whether this unit is there, whole: Orbax gives a checkpoint its name last."""
        return self._unit_folder(layer).is_dir()

    def write(self, layer: int | None, weights: Mapping[str, np.ndarray]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._sums_file(layer).write_bytes(msgspec.json.encode({path: _checksum(array) for path, array in weights.items()}))
        with _checkpointer() as checkpointer:
            checkpointer.save(self._unit_folder(layer), args=ocp.args.PyTreeSave({_key(path): array for path, array in weights.items()}))

    def check(self) -> None:
        """Look at every unit without reading its arrays. Raises ValueError naming the weight, the expected and the found shape."""
        for layer in self.units:
            folder, specs = self._unit_folder(layer), self.unit_specs(layer)
            found = self._found_shapes(folder)
            for path, spec in specs.items():
                if _key(path) not in found or path not in self._sums(layer):
                    raise ValueError(f"{folder}: weight {path} of shape {spec.shape} is missing, or its checksum is")
                if (shape := found[_key(path)]) != spec.shape:
                    raise ValueError(f"{folder}: weight {path} should have shape {spec.shape} but has {shape}")
            if unexpected := sorted(found.keys() - {_key(path) for path in specs}):
                raise ValueError(f"{folder}: weight {unexpected[0]} is not part of the model")

    def read(self, layer: int | None, path: str, dtype: np.dtype) -> np.ndarray:
        """One weight, or its layer, on the host. Raises ValueError naming it where it is not what was written."""
        try:
            found = self._restore(layer, {_key(path): ocp.RestoreArgs(restore_type=np.ndarray)})[_key(path)]
        except (OSError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(f"{self._unit_folder(layer)}: weight {path} cannot be read: {reason:.200}") from error
        if (checksum := _checksum(found)) != self._sums(layer)[path]:
            raise ValueError(f"{self._unit_folder(layer)}: weight {path} is damaged: its checksum is {checksum}, not {self._sums(layer)[path]}")
        return found.astype(dtype, copy=False)

    def read_sharded(self, layer: int | None, where: Mapping[str, jax.sharding.Sharding], dtype: np.dtype) -> dict[str, jax.Array]:
        """The weights `where` names by path, or their layer, on devices: each reads the part that it holds, and no more, without checksums."""
        specs = self.unit_specs(layer)
        wanted = {
            _key(path): ocp.ArrayRestoreArgs(sharding=sharding, dtype=dtype, global_shape=specs[path].shape) for path, sharding in where.items()
        }
        restored = self._restore(layer, wanted)
        return {path: restored[_key(path)] for path in where}

    def _restore(self, layer: int | None, wanted: dict[str, ocp.RestoreArgs]) -> dict[str, np.ndarray]:
        item = dict.fromkeys(wanted, 0)
        with _checkpointer() as checkpointer:
            args = ocp.args.PyTreeRestore(item, restore_args=wanted, partial_restore=True)
            return checkpointer.restore(self._unit_folder(layer), args=args)

    def _found_shapes(self, folder: Path) -> dict[str, tuple[int, ...]]:
        if not folder.is_dir():
            raise ValueError(f"{folder} is missing")
        try:
            with _checkpointer() as checkpointer:
                metadata = checkpointer.metadata(folder).item_metadata
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"{folder} is not a readable Orbax checkpoint: {error}") from error
        if metadata is None:
            raise ValueError(f"{folder} is not a readable Orbax checkpoint: it is damaged")
        return {name: tuple(each.shape) for name, each in metadata.tree.items()}

    def _sums(self, layer: int | None) -> dict[str, str]:
        """Checksums by path."""
        path = self._sums_file(layer)
        try:
            return msgspec.json.decode(path.read_bytes(), type=dict[str, str])
        except (OSError, msgspec.MsgspecError) as error:
            raise ValueError(f"{path} is not readable: {error}") from error

    def _sums_file(self, layer: int | None) -> Path:
        return self._unit_folder(layer).with_suffix(".sums.json")

    def _unit_folder(self, layer: int | None) -> Path:
        return self._folder / ("ends" if layer is None else f"layer-{layer:05}")


def _key(path: str) -> str:
    return path.rpartition("/")[2]


def _checksum(array: np.ndarray) -> str:
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(array).view(np.uint8))


def _checkpointer() -> ocp.Checkpointer:
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
