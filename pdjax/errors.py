"""What can go wrong in service, sorted by what the caller can do about it.

Bad caller input is a `ValueError` (`BadRequest` where it came over HTTP); a broken invariant is an `assert`. Errors become HTTP
responses in one place, `pdjax.api.errors`.
"""

from __future__ import annotations


class PdjaxError(Exception):
    """Base class of everything that pdjax raises on purpose."""


class BadRequest(PdjaxError, ValueError):
    """The request can never succeed as it is. `param` names the field at fault."""

    def __init__(self, message: str, param: str | None = None):
        super().__init__(message)
        self.param = param


class OverCapacity(PdjaxError):
    """Every queue that could take the request is full; come back in `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: float = 1.0):
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NoWorker(PdjaxError):
    """No healthy worker of a kind that the request needs."""


class DeadlineExceeded(PdjaxError):
    """The request's deadline passed before it was finished."""


class WorkerFailed(PdjaxError):
    """A worker failed the request and no retry was left."""


class TransferError(PdjaxError):
    """The KV of one request could not be moved. `retriable` is False where every attempt would end the same, as for a layout mismatch."""

    def __init__(self, message: str, retriable: bool = True):
        super().__init__(message)
        self.retriable = retriable
