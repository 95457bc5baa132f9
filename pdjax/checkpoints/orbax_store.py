"""Weights in Orbax checkpoints: one for the ends of a model and one for each layer, so that writing them can be taken up where it stopped.
Beside each lie the checksums of its weights and of its files.

The only module of this package that imports JAX; whoever only needs to know a model's shape and tokenizer does without it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import msgspec
import numpy as np
import orbax.checkpoint as ocp
import xxhash

from pdjax.models.pieces import Piece
from pdjax.models.shape import ModelShape, WeightSpec, weight_specs

CHUNK_BYTES = 4 << 20
"""What is read of an array at a time, at least: a device that holds a part of it reads the chunks which that part touches."""

_HASH_BYTES = 1 << 20

Cut = Callable[[WeightSpec], tuple[Piece, ...]]
"""The pieces in which weights are stored, each an array of its own."""


class _Stored(NamedTuple):
    """One array of a unit: a piece of the weight `path`."""

    path: str
    piece: Piece
    spec: WeightSpec

    @property
    def key(self) -> str:
        """Its name in the checkpoint."""
        return self.piece.path(self.path).rpartition("/")[2]


class WeightStore:
    """The weights of a model of `shape` under one folder, as arrays of `dtype`, in the pieces that `cut` makes of each."""

    def __init__(self, folder: Path, shape: ModelShape, dtype: np.dtype, cut: Cut):
        self._folder = folder.resolve()
        self._specs = weight_specs(shape)
        self._dtype = dtype
        self._cut = cut
        self.units: tuple[int | None, ...] = (None, *range(shape.num_layers))

    def unit_specs(self, layer: int | None) -> dict[str, WeightSpec]:
        """What belongs to the ends (None) or to a layer, by path, without the axis of layers."""
        if layer is None:
            return {path: spec for path, spec in self._specs.items() if not spec.is_layered}
        return {path: spec.of_one_layer() for path, spec in self._specs.items() if spec.is_layered}

    def is_written(self, layer: int | None) -> bool:
        """Whether this unit is there, whole: the checksums of its files come last."""
        return self._file_sums_file(layer).is_file() and self._unit_folder(layer).is_dir()

    def write(self, layer: int | None, weights: Mapping[str, np.ndarray]) -> None:
        """In the place of what a run that was stopped may have left."""
        folder = self._unit_folder(layer)
        if folder.exists():
            shutil.rmtree(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        stored = self._stored(layer)
        arrays = {name: np.ascontiguousarray(weights[each.path][each.piece.index()]) for name, each in stored.items()}
        self._sums_file(layer).write_bytes(msgspec.json.encode({name: _checksum(array) for name, array in arrays.items()}))
        item = {stored[name].key: array for name, array in arrays.items()}
        with _checkpointer() as checkpointer:
            chunks = ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES)
            checkpointer.save(folder, args=ocp.args.PyTreeSave(item, save_args=dict.fromkeys(item, chunks)))
        half = self._file_sums_file(layer).with_suffix(".half")
        half.write_bytes(msgspec.json.encode(_file_sums(folder)))
        half.rename(self._file_sums_file(layer))

    def check(self) -> None:
        """Look at every unit without reading its arrays. Raises ValueError naming the weight, the expected and the found shape."""
        for layer in self.units:
            folder, stored = self._unit_folder(layer), self._stored(layer)
            found = self._found_shapes(folder)
            for name, each in stored.items():
                if each.key not in found or name not in self._sums(layer):
                    raise ValueError(f"{folder}: weight {name} of shape {each.spec.shape} is missing, or its checksum is")
                if (shape := found[each.key]) != each.spec.shape:
                    raise ValueError(f"{folder}: weight {name} should have shape {each.spec.shape} but has {shape}")
            if unexpected := sorted(found.keys() - {each.key for each in stored.values()}):
                raise ValueError(f"{folder}: weight {unexpected[0]} is not part of the model")

    def read_into(self, layer: int | None, path: str, target: np.ndarray) -> None:
        """One weight, or its layer, on the host. Raises ValueError naming it where it is not what was written."""
        for name, each in self._stored(layer).items():
            if each.path != path:
                continue
            try:
                found = self._restore(layer, {each.key: ocp.RestoreArgs(restore_type=np.ndarray)})[each.key]
            except (OSError, ValueError) as error:
                reason = str(error).partition("\n")[0]
                raise ValueError(f"{self._unit_folder(layer)}: weight {name} cannot be read: {reason:.200}") from error
            if (checksum := _checksum(found)) != self._sums(layer)[name]:
                raise ValueError(
                    f"{self._unit_folder(layer)}: weight {name} is damaged: its checksum is {checksum}, not {self._sums(layer)[name]}"
                )
            target[each.piece.index()] = found

    def restore(self, layer: int | None, where: Mapping[str, jax.sharding.Sharding], dtype: np.dtype) -> dict[str, jax.Array]:
        """The pieces of weights that `where` names, by path, on devices: each reads the chunks of the part that it holds.

        Raises ValueError naming the file where one is not what was written, before any array is read.
        """
        self._check_files(layer)
        stored = self._stored(layer)
        wanted = {
            stored[name].key: ocp.ArrayRestoreArgs(sharding=sharding, dtype=dtype, global_shape=stored[name].spec.shape)
            for name, sharding in where.items()
        }
        restored = self._restore(layer, wanted)
        return {name: restored[stored[name].key] for name in where}

    def _stored(self, layer: int | None) -> dict[str, _Stored]:
        """The arrays of a unit, by the paths of the pieces."""
        return {
            piece.path(path): _Stored(path, piece, piece.of(spec)) for path, spec in self.unit_specs(layer).items() for piece in self._cut(spec)
        }

    def _restore(self, layer: int | None, wanted: Mapping[str, ocp.RestoreArgs]) -> dict[str, Any]:
        item = dict.fromkeys(wanted, 0)
        with _checkpointer() as checkpointer:
            args = ocp.args.PyTreeRestore(item, restore_args=dict(wanted), partial_restore=True)
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

    def _check_files(self, layer: int | None) -> None:
        folder, found = self._unit_folder(layer), _file_sums(self._unit_folder(layer))
        for name, checksum in _read_sums(self._file_sums_file(layer)).items():
            if name not in found:
                raise ValueError(f"{folder}: file {name} is missing")
            if found[name] != checksum:
                raise ValueError(f"{folder}: file {name} is damaged: its checksum is {found[name]}, not {checksum}")

    def _sums(self, layer: int | None) -> dict[str, str]:
        """Checksums of arrays, by path."""
        return _read_sums(self._sums_file(layer))

    def _sums_file(self, layer: int | None) -> Path:
        return self._unit_folder(layer).with_suffix(".sums.json")

    def _file_sums_file(self, layer: int | None) -> Path:
        return self._unit_folder(layer).with_suffix(".files.json")

    def _unit_folder(self, layer: int | None) -> Path:
        return self._folder / ("ends" if layer is None else f"layer-{layer:05}")


def _read_sums(path: Path) -> dict[str, str]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, str])
    except (OSError, msgspec.MsgspecError) as error:
        raise ValueError(f"{path} is not readable: {error}") from error


def _checksum(array: np.ndarray) -> str:
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(array).view(np.uint8))


def _file_sums(folder: Path) -> dict[str, str]:
    """Of every file under `folder`, by its path there."""
    return {str(path.relative_to(folder)): _checksum_of_file(path) for path in sorted(folder.rglob("*")) if path.is_file()}


def _checksum_of_file(path: Path) -> str:
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while block := file.read(_HASH_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _checkpointer() -> ocp.Checkpointer:
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
