"""From a reply to a line of the result files, and back from the line to what it counts for."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import msgspec

from pdjax.jobs.backend import Reply
from pdjax.jobs.rows import BadRow, Row

OK = 200
SHOWN_BODY_BYTES = 300


class Response(msgspec.Struct, frozen=True):
    """`body`: the answer as an HTTP client gets it."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class RowError(msgspec.Struct, frozen=True):
    code: str
    message: str


class ResultLine(msgspec.Struct, frozen=True):
    """A line of OpenAI's batch output and error files. `id` holds the number of the input's line. Where there is no `response` the row was
    never a request, or its answer was not JSON; `error` says what."""

    id: str
    custom_id: str | None
    response: Response | None
    error: RowError | None

    @property
    def is_ok(self) -> bool:
        return self.response is not None and self.response.status_code == OK

    @property
    def line(self) -> int:
        """The input's line. Raises ValueError for an id that was not made here."""
        found = re.fullmatch(r"batch_req_(\d{1,18})", self.id)
        if found is None:
            raise ValueError(f"id {self.id!r}")
        return int(found[1])


class Counts(NamedTuple):
    """What rows came to. `cached_tokens` of the prompt tokens were not computed; rows whose answers do not tell count as computed."""

    num_ok: int = 0
    num_failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    @property
    def num_rows(self) -> int:
        return self.num_ok + self.num_failed

    @property
    def num_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens

    @property
    def cached_share(self) -> float | None:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None

    def plus(self, other: Counts) -> Counts:
        return Counts(*(mine + its for mine, its in zip(self, other, strict=True)))


def result_of(row: Row, reply: Reply) -> ResultLine:
    try:
        body = msgspec.json.decode(reply.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        shown = reply.body[:SHOWN_BODY_BYTES].decode(errors="replace")
        return _line(row, None, RowError(f"http_{reply.status}", f"status {reply.status} with an answer that is not JSON: {shown}"))
    raw = msgspec.json.encode(body) if b"\n" in reply.body else reply.body  # a result has to be one line
    return _line(row, Response(reply.status, reply.request_id, msgspec.Raw(raw)), None)


def result_of_bad(row: BadRow) -> ResultLine:
    return _line(row, None, RowError(row.code, row.message))


def result_of_unasked(row: Row, code: str, message: str) -> ResultLine:
    """For a row that has been given up before it was answered."""
    return _line(row, None, RowError(code, message))


def counts_of(result: ResultLine) -> Counts:
    if not result.is_ok:
        return Counts(num_failed=1)
    assert result.response is not None
    usage = _usage(msgspec.json.decode(result.response.body))
    details = usage.get("prompt_tokens_details") or {}
    return Counts(1, 0, usage.get("prompt_tokens", 0), details.get("cached_tokens") or 0, usage.get("completion_tokens", 0))


def _usage(body: Any) -> dict[str, Any]:
    usage = body.get("usage") if isinstance(body, dict) else None
    return usage if isinstance(usage, dict) else {}


def _line(row: Row | BadRow, response: Response | None, error: RowError | None) -> ResultLine:
    return ResultLine(f"batch_req_{row.line}", row.custom_id, response, error)
