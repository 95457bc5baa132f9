"""A worker process: loads the model, compiles, serves sequences over gRPC, and ends in order."""

from __future__ import annotations

import asyncio
import secrets
import socket
import threading
from collections.abc import Callable
from typing import NamedTuple

import grpc
import grpc.aio
import jax

from pdjax import rpc
from pdjax.checkpoints import Checkpoint, open_checkpoint
from pdjax.config.schema import Config
from pdjax.engine.base import StepEngine
from pdjax.engine.compilation import DECODE_WORKER, PREFILL_WORKER, enable_compile_cache
from pdjax.engine.engine import Engine
from pdjax.observe.progress import Progress
from pdjax.observe.signals import stop_signals
from pdjax.protocol import Peer
from pdjax.transfer.grpc_stream import GrpcSink, GrpcSource
from pdjax.worker.build import build_decode, build_prefill, layout_of, load_engine, load_weights, transfer_limits, worker_info
from pdjax.worker.devices import devices_in
from pdjax.worker.hosts import LeaderEngine, end_now, follow, telling_failures
from pdjax.worker.hosts_meet import Meeting, devices_of_hosts, join, lead
from pdjax.worker.links import make_carriers, make_lander
from pdjax.worker.loop import EngineLoop
from pdjax.worker.membership import RouterLink
from pdjax.worker.memory_plan import WorkerRole, plan_memory
from pdjax.worker.role import Role
from pdjax.worker.service import sequence_handler

STOP_GRACE_S = 0.5
"""What calls that run get between the order to stop and being cut off. Their clients are told at once, so they have no use for more."""


class _Parts(NamedTuple):
    """What of a worker differs between the roles."""

    role: Role
    handlers: list[grpc.GenericRpcHandler]
    method: str


def run_worker(config: Config, role: WorkerRole, progress: Progress) -> int:
    """Run a prefill or decode worker until SIGTERM or SIGINT (exit status 0) or until it fails (1). Main thread only.

    Raises ValueError or OSError, before anything is loaded, where the model or the address cannot be had.
    """
    checkpoint = open_checkpoint(config.model.source)
    plan_memory(checkpoint.shape, config, role).check(role)
    if config.worker.host_index == 0:
        _check_port_is_free(config.worker.host, config.worker.port)
    if config.engine.compile_cache is not None:
        enable_compile_cache(config.engine.compile_cache)
    if config.worker.num_hosts == 1:
        (devices,) = devices_in([range(config.prefill.tensor_parallel if role == "prefill" else config.decode.tensor_parallel)])
        return asyncio.run(_serve(config, role, checkpoint, _load(config, role, checkpoint, devices, progress), progress))
    meeting = Meeting.of(config, role, checkpoint.fingerprint)
    return (_lead if config.worker.host_index == 0 else _follow)(meeting, config, role, checkpoint, progress)


def _load(config: Config, role: WorkerRole, checkpoint: Checkpoint, devices: list[jax.Device], progress: Progress) -> Engine:
    programs = PREFILL_WORKER if role == "prefill" else DECODE_WORKER
    weights = load_weights(checkpoint, config, progress)
    return load_engine(checkpoint, weights, config, programs, devices, progress)


def _lead(meeting: Meeting, config: Config, role: WorkerRole, checkpoint: Checkpoint, progress: Progress) -> int:
    """Host 0 of a worker over several."""
    links = lead(meeting, progress, end_now(progress))
    with telling_failures(links):
        engine = LeaderEngine(_load(config, role, checkpoint, devices_of_hosts(meeting), progress), links)
        engine.await_hosts()
        status = asyncio.run(_serve(config, role, checkpoint, engine, progress))
    engine.stop_hosts()
    return status


def _follow(meeting: Meeting, config: Config, role: WorkerRole, checkpoint: Checkpoint, progress: Progress) -> int:
    """Any other host: serves nobody and computes what host 0 says."""
    end = end_now(progress)
    link = join(meeting, progress, end)
    with telling_failures([link]):
        engine = _load(config, role, checkpoint, devices_of_hosts(meeting), progress)
        progress.ready(host=f"{meeting.host_index} of {meeting.num_hosts}")
        follow(engine, link, end)
    return 0


async def _serve(config: Config, role: WorkerRole, checkpoint: Checkpoint, engine: StepEngine, progress: Progress) -> int:
    stopped = _StopSignal(asyncio.get_running_loop())
    server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
    port = server.add_insecure_port(f"{config.worker.host}:{config.worker.port}")
    peer = Peer(f"{config.worker.advertise_host or config.worker.host}:{port}", secrets.token_hex(8))
    wakeup = threading.Event()
    make_parts = _prefill_parts if role == "prefill" else _decode_parts
    parts = make_parts(engine, checkpoint, config, peer, wakeup.set)
    loop = EngineLoop(parts.role, wakeup, asyncio.get_running_loop(), f"{role}-loop", stopped.died)
    server.add_generic_rpc_handlers((sequence_handler(parts.method, loop), *parts.handlers))
    await server.start()
    router = config.worker.router or f"{config.router.control_host}:{config.router.control_port}"
    link = RouterLink(router, worker_info(checkpoint, config, role, peer), loop.load, config.worker.heartbeat_interval_s)
    link.start()
    progress.ready(address=peer.address)
    try:
        return await stopped.wait()
    finally:
        await link.leave()
        await asyncio.to_thread(loop.stop)
        await server.stop(STOP_GRACE_S)


def _prefill_parts(engine: StepEngine, checkpoint: Checkpoint, config: Config, peer: Peer, wake: Callable[[], None]) -> _Parts:
    layout, limits = layout_of(checkpoint, config), transfer_limits(config)
    source = GrpcSource(layout, peer.instance_id, make_carriers(config, layout, limits), wake, limits)
    return _Parts(build_prefill(engine, checkpoint, config, source, wake), [source.handler()], rpc.PREFILL)


def _decode_parts(engine: StepEngine, checkpoint: Checkpoint, config: Config, peer: Peer, wake: Callable[[], None]) -> _Parts:
    layout, limits = layout_of(checkpoint, config), transfer_limits(config)
    sink = GrpcSink(layout, peer, make_lander(config, layout, limits, engine), asyncio.get_running_loop(), wake, limits)
    return _Parts(build_decode(engine, checkpoint, config, sink, wake), [], rpc.DECODE)


class _StopSignal:
    """Why the process ends: a signal, or the death of the engine loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self._status: asyncio.Future[int] = loop.create_future()
        for number in stop_signals():
            loop.add_signal_handler(number, self._set, 0)

    def died(self, error: Exception) -> None:
        """Thread-safe."""
        self._loop.call_soon_threadsafe(self._set, 1)

    async def wait(self) -> int:
        return await self._status

    def _set(self, status: int) -> None:
        if not self._status.done():
            self._status.set_result(status)


def _check_port_is_free(host: str, port: int) -> None:
    """Raises OSError naming the address where another process has it: better now than after the model has been loaded."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise OSError(f"cannot listen at {host}:{port}: {error.strerror}") from error
