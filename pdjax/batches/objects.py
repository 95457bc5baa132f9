"""OpenAI's file and batch objects: what clients get, and what is kept between two runs of the router. Times are seconds since the epoch."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from pdjax.jobs.outcomes import Counts

Status = Literal["validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"]
ENDED: frozenset[Status] = frozenset(("completed", "failed", "expired", "cancelled"))
CANCELLABLE: frozenset[Status] = frozenset(("validating", "in_progress"))


class Object(msgspec.Struct, frozen=True, kw_only=True):
    """Base of every struct here."""


class File(Object, frozen=True, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"] = "processed"


class FileDeleted(Object, frozen=True, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class BatchError(Object, frozen=True, kw_only=True):
    """`line` of the input, where it is one line that is at fault."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(Object, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[BatchError]


class RequestCounts(Object, frozen=True, kw_only=True):
    """`completed` rows have an answer in the output file, `failed` ones a line in the file of errors."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class InputTokensDetails(Object, frozen=True, kw_only=True):
    cached_tokens: int = 0


class OutputTokensDetails(Object, frozen=True, kw_only=True):
    reasoning_tokens: int = 0


class BatchUsage(Object, frozen=True, kw_only=True):
    input_tokens: int = 0
    input_tokens_details: InputTokensDetails = InputTokensDetails()
    output_tokens: int = 0
    output_tokens_details: OutputTokensDetails = OutputTokensDetails()
    total_tokens: int = 0


class Batch(Object, frozen=True, kw_only=True):
    """The whole state of a batch, beside the result lines on the disk.

    Once `finalizing_at` is set no row is worked on any more. `expired_at` is set with it where the completion window had passed.
    """

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    input_file_id: str
    completion_window: Literal["24h"] = "24h"
    status: Status
    created_at: int
    expires_at: int
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: BatchErrors | None = None
    request_counts: RequestCounts = RequestCounts()
    usage: BatchUsage = BatchUsage()
    metadata: dict[str, str] | None = None

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED

    def with_counts(self, num_rows: int, counts: Counts) -> Batch:
        usage = BatchUsage(
            input_tokens=counts.prompt_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=counts.cached_tokens),
            output_tokens=counts.output_tokens,
            total_tokens=counts.num_tokens,
        )
        told = RequestCounts(total=num_rows, completed=counts.num_ok, failed=counts.num_failed)
        return msgspec.structs.replace(self, request_counts=told, usage=usage)


class Page(Object, frozen=True, kw_only=True):
    """A part of a list. `has_more`: there are more behind `last_id`."""

    object: Literal["list"] = "list"
    data: list[Any]
    first_id: str | None
    last_id: str | None
    has_more: bool
