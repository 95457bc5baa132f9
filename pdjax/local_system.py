"""Router, prefill and decode in one process: no wire, KV moved by `jax.device_put` between two devices."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from typing import NamedTuple

from prometheus_client import CollectorRegistry

from pdjax.checkpoints import Checkpoint, open_checkpoint
from pdjax.config.schema import Config
from pdjax.engine.compilation import DECODE_WORKER, PREFILL_WORKER, enable_compile_cache
from pdjax.engine.engine import Engine
from pdjax.engine.split import check_split
from pdjax.observe.progress import Progress
from pdjax.observe.router_metrics import RouterStats
from pdjax.protocol import Event, Layout, Peer, SequenceRequest, WorkerInfo
from pdjax.router.client import WorkerClient
from pdjax.router.fleet import Fleet
from pdjax.router.roster import Roster
from pdjax.router.router import ModelIdentity, Router
from pdjax.transfer.in_process import InProcessSink, InProcessSource, Mover, Registry
from pdjax.transfer.loopback import LoopbackMover
from pdjax.transfer.push import mover_between
from pdjax.worker.build import build_decode, build_prefill, layout_of, load_engine, load_weights, transfer_limits, worker_info
from pdjax.worker.devices import devices_in
from pdjax.worker.loop import EngineLoop
from pdjax.worker.service import sequence_events

_TRANSPORTS = ("device_put", "loopback")

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
        if config.transfer.kind not in _TRANSPORTS:
            raise ValueError(f"transfer.kind {config.transfer.kind} moves KV between processes; one process takes {list(_TRANSPORTS)}")
        checkpoint = open_checkpoint(config.model.source)
        prefill_devices, decode_devices = devices_in(_spans(config))
        for devices in (prefill_devices, decode_devices):
            check_split(checkpoint.shape, len(devices))
        if config.engine.compile_cache is not None:
            enable_compile_cache(config.engine.compile_cache)
        weights = load_weights(checkpoint, config, progress)
        prefill_engine = load_engine(checkpoint, weights, config, PREFILL_WORKER, prefill_devices, progress)
        decode_engine = load_engine(checkpoint, weights, config, DECODE_WORKER, decode_devices, progress)
        workers = _start_workers(config, checkpoint, prefill_engine, decode_engine, loop)
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
    loop: asyncio.AbstractEventLoop,
) -> list[_LocalWorker]:
    wake_prefill, wake_decode = threading.Event(), threading.Event()
    layout, limits, registry = layout_of(checkpoint, config), transfer_limits(config), Registry()
    mover = _mover(config, layout, prefill_engine, decode_engine)
    source = InProcessSource(registry, layout, PREFILL, wake_prefill.set, limits)
    sink = InProcessSink(registry, layout, DECODE, mover, wake_decode.set, limits)
    prefill = build_prefill(prefill_engine, checkpoint, config, source, wake_prefill.set)
    decode = build_decode(decode_engine, checkpoint, config, sink, wake_decode.set)
    workers = []
    for name, role, wakeup, peer in (("prefill", prefill, wake_prefill, PREFILL), ("decode", decode, wake_decode, DECODE)):
        engine_loop = EngineLoop(role, wakeup, loop, f"{name}-loop", lambda error: None)
        workers.append(_LocalWorker(engine_loop, worker_info(checkpoint, config, name, peer)))
    return workers


def _mover(config: Config, layout: Layout, prefill_engine: Engine, decode_engine: Engine) -> Mover:
    if config.transfer.kind == "loopback":
        return LoopbackMover(decode_engine.chunk_sharding)
    page = (layout.num_layers, layout.page_size, 2 * layout.num_kv_heads, layout.head_dim)
    return mover_between(prefill_engine.chunk_sharding, decode_engine.chunk_sharding, page)


def _spans(config: Config) -> list[range]:
    """The devices of prefill and of decode, by index."""
    first, width = config.prefill.device, config.prefill.tensor_parallel
    behind = first + width if config.decode.device is None else config.decode.device
    return [range(first, first + width), range(behind, behind + config.decode.tensor_parallel)]
