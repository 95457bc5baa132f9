"""Checkpoints in GGUF files, as llama.cpp writes them."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import numpy as np

from pdjax.checkpoints.base import Checkpoint, TokenizerData
from pdjax.checkpoints.expand import SUPPORTED_KINDS
from pdjax.checkpoints.gguf_file import GgufFile
from pdjax.checkpoints.gguf_names import ROPE_TENSORS, Naming, parts_of
from pdjax.checkpoints.gguf_shape import read_shape
from pdjax.checkpoints.metadata import Metadata
from pdjax.checkpoints.parts import PartReader, checked_parts
from pdjax.checkpoints.sentencepiece import document_of

_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_CONTROL_TOKEN = 3
_USER_DEFINED_TOKEN = 4


def sha256_of(path: Path) -> str:
    """SHA-256 of the file's bytes, in hex; read in blocks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fingerprint_of(path: Path) -> str:
    """SHA-256 of the model's file; of several, of their hashes one behind the other."""
    hashes = [sha256_of(each) for each in files_of(path)]
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()


def files_of(path: Path) -> list[Path]:
    """All files of the model whose first file is `path`. Raises ValueError where it is another, FileNotFoundError where one is missing."""
    match = _SPLIT.fullmatch(path.name)
    if match is None:
        return [path]
    stem, number, total = match[1], int(match[2]), int(match[3])
    paths = [path.with_name(f"{stem}-{i:05}-of-{total:05}.gguf") for i in range(1, total + 1)]
    if number != 1:
        raise ValueError(f"{path} is file {number} of {total}; name the first, {paths[0].name}")
    if missing := [each for each in paths if not each.is_file()]:
        raise FileNotFoundError(f"{missing[0]}: there is no such file")
    return paths


class GgufCheckpoint(Checkpoint):
    """A model in one GGUF file, or in several, of which the first is named and holds all metadata.

    Raises ValueError at construction naming what is wrong: another architecture, a missing or unexpected tensor, a wrong shape.
    """

    def __init__(self, path: Path, name: str, fingerprint: str):
        self.name = name
        self.fingerprint = fingerprint
        self._file = GgufFile(path)
        for other in files_of(path)[1:]:
            self._file.tensors |= GgufFile(other).tensors
        _check_kinds(self._file)
        self.shape = read_shape(self._file)
        architecture = str(self._file.metadata["general.architecture"])
        tensors = {name: tensor for name, tensor in self._file.tensors.items() if name not in ROPE_TENSORS}
        parts = checked_parts(path, tensors, parts_of(self.shape, Naming.of(architecture)), architecture)
        self._reader = PartReader(tensors, parts)
        ids = (self._file.metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot"))
        self.eos_token_ids = tuple(dict.fromkeys(token for token in ids if token is not None))

    def tokenizer_data(self) -> TokenizerData:
        return _read_tokenizer(self._file)

    def read_into(self, path: str, layer: int | None, target: np.ndarray) -> None:
        self._reader.read_into(path, layer, target)


def _check_kinds(file: GgufFile) -> None:
    for tensor in file.tensors.values():
        if tensor.kind not in SUPPORTED_KINDS:
            supported = ", ".join(sorted(kind.name for kind in SUPPORTED_KINDS))
            raise ValueError(f"{file.path}: tensor {tensor.name} is stored as {tensor.kind.name}; supported are {supported}")


def _read_tokenizer(file: GgufFile) -> TokenizerData:
    metadata = Metadata(str(file.path), file.metadata, "metadata")
    model = metadata.required("tokenizer.ggml.model", str)
    if model not in ("gpt2", "llama"):
        raise ValueError(
            f"{file.path}: tokenizer.ggml.model {model!r} is not supported; supported are 'gpt2' (byte-level BPE) and 'llama' (sentencepiece)"
        )
    tokens = tuple(metadata.required("tokenizer.ggml.tokens", list))
    kinds = metadata.required("tokenizer.ggml.token_type", list)
    if len(kinds) != len(tokens):
        raise ValueError(f"{file.path}: tokenizer.ggml.token_type has {len(kinds)} entries for {len(tokens)} tokens")
    bos = metadata.values.get("tokenizer.ggml.bos_token_id")
    adds_bos = metadata.optional("tokenizer.ggml.add_bos_token", model == "llama")
    data = TokenizerData(
        tokens=tokens,
        merges=(),
        special_ids=frozenset(i for i, kind in enumerate(kinds) if kind == _CONTROL_TOKEN),
        added_ids=frozenset(i for i, kind in enumerate(kinds) if kind == _USER_DEFINED_TOKEN),
        pre_tokenizer="",
        chat_template=metadata.optional("tokenizer.chat_template", "") or None,
        bos_token_id=bos,
        eos_token_id=metadata.values.get("tokenizer.ggml.eos_token_id"),
        first_ids=(bos,) if bos is not None and adds_bos else (),
    )
    if model == "gpt2":
        merges, pre = tuple(metadata.required("tokenizer.ggml.merges", list)), metadata.required("tokenizer.ggml.pre", str)
        return data._replace(merges=merges, pre_tokenizer=pre)
    return data._replace(document=_sentencepiece_document(metadata, data), alphabet="sentencepiece")


def _sentencepiece_document(metadata: Metadata, data: TokenizerData) -> str:
    scores = metadata.numbers("tokenizer.ggml.scores")
    if len(scores) != len(data.tokens):
        raise ValueError(f"{metadata.where}: tokenizer.ggml.scores has {len(scores)} entries for {len(data.tokens)} tokens")
    unknown = metadata.optional("tokenizer.ggml.unknown_token_id", 0)
    if not 0 <= unknown < len(data.tokens):
        raise ValueError(f"{metadata.where}: tokenizer.ggml.unknown_token_id {unknown} is outside the vocabulary of {len(data.tokens)}")
    has_prefix_space = metadata.optional("tokenizer.ggml.add_space_prefix", True)
    return document_of(data.tokens, scores, data.special_ids, data.added_ids, unknown, has_prefix_space)
