"""Finds checkpoints and loads their weights into the one abstract tree of `pdjax.models.shape.weight_specs`."""

from __future__ import annotations

from pathlib import Path

from pdjax.checkpoints.base import Checkpoint, TokenizerData
from pdjax.checkpoints.converted import DESCRIPTION_FILE, UNFINISHED_FILE, ConvertedCheckpoint
from pdjax.checkpoints.embedded import open_embedded
from pdjax.checkpoints.gguf import GgufCheckpoint, fingerprint_of
from pdjax.checkpoints.hf import HfCheckpoint
from pdjax.checkpoints.hub import fetch, is_hub_id
from pdjax.checkpoints.random_weights import RandomCheckpoint

__all__ = ["Checkpoint", "TokenizerData", "open_checkpoint"]

EMBEDDED_PREFIX = "embedded:"
RANDOM_PREFIX = "random:"

_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def open_checkpoint(source: str) -> Checkpoint:
    """Find the model that `source` names and check that it can be loaded; nothing large is read into memory.

    `source`: `embedded:NAME`, `random:SHAPE`, the path of a .gguf file, of a Hugging Face folder or of one that `pdjax.convert` has
    written, or OWNER/NAME on the Hugging Face hub. Raises ValueError for an unknown kind of source and for a damaged or unsupported file,
    FileNotFoundError where there is none.
    """
    if source.startswith(EMBEDDED_PREFIX):
        return open_embedded(source.removeprefix(EMBEDDED_PREFIX))
    if source.startswith(RANDOM_PREFIX):
        return RandomCheckpoint(source.removeprefix(RANDOM_PREFIX))
    path = Path(source).expanduser()
    if path.is_dir():
        return _open_folder(path)
    if path.suffix in _PICKLED:
        raise ValueError(f"model source {source!r} is pickled, which could run code; give the folder of a model with safetensors")
    if path.suffix == ".gguf":
        if not path.is_file():
            raise FileNotFoundError(f"model source {source!r}: there is no such file")
        return GgufCheckpoint(path, name=path.stem, fingerprint=fingerprint_of(path))
    if is_hub_id(source):
        return HfCheckpoint(fetch(source), name=source.rpartition("/")[2])
    raise ValueError(
        f"model source {source!r} is none of {EMBEDDED_PREFIX}NAME, {RANDOM_PREFIX}SHAPE, a .gguf file, a model's folder, OWNER/NAME on the hub"
    )


def _open_folder(folder: Path) -> Checkpoint:
    name = folder.resolve().name
    if (folder / DESCRIPTION_FILE).is_file():
        return ConvertedCheckpoint(folder)
    if (folder / UNFINISHED_FILE).is_file():
        raise ValueError(f"{folder} holds an unfinished conversion; the same pdjax.convert command again finishes it")
    return HfCheckpoint(folder, name)
