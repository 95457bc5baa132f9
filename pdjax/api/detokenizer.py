"""Token ids to text as they come, cut at stop strings.

Cost is constant for each token, whatever the length of the answer and of the stop strings.
"""

from __future__ import annotations

import codecs

from pdjax.api.tokenizer import Tokenizer
from pdjax.errors import BadRequest


class _StopMatcher:
    """Knuth-Morris-Pratt search for one stop string. `matched`: how long a beginning of it the text so far ends with."""

    def __init__(self, stop: str):
        self.stop = stop
        self.matched = 0
        # _shorter[k]: the longest proper beginning of `stop` that its first k + 1 characters end with.
        self._shorter = [0]
        for char in stop[1:]:
            self._shorter.append(self._extend(self._shorter[-1], char))

    def _extend(self, matched: int, char: str) -> int:
        while matched and self.stop[matched] != char:
            matched = self._shorter[matched - 1]
        return matched + 1 if self.stop[matched] == char else 0

    def advance(self, text: str) -> int | None:
        """Take in more text. Returns the index in `text` just past the first full match, after which the matcher is used up."""
        for i, char in enumerate(text):
            self.matched = self._extend(self.matched, char)
            if self.matched == len(self.stop):
                return i + 1
        return None


class TextStream:
    """The text of one answer, token by token.

    Text is shown as early as it is certain: a character once all its bytes are there, and what may be the beginning of a stop string
    only when it has turned out not to be one. The stop string that is complete first wins, of several complete at once the longest,
    so the result does not depend on how the text is cut into tokens. Raises BadRequest for an empty stop string.

    `num_chars`: characters decoded so far, held ones included; read before a push it is the text offset of the pushed token.
    `stopped`: the stop string that ended the answer, cut off from what was shown; None as long as there is none.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = (), skip_special_tokens: bool = True):
        if "" in stop:
            raise BadRequest("stop strings must not be empty", "stop")
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._matchers = tuple(_StopMatcher(text) for text in dict.fromkeys(stop))
        self._held = ""
        self.num_chars = 0
        self.stopped: str | None = None

    def push(self, token: int) -> str:
        """Take in one token; returns the text that may be shown now. After a stop string nothing more is shown."""
        if self.stopped is not None or (self._skip_special_tokens and self._tokenizer.is_special(token)):
            return ""
        return self._show(self._decoder.decode(self._tokenizer.token_bytes(token)))

    def finish(self) -> str:
        """The answer has ended: returns what was held back, with U+FFFD for an incomplete character. Empty when called again."""
        if self.stopped is not None:
            return ""
        shown = self._show(self._decoder.decode(b"", final=True))
        rest, self._held = self._held, ""
        return shown + rest

    def _show(self, text: str) -> str:
        self.num_chars += len(text)
        matches = [(end, -len(matcher.stop), matcher.stop) for matcher in self._matchers if (end := matcher.advance(text)) is not None]
        start, text = len(self._held), self._held + text
        if matches:
            end, _, self.stopped = min(matches)
            self._held = ""
            return text[: start + end - len(self.stopped)]
        certain = len(text) - max((matcher.matched for matcher in self._matchers), default=0)
        self._held = text[certain:]
        return text[:certain]
