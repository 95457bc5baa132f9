"""Log probabilities of prompt tokens: which rows of a forward they come from, and whose is whose in a step's result.

The hidden state at position r of a prompt says how likely each token is at position r + 1. So a prompt of n tokens has n - 1 rows, and
all of them have to be computed: what comes from the prefix cache has no rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pdjax.protocol import PROMPT_TOKENS_PER_MESSAGE, PromptToken, SequenceRequest, Tokens


class StepRows(Protocol):
    """The rows that one step has scored, those of its first sequence first."""

    def __len__(self) -> int: ...

    def read(self, index: int, position: int, token: int, num_top: int) -> PromptToken:
        """Row number `index` of the step as what it says of `token` at `position`, with the `num_top` best."""
        ...


class Part(Protocol):
    """The share of one sequence in a step. `rows`: positions that the step scores for it."""

    @property
    def rows(self) -> range: ...
    @property
    def request(self) -> SequenceRequest: ...


def rows_wanted(request: SequenceRequest, num_known: int) -> range:
    """Positions that a forward has to score when the first `num_known` rows are known already."""
    if request.sampling.prompt_logprobs is None:
        return range(0)
    return range(num_known, max(num_known, len(request.prompt) - request.num_prior - 1))


def max_cached_tokens(wanted: range, num_tokens: int) -> int:
    """How much of a prompt of `num_tokens` may come from a cache: at least the last token is computed, and every row that is wanted."""
    return min(num_tokens - 1, wanted.start) if wanted else num_tokens - 1


class LogprobCursor:
    """Walks over the rows of one step together with its parts. Each part either takes its rows or is passed over, in order."""

    def __init__(self, rows: StepRows | None):
        self._rows = rows
        self._next = 0

    def advance_logprob_pt(self, part: Part) -> range:
        """Move past the rows of `part`; returns which they are. For a part whose sequence is gone this is all there is to do: left out,
        the rows of those behind it would be taken for theirs."""
        start, self._next = self._next, self._next + len(part.rows)
        return range(start, self._next)

    def take(self, part: Part) -> list[PromptToken]:
        """What the rows of `part` say of the tokens behind them."""
        indices, request = self.advance_logprob_pt(part), part.request
        if not indices:
            return []
        num_rows = 0 if self._rows is None else len(self._rows)
        assert self._rows is not None and indices.stop <= num_rows, f"{indices} are wanted of the {num_rows} rows of a step"
        num_top = request.sampling.prompt_logprobs or 0
        return [self._rows.read(index, row + 1, request.prompt[row + 1], num_top) for index, row in zip(indices, part.rows, strict=True)]


NO_LOGPROBS = LogprobCursor(None)
"""For steps in which nobody asked for any."""


def prompt_messages(scored: Sequence[PromptToken]) -> list[Tokens]:
    """`scored` in messages of bounded size; none where there is nothing to say."""
    starts = range(0, len(scored), PROMPT_TOKENS_PER_MESSAGE)
    return [Tokens([], list(scored[start : start + PROMPT_TOKENS_PER_MESSAGE])) for start in starts]
