"""A running router as the backend of a job: rows are posted to it as they are."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import io
from collections.abc import Callable
from typing import IO

import msgspec

from pdjax.api.errors import error_reply
from pdjax.benchmarks.client import Endpoint, RequestFailed, model_name
from pdjax.errors import DeadlineExceeded, WorkerFailed
from pdjax.jobs.backend import Reply, RowBackend, Unreachable

GREETING_TIMEOUT_S = 10.0


class RouterBackend(RowBackend):
    """One connection a row. `timeout_s`: longest wait for a whole answer."""

    def __init__(self, endpoint: Endpoint, timeout_s: float):
        self._endpoint = endpoint
        self._timeout_s = timeout_s

    async def start(self) -> str:
        try:
            return await model_name(self._endpoint, GREETING_TIMEOUT_S)
        except RequestFailed as error:
            raise Unreachable(f"no router at {self._endpoint.host}:{self._endpoint.port}: {error}") from error

    async def answer(self, url: str, body: bytes, on_prefilled: Callable[[], None]) -> Reply:
        """The prompt is known to be computed when the whole answer is there."""
        try:
            async with asyncio.timeout(self._timeout_s):
                reader, writer = await self._connect()
                try:
                    return _reply(await _exchange(reader, writer, _request(self._endpoint, url, body)))
                finally:
                    writer.close()
                    with contextlib.suppress(OSError):
                        await writer.wait_closed()
        except TimeoutError:
            return _own_reply(DeadlineExceeded(f"no complete answer within {self._timeout_s:g} s"))
        except (OSError, http.client.HTTPException) as error:
            # Another attempt may well succeed; after a few it counts as the row's own fault.
            return _own_reply(WorkerFailed(f"the connection broke off in mid-answer: {error!r}"))

    async def close(self) -> None:
        return None

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, port = self._endpoint.host, self._endpoint.port
        try:
            return await asyncio.open_connection(host, port, ssl=self._endpoint.is_tls or None)
        except OSError as error:
            raise Unreachable(f"no connection to {host}:{port}: {error.strerror or error}") from error


def _request(endpoint: Endpoint, path: str, body: bytes) -> bytes:
    host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
    head = (
        f"POST {endpoint.prefix}{path} HTTP/1.1\r\nHost: {host}:{endpoint.port}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode("ascii") + body


async def _exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> bytes:
    """Everything that comes back until the server closes the connection."""
    writer.write(request)
    with contextlib.suppress(ConnectionError):  # a server that refuses a long body may answer before it has read it
        await writer.drain()
    return await reader.read()


def _own_reply(error: Exception) -> Reply:
    """An error in the words that the router would use."""
    reply = error_reply(error)
    return Reply(reply.status, "", msgspec.json.encode(reply.body))


class _Received:
    """What http.client needs of a socket, to read an answer that is already here."""

    def __init__(self, data: bytes):
        self._data = data

    def makefile(self, mode: str) -> IO[bytes]:
        assert mode == "rb", f"an answer is read as bytes, got {mode}"
        return io.BytesIO(self._data)


def _reply(data: bytes) -> Reply:
    """Raises HTTPException for what is no HTTP answer, or only a part of one."""
    response = http.client.HTTPResponse(_Received(data), method="POST")  # type: ignore[arg-type]
    response.begin()
    body = response.read()
    retry_after = response.getheader("retry-after", "")
    return Reply(
        response.status,
        response.getheader("x-request-id", ""),
        body,
        float(retry_after) if retry_after.isdecimal() else None,
    )
