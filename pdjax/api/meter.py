"""Counts and times the sequences of one request while their events go by."""

from __future__ import annotations

import time
from collections.abc import Sequence

from pdjax.api.generation import Delta
from pdjax.api.responses import PromptTokensDetails, Usage
from pdjax.observe.http_metrics import HttpMetrics


class Meter:
    """`prompt_tokens`: one entry a prompt; every prompt has `n` answers. `arrived`: time.perf_counter() at the request's arrival."""

    def __init__(self, metrics: HttpMetrics, prompt_tokens: Sequence[int], n: int, arrived: float):
        self._metrics = metrics
        self._prompt_tokens = prompt_tokens
        self._n = n
        self._arrived = arrived
        self._last_token = [0.0] * (len(prompt_tokens) * n)
        self._handed_off = [False] * (len(prompt_tokens) * n)
        self._generated = 0
        self._cached: list[int | None] = [None] * (len(prompt_tokens) * n)

    def observe(self, index: int, delta: Delta) -> None:
        """Take in one event of answer `index`."""
        if delta.token is not None:
            self._time_token(index)
        if delta.finish is not None:
            self._cached[index] = delta.finish.cached_tokens
            self._metrics.prompt_tokens.inc(self._prompt_tokens[index // self._n])
            self._metrics.cached_tokens.inc(delta.finish.cached_tokens or 0)

    def usage(self) -> Usage:
        """Of the whole request so far. A prompt counts once, whatever its number of answers, and so do its cached tokens: those that no
        answer to it had to compute."""
        prompt = sum(self._prompt_tokens)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=self._generated,
            total_tokens=prompt + self._generated,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self._cached_tokens()),
        )

    def _time_token(self, index: int) -> None:
        now = time.perf_counter()
        self._generated += 1
        self._metrics.generated_tokens.inc()
        if self._last_token[index]:
            self._metrics.itl.observe(now - self._last_token[index])
            if not self._handed_off[index]:
                self._metrics.handoff.observe(now - self._last_token[index])
                self._handed_off[index] = True
        else:
            self._metrics.ttft.observe(now - self._arrived)
        self._last_token[index] = now

    def _cached_tokens(self) -> int | None:
        total = 0
        for first in range(0, len(self._cached), self._n):
            known = [count for count in self._cached[first : first + self._n] if count is not None]
            if not known:
                return None
            total += min(known)
        return total
