"""Prompts in progress and how one step's token budget is spent on them; the same for a prefill worker and for local prefill on decode."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from pdjax.protocol import SequenceRequest
from pdjax.scheduler.memory import Lease
from pdjax.scheduler.sequence import Answer


@dataclass(slots=True, eq=False)
class Computing:
    """One forward of a prompt. Owns its request slot and its lease.

    `start`: tokens that this forward found cached; `num_cached`: those that the sequence's first one did. `num_launched`: tokens whose KV
    is in the pool or will be once the steps in flight have run, the cached prefix included. `rows`: positions at which prompt log
    probabilities are wanted of this forward. `is_aborted` is set when it ends early, because the sequence does or is to be retried;
    results of steps still in flight are then ignored.
    """

    answer: Answer
    slot: int
    lease: Lease
    num_cached: int
    start: int
    rows: range = range(0)
    is_aborted: bool = False
    num_launched: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_launched = self.start

    @property
    def num_tokens(self) -> int:
        return len(self.answer.tokens)

    @property
    def is_launched(self) -> bool:
        return self.num_launched == self.num_tokens


class PrefillPart(NamedTuple):
    """One sequence's share of a prefill step: tokens `start .. end`. `is_last` samples the token behind them. `launched_s`: when."""

    seq: Computing
    start: int
    end: int
    launched_s: float = 0.0

    @property
    def is_first(self) -> bool:
        return self.start == self.seq.start

    @property
    def is_last(self) -> bool:
        return self.end == self.seq.num_tokens

    @property
    def rows(self) -> range:
        """Positions that are scored in this step, each against the token behind it."""
        wanted = self.seq.rows
        return range(max(self.start, wanted.start), min(self.end, wanted.stop))

    @property
    def request(self) -> SequenceRequest:
        return self.seq.answer.request


@dataclass(slots=True)
class StepBudget:
    """What is left of one prefill step while it is put together. Lives for one scheduling pass."""

    tokens: int
    seqs: int

    @property
    def is_spent(self) -> bool:
        return self.tokens == 0 or self.seqs == 0

    def take_chunk(self, seq: Computing, page_size: int) -> PrefillPart | None:
        """Launch the next chunk of `seq` within the budget. All chunks but the last end at a page border, so that full pages can leave at
        once; None where the rest of the budget holds no full page."""
        remaining = seq.num_tokens - seq.num_launched
        count = min(remaining, self.tokens)
        if count < remaining:
            count = (seq.num_launched + count) // page_size * page_size - seq.num_launched
        if count <= 0 or self.seqs == 0:
            return None
        part = PrefillPart(seq, seq.num_launched, seq.num_launched + count)
        seq.num_launched = part.end
        self.tokens -= count
        self.seqs -= 1
        return part


def take_chunks(budget: StepBudget, seqs: Iterable[Computing], page_size: int) -> list[PrefillPart]:
    """One chunk of each sequence that still has tokens to launch, first come first served, until the budget is spent."""
    parts = []
    for seq in seqs:
        if budget.is_spent:
            break
        if not seq.is_launched and (part := budget.take_chunk(seq, page_size)):
            parts.append(part)
    return parts
