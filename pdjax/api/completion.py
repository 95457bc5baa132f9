"""Whole answers of the Python API, and how notebooks show them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from html import escape
from typing import NamedTuple

from pdjax.protocol import PromptToken, TokenOut

MAX_SHOWN_TOKENS = 64
MAX_SHOWN_ANSWERS = 32
MAX_SHOWN_CHARS = 4000
MAX_SHOWN_BEGINNING_CHARS = 160
"""Bounds on what a notebook is given to show; the answers themselves are whole."""

_Cells = tuple[str, ...]


class Completion(NamedTuple):
    """One answer. `tokens` include the one that ended it; `cached_tokens`: prompt tokens that were not computed, None where unknown.

    `prompt_logprobs`: one entry a prompt token where they were asked for, empty otherwise; the first has no log probability.
    One entry a token have `text_offsets`, where in the answer, in characters, its text begins, and `token_times_s`, when it arrived, in
    seconds after the sequence was given to the router.
    """

    request_id: str
    prompt_token_ids: list[int]
    text: str
    tokens: list[TokenOut]
    text_offsets: list[int]
    token_times_s: list[float]
    finish_reason: str
    stop_reason: int | str | None
    cached_tokens: int | None
    prompt_logprobs: list[PromptToken]

    @property
    def token_ids(self) -> list[int]:
        return [token.token for token in self.tokens]

    @property
    def ttft_s(self) -> float | None:
        """Time to first token; None where there is no token."""
        return self.token_times_s[0] if self.token_times_s else None

    @property
    def itl_s(self) -> float | None:
        """Mean time between two tokens; None where there are no two."""
        gaps = len(self.token_times_s) - 1
        return (self.token_times_s[-1] - self.token_times_s[0]) / gaps if gaps > 0 else None

    def _repr_html_(self) -> str:
        """For notebooks: the text, how it came about, and a table of its tokens."""
        text = f'<div style="white-space: pre-wrap">{escape(_cut(self.text, MAX_SHOWN_CHARS))}</div>'
        facts = f'<div style="opacity: 0.7">{escape(", ".join(self._facts()))}</div>'
        return f"<div>{text}{facts}{self._token_table()}</div>"

    def _facts(self) -> list[str]:
        facts = [f"{len(self.tokens)} tokens", f"ended by {_end(self)}", f"prompt of {len(self.prompt_token_ids)} tokens"]
        if self.cached_tokens is not None:
            facts[-1] += f" ({self.cached_tokens} cached)"
        if self.ttft_s is not None:
            facts.append(f"first token after {_ms(self.ttft_s)} ms")
        if self.itl_s is not None:
            facts.append(f"then {_ms(self.itl_s)} ms a token")
        return facts

    def _token_table(self) -> str:
        """The first tokens. A table without a row says nothing, so there is none then."""
        if not self.tokens:
            return ""
        has_logprobs = any(token.logprob is not None for token in self.tokens)
        heads = ("", "token", "id", *(("log probability",) if has_logprobs else ()), "after, ms", "gap, ms")
        rows = [self._token_row(index, has_logprobs) for index in range(min(len(self.tokens), MAX_SHOWN_TOKENS))]
        return f"<details open><summary>tokens</summary>{_table(heads, rows, len(self.tokens))}</details>"

    def _token_row(self, index: int, has_logprobs: bool) -> _Cells:
        token, time_s = self.tokens[index], self.token_times_s[index]
        start, end = [*self.text_offsets[index : index + 2], len(self.text)][:2]
        logprob = () if not has_logprobs else ("" if token.logprob is None else f"{token.logprob:.3f}",)
        gap = _ms(time_s - self.token_times_s[index - 1]) if index else ""
        shown = f"<code>{escape(json.dumps(self.text[start:end], ensure_ascii=False)[1:-1])}</code>"
        return (str(index), shown, str(token.token), *logprob, _ms(time_s), gap)


class Completions(list[Completion]):
    """Several answers, as a list that notebooks show as a table."""

    def _repr_html_(self) -> str:
        heads = ("", "prompt", "cached", "answer", "tokens", "ended by", "first token, ms", "then, ms a token")
        rows = [_answer_row(index, each) for index, each in enumerate(self[:MAX_SHOWN_ANSWERS])]
        return _table(heads, rows, len(self))


def _answer_row(index: int, answer: Completion) -> _Cells:
    return (
        str(index),
        str(len(answer.prompt_token_ids)),
        "" if answer.cached_tokens is None else str(answer.cached_tokens),
        escape(_cut(answer.text, MAX_SHOWN_BEGINNING_CHARS)),
        str(len(answer.tokens)),
        escape(_end(answer)),
        "" if answer.ttft_s is None else _ms(answer.ttft_s),
        "" if answer.itl_s is None else _ms(answer.itl_s),
    )


def _end(answer: Completion) -> str:
    if answer.stop_reason is None:
        return answer.finish_reason
    return _cut(f"{answer.finish_reason} {json.dumps(answer.stop_reason, ensure_ascii=False)}", MAX_SHOWN_BEGINNING_CHARS)


def _table(heads: Iterable[str], rows: list[_Cells], num_rows: int) -> str:
    """Cells are HTML. `num_rows`: how many there are, of which `rows` are the first."""
    head = "".join(f'<th style="text-align: left">{name}</th>' for name in heads)
    body = "".join("<tr>" + "".join(f'<td style="text-align: left">{cell}</td>' for cell in row) + "</tr>" for row in rows)
    more = f"<div>and {num_rows - len(rows)} more</div>" if num_rows > len(rows) else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"


def _cut(text: str, max_chars: int) -> str:
    return text if len(text) <= max_chars else f"{text[:max_chars]}…"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"
