"""Several ranks in one worker process: the same tokens as one worker, all of them at work, and the rest goes on without one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from pdjax import local_system
from pdjax.checkpoints import Checkpoint, open_checkpoint
from pdjax.checkpoints.base import weight_units
from pdjax.config.load import ConfigError, load_config
from pdjax.config.schema import Config
from pdjax.engine.batch import DecodeSeq, PrefillSeq
from pdjax.engine.compilation import Programs
from pdjax.engine.engine import Engine
from pdjax.engine.weights import StreamedWeights
from pdjax.local_system import LocalSystem
from pdjax.observe.progress import NullProgress
from pdjax.observe.router_metrics import RouterStats
from pdjax.protocol import Failed, Sampling, SequenceRequest, TokenOut
from pdjax.router.control import ControlServer
from pdjax.router.fleet import Fleet, Health, Role
from pdjax.router.grpc_client import GrpcWorkerClient
from pdjax.router.roster import Roster
from pdjax.router.router import ModelIdentity, Router
from pdjax.serve import check_role
from pdjax.worker import main
from pdjax.worker.build import load_engines, load_weights
from pdjax.worker.devices import devices_of_ranks
from pdjax.worker.loop import EngineLoop
from pdjax.worker.memory_plan import memory_report
from pdjax.worker.ranks import Rank, Seat, start_ranks, stop_ranks
from tests.live import free_port
from tests.model_kit import golden_tensors, quick_compilation, read_golden, write_folder

GOLDEN = read_golden("llama")
SETTINGS = {
    "model.max_context_tokens": 128,
    "engine.compile_cache": None,
    "engine.page_size": 4,
    "engine.num_pages": 96,
    "engine.max_running": 2,
    "engine.max_prefill_seqs": 2,
    "engine.prefill_buckets": [64],
    "engine.decode_buckets": [2],
    "engine.transfer_buckets": [4],
    "scheduler.max_step_tokens": 64,
    "worker.heartbeat_interval_s": 0.05,
    "prefill.data_parallel": 2,
    "prefill.tensor_parallel": 2,
    "decode.data_parallel": 2,
    "decode.tensor_parallel": 2,
}
GREEDY = Sampling(max_tokens=len(GOLDEN.answer), temperature=0.0)
PROMPTS = [GOLDEN.prompt, *([first, *GOLDEN.prompt[1:]] for first in (3, 5, 7))]
"""Without a page in common, so that no rank is better than another for knowing a prompt."""


def config_of(source: Path, **changes: object) -> Config:
    settings = SETTINGS | {"model.source": str(source)} | {key.replace("__", "."): value for key, value in changes.items()}
    return load_config(None, [f"{key}={json.dumps(value)}" for key, value in settings.items()])


class Built(NamedTuple):
    """What processes of a prefill and of a decode worker would load, two ranks each."""

    config: Config
    checkpoint: Checkpoint
    prefill: list[Seat]
    decode: list[Seat]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("ranks") / "model", GOLDEN.config | {"eos_token_id": 127}, golden_tensors(GOLDEN))


@pytest.fixture(scope="module")
def built(folder: Path) -> Built:
    config = config_of(folder)
    checkpoint = open_checkpoint(config.model.source)
    weights = load_weights(checkpoint, config, NullProgress())
    places = devices_of_ranks(4, 2)
    with quick_compilation(folder.parent / "programs"):
        engines = load_engines(checkpoint, weights, config, Programs(0), places, NullProgress())
        for engine in engines[:2]:
            compile_prefill(engine)
        for engine in engines[2:]:
            compile_decode(engine)
    seats = [Seat(index % 2, engine, place[0]) for index, (engine, place) in enumerate(zip(engines, places, strict=True))]
    return Built(config, checkpoint, seats[:2], seats[2:])


def compile_prefill(engine: Engine) -> None:
    """What greedy answers take, a third of what a worker compiles."""
    seqs = [PrefillSeq(slot, [1], 0, [1], GREEDY, 0) for slot in range(2)]
    for number in (1, 2):
        engine.read(engine.launch_prefill(seqs[:number]))
    engine.gather([1])


def compile_decode(engine: Engine) -> None:
    shape, page_size = engine.shape, engine.config.page_size
    engine.install([1], np.zeros((1, shape.num_layers, page_size, 2 * shape.num_kv_heads, shape.head_dim), np.float32))
    engine.read(engine.launch_decode([DecodeSeq(0, 1, 1, [1], GREEDY, 1)]))


class System(NamedTuple):
    """A router and its workers, over real connections, in one event loop. `deaths`: of ranks' loops."""

    router: Router
    fleet: Fleet
    prefill: list[Rank]
    decode: list[Rank]
    deaths: list[Exception]

    async def answer(self, prompt: list[int]) -> list[int]:
        parts = self.router.generate("request", prompt, GREEDY, time.time() + 60)
        return [part.token async for part in parts if isinstance(part, TokenOut)]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0.02)

    def num_ready(self, role: Role) -> int:
        return self.fleet.count(role, Health.READY)


