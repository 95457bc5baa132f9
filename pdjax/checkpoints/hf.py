"""Hugging Face folders: config.json, safetensors in one file or several, tokenizer.json, a chat template.

Nothing in a folder is run: configurations that point at code are read as data, and pickled weights are refused.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from pdjax.checkpoints.base import Checkpoint, TokenizerData
from pdjax.checkpoints.hf_config import read_shape
from pdjax.checkpoints.hf_names import Naming, parts_of
from pdjax.checkpoints.hf_tokenizer import read_tokenizer
from pdjax.checkpoints.metadata import Metadata
from pdjax.checkpoints.parts import PartReader, checked_parts
from pdjax.checkpoints.safetensors_file import MappedTensor, read_tensors

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_READ_BYTES = 1 << 22
_VISION = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")


class HfCheckpoint(Checkpoint):
    """A model in a folder. `fingerprint`, read on first use, covers every byte of config.json and of the weights.

    Raises ValueError at construction naming what is wrong: another architecture, a missing or unexpected tensor, a wrong shape, a
    damaged file; FileNotFoundError for a missing file.
    """

    def __init__(self, folder: Path, name: str):
        self.name = name
        self._folder = folder
        config = read_config(folder / "config.json")
        self.shape = read_shape(config)
        self._files = weight_files(folder)
        tensors = self._tensors()
        parts = checked_parts(folder, tensors, parts_of(self.shape, _naming(config, tensors)), config.required("architectures", list)[0])
        self._reader = PartReader(tensors, parts)
        self.eos_token_ids = _eos_token_ids(folder, config)
        if (folder / "tokenizer.json").is_file():
            self.tokenizer_data()  # every process that opens the model finds out whether the two fit

    @functools.cached_property
    def fingerprint(self) -> str:  # type: ignore[override]
        digest = xxhash.xxh3_128()
        for path in (self._folder / "config.json", *self._files):
            with path.open("rb") as file:
                while block := file.read(_READ_BYTES):
                    digest.update(block)
        return f"xxh3:{digest.hexdigest()}"

    def tokenizer_data(self) -> TokenizerData:
        return read_tokenizer(self._folder, self.shape.vocab_size)

    def read_into(self, path: str, layer: int | None, target: np.ndarray) -> None:
        self._reader.read_into(path, layer, target)

    def _tensors(self) -> dict[str, MappedTensor]:
        """Of all files; without those that a text model has no use for."""
        tensors: dict[str, MappedTensor] = {}
        for path in self._files:
            tensors |= read_tensors(path)
        is_tied = self.shape.tied_embeddings
        return {
            name: tensor
            for name, tensor in tensors.items()
            if not name.startswith(_VISION) and not name.endswith("rotary_emb.inv_freq") and not (is_tied and name.endswith("lm_head.weight"))
        }


def read_config(path: Path) -> Metadata:
    """A JSON file as metadata. Raises ValueError where it holds no object, FileNotFoundError where there is none."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file")
    return Metadata(str(path), read_json(path), "field")


def read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds a {type(values).__name__}, not an object")
    return values


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model. Raises FileNotFoundError naming the one that is missing, ValueError where weights are pickled."""
    if (folder / _INDEX).is_file():
        index = read_config(folder / _INDEX).required("weight_map", dict)
        names = sorted({str(name) for name in index.values()})
        if strays := [name for name in names if Path(name).name != name]:
            raise ValueError(f"{folder / _INDEX} names {strays[0]!r}, which is no file of its folder")
        paths = [folder / name for name in names]
    else:
        paths = [folder / _SINGLE]
    if missing := [path for path in paths if not path.is_file()]:
        pickled = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLED)
        if pickled:
            raise ValueError(f"{folder} holds pickled weights ({pickled[0]}), which could run code; only safetensors are read")
        raise FileNotFoundError(f"{missing[0]}: there is no such file")
    return paths


def _naming(config: Metadata, tensors: dict[str, MappedTensor]) -> Naming:
    match config.required("architectures", list)[0]:
        case "Phi3ForCausalLM":
            return Naming(is_fused=True)
        case "Gemma3ForConditionalGeneration" if any(name.startswith("language_model.") for name in tensors):
            return Naming("language_model.model.", "language_model.")
        case "Gemma3ForConditionalGeneration":
            return Naming("model.language_model.")
        case _:
            return Naming()


def _eos_token_ids(folder: Path, config: Metadata) -> tuple[int, ...]:
    """What ends an answer, as generation_config.json says, or config.json."""
    path = folder / "generation_config.json"
    sources = [read_config(path)] if path.is_file() else []
    for source in (*sources, config, config.section("text_config")):
        if source.has("eos_token_id"):
            value = source.values["eos_token_id"]
            ids = value if isinstance(value, list) else [value]
            if not all(type(each) is int for each in ids):
                raise ValueError(f"{source.where}: field eos_token_id should be a token id or several but is {value!r:.80}")
            return tuple(dict.fromkeys(ids))
    return ()
