"""Membership over real gRPC on free ports: joining, leaving, dying, and routers that come, go and come back."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import msgspec
import pytest

from pdjax.protocol import PROTOCOL_VERSION, MembershipMessage, RouterHello, WorkerInfo, WorkerLeaving, WorkerLoad
from pdjax.router.control import ControlServer
from pdjax.router.fleet import Fleet, Health
from pdjax.router.roster import Roster
from pdjax.rpc import JOIN, decoder, encode
from pdjax.worker.membership import RouterLink
from tests.live import free_port
from tests.test_router_fakes import LAYOUT, FakeWorker, worker_info

INTERVAL_S = 0.02
READY = WorkerLoad(ready=True, waiting=1, running=2, free_pages=3)


class Site:
    """A router's control side. `clients`: every connection that it has made."""

    def __init__(self, port: int = 0, heartbeat_timeout_s: float = 30.0):
        self.clients: list[FakeWorker] = []
        self.fleet = Fleet(time.monotonic, heartbeat_timeout_s, stall_timeout_s=60.0)
        self.roster = Roster(self.fleet, self._connect)
        self.control = ControlServer(self.roster, "127.0.0.1", port)

    def _connect(self, info: WorkerInfo) -> FakeWorker:
        self.clients.append(FakeWorker(info))
        return self.clients[-1]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for changes until `condition` holds; the scenario's bound ends a wait in vain."""
        while not condition():
            await self.roster.wait_changed(0.05)

    def health(self, name: str) -> Health | None:
        return next((self.fleet.health(member) for member in self.fleet.members() if member.instance_id == name), None)


@asynccontextmanager
async def site(**settings: float) -> AsyncIterator[tuple[Site, str]]:
    built = Site(**settings)
    port = await built.control.start()
    try:
        yield built, f"127.0.0.1:{port}"
    finally:
        await built.control.stop()
        await built.roster.close()


@asynccontextmanager
async def link(address: str, info: WorkerInfo, load: Callable[[], WorkerLoad] = lambda: READY) -> AsyncIterator[RouterLink]:
    built = RouterLink(address, info, load, INTERVAL_S)
    built.start()
    try:
        yield built
    finally:
        await built.leave()


@asynccontextmanager
async def raw_join(address: str) -> AsyncIterator[grpc.aio.StreamStreamCall]:
    """A membership stream without the worker's manners."""
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.stream_stream(JOIN, request_serializer=encode, response_deserializer=decoder(RouterHello))()
        yield call
        call.cancel()


async def say(call: grpc.aio.StreamStreamCall, message: MembershipMessage) -> RouterHello:
    await call.write(message)
    return await call.read()


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await scenario()

    asyncio.run(bounded())


def test_a_worker_joins_with_its_load_and_leaves_in_order() -> None:
    async def scenario() -> None:
        async with site() as (router, address):
            loads = [WorkerLoad(ready=False), READY]
            async with link(address, worker_info("d1"), lambda: loads.pop(0) if len(loads) > 1 else loads[0]) as joined:
                await joined.wait_joined()
                await router.until(lambda: router.health("d1") is Health.READY)
                (member,) = router.fleet.members()
                assert (member.info, member.load) == (worker_info("d1"), READY)
                assert joined.is_joined
            assert router.fleet.members() == []
            await router.clients[0].closed.wait()
            assert len(router.clients) == 1

    run(scenario)


def test_heartbeats_go_on_over_a_quiet_link() -> None:
    async def scenario() -> None:
        async with site(heartbeat_timeout_s=0.3) as (router, address), link(address, worker_info("d1")) as joined:
            await joined.wait_joined()
            first = router.fleet.members()[0].heard_s
            await router.until(lambda: router.fleet.members()[0].heard_s > first + 0.05)
            assert router.health("d1") is Health.READY

    run(scenario)


def test_a_broken_stream_takes_the_worker_out_at_once() -> None:
    async def scenario() -> None:
        async with site() as (router, address):
            async with raw_join(address) as call:
                assert (await say(call, worker_info("d1"))).instance_id == router.control.instance_id
                await say(call, READY)
                assert router.health("d1") is Health.READY
            await router.until(lambda: router.health("d1") is Health.SILENT)

    run(scenario)


def test_a_worker_finds_a_router_that_starts_later() -> None:
    async def scenario() -> None:
        port = free_port()
        async with link(f"127.0.0.1:{port}", worker_info("d1")) as joined:
            await asyncio.sleep(0.05)
            assert not joined.is_joined
            async with site(port=port) as (router, _):
                await router.until(lambda: router.health("d1") is Health.READY)

    run(scenario)


