"""A router process: the HTTP surface, the membership server and the router between them, in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Sequence

import uvicorn
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from pdjax.api.app import create_app
from pdjax.api.chat_template import ChatTemplate
from pdjax.api.extension import Extension
from pdjax.api.tokenizer import Tokenizer
from pdjax.checkpoints import Checkpoint, open_checkpoint
from pdjax.config.schema import Config, ServerConfig
from pdjax.observe.fleet_metrics import FleetCollector, WorkerReport
from pdjax.observe.progress import Progress
from pdjax.observe.router_metrics import RouterStats
from pdjax.observe.signals import stop_signals
from pdjax.router.control import ControlServer
from pdjax.router.fleet import Fleet
from pdjax.router.grpc_client import GrpcWorkerClient
from pdjax.router.roster import Roster
from pdjax.router.router import ModelIdentity, Router

STOP_GRACE_S = 1
"""How long open answers may go on after the order to stop; then they end with an error, and as long again after that their connections
are cut."""

MAX_CONNECTIONS = 8192
"""Open HTTP connections, far above any load that the router admits; it keeps file descriptors and memory bounded."""

KEEP_ALIVE_S = 75
"""Longer than the keep-alive of common clients, so that a reused connection is rarely one that the server is just closing."""


def run_router(config: Config, progress: Progress, extensions: Sequence[Extension] = ()) -> int:
    """Run the router until SIGTERM or SIGINT; the exit status. Main thread only. Starts and stops `extensions`.

    Raises ValueError or OSError where the model's files or an address cannot be had.
    """
    listener = _listen(config.server)
    try:
        checkpoint = open_checkpoint(config.model.source)
        progress.stage("load tokenizer", 0)
        data = checkpoint.tokenizer_data()
        tokenizer = Tokenizer(data)
        template = ChatTemplate.from_data(data)
        return asyncio.run(_serve(config, checkpoint, tokenizer, template, listener, progress, extensions))
    finally:
        listener.close()


async def _serve(
    config: Config,
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    listener: socket.socket,
    progress: Progress,
    extensions: Sequence[Extension],
) -> int:
    registry = CollectorRegistry()
    fleet = Fleet(time.monotonic, config.router.heartbeat_timeout_s, config.router.stall_timeout_s)
    roster = Roster(fleet, GrpcWorkerClient)
    identity = ModelIdentity(config.model.name or checkpoint.name, checkpoint.shape.vocab_size, checkpoint.eos_token_ids)
    router = Router(config.router, identity, roster, RouterStats(registry))
    FleetCollector(registry, lambda: [WorkerReport(each.info.role, each.info.peer.address, each.load) for each in fleet.members()])
    control = ControlServer(roster, config.router.control_host, config.router.control_port)
    control_port = await control.start()
    app = create_app(router, tokenizer, template, config.server, registry, router.timelines, extensions)
    try:
        for extension in extensions:
            await extension.start()
        server = _HttpServer(app, config)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        stop = _Stop(router, roster, server)
        for number in stop_signals():
            asyncio.get_running_loop().add_signal_handler(number, stop)
        host, port = listener.getsockname()[:2]
        progress.ready(url=f"http://{host}:{port}", control=f"{config.router.control_host}:{control_port}")
        await serving
        return 0
    finally:
        for extension in extensions:
            await extension.stop()
        await control.stop()
        await roster.close()


class _Stop:
    """The order to stop. Answers that are still open after the grace period lose their workers, of which their clients are told."""

    def __init__(self, router: Router, roster: Roster, server: _HttpServer):
        self._router = router
        self._roster = roster
        self._server = server
        self._ending: asyncio.Task[None] | None = None

    def __call__(self) -> None:
        self._router.close()
        self._server.stop()
        if self._ending is None:
            self._ending = asyncio.get_running_loop().create_task(self._end_answers())

    async def _end_answers(self) -> None:
        await asyncio.sleep(STOP_GRACE_S)
        await self._roster.close()


class _HttpServer(uvicorn.Server):
    """Leaves signals to its caller."""

    def __init__(self, app: FastAPI, config: Config):
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                loop="none",
                lifespan="off",
                timeout_keep_alive=KEEP_ALIVE_S,
                limit_concurrency=MAX_CONNECTIONS,
                timeout_graceful_shutdown=2 * STOP_GRACE_S,
            )
        )

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def stop(self) -> None:
        """A second order cuts open answers off at once."""
        self.force_exit = self.should_exit
        self.should_exit = True


def _listen(server: ServerConfig) -> socket.socket:
    """Bind before anything is loaded. Raises OSError naming the address."""
    listener = socket.socket(socket.AF_INET6 if ":" in server.host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((server.host, server.port))
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen at {server.host}:{server.port}: {error.strerror}") from error
    return listener