@contextlib.asynccontextmanager
async def system_of(built: Built) -> AsyncIterator[System]:
    fleet = Fleet(time.monotonic, 3.0, 30.0)
    roster = Roster(fleet, GrpcWorkerClient)
    control = ControlServer(roster, "127.0.0.1", 0)
    worker = built.config.worker.model_copy(update={"router": f"127.0.0.1:{await control.start()}"})
    config = built.config.model_copy(update={"worker": worker})
    identity = ModelIdentity("small", built.checkpoint.shape.vocab_size, ())
    router = Router(config.router, identity, roster, RouterStats(CollectorRegistry()))
    deaths: list[Exception] = []
    prefill = await start_ranks(config, "prefill", built.checkpoint, built.prefill, deaths.append)
    decode = await start_ranks(config, "decode", built.checkpoint, built.decode, deaths.append)
    system = System(router, fleet, prefill, decode, deaths)
    try:
        await system.until(lambda: (system.num_ready("prefill"), system.num_ready("decode")) == (2, 2))
        yield system
    finally:
        await stop_ranks([*prefill, *decode])
        await control.stop()
        await roster.close()


def gauge(rank: Rank, name: str) -> float:
    return rank.loop.load().gauges[name]


def test_two_ranks_of_two_chips_on_either_side_answer_as_the_reference_does_and_all_of_them_work(built: Built) -> None:
    async def scenario() -> None:
        async with system_of(built) as system:
            answers = await asyncio.gather(*(system.answer(prompt) for prompt in PROMPTS))
            assert answers[0] == GOLDEN.answer
            assert len({tuple(answer) for answer in answers}) == len(PROMPTS)
            addresses = {rank.peer.address for rank in (*system.prefill, *system.decode)}
            assert len(addresses) == 4, "each rank is a worker of its own"
            for rank in system.prefill:
                assert gauge(rank, "prompt_tokens_total") >= len(GOLDEN.prompt)
            for rank in system.decode:
                assert gauge(rank, "kv_rooms_succeeded_total") >= 1
            ranks = {member.info.peer.address: member.load.gauges["rank"] for member in system.fleet.members()}
            assert [ranks[rank.peer.address] for rank in (*system.prefill, *system.decode)] == [0, 1, 0, 1]
            again = [await system.answer(prompt) for prompt in PROMPTS]
            assert again == answers, "whichever rank it was"

    asyncio.run(scenario())


def test_the_other_rank_answers_when_one_has_left(built: Built) -> None:
    async def scenario() -> None:
        async with system_of(built) as system:
            await stop_ranks([system.prefill[0], system.decode[1]])
            await system.until(lambda: (system.num_ready("prefill"), system.num_ready("decode")) == (1, 1))
            assert await asyncio.gather(*(system.answer(GOLDEN.prompt) for _ in range(3))) == [GOLDEN.answer] * 3
            assert gauge(system.decode[0], "kv_rooms_succeeded_total") == 3
            assert system.deaths == []

    asyncio.run(scenario())


