"""The rows of a job's input: OpenAI's batch requests or plain prompts, one a line, each good or bad on its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import xxhash

from pdjax.errors import PdjaxError

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ENDPOINTS = (COMPLETIONS, CHAT)
MAX_CUSTOM_ID_CHARS = 512

_ToRow = Callable[[int, bytes, Any], "Row"]
"""From a numbered line and what it holds. Raises _Malformed."""


class Row(NamedTuple):
    """A request. `line` counts from 1. `body` is the JSON that an HTTP client would send; where `lacks_model` it is a non-empty object to
    which the name of the served model has to be added. `key`: rows with the same beginning of it have the same beginning of their prompts.
    """

    line: int
    custom_id: str
    url: str
    body: bytes
    lacks_model: bool
    key: str

    def body_for(self, model: str) -> bytes:
        """The whole body, where the system serves `model`."""
        return b'{"model":' + msgspec.json.encode(model) + b"," + self.body[1:] if self.lacks_model else self.body


class BadRow(NamedTuple):
    """A line that is no request. `custom_id` None: it could not be read."""

    line: int
    custom_id: str | None
    code: str
    message: str


class Input(NamedTuple):
    """A whole input. `fingerprint` changes whenever a byte of the file does."""

    rows: list[Row]
    bad_rows: list[BadRow]
    fingerprint: str

    @property
    def num_rows(self) -> int:
        return len(self.rows) + len(self.bad_rows)


class _Malformed(PdjaxError):
    """`code` in OpenAI's manner; the message is for the error file."""

    def __init__(self, message: str, code: str = "invalid_row"):
        super().__init__(message)
        self.code = code


class _BatchRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line of OpenAI's batch input. `body` stays as it was written."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


def read_jsonl(path: Path, defaults: dict[str, Any]) -> Input:
    """`defaults`: request fields of plain prompts. Blank lines are no rows. Raises OSError."""
    data = path.read_bytes()
    return parse(_numbered(data), defaults, xxhash.xxh3_128_hexdigest(data))


def read_requests(path: Path, endpoint: str) -> Input:
    """OpenAI's batch requests only, all to `endpoint`. Raises OSError."""

    def row(number: int, line: bytes, value: Any) -> Row:
        if not isinstance(value, dict):
            raise _Malformed(f"a row is an object, got {type(value).__name__}")
        request = _batch_row(number, line, value)
        if request.url != endpoint:
            raise _Malformed(f"url {request.url} is not the batch's endpoint, {endpoint}", "mismatched_url")
        return request

    data = path.read_bytes()
    return _parse(_numbered(data), row, xxhash.xxh3_128_hexdigest(data))


def parse(lines: Iterable[tuple[int, bytes]], defaults: dict[str, Any], fingerprint: str) -> Input:
    """Numbered lines of JSON. Of several rows with one custom_id the first is good."""
    return _parse(lines, lambda number, line, value: _row(number, line, value, defaults), fingerprint)


def _numbered(data: bytes) -> Iterator[tuple[int, bytes]]:
    return ((number, line) for number, line in enumerate(data.split(b"\n"), 1) if line.strip())


def _parse(lines: Iterable[tuple[int, bytes]], to_row: _ToRow, fingerprint: str) -> Input:
    rows: list[Row] = []
    bad_rows: list[BadRow] = []
    first_lines: dict[str, int] = {}
    for row in _rows(lines, to_row):
        if isinstance(row, Row) and (first := first_lines.setdefault(row.custom_id, row.line)) != row.line:
            row = BadRow(row.line, row.custom_id, "duplicate_custom_id", f"custom_id {row.custom_id!r} is that of line {first} already")
        if isinstance(row, Row):
            rows.append(row)
        else:
            bad_rows.append(row)
    return Input(rows, bad_rows, fingerprint)


def _rows(lines: Iterable[tuple[int, bytes]], to_row: _ToRow) -> Iterator[Row | BadRow]:
    for number, line in lines:
        value: Any = None
        try:
            value = _decode(line)
            yield to_row(number, line, value)
        except _Malformed as error:
            custom_id = value.get("custom_id") if isinstance(value, dict) else None
            yield BadRow(number, custom_id if isinstance(custom_id, str) else None, error.code, f"line {number}: {error}")


def _row(number: int, line: bytes, value: Any, defaults: dict[str, Any]) -> Row:
    """Raises _Malformed."""
    if isinstance(value, str):
        value = {"prompt": value}
    if not isinstance(value, dict):
        raise _Malformed(f"a row is a text or an object, got {type(value).__name__}")
    if value.keys() & {"method", "url", "body"}:
        return _batch_row(number, line, value)
    return _plain_row(number, value, defaults)


def _batch_row(number: int, line: bytes, value: dict[str, Any]) -> Row:
    try:
        request = msgspec.json.decode(line, type=_BatchRequest)
    except msgspec.DecodeError as error:
        raise _Malformed(str(error)) from None
    if request.method != "POST":
        raise _Malformed(f"method must be POST, got {request.method[:20]!r}", "invalid_method")
    if request.url not in ENDPOINTS:
        raise _Malformed(f"url must be {' or '.join(ENDPOINTS)}, got {request.url[:100]!r}", "invalid_url")
    body = value["body"]
    _check_is_whole(body)
    return Row(number, _checked_id(request.custom_id), request.url, bytes(request.body), False, prefix_key(body))


def _plain_row(number: int, value: dict[str, Any], defaults: dict[str, Any]) -> Row:
    """Fields beside the prompt are fields of the request."""
    if ("prompt" in value) == ("messages" in value):
        raise _Malformed("a row needs either prompt or messages, or all of custom_id, method, url and body")
    fields = {**defaults, **value}
    custom_id = _checked_id(fields.pop("custom_id", f"line-{number}"))
    _check_is_whole(fields)
    url = CHAT if "messages" in fields else COMPLETIONS
    return Row(number, custom_id, url, msgspec.json.encode(fields), "model" not in fields, prefix_key(fields))


def _checked_id(custom_id: Any) -> str:
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID_CHARS:
        raise _Malformed(f"custom_id must be a text of 1 to {MAX_CUSTOM_ID_CHARS} characters")
    return custom_id


def _check_is_whole(body: Any) -> None:
    if isinstance(body, dict) and body.get("stream"):
        raise _Malformed("stream: a batch has no streams", "unsupported_value")


def _decode(line: bytes) -> Any:
    """As the HTTP API decodes a body. Raises _Malformed."""
    try:
        return msgspec.json.decode(line)
    except RecursionError:
        raise _Malformed("nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _Malformed(f"not valid JSON: {error}") from None


def prefix_key(body: Any) -> str:
    """A text that begins alike for prompts that begin alike: the prompt, the conversation as JSON, or a character for each token id.

    The text stands in for the tokens, which only the model's own process knows: texts that differ from some character on have tokens that
    differ from there on, or a few characters earlier.
    """
    if not isinstance(body, dict):
        return ""
    prompt, messages = body.get("prompt"), body.get("messages")
    if isinstance(messages, list):
        return "c" + msgspec.json.encode(messages).decode()
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, list):
        return "i" + "".join(chr(min(token, 0x10FFFF)) for token in prompt if isinstance(token, int) and token >= 0)
    return "p" + prompt if isinstance(prompt, str) else ""
