"""Router, prefill and decode in one process: no wire, KV moved by `jax.device_put` from the devices of one to those of the other."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence
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
from pdjax.transfer.device_put import DevicePutMover
from pdjax.transfer.in_process import InProcessSink, InProcessSource, Mover, Registry
from pdjax.transfer.loopback import LoopbackMover
from pdjax.transfer.push import mover_between
from pdjax.worker.build import build_decode, build_prefill, layout_of, load_engines, load_weights, transfer_limits, worker_info
from pdjax.worker.devices import devices_in, spans_of_ranks
from pdjax.worker.loop import EngineLoop
from pdjax.worker.memory_plan import WorkerRole
from pdjax.worker.role import Role
from pdjax.worker.service import sequence_events

_TRANSPORTS = ("device_put", "loopback")


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
    """Owns all engines and the router. `start` and `stop` run in the event loop that `load` was given."""

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
        """Load the weights once and compile for all devices. Raises ValueError where the configuration asks for what is not there."""
        if config.transfer.kind not in _TRANSPORTS:
            raise ValueError(f"transfer.kind {config.transfer.kind} moves KV between processes; one process takes {list(_TRANSPORTS)}")
        checkpoint = open_checkpoint(config.model.source)
        number = config.prefill.data_parallel
        places = devices_in(_spans(config))
        for devices in (places[0], places[-1]):
            check_split(checkpoint.shape, len(devices))
        if config.engine.compile_cache is not None:
            enable_compile_cache(config.engine.compile_cache)
        weights = load_weights(checkpoint, config, progress)
        prefill = load_engines(checkpoint, weights, config, PREFILL_WORKER, places[:number], progress)
        if not isinstance(weights, dict) and len(places[0]) == len(places[-1]):
            weights = prefill[0].weights
        decode = load_engines(checkpoint, weights, config, DECODE_WORKER, places[number:], progress)
        workers = _start_workers(config, checkpoint, prefill, decode, loop)
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
    prefill: Sequence[Engine],
    decode: Sequence[Engine],
    loop: asyncio.AbstractEventLoop,
) -> list[_LocalWorker]:
    """Every rank of either role is a worker. Where a loop dies its worker is not ready any more; the others go on."""
    limits, registry = transfer_limits(config), Registry()
    workers = []

    def start(kind: WorkerRole, peer: Peer, role: Role, wakeup: threading.Event, layout: Layout) -> None:
        engine_loop = EngineLoop(role, wakeup, loop, f"{peer.instance_id}-loop", lambda error: None)
        workers.append(_LocalWorker(engine_loop, worker_info(checkpoint, config, kind, peer, layout)))

    for rank, engine in enumerate(prefill):
        peer, wakeup, layout = _peer("prefill", rank), threading.Event(), layout_of(checkpoint, config, engine)
        source = InProcessSource(registry, layout, peer, wakeup.set, limits)
        start("prefill", peer, build_prefill(engine, checkpoint, config, source, wakeup.set), wakeup, layout)
    for rank, engine in enumerate(decode):
        peer, wakeup, layout = _peer("decode", rank), threading.Event(), layout_of(checkpoint, config, engine)
        sink = InProcessSink(registry, layout, peer, _mover(config, layout, prefill, engine, len(decode)), wakeup.set, limits)
        start("decode", peer, build_decode(engine, checkpoint, config, sink, wakeup.set), wakeup, layout)
    return workers


def _peer(kind: WorkerRole, rank: int) -> Peer:
    return Peer(f"local:{kind}-{rank}", f"local-{kind}-{rank}")


def _mover(config: Config, layout: Layout, prefill: Sequence[Engine], engine: Engine, num_decodes: int) -> Mover:
    """To the decode rank `engine`."""
    if config.transfer.kind == "loopback":
        return LoopbackMover(engine.chunk_sharding)
    if len(prefill) > 1 or num_decodes > 1:
        # A push is a program of both ends' chips. Pushes of several pairs that share chips would have to start in one order on all of them.
        return DevicePutMover(engine.chunk_sharding)
    page = (layout.num_layers, layout.page_size, 2 * layout.num_kv_heads, layout.head_dim)
    return mover_between(prefill[0].chunk_sharding, engine.chunk_sharding, page)


def _spans(config: Config) -> list[range]:
    """The devices of every prefill rank and then of every decode rank, by index."""
    first, width, number = config.prefill.device, config.prefill.tensor_parallel, config.prefill.data_parallel
    behind = first + number * width if config.decode.device is None else config.decode.device
    decode = spans_of_ranks(behind, config.decode.data_parallel, config.decode.tensor_parallel)
    return [*spans_of_ranks(first, number, width), *decode]
