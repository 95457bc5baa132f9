"""`/v1/files` and `/v1/batches`: OpenAI's Batch API as an extension of the router's application."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse

from pdjax.api.errors import NotFound
from pdjax.api.extension import Extension
from pdjax.api.service import Service
from pdjax.api.transport import read_json
from pdjax.batches.keeper import Keeper
from pdjax.batches.objects import FileDeleted
from pdjax.batches.requests import parse_batch, parse_batch_list, parse_file_list
from pdjax.batches.upload import Upload, receive_upload
from pdjax.config.schema import BatchesConfig, Config, ServerConfig
from pdjax.errors import NoWorker
from pdjax.jobs.answers import ServiceAnswers

FILES, BATCHES = "/v1/files", "/v1/batches"


def batch_extension(config: Config) -> Extension:
    """The endpoints, or ones that say how to have them."""
    if config.batches.directory is None:
        return NoBatches()
    return BatchEndpoints(config.batches, Path(config.batches.directory).expanduser(), config.server)


class NoBatches(Extension):
    """Where `batches.directory` is not set."""

    def install(self, app: FastAPI, service: Service) -> None:
        for stem in (FILES, BATCHES):
            for path in (stem, f"{stem}/{{rest:path}}"):
                app.add_api_route(path, self.refuse, methods=["GET", "POST", "DELETE"])

    async def refuse(self) -> Response:
        raise NotFound("files and batches are off on this server; the setting batches.directory turns them on", None, "batches_disabled")

    async def start(self) -> None:
        return None

    async def stop(self) -> None:
        return None


class BatchEndpoints(Extension):
    """Thin handlers; the work is done by a keeper, which lives between `start` and `stop`."""

    def __init__(self, config: BatchesConfig, directory: Path, server: ServerConfig):
        self._config = config
        self._directory = directory
        self._server = server
        self._answers: ServiceAnswers | None = None
        self._open_keeper: Keeper | None = None

    def install(self, app: FastAPI, service: Service) -> None:
        self._answers = ServiceAnswers(service, self._server.max_body_bytes, self._server.request_timeout_s)
        app.add_api_route(FILES, self.upload, methods=["POST"])
        app.add_api_route(FILES, self.files, methods=["GET"])
        app.add_api_route(f"{FILES}/{{file_id}}", self.file, methods=["GET"])
        app.add_api_route(f"{FILES}/{{file_id}}", self.remove_file, methods=["DELETE"])
        app.add_api_route(f"{FILES}/{{file_id}}/content", self.content, methods=["GET"])
        app.add_api_route(BATCHES, self.create, methods=["POST"])
        app.add_api_route(BATCHES, self.batches, methods=["GET"])
        app.add_api_route(f"{BATCHES}/{{batch_id}}", self.batch, methods=["GET"])
        app.add_api_route(f"{BATCHES}/{{batch_id}}/cancel", self.cancel, methods=["POST"])

    async def start(self) -> None:
        assert self._answers is not None, "installed before it is started"
        self._open_keeper = await Keeper.open(self._config, self._directory, self._answers)

    async def stop(self) -> None:
        keeper, self._open_keeper = self._open_keeper, None
        if keeper is not None:
            await keeper.stop()

    @property
    def _keeper(self) -> Keeper:
        if self._open_keeper is None:
            raise NoWorker("the server is shutting down")
        return self._open_keeper

    async def upload(self, http: Request) -> Response:
        async def receive(file: BinaryIO) -> Upload:
            return await receive_upload(http, file, self._config.max_file_bytes, self._server.request_timeout_s)

        return _json(await self._keeper.add_file(receive))

    async def files(self, http: Request) -> Response:
        return _json(await self._keeper.files(*parse_file_list(http.query_params)))

    async def file(self, file_id: str) -> Response:
        return _json(await self._keeper.file(file_id))

    async def content(self, file_id: str) -> Response:
        return FileResponse(await self._keeper.content(file_id), media_type="application/octet-stream")

    async def remove_file(self, file_id: str) -> Response:
        await self._keeper.remove_file(file_id)
        return _json(FileDeleted(id=file_id))

    async def create(self, http: Request) -> Response:
        body = await read_json(http.scope, http.receive, self._server.max_body_bytes, self._server.request_timeout_s)
        return _json(await self._keeper.add_batch(parse_batch(body)))

    async def batches(self, http: Request) -> Response:
        return _json(await self._keeper.batches(parse_batch_list(http.query_params)))

    async def batch(self, batch_id: str) -> Response:
        return _json(await self._keeper.batch(batch_id))

    async def cancel(self, batch_id: str) -> Response:
        return _json(await self._keeper.cancel(batch_id))


def _json(message: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(message), media_type="application/json")
