"""The outermost layer of the HTTP surface: counts and names every request, and lets no exception out unanswered."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pdjax.api.errors import error_response, new_request_id
from pdjax.observe.http_metrics import HttpMetrics

CLIENT_GONE_STATUS = 499
"""What requests count as whose client left before there was a status."""

REQUEST_ID = "request_id"
"""Key of the request's state (`Request.state`). A handler whose request has an id of its own, as of a completion, puts it there."""


class Outermost:
    """Every answer, good or bad, carries the request's id as `x-request-id`."""

    def __init__(self, app: ASGIApp, metrics: HttpMetrics):
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status: int | None = None
        state = scope.setdefault("state", {})
        state[REQUEST_ID] = new_request_id()

        async def send_noting_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", state[REQUEST_ID].encode())]
            await send(message)

        self._metrics.in_flight.inc()
        try:
            await self._app(scope, receive, send_noting_status)
        except Exception as error:
            if status is not None:
                raise
            await error_response(error, state[REQUEST_ID])(scope, receive, send_noting_status)
        finally:
            self._metrics.in_flight.dec()
            self._metrics.requests.labels(_route(scope), str(status or CLIENT_GONE_STATUS)).inc()


def _route(scope: Scope) -> str:
    """The path as it was declared, so that clients cannot make up label values."""
    route = scope.get("route")
    return "unmatched" if route is None else route.path
