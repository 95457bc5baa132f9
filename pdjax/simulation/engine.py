"""The device of a simulated worker: a KV pool that remembers what was computed where, and steps whose results come back later.

What a place of the pool holds is the chain (see `arithmetic`) of the sequence up to and with its token, as real KV depends on all tokens
before it. A page also knows the chain that it follows. So a page table that leads through a wrong, stale or unwritten page is found on
the next read, and a wrong token can not come out of right pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from pdjax.scheduler.chunks import PrefillPart
from pdjax.scheduler.decode_states import DecodePart
from pdjax.simulation.arithmetic import MODULUS, MULTIPLIER, START, VOCAB
from pdjax.simulation.process import Process

UNWRITTEN = -1


class PageContent(NamedTuple):
    """One page: the chain before its first place, and the chain at each place (UNWRITTEN where nothing was computed)."""

    before: int
    chains: tuple[int, ...]


class Gathered(NamedTuple):
    """A copy of pages, as a gather makes it. `shape` is what a transport asks of an array."""

    pages: list[PageContent]

    @property
    def shape(self) -> tuple[int]:
        return (len(self.pages),)


class Engine:
    """A pool of `num_pages` pages. Every method takes effect in the order of the calls, as dispatches to one device do."""

    def __init__(self, num_pages: int, page_size: int):
        self.page_size = page_size
        self.num_computed_tokens = 0
        self._before = [UNWRITTEN] * num_pages
        self._chains = [[UNWRITTEN] * page_size for _ in range(num_pages)]
        self._last_token: dict[int, int] = {}

    def prefill(self, parts: Sequence[PrefillPart]) -> list[int]:
        """Compute each part's tokens behind what the pool holds of its sequence. Returns what follows each part."""
        results = []
        for part in parts:
            seq = part.seq
            token = self._write(seq.lease.pages, part.start, seq.answer.tokens[part.start : part.end]) % VOCAB
            if part.is_last:
                self._last_token[seq.slot] = token
            results.append(token)
        return results

    def decode(self, parts: Sequence[DecodePart]) -> list[int]:
        """One token of each sequence; a part without a token goes on with the one that the device sampled last in its slot."""
        results = []
        for part in parts:
            slot = part.seq.slot
            token = self._last_token[slot] if part.token is None else part.token
            self._last_token[slot] = self._write(part.seq.lease.pages, part.position, (token,)) % VOCAB
            results.append(self._last_token[slot])
        return results

    def gather(self, pages: Sequence[int]) -> Gathered:
        return Gathered([PageContent(self._before[page], tuple(self._chains[page])) for page in pages])

    def install(self, pages: Sequence[int], kv: Gathered) -> None:
        for page, content in zip(pages, kv.pages, strict=True):
            assert page != 0, "the null page is written"
            self._before[page], self._chains[page] = content.before, list(content.chains)

    def _write(self, pages: Sequence[int], start: int, tokens: Sequence[int]) -> int:
        """Compute `tokens` at positions from `start` on; returns the chain behind them."""
        size = self.page_size
        self.num_computed_tokens += len(tokens)
        chain = self._read(pages, start)
        for position, token in enumerate(tokens, start):
            page, place = pages[position // size], position % size
            if place == 0:
                assert page != 0, "the null page is written"
                self._before[page], self._chains[page] = chain, [UNWRITTEN] * size
            chain = self._chains[page][place] = (chain * MULTIPLIER + token + 7) % MODULUS
        return chain

    def _read(self, pages: Sequence[int], count: int) -> int:
        """Follow the first `count` places of a page table; returns the chain at the last one."""
        full, rest = divmod(count, self.page_size)
        chain = START
        for number, page in enumerate(pages[: full + 1 if rest else full]):
            chains = self._chains[page]
            last = chains[-1 if number < full else rest - 1]
            assert self._before[page] == chain and last != UNWRITTEN, (
                f"place {number} of a page table leads to page {page}, which holds "
                f"{'other' if self._before[page] != chain else 'too few'} tokens than the {count} before it"
            )
            chain = last
        return chain


class Cost(NamedTuple):
    """Ticks that a step takes: `step`, and `token` for each token that it computes."""

    step: int
    token: int


class Pace:
    """Durations for a `Device` whose steps cost as much as what `engine` has computed since the one before."""

    def __init__(self, engine: Engine, cost: Cost):
        self._engine = engine
        self._cost = cost
        self._num_tokens = engine.num_computed_tokens

    def __call__(self) -> int:
        before, self._num_tokens = self._num_tokens, self._engine.num_computed_tokens
        return self._cost.step + self._cost.token * (self._num_tokens - before)


class Launched(NamedTuple):
    """A step and what it sampled, one token a part."""

    parts: Sequence
    tokens: list[int]


class Device:
    """Steps in flight: they run one after another, each for `duration()` ticks, and their results wake the worker."""

    def __init__(self, process: Process, duration: Callable[[], int], wake: Callable[[], None]):
        self._process = process
        self._duration = duration
        self._wake = wake
        self._done: list[Launched] = []
        self._free_at = 0
        self.num_in_flight = 0

    def launch(self, parts: Sequence, tokens: list[int]) -> None:
        self.num_in_flight += 1
        now = self._process.timeline.now
        self._free_at = max(now, self._free_at) + self._duration()
        self._process.post(self._free_at - now, self._finish, Launched(parts, tokens))

    def take(self) -> list[Launched]:
        """Steps that have finished since the last call."""
        done, self._done = self._done, []
        self.num_in_flight -= len(done)
        return done

    def _finish(self, step: Launched) -> None:
        self._done.append(step)
        self._wake()