def test_an_answer_goes_on_where_a_rank_dies_in_the_middle_of_it(built: Built) -> None:
    async def scenario() -> None:
        async with system_of(built) as system:
            tokens = []
            async for part in system.router.generate("request", GOLDEN.prompt, GREEDY, time.time() + 60):
                if not isinstance(part, TokenOut):
                    continue
                tokens.append(part.token)
                if len(tokens) == 3:
                    (busy,) = [rank for rank in system.decode if rank.loop.load().running]
                    break_loop(busy.loop)
            assert tokens == GOLDEN.answer
            assert [str(death) for death in system.deaths] == ["out of memory"]

    asyncio.run(scenario())


def test_a_loop_that_has_ended_refuses_what_comes_later(built: Built) -> None:
    async def scenario() -> None:
        async with system_of(built) as system:
            loop = system.decode[0].loop
            break_loop(loop)
            await system.until(lambda: bool(system.deaths))
            request = SequenceRequest(request_id="late", room=1, prompt=[1], sampling=GREEDY, deadline_s=time.time() + 60)
            async with asyncio.timeout(5):
                (event,) = [event async for event in loop.submit(request)]
            assert event == Failed(kind="internal", message="the worker failed: RuntimeError('out of memory')", retriable=True)

    asyncio.run(scenario())


def break_loop(loop: EngineLoop) -> None:
    def turn(now_s: float) -> None:
        raise RuntimeError("out of memory")

    loop.role.turn = turn  # type: ignore[method-assign]


def test_the_death_of_one_rank_ends_the_process(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    async def start_and_break(*arguments: Any) -> list[Rank]:
        ranks = await start_ranks(*arguments)
        break_loop(ranks[1].loop)
        return ranks

    monkeypatch.setattr(main, "start_ranks", start_and_break)
    before = threading.active_count()
    config = built.config.model_copy(update={"worker": built.config.worker.model_copy(update={"router": "127.0.0.1:9"})})
    assert asyncio.run(main._serve(config, "decode", built.checkpoint, built.decode, NullProgress())) == 1
    assert threading.active_count() <= before


class CountingReads:
    """As an accelerator's worker reads a checkpoint."""

    def __init__(self, checkpoint: Checkpoint):
        self._checkpoint = checkpoint
        self.units: list[tuple[str, int | None]] = []

    def read_into(self, path: str, layer: int | None, target: np.ndarray) -> None:
        self.units.append((path, layer))
        self._checkpoint.read_into(path, layer, target)


@pytest.mark.parametrize("width", [1, 2])
def test_weights_are_read_once_and_copied_from_chips_to_chips(built: Built, width: int) -> None:
    reads = CountingReads(built.checkpoint)
    shape, places = built.checkpoint.shape, devices_of_ranks(2, width)
    streamed = StreamedWeights(shape, np.dtype(np.float32), reads.read_into, lambda done, total: None)
    engines = load_engines(built.checkpoint, streamed, built.config, Programs(0), places, NullProgress())
    assert sorted(reads.units, key=repr) == sorted(weight_units(shape), key=repr)
    for one, other in zip(*(jax.tree.leaves(engine.weights) for engine in engines), strict=True):
        assert (one.sharding.device_set, other.sharding.device_set) == (set(places[0]), set(places[1]))
        np.testing.assert_array_equal(one, other)
        for mine, theirs in zip(one.addressable_shards, other.addressable_shards, strict=True):
            assert mine.index == theirs.index


def test_several_ranks_in_one_process_with_the_router_answer_and_outlive_one_of_them(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(Path(built.config.model.source), transfer__kind="device_put")
    asked: list[list[int]] = []
    streamed = StreamedWeights(built.checkpoint.shape, np.dtype(np.float32), built.checkpoint.read_into, lambda done, total: None)

    def load_built(*arguments: Any) -> list[Engine]:
        weights, places = arguments[1], arguments[4]
        assert weights is (streamed if not asked else built.prefill[0].engine.weights), "those of decode are copied from prefill's chips"
        asked.extend([device.id for device in place] for place in places)
        return [seat.engine for seat in (built.prefill if places[0][0].id == 0 else built.decode)]

    async def scenario() -> None:
        monkeypatch.setattr(local_system, "load_engines", load_built)
        monkeypatch.setattr(local_system, "load_weights", lambda *arguments: streamed)
        system = LocalSystem.load(config, asyncio.get_running_loop(), NullProgress())
        assert asked == [[0, 1], [2, 3], [4, 5], [6, 7]]
        await system.start()
        try:
            router = system.router

            async def answer(prompt: list[int]) -> list[int]:
                parts = router.generate("request", prompt, GREEDY, time.time() + 60)
                return [part.token async for part in parts if isinstance(part, TokenOut)]

            answers = await asyncio.gather(*(answer(prompt) for prompt in PROMPTS))
            assert answers[0] == GOLDEN.answer
            loops = {name: worker.loop for name, worker in system._workers.items()}
            assert list(loops) == ["local-prefill-0", "local-prefill-1", "local-decode-0", "local-decode-1"]
            for name, loop in loops.items():
                counted = "prompt_tokens_total" if "prefill" in name else "kv_rooms_succeeded_total"
                assert loop.load().gauges[counted] > 0, name
            for name in ("local-prefill-0", "local-decode-0"):
                break_loop(loops[name])
            assert await asyncio.gather(*(answer(prompt) for prompt in PROMPTS)) == answers
        finally:
            await system.stop()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            ["worker.num_chips=4", "decode.data_parallel=3", "decode.tensor_parallel=2"],
            "decode.data_parallel 3 with decode.tensor_parallel 2 takes 6 chips, worker.num_chips is 4",
        ),
        (
            ["worker.num_chips=1", "prefill.data_parallel=2"],
            "prefill.data_parallel 2 with prefill.tensor_parallel 1 takes 2 chips, worker.num_chips is 1",
        ),
    ],
)
def test_more_chips_than_a_process_sees_are_refused_with_both_numbers(settings: list[str], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, settings)
    assert [each.partition(": ")[2] for each in caught.value.problems] == [problem]


