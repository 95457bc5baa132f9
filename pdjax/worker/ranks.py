"""The ranks of a worker process: each an engine on chips of its own and, to routers and peers, a worker like any other.

A process that owns several groups of chips (data parallel) has one rank a group. A rank has its own address and instance id, its own pool,
radix tree, scheduler and engine loop, so whatever holds for workers holds for ranks. They share the event loop, the weights on the host,
and their fate: where the loop of one dies, the process ends.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import grpc
import grpc.aio
import jax
import msgspec

from pdjax import rpc
from pdjax.checkpoints import Checkpoint
from pdjax.config.schema import Config
from pdjax.engine.base import StepEngine
from pdjax.protocol import Peer, WorkerLoad
from pdjax.transfer.base import Wake
from pdjax.transfer.grpc_stream import GrpcSink, GrpcSource
from pdjax.worker.build import build_decode, build_prefill, layout_of, transfer_limits, worker_info
from pdjax.worker.links import make_carriers, make_lander
from pdjax.worker.loop import EngineLoop
from pdjax.worker.membership import RouterLink
from pdjax.worker.memory_plan import WorkerRole
from pdjax.worker.role import Role
from pdjax.worker.service import sequence_handler

STOP_GRACE_S = 0.5
"""What calls that run get between the order to stop and being cut off. Their clients are told at once, so they have no use for more."""

OnDeath = Callable[[Exception], None]


class Seat(NamedTuple):
    """Where a rank sits: its number in the process, its engine, and the first of the engine's devices."""

    index: int
    engine: StepEngine
    device: jax.Device


class _Parts(NamedTuple):
    """What of a rank differs between the roles."""

    role: Role
    handlers: list[grpc.GenericRpcHandler]
    method: str


class Rank:
    """One rank that serves, from `start` to `stop`, both in the same event loop."""

    def __init__(self, peer: Peer, server: grpc.aio.Server, loop: EngineLoop, link: RouterLink):
        self.peer = peer
        self.loop = loop
        self._server = server
        self._link = link

    @classmethod
    async def start(cls, config: Config, role: WorkerRole, checkpoint: Checkpoint, seat: Seat, died: OnDeath) -> Rank:
        """Listen at `worker.port` plus the rank's number, or at any free port, and register at the router. `died` is called from another
        thread where the rank's loop ends by itself. Raises OSError or ValueError where the transport cannot be had."""
        server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
        wanted = config.worker.port + seat.index if config.worker.port else 0
        port = server.add_insecure_port(f"{config.worker.host}:{wanted}")
        peer = Peer(f"{config.worker.advertise_host or config.worker.host}:{port}", secrets.token_hex(8))
        wakeup = threading.Event()
        make_parts = _prefill_parts if role == "prefill" else _decode_parts
        parts = make_parts(seat, checkpoint, config, peer, wakeup.set)
        loop = EngineLoop(parts.role, wakeup, asyncio.get_running_loop(), f"{role}-{seat.index}-loop", died)
        server.add_generic_rpc_handlers((sequence_handler(parts.method, loop), *parts.handlers))
        await server.start()

        def load() -> WorkerLoad:
            load = loop.load()
            return msgspec.structs.replace(load, gauges={**load.gauges, "rank": seat.index})

        router = config.worker.router or f"{config.router.control_host}:{config.router.control_port}"
        info = worker_info(checkpoint, config, role, peer, layout_of(checkpoint, config, seat.engine))
        link = RouterLink(router, info, load, config.worker.heartbeat_interval_s)
        link.start()
        return cls(peer, server, loop, link)

    async def stop(self) -> None:
        """Leave the router, fail what is open, and end every thread of the rank."""
        await self._link.leave()
        await asyncio.to_thread(self.loop.stop)
        await self._server.stop(STOP_GRACE_S)


async def start_ranks(config: Config, role: WorkerRole, checkpoint: Checkpoint, seats: Sequence[Seat], died: OnDeath) -> list[Rank]:
    """A rank on each seat, or none: where one cannot start, those that have are stopped."""
    ranks: list[Rank] = []
    try:
        for seat in seats:
            ranks.append(await Rank.start(config, role, checkpoint, seat, died))
    except BaseException:
        await stop_ranks(ranks)
        raise
    return ranks


async def stop_ranks(ranks: Sequence[Rank]) -> None:
    """All at the same time."""
    await asyncio.gather(*(rank.stop() for rank in ranks))


def _prefill_parts(seat: Seat, checkpoint: Checkpoint, config: Config, peer: Peer, wake: Wake) -> _Parts:
    layout, limits = layout_of(checkpoint, config, seat.engine), transfer_limits(config)
    source = GrpcSource(layout, peer.instance_id, make_carriers(config, layout, limits, seat.device), wake, limits)
    return _Parts(build_prefill(seat.engine, checkpoint, config, source, wake), [source.handler()], rpc.PREFILL)


def _decode_parts(seat: Seat, checkpoint: Checkpoint, config: Config, peer: Peer, wake: Wake) -> _Parts:
    layout, limits = layout_of(checkpoint, config, seat.engine), transfer_limits(config)
    lander = make_lander(config, layout, limits, seat.engine, seat.device)
    sink = GrpcSink(layout, peer, lander, asyncio.get_running_loop(), wake, limits)
    return _Parts(build_decode(seat.engine, checkpoint, config, sink, wake), [], rpc.DECODE)
