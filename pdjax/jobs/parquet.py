"""Parquet in and out, by pyarrow (extra `batch`), which is imported here and only where a job asks for it.

A Parquet file cannot grow line by line. So a job keeps its results in a journal of JSON lines, and writes Parquet when all rows are done.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from pdjax.config.load import ConfigError
from pdjax.jobs.outcomes import ResultLine
from pdjax.jobs.rows import Input, parse


def read_parquet(path: Path, defaults: dict[str, Any]) -> Input:
    """Rows with the columns that a JSON line has as fields; nulls are not given; `body` and `messages` may be text that holds JSON.

    Raises OSError, and ConfigError for what is no Parquet.
    """
    import pyarrow

    fingerprint = xxhash.xxh3_128_hexdigest(path.read_bytes())
    try:
        return parse(_lines(path), defaults, fingerprint)
    except pyarrow.ArrowException as error:
        raise ConfigError([f"{path}: cannot be read as Parquet: {error}"]) from None


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    import pyarrow.parquet

    number = 0
    with pyarrow.parquet.ParquetFile(path) as file:
        for batch in file.iter_batches():
            for record in batch.to_pylist():
                number += 1
                yield number, msgspec.json.encode({name: _field(name, value) for name, value in record.items() if value is not None})


def _field(name: str, value: Any) -> Any:
    is_json = name in ("body", "messages") and isinstance(value, str)
    return msgspec.Raw(value.encode()) if is_json else _without_nulls(value)


def _without_nulls(value: Any) -> Any:
    """A struct has every field of its column, null where a row did not give it."""
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def write_parquet(path: Path, results: Sequence[ResultLine]) -> None:
    """A row each, with the answer's text beside its whole body (JSON). Replaces `path` as a whole. Raises OSError."""
    import pyarrow
    import pyarrow.parquet

    texts = ("id", "custom_id", "request_id", "text", "body", "error_code", "error_message")
    schema = pyarrow.schema([("status_code", pyarrow.int32()), *((name, pyarrow.string()) for name in texts)])
    unfinished = path.with_name(path.name + ".new")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([_record(result) for result in results], schema=schema), unfinished)
    unfinished.replace(path)


def _record(result: ResultLine) -> dict[str, Any]:
    record: dict[str, Any] = {"id": result.id, "custom_id": result.custom_id}
    if result.response is not None:
        body = bytes(result.response.body)
        told = {"status_code": result.response.status_code, "request_id": result.response.request_id, "body": body.decode()}
        record |= told | {"text": _text(msgspec.json.decode(body))}
    if result.error is not None:
        record |= {"error_code": result.error.code, "error_message": result.error.message}
    return record


def _text(body: Any) -> str | None:
    """Of the first choice; None where the body is an error."""
    try:
        choice = body["choices"][0]
        return choice["text"] if "text" in choice else choice["message"]["content"]
    except (TypeError, LookupError):
        return None
