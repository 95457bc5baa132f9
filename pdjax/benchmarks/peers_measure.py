"""What is measured of every engine, with the same client, the same prompts and greedy sampling.

Prompts are random words that are one token each in the model's vocabulary, so that a server which takes only text computes the same tokens as
one that takes token ids. No two requests share a prefix, but where a prefix is to be found cached.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

from pdjax.api.tokenizer import Tokenizer
from pdjax.benchmarks.client import Clock, RequestFailed, Sample
from pdjax.benchmarks.report import quantile

Say = Callable[[str], None]
Figures = dict[str, list[float]]

_Answer = TypeVar("_Answer")

KNOWN_PROMPT = "Shopping list:\n\n- milk\n- bread\n-"
KNOWN_ANSWER = " cheese\n- eggs\n- wine"
KNOWN_TOKENS = 7
"""What the model answers greedily. At each of these tokens its two best logits are more than 1 apart: 4-bit arithmetic shifts them by less."""

MAX_TRIES = 5
"""How often a request is sent with another prompt where the answer ends too early."""

MIN_GAPS = 32
MIN_OUT = 12
WARM_OUT = 4
_WORD = re.compile(rb" [a-z]{3,12}")


@dataclass(frozen=True)
class Plan:
    """How much is measured. Lengths in tokens; `cached` of the longest prompt are found cached in one of the rows.

    The closed loop: `clients` clients, or none, send `client_requests` requests each, one after another.
    Raises ValueError, naming value and limit.
    """

    repeats: int = 3
    lens: tuple[int, ...] = (128, 512, 2048)
    cached: int = 1792
    clients: int = 8
    client_requests: int = 2
    client_prompt: int = 256
    client_out: int = 32

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ValueError(f"repeats must be at least 1, got {self.repeats}")
        if not self.lens or min(self.lens) < 2 or len(set(self.lens)) < len(self.lens):
            raise ValueError(f"prompt lengths must be at least 2 tokens and differ, got {list(self.lens)}")
        if not 0 < self.cached < max(self.lens):
            raise ValueError(f"cached must be above 0 and below the longest prompt of {max(self.lens)} tokens, got {self.cached}")

    @property
    def out(self) -> int:
        """Output tokens of a request, so that all repeats of a length together have MIN_GAPS gaps behind the hand-off."""
        return max(MIN_OUT, math.ceil(MIN_GAPS / self.repeats) + 2)


class Prompt(NamedTuple):
    """The same prompt twice: as token ids and as text."""

    ids: list[int]
    text: str


class Observed(NamedTuple):
    """`prefill_s`: the part of the time to the first token that prefill itself took; None where the engine has no prefill of its own."""

    sample: Sample
    prefill_s: float | None


class EndedEarly(RequestFailed):
    """The model ended its answer, on a server that cannot be told to go on."""


class Requests(Protocol):
    """One way to send requests to a started engine: greedy, for exactly `out` tokens, past the end of sequence. All raise RequestFailed,
    and EndedEarly where the server stops at an end of sequence."""

    async def send(self, prompt: Prompt, out: int) -> Sample: ...

    async def observe(self, prompt: Prompt, out: int) -> Observed:
        """`send`, and then find out what prefill took."""

    async def text(self, prompt: Prompt, out: int) -> str:
        """The text of the answer."""


class Words:
    """Prompts of words that are one token each, drawn with a seed. Endless: no two prompts are the same but by a rare chance."""

    def __init__(self, tokenizer: Tokenizer, seed: int):
        self._tokenizer = tokenizer
        self._ids = _word_ids(tokenizer)
        self._rng = random.Random(f"peers {seed}")

    def draw(self, count: int) -> Prompt:
        return self.prompt(self._rng.choices(self._ids, k=count))

    def extend(self, prefix: Sequence[int], count: int) -> Prompt:
        """`prefix` and then fresh words, `count` tokens in all."""
        return self.prompt([*prefix, *self._rng.choices(self._ids, k=count - len(prefix))])

    def prompt(self, ids: list[int]) -> Prompt:
        return Prompt(ids, self._tokenizer.decode(ids))

    def of_text(self, text: str) -> Prompt:
        return Prompt(self._tokenizer.encode(text), text)


def _word_ids(tokenizer: Tokenizer) -> list[int]:
    words = [i for i in range(tokenizer.vocab_size) if not tokenizer.is_special(i) and _WORD.fullmatch(tokenizer.token_bytes(i))]
    assert words, f"a vocabulary of {tokenizer.vocab_size} tokens has no words"
    return [i for i in words if tokenizer.encode(tokenizer.token_text(i)) == [i]]


class Measurement:
    """One engine's turn: warm it, then measure row after row.

    `figures` is filled by row, one value a repeat; seconds, or tokens a second. What was measured before a failure stays there.
    """

    def __init__(self, requests: Requests, plan: Plan, words: Words, say: Say, clock: Clock = time.perf_counter):
        self._requests = requests
        self._plan = plan
        self._words = words
        self._say = say
        self._clock = clock
        self.figures: Figures = {}

    async def run(self) -> None:
        """Raises RequestFailed with the first request that fails."""
        await self._warm_up()
        for length in self._plan.lens:
            await self._one_by_one(length)
        await self._cached()
        if self._plan.clients:
            await self._closed_loop()

    async def _warm_up(self) -> None:
        """Also proves that the engine runs the same model as the others."""
        answer = await self._requests.text(self._words.of_text(KNOWN_PROMPT), KNOWN_TOKENS)
        if answer.rstrip() != KNOWN_ANSWER:
            raise RequestFailed(f"the model answered {answer!r}, expected {KNOWN_ANSWER!r}")
        for length in self._plan.lens:
            await self._ask(self._requests.send, [], length, WARM_OUT)

    async def _one_by_one(self, length: int) -> None:
        for _ in range(self._plan.repeats):
            sample, prefill_s = await self._ask(self._requests.observe, [], length, self._plan.out)
            self._note(f"ttft_{length}", sample.ttft_s)
            self._note(f"second_{length}", sample.ttft_s + sample.itl_s[0])
            self._note(f"itl_{length}", quantile(sample.steady_itl_s, 0.5))
            if prefill_s is not None:
                self._note(f"prefill_{length}", prefill_s)
                self._note(f"beyond_prefill_{length}", sample.ttft_s - prefill_s)
        self._tell(f"ttft_{length}", f"itl_{length}")

    async def _cached(self) -> None:
        """The prefix is computed by one request; those that are measured have it in common and nothing else."""
        length, cached = max(self._plan.lens), self._plan.cached
        prefix = self._words.draw(cached).ids
        await self._ask(self._requests.send, prefix, cached + 1, 1)
        for _ in range(self._plan.repeats):
            sample = await self._ask(self._requests.send, prefix, length, WARM_OUT)
            if sample.cached_tokens is not None and sample.cached_tokens < cached:
                raise RequestFailed(f"{sample.cached_tokens} of {length} prompt tokens were cached, expected {cached}")
            self._note(f"ttft_{length}_cached", sample.ttft_s)
        self._tell(f"ttft_{length}_cached")

    async def _closed_loop(self) -> None:
        plan = self._plan
        for _ in range(plan.repeats):
            prompts = [self._words.draw(plan.client_prompt) for _ in range(plan.clients * plan.client_requests)]
            pending = iter(prompts)
            start_s = self._clock()
            turns = await asyncio.gather(*(self._client(pending) for _ in range(plan.clients)))
            duration_s = self._clock() - start_s
            samples = [sample for turn in turns for sample in turn]
            self._note("clients_tokens_per_s", sum(sample.output_tokens for sample in samples) / duration_s)
            self._note("clients_ttft", quantile([sample.ttft_s for sample in samples], 0.5))
        self._tell("clients_tokens_per_s", "clients_ttft")

    async def _ask(self, verb: Callable[[Prompt, int], Awaitable[_Answer]], prefix: Sequence[int], length: int, out: int) -> _Answer:
        """`verb` of the requests, with a fresh prompt of `length` tokens that starts with `prefix`."""
        for _ in range(MAX_TRIES - 1):
            with contextlib.suppress(EndedEarly):
                return await verb(self._words.extend(prefix, length), out)
        return await verb(self._words.extend(prefix, length), out)

    async def _client(self, pending: Iterator[Prompt]) -> list[Sample]:
        return [await self._requests.send(prompt, self._plan.client_out) for prompt in pending]

    def _note(self, row: str, value: float) -> None:
        self.figures.setdefault(row, []).append(value)

    def _tell(self, *rows: str) -> None:
        shown = (f"{row} {quantile(self.figures[row], 0.5):.4g}" for row in rows)
        self._say(f"  {', '.join(shown)}")
