"""Finds checkpoints and loads their weights into the one abstract tree of `pdjax.models.shape.weight_specs`."""

from __future__ import annotations

from pathlib import Path

from pdjax.checkpoints.base import Checkpoint, TokenizerData
from pdjax.checkpoints.embedded import open_embedded
from pdjax.checkpoints.gguf import GgufCheckpoint, sha256_of

__all__ = ["Checkpoint", "TokenizerData", "open_checkpoint"]

EMBEDDED_PREFIX = "embedded:"


def open_checkpoint(source: str) -> Checkpoint:
    """Find the model that `source` names and check that it can be loaded; nothing large is read into memory.

    `source`: `embedded:NAME` or the path of a .gguf file. Raises ValueError for an unknown kind of source and for a damaged or
    unsupported file, FileNotFoundError where there is none.
    """
    if source.startswith(EMBEDDED_PREFIX):
        return open_embedded(source.removeprefix(EMBEDDED_PREFIX))
    path = Path(source)
    if path.suffix != ".gguf":
        raise ValueError(f"model source {source!r} is neither {EMBEDDED_PREFIX}NAME nor the path of a .gguf file")
    if not path.is_file():
        raise FileNotFoundError(f"model source {source!r}: there is no such file")
    return GgufCheckpoint(path, name=path.stem, fingerprint=sha256_of(path))