def test_a_worker_finds_the_next_router_without_being_restarted() -> None:
    async def scenario() -> None:
        port = free_port()
        async with site(port=port) as (first, address):
            built = RouterLink(address, worker_info("d1"), lambda: READY, INTERVAL_S)
            built.start()
            await first.until(lambda: first.health("d1") is Health.READY)
        async with site(port=port) as (second, _):
            await second.until(lambda: second.health("d1") is Health.READY)
            assert second.control.instance_id != first.control.instance_id
            await built.leave()
            assert second.fleet.members() == []

    run(scenario)


def test_leaving_is_quick_without_a_router() -> None:
    async def scenario() -> None:
        built = RouterLink(f"127.0.0.1:{free_port()}", worker_info("d1"), lambda: READY, INTERVAL_S)
        await built.leave()
        started = RouterLink(f"127.0.0.1:{free_port()}", worker_info("d1"), lambda: READY, INTERVAL_S)
        started.start()
        await asyncio.sleep(0.01)
        await started.leave()
        await started.leave()
        assert not started.is_joined

    run(scenario)


def test_a_worker_whose_load_cannot_be_told_stays_on_and_joins_when_it_can(caplog: pytest.LogCaptureFixture) -> None:
    faults = [RuntimeError("no load yet")]

    def load() -> WorkerLoad:
        if faults:
            raise faults.pop()
        return READY

    async def scenario() -> None:
        async with site() as (router, address), link(address, worker_info("d1"), load):
            await router.until(lambda: router.health("d1") is Health.READY)

    with caplog.at_level(logging.ERROR):
        run(scenario)
    assert "no load yet" in caplog.text


def test_a_new_instance_behind_an_address_replaces_the_old_one_and_is_not_replaced_by_it() -> None:
    async def scenario() -> None:
        async with site() as (router, address), raw_join(address) as old:
            await say(old, worker_info("d1"))
            async with link(address, worker_info("d2", address="d1:1")):
                await router.until(lambda: router.health("d2") is Health.READY)
                assert router.health("d1") is None
                await router.clients[0].closed.wait()
                await old.write(READY)
                assert await old.code() is grpc.StatusCode.FAILED_PRECONDITION
                async with raw_join(address) as again:
                    await again.write(worker_info("d1"))
                    assert await again.code() is grpc.StatusCode.FAILED_PRECONDITION
                    assert await again.details() == "worker d1 at d1:1 has been replaced by d2"
                assert router.health("d2") is Health.READY

    run(scenario)


def test_a_worker_that_comes_back_over_a_new_stream_is_not_taken_out_by_the_end_of_the_old_one() -> None:
    async def scenario() -> None:
        async with site() as (router, address), raw_join(address) as new:
            async with raw_join(address) as old:
                await say(old, worker_info("d1"))
                await say(new, worker_info("d1"))
                await say(new, READY)
            await asyncio.sleep(0.02)
            await say(new, READY)
            assert router.health("d1") is Health.READY
            assert len(router.clients) == 1, "the connection is kept"

    run(scenario)


def test_another_protocol_version_is_refused_with_both_values() -> None:
    async def scenario() -> None:
        async with site() as (router, address), raw_join(address) as call:
            await call.write(worker_info("d1", layout=msgspec.structs.replace(LAYOUT, protocol_version=99)))
            assert await call.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert await call.details() == f"protocol version {PROTOCOL_VERSION} here, 99 there"
            assert router.fleet.members() == []

    run(scenario)


@pytest.mark.parametrize("message", [READY, WorkerLeaving()])
def test_the_first_message_must_say_who_is_there(message: MembershipMessage) -> None:
    async def scenario() -> None:
        async with site() as (router, address), raw_join(address) as call:
            await call.write(message)
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert router.fleet.members() == []

    run(scenario)


def test_a_stream_that_falls_silent_is_cut_in_the_end_and_the_worker_forgotten() -> None:
    async def scenario() -> None:
        async with site(heartbeat_timeout_s=0.02) as (router, address), raw_join(address) as call:
            await say(call, worker_info("d1"))
            assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            await router.until(lambda: router.fleet.members() == [])
            await router.clients[0].closed.wait()

    run(scenario)


def test_a_port_that_is_taken_is_an_error() -> None:
    async def scenario() -> None:
        async with site() as (_, address):
            with pytest.raises(RuntimeError):
                await Site(port=int(address.rpartition(":")[2])).control.start()

    run(scenario)
