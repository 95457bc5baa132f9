"""The nodes of a Ray cluster as the backend of a job: an engine on each, started when a node joins, replaced when it is lost.

The driver owns everything that must not be lost: the order of the rows, the journals, and which engine works on which row. A row whose
engine is lost is given to another one; the lost one's answer can not come any more, so each row has one result.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

import msgspec
import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pdjax.api.errors import error_reply
from pdjax.config.schema import Config
from pdjax.errors import PdjaxError, WorkerFailed
from pdjax.jobs.backend import Reply, RowBackend, Unreachable
from pdjax.jobs.outcomes import OK
from pdjax.jobs.ray_config import RayConfig
from pdjax.jobs.ray_engine import Load, Prefilled, RayEngine, load_local
from pdjax.jobs.ray_pool import Pool, Seat, prompt_of
from pdjax.observe.progress import Progress

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Between two looks at which nodes there are."""

START_S = 1800.0
"""How long an engine may take to load and compile, waiting for its resources included."""

MAX_FAILED_STARTS = 3
"""On one node, in a row; then the node is left alone."""

SPARE_CALLS = 8
"""Calls that an engine takes beyond its rows: `start`, and rows that are being cancelled."""


class ClusterError(PdjaxError):
    """The cluster cannot be reached, or no engine could be started on it."""


class _Node(NamedTuple):
    node_id: str
    name: str
    resources: dict[str, float]


