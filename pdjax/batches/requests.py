"""What clients may ask of /v1/files and /v1/batches; what they may upload stands in `pdjax.batches.upload`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from pdjax.api.errors import InvalidField
from pdjax.api.schemas import Schema, validated
from pdjax.batches.store import Window
from pdjax.errors import BadRequest

MAX_FILES_LISTED, MAX_BATCHES_LISTED, DEFAULT_BATCHES_LISTED = 10_000, 100, 20


class CreateBatch(Schema):
    input_file_id: str
    endpoint: Literal["/v1/completions", "/v1/chat/completions"]
    completion_window: Literal["24h"]
    metadata: (
        Annotated[
            dict[Annotated[str, StringConstraints(max_length=64)], Annotated[str, StringConstraints(max_length=512)]], Field(max_length=16)
        ]
        | None
    ) = None


def parse_batch(body: Any) -> CreateBatch:
    """Raises BadRequest naming the field at fault."""
    if not isinstance(body, dict):
        raise BadRequest("the request body must be a JSON object")
    for name in body.keys() - CreateBatch.model_fields.keys():
        if body[name] is not None:
            raise InvalidField(f"{name[:100]} is not supported by this server", name[:100], "unsupported_parameter")
    return validated(CreateBatch, {name: body[name] for name in CreateBatch.model_fields if body.get(name) is not None})


class _FileList(Schema):
    after: str | None = None
    limit: int = Field(MAX_FILES_LISTED, ge=1, le=MAX_FILES_LISTED)
    order: Literal["asc", "desc"] = "desc"
    purpose: str | None = None


class _BatchList(Schema):
    after: str | None = None
    limit: int = Field(DEFAULT_BATCHES_LISTED, ge=1, le=MAX_BATCHES_LISTED)


def parse_file_list(query: Mapping[str, str]) -> tuple[Window, str | None]:
    """Which part of the list, and of which purpose. Raises BadRequest."""
    wanted = validated(_FileList, _numbered(query))
    return Window(wanted.after, wanted.limit, wanted.order), wanted.purpose


def parse_batch_list(query: Mapping[str, str]) -> Window:
    """Raises BadRequest."""
    wanted = validated(_BatchList, _numbered(query))
    return Window(wanted.after, wanted.limit)


def _numbered(query: Mapping[str, str]) -> dict[str, Any]:
    fields: dict[str, Any] = dict(query)
    limit = fields.get("limit", "")
    if limit.isdecimal() and len(limit) < 10:
        fields["limit"] = int(limit)
    return fields
