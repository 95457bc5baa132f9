"""One answer out of two event streams: prefill gives the first token of an attempt, decode the ones behind it. Pure Python."""

from __future__ import annotations

import enum
from typing import NamedTuple

from pdjax.protocol import Event, Failed, Finished, PromptToken, TokenOut, Tokens


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
    `prompt`: positions of the prompt whose log probabilities are due, before the first token. `last_words`: the event with which each
    side ended, by the side's name.
    """

    def __init__(self, num_prior: int, max_tokens: int, has_prefill: bool, prompt: range = range(0)):
        self.outcome: Ended | Broken | None = None
        self.last_words: dict[str, Finished | Failed] = {}
        self._first = num_prior
        self._next = num_prior
        self._max_tokens = max_tokens
        self._starts = {Side.PREFILL: num_prior, Side.DECODE: num_prior + has_prefill}
        self._expected = dict(self._starts)
        self._early: dict[int, TokenOut] = {}
        self._prompt = prompt
        self._scored: list[PromptToken] = []
        self._is_prefill_open = has_prefill
        self._prefill_finished: Finished | None = None
        self._decode_end: Finished | Failed | None = None

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that the worker which computed the prompt found in its cache; None where it has not said."""
        if self._prefill_finished is not None:
            return self._prefill_finished.cached_tokens
        return self._decode_end.cached_tokens if isinstance(self._decode_end, Finished) else None

    @property
    def is_settling(self) -> bool:
        """Decode's part is over and prefill's last word, due at any moment, decides the rest.

        Either every token is there and prefill's count of cached tokens is not; or decode lost the transfer before prefill's first
        token came, which is how it looks from decode when that token ends the answer.
        """
        return self.outcome is None and (isinstance(self._decode_end, Failed) or self._is_complete())

    def feed(self, side: Side, event: Event) -> list[TokenOut]:
        """Take one event; returns the tokens that are next in the answer because of it."""
        if self.outcome is not None:
            return []
        if not isinstance(event, Tokens):
            self.last_words[side.value] = event
        match event:
            case Tokens():
                self._take_prompt_tokens(side, event.prompt)
                ready = self._take_tokens(side, event.tokens)
            case Finished():
                ready = []
                self._finish(side, event)
            case Failed():
                ready = []
                self._fail(side, event)
        if self.is_settling and not self._is_prefill_open:
            self.conclude()
        return ready

    def take_prompt(self) -> list[PromptToken]:
        """What has come of the prompt since the last call: each position once, in order."""
        scored, self._scored = self._scored, []
        return scored

    def conclude(self) -> None:
        """End without prefill's last word. Requires `is_settling`."""
        assert self.is_settling, (self._next, self._expected, self._decode_end, self.outcome)
        if isinstance(self._decode_end, Failed):
            self.outcome = Broken(Side.DECODE, self._decode_end)
        elif self._decode_end is not None:
            self.outcome = Ended(self._decode_end)

    def _take_prompt_tokens(self, side: Side, scored: list[PromptToken]) -> None:
        """An attempt tells its prompt from the start; what an earlier one told already is left out."""
        for token in scored:
            if token.position in self._prompt:
                if token.position > self._prompt.start:
                    return self._break(side, f"prompt token {token.position} came where {self._prompt.start} was due")
                self._prompt = self._prompt[1:]
                self._scored.append(token)

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
        ready: list[TokenOut] = []
        if self._prompt and self._next in self._early:
            self._break(side, f"token {self._next} came while prompt token {self._prompt.start} was due")
            return ready
        while self._next in self._early:
            ready.append(self._early.pop(self._next))
            self._next += 1
        return ready

    def _finish(self, side: Side, finished: Finished) -> None:
        """Workers give the token that ends an answer too, so an end without a token of one's own has lost it."""
        if side is Side.PREFILL:
            self._is_prefill_open = False
        if self._expected[side] == self._starts[side]:
            self._break(side, f"{side.value} finished with {finished.reason!r} and without a token")
        elif side is Side.DECODE and finished.reason == "handed_off":
            self._break(side, "decode has nobody to hand off to")
        elif side is Side.DECODE:
            self._decode_end = finished
        else:
            self._prefill_finished = finished
            if finished.reason != "handed_off":
                self.outcome = Ended(finished)

    def _fail(self, side: Side, failed: Failed) -> None:
        """Decode holds the whole KV once it has given a token; prefill may fail then without harm."""
        if side is Side.PREFILL:
            self._is_prefill_open = False
            if self._next > self._first and self._expected[Side.DECODE] > self._starts[Side.DECODE]:
                return
        elif failed.kind == "transfer" and self._is_prefill_open and self._next == self._first:
            self._decode_end = failed
            return
        self.outcome = Broken(side, failed)

    def _break(self, side: Side, message: str) -> None:
        self.outcome = Broken(side, Failed(kind="internal", message=message, retriable=True))

    def _is_complete(self) -> bool:
        return isinstance(self._decode_end, Finished) and not self._early and self._next >= self._expected[Side.DECODE]
