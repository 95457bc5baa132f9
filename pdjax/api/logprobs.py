"""Log probabilities in the two shapes of OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence

from pdjax.api.generation import Delta
from pdjax.api.responses import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob
from pdjax.api.tokenizer import Tokenizer
from pdjax.protocol import PromptToken, TokenOut

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot hold."""


class LogprobWriter:
    """`num_top`: how many alternatives the client wants for each token. Every output token has an entry, the one that stops too, and in
    front of them every prompt token whose log probability was asked for."""

    def __init__(self, tokenizer: Tokenizer, num_top: int):
        self._tokenizer = tokenizer
        self._num_top = num_top

    def completion(self, deltas: Sequence[Delta], echo_chars: int) -> CompletionLogprobs | None:
        """For the tokens of `deltas`; None where they have none. `echo_chars`: length of the prompt in front of the answer's own text."""
        entries: list[tuple[PromptToken | TokenOut, int]] = []
        for delta in deltas:
            if delta.prompt is not None:
                entries += zip(delta.prompt.tokens, delta.prompt.text_offsets, strict=True)
            if delta.token is not None:
                entries.append((delta.token, echo_chars + delta.text_offset))
        if not entries:
            return None
        return CompletionLogprobs(
            text_offset=[offset for _, offset in entries],
            token_logprobs=[_finite(token.logprob) for token, _ in entries],
            tokens=[self._name(token.token) for token, _ in entries],
            top_logprobs=[self._alternatives(token) for token, _ in entries] if self._num_top else None,
        )

    def chat(self, deltas: Sequence[Delta]) -> ChatLogprobs | None:
        """For the tokens of `deltas`; None where they have none."""
        content = [self._chat_entry(delta.token) for delta in deltas if delta.token is not None]
        return ChatLogprobs(content=content) if content else None

    def _alternatives(self, token: PromptToken | TokenOut) -> dict[str, float] | None:
        """The best tokens and, as OpenAI does it, the chosen one where it is not among them. None for a token that follows nothing."""
        if token.logprob is None:
            return None
        best = {self._name(other): max(logprob, LOWEST_LOGPROB) for other, logprob in self._best(token)}
        best.setdefault(self._name(token.token), max(token.logprob, LOWEST_LOGPROB))
        return best

    def _chat_entry(self, token: TokenOut) -> TokenLogprob:
        top = [
            TopLogprob(token=self._name(other), logprob=max(logprob, LOWEST_LOGPROB), bytes=list(self._tokenizer.token_bytes(other)))
            for other, logprob in self._best(token)
        ]
        raw = list(self._tokenizer.token_bytes(token.token))
        return TokenLogprob(token=self._name(token.token), logprob=_finite(token.logprob), bytes=raw, top_logprobs=top)

    def _best(self, token: PromptToken | TokenOut) -> list[tuple[int, float]]:
        return (token.top_logprobs or [])[: self._num_top]

    def _name(self, token: int) -> str:
        """The token's text; for a part of a character, OpenAI's spelling of its bytes."""
        raw = self._tokenizer.token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LOWEST_LOGPROB)
