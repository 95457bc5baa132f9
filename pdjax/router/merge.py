"""One answer out of two event streams: prefill gives the first token of an attempt, decode the ones behind it. Pure Python."""

from __future__ import annotations

import enum
from typing import NamedTuple

from pdjax.protocol import Event, Failed, Finished, TokenOut, Tokens


class Side(enum.Enum):
    PREFILL = "prefill"
    DECODE = "decode"


class Ended(NamedTuple):
    """The answer is complete; every token has been given out."""

    finished: Finished


class Broken(NamedTuple):
    """This attempt cannot complete the answer. `side`: where it failed."""

    side: Side
    failed: Failed


class Merge:
    """Fed with the events of one attempt, in the order of arrival; gives each token once, in order, without gaps.

    `num_prior` output tokens were given by earlier attempts. With prefill, decode's own tokens start at `num_prior + 1`; they may
    arrive before prefill's token and wait for it here (at most `max_tokens` of them). After `outcome` is set nothing is taken any more.
    """

    def __init__(self, num_prior: int, max_tokens: int, has_prefill: bool):
        self.outcome: Ended | Broken | None = None
        self._first = num_prior
        self._next = num_prior
        self._max_tokens = max_tokens
        self._expected = {Side.PREFILL: num_prior, Side.DECODE: num_prior + has_prefill}
        self._early: dict[int, TokenOut] = {}
        self._is_prefill_open = has_prefill
        self._prefill_finished: Finished | None = None
        self._decode_finished: Finished | None = None

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that the worker which computed the prompt found in its cache; None where it has not said."""
        finished = self._prefill_finished or self._decode_finished
        return None if finished is None else finished.cached_tokens

    @property
    def is_settling(self) -> bool:
        """Every token is there; only prefill's last word, with its count of cached tokens, is still on its way."""
        return self.outcome is None and self._is_complete()

    def feed(self, side: Side, event: Event) -> list[TokenOut]:
        """Take one event; returns the tokens that are next in the answer because of it."""
        if self.outcome is not None:
            return []
        match event:
            case Tokens():
                ready = self._take_tokens(side, event.tokens)
            case Finished():
                ready = []
                self._finish(side, event)
            case Failed():
                ready = []
                self._fail(side, event)
        if self.outcome is None and self._is_complete() and not self._is_prefill_open:
            self.conclude()
        return ready

    def conclude(self) -> None:
        """End without prefill's last word. Requires `is_settling`."""
        assert self.outcome is None and self._is_complete() and self._decode_finished is not None, (self._next, self._expected, self.outcome)
        self.outcome = Ended(self._decode_finished)

    def _take_tokens(self, side: Side, tokens: list[TokenOut]) -> list[TokenOut]:
        for token in tokens:
            if token.index > self._expected[side]:
                self._break(side, f"token {token.index} came where {self._expected[side]} was due")
            elif token.index >= self._max_tokens:
                self._break(side, f"token {token.index} came although max_tokens is {self._max_tokens}")
            if self.outcome is not None:
                break
            if token.index == self._expected[side]:
                self._expected[side] += 1
            if token.index >= self._next:
                self._early.setdefault(token.index, token)
        ready = []
        while self._next in self._early:
            ready.append(self._early.pop(self._next))
            self._next += 1
        return ready

    def _finish(self, side: Side, finished: Finished) -> None:
        """A first token that ends the answer ends it on prefill's word; decode never starts then."""
        has_own_token = self._expected[side] > self._first + (side is Side.DECODE and self._is_prefill_open)
        if side is Side.PREFILL:
            self._is_prefill_open = False
            if self._next == self._first and (finished.reason != "stop" or finished.stop_token is None):
                return self._break(side, f"prefill finished with {finished.reason!r} and without a token")
            self._prefill_finished = finished
            if finished.reason != "handed_off":
                self.outcome = Ended(finished)
        elif finished.reason == "handed_off":
            self._break(side, "decode has nobody to hand off to")
        elif not has_own_token and finished.reason == "length" and self._next == self._first:
            self._break(side, "decode finished with 'length' and without a token")
        else:
            self._decode_finished = finished

    def _fail(self, side: Side, failed: Failed) -> None:
        if side is Side.PREFILL:
            self._is_prefill_open = False
            is_not_needed = self._next > self._first and (self._next > self._first + 1 or self._decode_finished is not None)
            if is_not_needed:
                return
        self.outcome = Broken(side, failed)

    def _break(self, side: Side, message: str) -> None:
        self.outcome = Broken(side, Failed(kind="internal", message=message, retriable=True))

    def _is_complete(self) -> bool:
        return self._decode_finished is not None and not self._early and self._next >= self._expected[Side.DECODE]
