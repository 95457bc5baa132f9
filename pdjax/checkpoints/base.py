"""What every checkpoint format offers."""

from __future__ import annotations

import abc
from collections.abc import Callable

import numpy as np

from pdjax.models.shape import ModelShape

Report = Callable[[int, int], None]
"""Progress: called with (tensors done, tensors in all)."""


class TokenizerData:
    """Vocabulary, merges, special tokens and chat template as the checkpoint holds them; see `pdjax.api.tokenizer`."""


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
    def load_weights(self, dtype: np.dtype, report: Report) -> dict[str, np.ndarray]:
        """Every weight of `weight_specs(self.shape)`, by path, each in one C-contiguous array aligned to 64 bytes.

        Tensors are read and expanded one at a time, straight into their place: no second copy of the weights exists at any moment.
        Raises ValueError naming tensor, expected and found shape where the file does not fit.
        """
