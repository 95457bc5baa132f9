"""How the two endpoints word an answer: whole, or as the chunks of a stream.

Writers are made for one request and used by one task. Choices are known by their index: prompt by prompt, `n` to each.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from pdjax.api.generation import Delta, Finish
from pdjax.api.logprobs import LogprobWriter
from pdjax.api.responses import (
    Answer,
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatMessage,
    CompletionChoice,
    Usage,
)

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


class AnswerHead(NamedTuple):
    """What every chunk of an answer repeats. `include_usage`: the client wants a chunk with the usage at the end."""

    id: str
    created: int
    model: str
    include_usage: bool

    @property
    def chunk_usage(self) -> UnsetType | None:
        """`usage` of the chunks before the last."""
        return None if self.include_usage else UNSET


def server_sent_event(message: msgspec.Struct) -> bytes:
    return b"data: " + _encode(message) + b"\n\n"


class AnswerWriter(abc.ABC):
    @abc.abstractmethod
    def chunk(self, index: int, delta: Delta) -> bytes:
        """What goes to the client for one event of a choice: server-sent events, or b"" where there is nothing to tell yet."""

    @abc.abstractmethod
    def usage_chunk(self, usage: Usage) -> bytes:
        """The last event of a stream with `include_usage`."""

    @abc.abstractmethod
    def whole(self, choices: Sequence[Sequence[Delta]], usage: Usage) -> bytes:
        """The body of an answer that is not streamed, from all events of each choice."""


class CompletionWriter(AnswerWriter):
    """`echoes`: text to put in front of each choice, "" for none."""

    def __init__(self, head: AnswerHead, echoes: Sequence[str], logprobs: LogprobWriter | None):
        self._head = head
        self._echoes = list(echoes)
        self._echo_chars = [len(echo) for echo in echoes]
        self._logprobs = logprobs

    def chunk(self, index: int, delta: Delta) -> bytes:
        text = self._echoes[index] + delta.text
        if not text and delta.finish is None and self._logprobs is None:
            return b""
        self._echoes[index] = ""
        return server_sent_event(self._answer([self._choice(index, text, [delta])], self._head.chunk_usage))

    def usage_chunk(self, usage: Usage) -> bytes:
        return server_sent_event(self._answer([], usage))

    def whole(self, choices: Sequence[Sequence[Delta]], usage: Usage) -> bytes:
        return _encode(
            self._answer([self._choice(i, self._echoes[i] + _text(deltas), deltas) for i, deltas in enumerate(choices)], usage)
        )

    def _choice(self, index: int, text: str, deltas: Sequence[Delta]) -> CompletionChoice:
        finish = deltas[-1].finish
        return CompletionChoice(
            index=index,
            text=text,
            logprobs=self._logprobs and self._logprobs.completion(deltas, self._echo_chars[index]),
            finish_reason=finish and finish.reason,
            stop_reason=finish and finish.stop_reason,
        )

    def _answer(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> Answer:
        head = self._head
        return Answer(id=head.id, object="text_completion", created=head.created, model=head.model, choices=choices, usage=usage)


class ChatWriter(AnswerWriter):
    """The first chunk of each choice carries the role."""

    def __init__(self, head: AnswerHead, logprobs: LogprobWriter | None):
        self._head = head
        self._logprobs = logprobs
        self._opened: set[int] = set()

    def chunk(self, index: int, delta: Delta) -> bytes:
        opening = b""
        if index not in self._opened:
            self._opened.add(index)
            opening = self._event(index, ChatDelta(role="assistant", content=""), Delta(""))
        if not delta.text and delta.finish is None and self._logprobs is None:
            return opening
        return opening + self._event(index, ChatDelta(content=delta.text or UNSET), delta)

    def usage_chunk(self, usage: Usage) -> bytes:
        return server_sent_event(self._chunk([], usage))

    def whole(self, choices: Sequence[Sequence[Delta]], usage: Usage) -> bytes:
        head = self._head
        finished = [self._choice(index, deltas, _finish(deltas)) for index, deltas in enumerate(choices)]
        return _encode(
            Answer(id=head.id, object="chat.completion", created=head.created, model=head.model, choices=finished, usage=usage)
        )

    def _event(self, index: int, words: ChatDelta, delta: Delta) -> bytes:
        choice = ChatChunkChoice(
            index=index,
            delta=words,
            logprobs=self._logprobs and self._logprobs.chat([delta]),
            finish_reason=delta.finish and delta.finish.reason,
            stop_reason=delta.finish and delta.finish.stop_reason,
        )
        return server_sent_event(self._chunk([choice], self._head.chunk_usage))

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | UnsetType | None) -> Answer:
        head = self._head
        return Answer(id=head.id, object="chat.completion.chunk", created=head.created, model=head.model, choices=choices, usage=usage)

    def _choice(self, index: int, deltas: Sequence[Delta], finish: Finish) -> ChatChoice:
        return ChatChoice(
            index=index,
            message=ChatMessage(content=_text(deltas)),
            logprobs=self._logprobs and self._logprobs.chat(deltas),
            finish_reason=finish.reason,
            stop_reason=finish.stop_reason,
        )


def _text(deltas: Sequence[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def _finish(deltas: Sequence[Delta]) -> Finish:
    finish = deltas[-1].finish
    assert finish is not None, "a choice ended without saying how"
    return finish