class RayBackend(RowBackend):
    """Owns the connection to the cluster and every engine that it starts there."""

    def __init__(self, config: RayConfig, load: Load, max_rows: int, progress: Progress):
        """Use `connect`. `max_rows`: what one engine is given at a time."""
        self._config = config
        self._load = load
        self._max_rows = max_rows
        self._progress = progress
        self._pool: Pool[ActorHandle] = Pool(max_rows, lambda: not self._is_hopeless())
        self._nodes: list[_Node] = []
        self._starting: Counter[str] = Counter()
        self._failed_starts: Counter[str] = Counter()
        self._numbers = itertools.count(1)
        self._model: asyncio.Future[str] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    def connect(cls, config: RayConfig, load: Load, max_rows: int, progress: Progress) -> RayBackend:
        """Blocks. Raises ClusterError where there is no such cluster."""
        try:
            ray.init(address=config.address, log_to_driver=False, configure_logging=False)
        except (ConnectionError, RuntimeError, ValueError, RayError) as error:
            raise ClusterError(f"no Ray cluster at {config.address or 'this machine'}: {error}") from error
        return cls(config, load, max_rows, progress)

    async def start(self) -> str:
        """Ready as soon as one engine is; the others join while rows are answered."""
        self._model = asyncio.get_running_loop().create_future()
        self._progress.stage("engines", 0)
        await self._look()
        self._spawn(self._keep_looking())
        if self._is_hopeless():
            raise ClusterError(f"no node of the cluster has what one engine needs: {self._config.needs}")
        try:
            model = await asyncio.shield(self._model)
        except ClusterError as error:
            self._progress.failed(str(error))
            raise
        self._progress.ready()
        return model

    async def answer(self, url: str, body: bytes, on_prefilled: Callable[[], None]) -> Reply:
        """A row whose engine is lost gets 502, as from a router whose workers are lost, and is tried again elsewhere; where the whole
        node is gone the row is surely not to blame, and it raises Unreachable."""
        prompt = prompt_of(body)
        seat, cost = await self._pool.take(prompt)

        def computed() -> None:
            self._pool.computed(seat, prompt)
            on_prefilled()

        try:
            reply = await _ask(seat.handle, url, body, computed)
            if reply.status == OK:
                computed()
            return reply
        except RayTaskError:
            raise  # a bug; Ray has carried it here
        except RayError as error:
            await self._lose(seat, error)
            if seat.node not in {node.node_id for node in await asyncio.to_thread(_alive_nodes)}:
                raise Unreachable(f"{seat.name} is gone with its node") from error
            reply = error_reply(WorkerFailed(f"{seat.name} was lost: {_line(error)}"))
            return Reply(reply.status, "", msgspec.json.encode(reply.body))
        finally:
            await self._pool.give_back(seat, cost)

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for seat in self._pool.seats:
            ray.kill(seat.handle)
        self._pool.seats.clear()
        await asyncio.to_thread(ray.shutdown)

    # -- engines come and go --

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self._look()
            except (RayError, RuntimeError, ConnectionError) as error:
                log.warning("the cluster does not say which nodes it has: %s", error)

    async def _look(self) -> None:
        """Start engines where there is room for them, let go of those whose nodes are gone."""
        self._nodes = await asyncio.to_thread(_alive_nodes)
        alive = {node.node_id for node in self._nodes}
        for seat in list(self._pool.seats):
            if seat.node not in alive:
                await self._lose(seat, "its node is gone")
        for node in self._nodes:
            num_here = self._starting[node.node_id] + sum(seat.node == node.node_id for seat in self._pool.seats)
            for _ in range(num_here, self._wanted(node)):
                if len(self._pool.seats) + self._starting.total() < self._config.max_engines:
                    self._starting[node.node_id] += 1
                    self._spawn(self._start_engine(node))
        await self._pool.tell()

    def _wanted(self, node: _Node) -> int:
        """Engines that the node shall run: what its resources, taken as a whole, have room for."""
        if self._failed_starts[node.node_id] >= MAX_FAILED_STARTS:
            return 0
        rooms = [int(node.resources.get(name, 0.0) / amount) for name, amount in self._config.needs.items()]
        return min(self._config.engines_per_node, *rooms)

    def _is_hopeless(self) -> bool:
        """No engine is ready, none is being started, and no node that is known will get one."""
        return not (self._pool.seats or self._starting.total() or any(self._wanted(node) for node in self._nodes))

    async def _start_engine(self, node: _Node) -> None:
        """`_look` has counted it as starting."""
        name = f"engine {next(self._numbers)} on {node.name}"
        handle = self._actor(node)
        try:
            async with asyncio.timeout(START_S):
                model = await handle.start.remote()
        except (RayError, TimeoutError) as error:
            self._starting[node.node_id] -= 1
            self._failed_starts[node.node_id] += 1
            ray.kill(handle)
            await self._not_started(f"{name} did not start: {_line(error)}")
        except asyncio.CancelledError:
            ray.kill(handle)
            raise
        else:
            self._starting[node.node_id] -= 1
            self._failed_starts.pop(node.node_id, None)
            await self._started(Seat(handle, node.node_id, name), model)

    async def _started(self, seat: Seat[ActorHandle], model: str) -> None:
        await self._pool.add(seat)
        num_ready = len(self._pool.seats)
        self._progress.advance(num_ready, num_ready + self._starting.total(), seat.name)
        log.info("%s is ready", seat.name)
        assert self._model is not None, "an engine was started before the backend"
        if not self._model.done():
            self._model.set_result(model)

    async def _not_started(self, failure: str) -> None:
        log.warning("%s", failure)
        assert self._model is not None, "an engine was started before the backend"
        if self._is_hopeless() and not self._model.done():
            self._model.set_exception(ClusterError(failure))
        await self._pool.tell()

    def _actor(self, node: _Node) -> ActorHandle:
        """Bound to its node, and neither it nor its calls are repeated by Ray: rows are given to another engine here."""
        options: dict[str, Any] = {
            "num_cpus": self._config.num_cpus,
            "num_gpus": self._config.num_gpus,
            "resources": self._config.resources,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node.node_id, soft=False),
            "max_concurrency": self._max_rows + SPARE_CALLS,
            "max_restarts": 0,
            "max_task_retries": 0,
        }
        return ray.remote(RayEngine).options(**options).remote(self._load)

    async def _lose(self, seat: Seat[ActorHandle], why: RayError | str) -> None:
        if await self._pool.remove(seat):
            log.warning("%s is lost: %s", seat.name, why if isinstance(why, str) else _line(why))
            ray.kill(seat.handle)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _ask(handle: ActorHandle, url: str, body: bytes, on_prefilled: Callable[[], None]) -> Reply:
    """Cancelling stops the work on the node too."""
    reply: Reply | None = None
    stream = handle.answer.remote(url, body)
    try:
        async for reference in stream:
            news = await reference
            if isinstance(news, Prefilled):
                on_prefilled()
            else:
                reply = news
    except asyncio.CancelledError:
        ray.cancel(stream)
        raise
    assert reply is not None, "an engine ended a row without a reply"
    return reply


def _alive_nodes() -> list[_Node]:
    return [_Node(node["NodeID"], node["NodeManagerAddress"], node["Resources"]) for node in ray.nodes() if node["Alive"]]


def _line(error: BaseException) -> str:
    """What an error says, in one line: of one on a node the last line of its traceback."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1] if isinstance(error, RayTaskError) else lines[0]


def connect(config: RayConfig, engine: Config, timeout_s: float, max_rows: int, progress: Progress) -> RayBackend:
    """Real engines, each a prefill and a decode worker in one process. Blocks; raises ClusterError."""
    load = functools.partial(load_local, engine.model_dump_json(), timeout_s)
    return RayBackend.connect(config, load, max_rows, progress)
