"""A worker process: loads the model, compiles, serves sequences over gRPC, and ends in order."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

import jax

from pdjax.checkpoints import Checkpoint, open_checkpoint
from pdjax.config.schema import Config
from pdjax.engine.compilation import DECODE_WORKER, PREFILL_WORKER, enable_compile_cache
from pdjax.engine.engine import Engine
from pdjax.observe.progress import Progress
from pdjax.observe.signals import stop_signals
from pdjax.worker.build import load_engines, load_weights
from pdjax.worker.devices import devices_of_ranks
from pdjax.worker.hosts import LeaderEngine, end_now, follow, telling_failures
from pdjax.worker.hosts_meet import Meeting, devices_of_hosts, join, lead
from pdjax.worker.memory_plan import WorkerRole, plan_memory
from pdjax.worker.ranks import Seat, start_ranks, stop_ranks


def run_worker(config: Config, role: WorkerRole, progress: Progress) -> int:
    """Run a prefill or decode worker until SIGTERM or SIGINT (exit status 0) or until it fails (1). Main thread only.

    Raises ValueError or OSError, before anything is loaded, where the model or the address cannot be had.
    """
    checkpoint = open_checkpoint(config.model.source)
    plan_memory(checkpoint.shape, config, role).check(role)
    if config.worker.host_index == 0:
        _check_ports_are_free(config, role)
    if config.engine.compile_cache is not None:
        enable_compile_cache(config.engine.compile_cache)
    if config.worker.num_hosts == 1:
        places = devices_of_ranks(config.workers(role).data_parallel, config.workers(role).tensor_parallel)
        engines = _load(config, role, checkpoint, places, progress)
        seats = [Seat(index, engine, place[0]) for index, (engine, place) in enumerate(zip(engines, places, strict=True))]
        return asyncio.run(_serve(config, role, checkpoint, seats, progress))
    meeting = Meeting.of(config, role, checkpoint.fingerprint)
    return (_lead if config.worker.host_index == 0 else _follow)(meeting, config, role, checkpoint, progress)


def _load(
    config: Config, role: WorkerRole, checkpoint: Checkpoint, places: Sequence[Sequence[jax.Device]], progress: Progress
) -> list[Engine]:
    """An engine at each place."""
    programs = PREFILL_WORKER if role == "prefill" else DECODE_WORKER
    weights = load_weights(checkpoint, config, progress)
    return load_engines(checkpoint, weights, config, programs, places, progress)


def _lead(meeting: Meeting, config: Config, role: WorkerRole, checkpoint: Checkpoint, progress: Progress) -> int:
    """Host 0 of a worker over several."""
    links = lead(meeting, progress, end_now(progress))
    with telling_failures(links):
        devices = devices_of_hosts(meeting)
        (own_engine,) = _load(config, role, checkpoint, [devices], progress)
        engine = LeaderEngine(own_engine, links)
        engine.await_hosts()
        status = asyncio.run(_serve(config, role, checkpoint, [Seat(0, engine, devices[0])], progress))
    engine.stop_hosts()
    return status


def _follow(meeting: Meeting, config: Config, role: WorkerRole, checkpoint: Checkpoint, progress: Progress) -> int:
    """Any other host: serves nobody and computes what host 0 says."""
    end = end_now(progress)
    link = join(meeting, progress, end)
    with telling_failures([link]):
        (engine,) = _load(config, role, checkpoint, [devices_of_hosts(meeting)], progress)
        progress.ready(host=f"{meeting.host_index} of {meeting.num_hosts}")
        follow(engine, link, end)
    return 0


async def _serve(config: Config, role: WorkerRole, checkpoint: Checkpoint, seats: Sequence[Seat], progress: Progress) -> int:
    """Serve with a rank on each seat. The death of one ends all: the supervisor, or whoever watches this process, starts it anew."""
    stopped = _StopSignal(asyncio.get_running_loop())
    ranks = await start_ranks(config, role, checkpoint, seats, stopped.died)
    progress.ready(address=" ".join(rank.peer.address for rank in ranks))
    try:
        return await stopped.wait()
    finally:
        await stop_ranks(ranks)


class _StopSignal:
    """Why the process ends: a signal, or the death of an engine loop."""

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


def _check_ports_are_free(config: Config, role: WorkerRole) -> None:
    """Raises OSError naming an address that another process has: better now than after the model has been loaded."""
    host, first = config.worker.host, config.worker.port
    for port in range(first, first + (config.workers(role).data_parallel if first else 1)):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                raise OSError(f"cannot listen at {host}:{port}: {error.strerror}") from error
