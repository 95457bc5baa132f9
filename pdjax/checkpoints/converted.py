"""Folders that `python -m pdjax.convert` writes: a description in JSON, and the weights in Orbax checkpoints."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

import ml_dtypes
import msgspec
import numpy as np

from pdjax.checkpoints.base import Checkpoint, Restore, TokenizerData
from pdjax.models.pieces import Piece, pieces_of, whole
from pdjax.models.shape import ModelShape, WeightSpec

if TYPE_CHECKING:
    from pdjax.checkpoints.orbax_store import WeightStore

DESCRIPTION_FILE = "pdjax.json"
UNFINISHED_FILE = "pdjax.unfinished.json"
"""The description, before all weights are there."""

WEIGHTS_FOLDER = "weights"
FORMAT = 2
"""1 stored each weight in one piece, which devices that hold parts of it cannot read their parts of: such folders are read through the host."""

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


class Description(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything about a converted model but its weights. `dtype`: one of `DTYPES`. `format`: 1 or `FORMAT`."""

    name: str
    fingerprint: str
    dtype: str
    shape: ModelShape
    eos_token_ids: tuple[int, ...]
    tokenizer: TokenizerData
    format: int = FORMAT


def describe(checkpoint: Checkpoint, dtype: str) -> Description:
    """What is written beside the weights of `checkpoint`."""
    fingerprint = f"{checkpoint.fingerprint}:{dtype}"
    return Description(checkpoint.name, fingerprint, dtype, checkpoint.shape, checkpoint.eos_token_ids, checkpoint.tokenizer_data())


def read_description(path: Path) -> Description:
    """Raises ValueError naming the file where it is damaged or of another format."""
    try:
        description = msgspec.json.decode(path.read_bytes(), type=Description)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path} does not describe a converted model: {error}") from error
    if description.format not in (1, FORMAT) or description.dtype not in DTYPES:
        raise ValueError(f"{path}: format {description.format} with dtype {description.dtype!r} is not known")
    return description


class ConvertedCheckpoint(Checkpoint):
    """A converted model. Raises ValueError at construction where its description is damaged, on first reading where a weight does not fit."""

    def __init__(self, folder: Path):
        description = read_description(folder / DESCRIPTION_FILE)
        self.name = description.name
        self.shape = description.shape
        self.fingerprint = description.fingerprint
        self.eos_token_ids = description.eos_token_ids
        self._folder = folder
        self._description = description

    def tokenizer_data(self) -> TokenizerData:
        return self._description.tokenizer

    def read_into(self, path: str, layer: int | None, target: np.ndarray) -> None:
        self.store.read_into(layer, path, target)

    def restorer(self, dtype: np.dtype) -> Restore | None:
        if self._description.format == 1:
            return None
        return lambda layer, where: self.store.restore(layer, where, dtype)

    @functools.cached_property
    def store(self) -> WeightStore:
        """The weights, each of which has been looked at. Imported here: a router does without JAX."""
        from pdjax.checkpoints.orbax_store import WeightStore

        cut = _in_one_piece if self._description.format == 1 else functools.partial(pieces_of, self.shape)
        store = WeightStore(self._folder / WEIGHTS_FOLDER, self.shape, DTYPES[self._description.dtype], cut)
        store.check()
        return store


def _in_one_piece(spec: WeightSpec) -> tuple[Piece, ...]:
    return (whole(spec),)