def test_hosts_that_share_a_worker_bring_their_chips_together() -> None:
    words = ["worker.num_hosts=2", "worker.coordinator=host-a:8476", "worker.num_chips=4", "decode.tensor_parallel=8"]
    check_role(load_config(None, words), "decode")


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            ["worker.num_hosts=2", "worker.coordinator=host-a:8476", "decode.tensor_parallel=4", "decode.data_parallel=2"],
            "decode.data_parallel 2 needs a process that owns all its chips, worker.num_hosts is 2; use 1",
        ),
        (["worker.port=65534", "decode.data_parallel=3"], "worker.port 65534 leaves no ports for 3 ranks, the last is 65535"),
    ],
)
def test_what_ranks_cannot_do_is_refused_before_anything_starts(settings: list[str], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_role(load_config(None, settings), "decode")
    assert caught.value.problems == (problem,)


def test_fewer_devices_than_the_ranks_need_are_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match="data_parallel 3 with tensor_parallel 4 takes 12 devices, JAX has 8"):
        devices_of_ranks(3, 4)


def test_ranks_have_devices_side_by_side() -> None:
    assert [[device.id for device in place] for place in devices_of_ranks(3, 2)] == [[0, 1], [2, 3], [4, 5]]


def test_each_rank_listens_behind_the_one_before(built: Built) -> None:
    async def scenario() -> None:
        port = first_of_free_ports()
        worker = built.config.worker.model_copy(update={"port": port, "router": "127.0.0.1:9"})
        config = built.config.model_copy(update={"worker": worker})
        ranks = await start_ranks(config, "decode", built.checkpoint, built.decode, lambda error: None)
        await stop_ranks(ranks)
        assert [rank.peer.address for rank in ranks] == [f"127.0.0.1:{port}", f"127.0.0.1:{port + 1}"]

    asyncio.run(scenario())


def first_of_free_ports() -> int:
    """Of two that follow each other, both free a moment ago."""
    while True:
        port = free_port()
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port + 1)):
            return port


def test_the_memory_plan_is_of_one_chip_of_one_rank() -> None:
    words = ["model.source=random:llama-3.2-1b", "model.dtype=bfloat16", "decode.tensor_parallel=2"]
    alone, together = (memory_report(load_config(None, [*words, f"decode.data_parallel={number}"]), "decode") for number in (1, 4))
    assert alone[0] == "memory of a decode worker, on each of its chips (2):"
    assert together[0] == "memory of a decode worker, on each of its chips (4 ranks of 2):"
    assert alone[1:] == together[1:]
