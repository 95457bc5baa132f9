"""Errors in OpenAI's shape: the one place where an exception becomes a status, a body and headers."""

from __future__ import annotations

import logging
import math
import uuid
from typing import NamedTuple

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from pdjax.errors import BadRequest, DeadlineExceeded, NoWorker, OverCapacity, WorkerFailed

logger = logging.getLogger(__name__)

NO_WORKER_RETRY_AFTER_S = 2.0
"""About the time in which a restarted worker registers again."""


class InvalidField(BadRequest):
    """A BadRequest with the machine-readable code that OpenAI gives this kind of mistake."""

    def __init__(self, message: str, param: str | None, code: str):
        super().__init__(message, param)
        self.code = code


class ContextLengthExceeded(InvalidField):
    """Prompt and answer together do not fit the context."""

    def __init__(self, message: str, param: str | None):
        super().__init__(message, param, "context_length_exceeded")


class NotFound(InvalidField):
    """What the URL or a field names does not exist here."""


class ModelNotFound(NotFound):
    """The request names a model that is not served here."""

    def __init__(self, wanted: str, served: str):
        super().__init__(f"model {wanted[:100]!r} does not exist here; this server has {served!r}", "model", "model_not_found")


class RequestNotFound(NotFound):
    """Nothing is remembered of the request whose timeline was asked for."""

    def __init__(self, request_id: str):
        super().__init__(f"no request {request_id[:100]!r} is remembered; only the last ones are", "id", "request_not_found")


class BodyTooLarge(InvalidField):
    """The request body exceeds the limit of its endpoint, `server.max_body_bytes` where there is no other."""

    def __init__(self, max_bytes: int):
        super().__init__(f"request body exceeds {max_bytes} bytes", None, "request_too_large")


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


class ErrorReply(NamedTuple):
    """One error, ready for a response (`status`, `headers`, `body`) or for an event of a stream (`body` alone)."""

    status: int
    body: ErrorBody
    headers: dict[str, str]


def new_request_id() -> str:
    """For what ends before it has an id of its own, such as a completion's."""
    return f"req-{uuid.uuid4().hex}"


def error_reply(error: Exception, request_id: str | None = None) -> ErrorReply:
    """Sort an exception by what the client can do about it. Unknown ones are logged, with the id that the client is told, and told apart
    from nothing: plain 500."""
    if isinstance(error, BadRequest):
        return _bad_request(error)
    if isinstance(error, OverCapacity):
        headers = _retry_after(error.retry_after_s)
        return _reply(429, "rate_limit_error", "over_capacity", str(error), headers=headers)
    if isinstance(error, NoWorker):
        return _reply(503, "server_error", "no_worker", str(error), headers=_retry_after(NO_WORKER_RETRY_AFTER_S))
    if isinstance(error, WorkerFailed):
        return _reply(502, "server_error", "worker_failed", str(error))
    if isinstance(error, DeadlineExceeded):
        # The client has waited its whole time already; OpenAI's clients would silently wait it again.
        return _reply(504, "server_error", "deadline_exceeded", str(error), headers={"x-should-retry": "false"})
    if isinstance(error, HTTPException):
        return _http_error(error)
    logger.error("%s failed unexpectedly", request_id or "a request", exc_info=error)
    return _reply(500, "server_error", "internal_error", "the server failed to answer this request")


def error_response(error: Exception, request_id: str | None = None) -> Response:
    reply = error_reply(error, request_id)
    return Response(msgspec.json.encode(reply.body), reply.status, reply.headers, media_type="application/json")


def install_error_handlers(app: FastAPI) -> None:
    """Make every exception that leaves a handler of `app`, and every unknown route or method, an error in OpenAI's shape."""

    async def handle(_request: Request, error: Exception) -> Response:
        return error_response(error)

    for kind in (BadRequest, OverCapacity, NoWorker, WorkerFailed, DeadlineExceeded, HTTPException):
        app.add_exception_handler(kind, handle)


def _reply(
    status: int, kind: str, code: str | None, message: str, param: str | None = None, headers: dict[str, str] | None = None
) -> ErrorReply:
    return ErrorReply(status, ErrorBody(ErrorDetail(message, kind, param, code)), headers or {})


def _bad_request(error: BadRequest) -> ErrorReply:
    status = 404 if isinstance(error, NotFound) else 413 if isinstance(error, BodyTooLarge) else 400
    code = error.code if isinstance(error, InvalidField) else None
    return _reply(status, "invalid_request_error", code, str(error), error.param)


def _http_error(error: HTTPException) -> ErrorReply:
    code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code)
    message = {404: "there is nothing at this URL", 405: "this URL does not take this method"}.get(error.status_code, str(error.detail))
    return _reply(error.status_code, "invalid_request_error", code, message, headers=dict(error.headers or {}))


def _retry_after(seconds: float) -> dict[str, str]:
    """The header counts whole seconds; OpenAI's clients also read one in milliseconds."""
    return {"retry-after": str(max(1, math.ceil(seconds))), "retry-after-ms": str(max(1, round(seconds * 1000)))}
