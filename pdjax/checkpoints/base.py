"""What every checkpoint format offers."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from pdjax.checkpoints.parts import aligned_empty
from pdjax.models.shape import ModelShape, weight_specs

Restore = Callable[[int | None, Mapping[str, Any]], dict[str, Any]]
"""(a layer, or None for weights that are not stacked; JAX shardings by path of a piece, as `pdjax.models.pieces` cuts weights) -> JAX arrays.
This package does without JAX."""

Report = Callable[[int, int], None]
"""Progress: called with (units done, units in all); a unit is a weight, or one layer of a weight that is stacked."""


class TokenizerData(NamedTuple):
    """Vocabulary, merges, special tokens and chat template as the checkpoint holds them; see `pdjax.api.tokenizer`.

    `tokens`: the text of each id, in the byte-level alphabet of GPT-2 except for special and added tokens, which are plain text.
    `merges`: pairs of byte-pair encoding, best first, each "left right". `special_ids` and `added_ids` are recognised whole in text;
    special ones are not shown in answers, added ones are. `pre_tokenizer` names how text is cut before the merges.
    `chat_template` is Jinja source.

    `document`: the whole tokenizer as a tokenizer.json, which then says how text is cut and merged instead of `merges` and
    `pre_tokenizer`. `alphabet`: how `tokens` spell bytes, "byte-level" or "sentencepiece" (U+2581 is a space, <0x0A> a byte).
    `first_ids`: what every document starts with; a chat template writes it out, a plain prompt does not.
    """

    tokens: tuple[str, ...]
    merges: tuple[str, ...]
    special_ids: frozenset[int]
    added_ids: frozenset[int]
    pre_tokenizer: str
    chat_template: str | None
    bos_token_id: int | None
    eos_token_id: int | None
    document: str | None = None
    alphabet: str = "byte-level"
    first_ids: tuple[int, ...] = ()


class Checkpoint(abc.ABC):
    """A model that has been found and looked at, but not loaded.

    `name`: what clients call it by default. `fingerprint`: equal exactly for equal weights; part of the transfer layout.
    `eos_token_ids`: tokens that end an answer.
    """

    name: str
    shape: ModelShape
    fingerprint: str
    eos_token_ids: tuple[int, ...]

    @abc.abstractmethod
    def tokenizer_data(self) -> TokenizerData:
        """What turns text into this model's token ids. Raises ValueError where the file holds no tokenizer that is understood."""

    @abc.abstractmethod
    def read_into(self, path: str, layer: int | None, target: np.ndarray) -> None:
        """Fill `target`, C-contiguous, with the weight `path` of `weight_specs(self.shape)`, or with its layer `layer` where it is stacked.

        Values are rounded to the dtype of `target`. What is read of a file at a time is small beside a layer.
        """

    def restorer(self, dtype: np.dtype) -> Restore | None:
        """What brings weights straight to devices, each of which reads the part that it holds; None where the host has to read them.

        What it returns raises ValueError naming the file where one is damaged.
        """
        return None

    def load_weights(self, dtype: np.dtype, report: Report) -> dict[str, np.ndarray]:
        """Every weight of `weight_specs(self.shape)`, by path, each in one C-contiguous array aligned to 64 bytes.

        No second copy of the weights exists at any moment.
        """
        specs = weight_specs(self.shape)
        weights = {path: aligned_empty(spec.shape, np.dtype(dtype)) for path, spec in specs.items()}
        units = weight_units(self.shape)
        for done, (path, layer) in enumerate(units, start=1):
            self.read_into(path, layer, weights[path] if layer is None else weights[path][layer])
            report(done, len(units))
        return weights


def weight_units(shape: ModelShape) -> list[tuple[str, int | None]]:
    """What is read at a time, as (path, layer): weights that are not stacked, then one layer after the other."""
    specs = weight_specs(shape)
    ends: list[tuple[str, int | None]] = [(path, None) for path, spec in specs.items() if not spec.is_layered]
    layered = [path for path, spec in specs.items() if spec.is_layered]
    return ends + [(path, layer) for layer in range(shape.num_layers) for path in layered]
