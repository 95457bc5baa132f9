"""What every checkpoint format offers."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from pdjax.models.shape import ModelShape

Report = Callable[[int, int], None]
"""Progress: called with (tensors done, tensors in all)."""


class TokenizerData(NamedTuple):
    """Vocabulary, merges, special tokens and chat template as the checkpoint holds them; see `pdjax.api.tokenizer`.

    `tokens`: the text of each id, in the byte-level alphabet of GPT-2 except for special and added tokens, which are plain text.
    `merges`: pairs of byte-pair encoding, best first, each "left right". `special_ids` and `added_ids` are recognised whole in text;
    special ones are not shown in answers, added ones are. `pre_tokenizer` names how text is cut before the merges.
    `chat_template` is Jinja source.
    """

    tokens: tuple[str, ...]
    merges: tuple[str, ...]
    special_ids: frozenset[int]
    added_ids: frozenset[int]
    pre_tokenizer: str
    chat_template: str | None
    bos_token_id: int | None
    eos_token_id: int | None


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
    def load_weights(self, dtype: np.dtype, report: Report) -> dict[str, np.ndarray]:
        """Every weight of `weight_specs(self.shape)`, by path, each in one C-contiguous array aligned to 64 bytes.

        Tensors are read and expanded one at a time, straight into their place: no second copy of the weights exists at any moment.
        Raises ValueError naming tensor, expected and found shape where the file does not fit.
        """
