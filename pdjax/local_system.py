"""Router, prefill and decode in one process: no wire, KV moved by `jax.device_put` between two devices."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator
from typing import NamedTuple

import jax
from jax.sharding import SingleDeviceSharding
from prometheus_client import CollectorRegistry

from pdjax.checkpoints import Checkpoint, open_checkpoint
from pdjax.config.schema import Config
from pdjax.engine.compilation import DECODE_WORKER, PREFILL_WORKER, enable_compile_cache
from pdjax.engine.engine import Engine
from pdjax.observe.progress import Progress
from pdjax.observe.router_metrics import RouterStats
from pdjax.protocol import Event, Peer, SequenceRequest, WorkerInfo
from pdjax.router.client import WorkerClient
from pdjax.router.fleet import Fleet
from pdjax.router.roster import Roster
from pdjax.router.router import ModelIdentity, Router
from pdjax.transfer.device_put import DevicePutMover
from pdjax.transfer.in_process import InProcessSink, InProcessSource, Registry
from pdjax.transfer.loopback import LoopbackMover
from pdjax.worker.build import build_decode, build_prefill, layout_of, load_engine, load_weights, transfer_limits, worker_info
from pdjax.worker.loop import EngineLoop
from pdjax.worker.service import sequence_events

_MOVERS = {"device_put": DevicePutMover, "loopback": LoopbackMover}

PREFILL, DECODE = Peer("local:prefill", "local-prefill"), Peer("local:decode", "local-decode")


class _LocalWorker(NamedTuple):
    loop: EngineLoop
    info: WorkerInfo


class LocalClient(WorkerClient):
    """A worker of this process, as the router sees it."""

    def __init__(self, info: WorkerInfo, loop: EngineLoop):
        self.info = info
        self._loop = loop

    def prefill(self, request: SequenceRequest) -> AsyncIterator[Event]:
        return sequence_events(self._loop, request)

    def decode(self, request: SequenceRequest) -> AsyncIterator[Event]:
        return sequence_events(self._loop, request)

    async def close(self) -> None:
        pass


class LocalSystem:
    """Owns both engines and the router. `start` and `stop` run in the event loop that `load` was given."""

    def __init__(self, config: Config, checkpoint: Checkpoint, workers: list[_LocalWorker], registry: CollectorRegistry):
        self.checkpoint = checkpoint
        self._workers = {worker.info.peer.instance_id: worker for worker in workers}
        self._heartbeat_s = config.worker.heartbeat_interval_s
        self._heart: asyncio.Task[None] | None = None
        fleet = Fleet(time.monotonic, config.router.heartbeat_timeout_s, config.router.stall_timeout_s)
        self._roster = Roster(fleet, self._client)
        identity = ModelIdentity(config.model.name or checkpoint.name, checkpoint.shape.vocab_size, checkpoint.eos_token_ids)
        self.router = Router(config.router, identity, self._roster, RouterStats(registry))

    @classmethod
    def load(cls, config: Config, loop: asyncio.AbstractEventLoop, progress: Progress) -> LocalSystem:
        """Load the weights once and compile for both devices. Raises ValueError where the configuration asks for what is not there."""
        if config.transfer.kind not in _MOVERS:
            raise ValueError(f"transfer.kind {config.transfer.kind} moves KV between processes; one process takes {sorted(_MOVERS)}")
        checkpoint = open_checkpoint(config.model.source)
        prefill_device, decode_device = _devices(config.prefill.device, config.decode.device)
        if config.engine.compile_cache is not None:
            enable_compile_cache(config.engine.compile_cache)
        weights = load_weights(checkpoint, config, progress)
        prefill_engine = load_engine(checkpoint, weights, config, PREFILL_WORKER, prefill_device, progress)
        decode_engine = load_engine(checkpoint, weights, config, DECODE_WORKER, decode_device, progress)
        workers = _start_workers(config, checkpoint, prefill_engine, decode_engine, decode_device, loop)
        return cls(config, checkpoint, workers, CollectorRegistry())

    async def start(self) -> None:
        for worker in self._workers.values():
            self._roster.join(worker.info)
        self._beat()
        self._heart = asyncio.create_task(self._keep_beating())

    async def stop(self) -> None:
        if self._heart is not None:
            self._heart.cancel()
        await self._roster.close()
        for worker in self._workers.values():
            await asyncio.to_thread(worker.loop.stop)

    def _client(self, info: WorkerInfo) -> WorkerClient:
        return LocalClient(info, self._workers[info.peer.instance_id].loop)

    def _beat(self) -> None:
        for instance_id, worker in self._workers.items():
            self._roster.heartbeat(instance_id, worker.loop.load())

    async def _keep_beating(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_s)
            self._beat()


def _start_workers(
    config: Config,
    checkpoint: Checkpoint,
    prefill_engine: Engine,
    decode_engine: Engine,
    decode_device: jax.Device,
    loop: asyncio.AbstractEventLoop,
) -> list[_LocalWorker]:
    wake_prefill, wake_decode = threading.Event(), threading.Event()
    layout, limits, registry = layout_of(checkpoint, config), transfer_limits(config), Registry()
    mover = _MOVERS[config.transfer.kind](SingleDeviceSharding(decode_device))
    source = InProcessSource(registry, layout, PREFILL, wake_prefill.set, limits)
    sink = InProcessSink(registry, layout, DECODE, mover, wake_decode.set, limits)
    prefill = build_prefill(prefill_engine, checkpoint, config, source, wake_prefill.set)
    decode = build_decode(decode_engine, checkpoint, config, sink, wake_decode.set)
    workers = []
    for name, role, wakeup, peer in (("prefill", prefill, wake_prefill, PREFILL), ("decode", decode, wake_decode, DECODE)):
        engine_loop = EngineLoop(role, wakeup, loop, f"{name}-loop", lambda error: None)
        workers.append(_LocalWorker(engine_loop, worker_info(checkpoint, config, name, peer)))
    return workers


def _devices(*indices: int) -> list[jax.Device]:
    """JAX's devices by index. On a CPU as many virtual ones are made as are asked for, if JAX has not been used before."""
    with contextlib.suppress(RuntimeError):
        if max(indices) >= jax.config.jax_num_cpu_devices:
            jax.config.update("jax_num_cpu_devices", max(indices) + 1)
    devices = jax.devices()
    for index in indices:
        if index >= len(devices):
            raise ValueError(f"device {index} was asked for, JAX has {len(devices)}: {devices}")
    return [devices[index] for index in indices]
