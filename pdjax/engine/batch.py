"""What the worker asks of the engine in one step, and what it gets back: plain host values, unpadded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pdjax.protocol import PromptToken, Sampling


class PrefillSeq(NamedTuple):
    """One sequence's part of a prefill step: tokens at positions `start .. start + len(tokens)`.

    `pages` is the page table from position 0 on and covers at least `start + len(tokens)` tokens. `slot` is the request slot, whose
    sampling history and last token it reads and writes. `output_index` None: this is not the last chunk, nothing is sampled;
    otherwise the index, counted from the start of the answer, of the token to sample. `scored`: rows of the chunk whose distribution is
    asked about the tokens `targets`, one a row.
    """

    slot: int
    tokens: list[int]
    start: int
    pages: list[int]
    sampling: Sampling
    output_index: int | None
    scored: range = range(0)
    targets: Sequence[int] = ()


class DecodeSeq(NamedTuple):
    """One sequence's part of a decode step: one token at `position`, whose KV goes to page `pages[position // page_size]`.

    `token` None: the input is what the previous step sampled for `slot`, still on the device.
    """

    slot: int
    token: int | None
    position: int
    pages: list[int]
    sampling: Sampling
    output_index: int


@dataclass(frozen=True)
class PromptRows:
    """The scored rows of a prefill step, those of its first sequence first: the target's log probability, and the best instead of it."""

    logprobs: np.ndarray  # float32[n]
    top_ids: np.ndarray  # int32[n, 20]
    top_logprobs: np.ndarray  # float32[n, 20]

    def __len__(self) -> int:
        return len(self.logprobs)

    def read(self, index: int, position: int, token: int, num_top: int) -> PromptToken:
        """Row `index`, whose target was `token`, the prompt's token at `position`; with the `num_top` best."""
        best = slice(0, num_top)
        top = list(zip(self.top_ids[index, best].tolist(), self.top_logprobs[index, best].tolist(), strict=True))
        return PromptToken(position, token, float(self.logprobs[index]), top)


class StepOutput(NamedTuple):
    """Sampled tokens, one row a sequence of the step, in its order (rows of sequences that did not sample hold nothing of use).

    `logprobs`: of the chosen token under the unmodified distribution; None where no sequence wanted any. `top_ids`, `top_logprobs`:
    the MAX_TOP_LOGPROBS best, best first. `prompt`: None where the step scored no rows.
    """

    tokens: np.ndarray  # int32[n]
    logprobs: np.ndarray | None  # float32[n]
    top_ids: np.ndarray | None  # int32[n, 20]
    top_logprobs: np.ndarray | None  # float32[n, 20]
    prompt: PromptRows | None = None
