"""What the worker asks of the engine in one step, and what it gets back: plain host values, unpadded."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pdjax.protocol import Sampling


class PrefillSeq(NamedTuple):
    """One sequence's part of a prefill step: tokens at positions `start .. start + len(tokens)`.

    `pages` is the page table from position 0 on and covers at least `start + len(tokens)` tokens. `slot` is the request slot, whose
    sampling history and last token it reads and writes. `output_index` None: this is not the last chunk, nothing is sampled;
    otherwise the index, counted from the start of the answer, of the token to sample.
    """

    slot: int
    tokens: list[int]
    start: int
    pages: list[int]
    sampling: Sampling
    output_index: int | None


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


class StepOutput(NamedTuple):
    """Sampled tokens, one row a sequence of the step, in its order (rows of sequences that did not sample hold nothing of use).

    `logprobs`: of the chosen token under the unmodified distribution; None where no sequence wanted any. `top_ids`, `top_logprobs`:
    the MAX_TOP_LOGPROBS best, best first.
    """

    tokens: np.ndarray  # int32[n]
    logprobs: np.ndarray | None  # float32[n]
    top_ids: np.ndarray | None  # int32[n, 20]
    top_logprobs: np.ndarray | None  # float32[n, 20]
