"""The OpenAI-compatible HTTP application: thin handlers that parse, hand over and stream."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from pdjax.api.backend import Backend
from pdjax.api.chat_template import ChatTemplate
from pdjax.api.errors import ModelNotFound, RequestNotFound, install_error_handlers
from pdjax.api.extension import Extension
from pdjax.api.middleware import CLIENT_GONE_STATUS, Outermost
from pdjax.api.responses import Model, ModelList, Status
from pdjax.api.schemas import parse_chat, parse_completion, parse_detokenize, parse_tokenize
from pdjax.api.service import Arrival, Job, Service
from pdjax.api.tokenizer import Tokenizer
from pdjax.api.transport import ClientGone, EventStream, read_json, while_connected
from pdjax.config.schema import ServerConfig
from pdjax.errors import NoWorker
from pdjax.observe.http_metrics import HttpMetrics
from pdjax.observe.timeline_trace import trace
from pdjax.observe.timeline_view import RequestView, view
from pdjax.observe.timelines import RequestTimelines
from pdjax.version import __version__


def create_app(
    backend: Backend,
    tokenizer: Tokenizer,
    chat_template: ChatTemplate | None,
    server: ServerConfig,
    registry: CollectorRegistry | None = None,
    timelines: RequestTimelines | None = None,
    extensions: Sequence[Extension] = (),
) -> FastAPI:
    """The application, to be run by an ASGI server in the event loop that `backend` lives in.

    `chat_template` None: the model has none, chat requests get a 400. `registry`: where GET /metrics reads and the application's own
    metrics go; one application a registry. `timelines`: where `backend` keeps what it remembers of requests. `extensions`: whoever calls
    this starts and stops them.
    """
    registry = CollectorRegistry() if registry is None else registry
    timelines = RequestTimelines() if timelines is None else timelines
    metrics = HttpMetrics(registry)
    app = FastAPI(title="pdjax", version=__version__, docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.add_middleware(Outermost, metrics=metrics)
    install_error_handlers(app)
    app.add_exception_handler(ClientGone, _nobody_to_answer)
    service = Service(backend, tokenizer, chat_template, server, metrics)
    _Endpoints(service, server, timelines).install(app)
    _StatusEndpoints(backend, registry, timelines).install(app)
    for extension in extensions:
        extension.install(app, service)
    return app


class _Endpoints:
    """What does work on text."""

    def __init__(self, service: Service, server: ServerConfig, timelines: RequestTimelines):
        self._service = service
        self._timelines = timelines
        self._max_body_bytes = server.max_body_bytes
        self._timeout_s = server.request_timeout_s

    def install(self, app: FastAPI) -> None:
        app.add_api_route("/v1/completions", self.completions, methods=["POST"])
        app.add_api_route("/v1/chat/completions", self.chat_completions, methods=["POST"])
        app.add_api_route("/tokenize", self.tokenize, methods=["POST"])
        app.add_api_route("/detokenize", self.detokenize, methods=["POST"])

    async def completions(self, http: Request) -> Response:
        arrival = self._arrival()
        request = parse_completion(await self._body(http))
        return await self._answer(http, await self._service.complete(request, arrival), request.stream, arrival)

    async def chat_completions(self, http: Request) -> Response:
        arrival = self._arrival()
        request = parse_chat(await self._body(http))
        return await self._answer(http, await self._service.chat(request, arrival), request.stream, arrival)

    async def tokenize(self, http: Request) -> Response:
        return _json(await self._service.tokenize(parse_tokenize(await self._body(http))))

    async def detokenize(self, http: Request) -> Response:
        return _json(self._service.detokenize(parse_detokenize(await self._body(http))))

    def _arrival(self) -> Arrival:
        return Arrival(time.perf_counter(), time.time() + self._timeout_s)

    async def _answer(self, http: Request, job: Job, stream: bool, arrival: Arrival) -> Response:
        self._timelines.arrived(job.head.id, time.perf_counter() - arrival.clock)
        http.state.request_id = job.head.id
        if stream:
            return EventStream(job.chunks(), arrival.time_left_s)
        body = await while_connected(http.receive, job.whole(), arrival.time_left_s)
        return Response(body, media_type="application/json")

    async def _body(self, http: Request) -> Any:
        return await read_json(http.scope, http.receive, self._max_body_bytes, self._timeout_s)


class _StatusEndpoints:
    """What only looks."""

    def __init__(self, backend: Backend, registry: CollectorRegistry, timelines: RequestTimelines):
        self._backend = backend
        self._timelines = timelines
        self._registry = registry
        self._created = int(time.time())

    def install(self, app: FastAPI) -> None:
        app.add_api_route("/v1/models", self.models, methods=["GET"])
        app.add_api_route("/v1/models/{model_id:path}", self.model, methods=["GET"])
        app.add_api_route("/health", self.health, methods=["GET"])
        app.add_api_route("/ready", self.ready, methods=["GET"])
        app.add_api_route("/metrics", self.metrics, methods=["GET"])
        app.add_api_route("/v1/requests/{request_id}/timeline", self.timeline, methods=["GET"])

    async def models(self) -> Response:
        return _json(ModelList(data=[self._model()]))

    async def model(self, model_id: str) -> Response:
        model = self._model()
        if model_id != model.id:
            raise ModelNotFound(model_id, model.id)
        return _json(model)

    async def health(self) -> Response:
        """The process is alive and its event loop turns."""
        return _json(Status(status="ok"))

    async def ready(self) -> Response:
        """The next request will succeed."""
        if not self._backend.is_ready():
            raise NoWorker("not ready: no worker can take a request")
        return _json(Status(status="ready"))

    async def metrics(self) -> Response:
        return Response(generate_latest(self._registry), headers={"content-type": CONTENT_TYPE_LATEST})

    async def timeline(self, request_id: str) -> Response:
        """What one of the last requests went through; the id is that of its answer."""
        record = self._timelines.find(request_id)
        if record is None:
            raise RequestNotFound(request_id)
        picture = view(record)
        return _json(Timeline(picture, trace(picture)))

    def _model(self) -> Model:
        card = self._backend.model_card()
        return Model(id=card.name, created=self._created, max_model_len=card.max_context_tokens)


class Timeline(msgspec.Struct, frozen=True):
    """`trace` is the same again, as a trace file for Perfetto or Chrome."""

    timeline: RequestView
    trace: dict[str, Any]


def _json(message: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(message), media_type="application/json")


async def _nobody_to_answer(_http: Request, _error: Exception) -> Response:
    return Response(status_code=CLIENT_GONE_STATUS)
