"""What happens when clients leave, stall or wait too long; and the merging of streams underneath."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing

import pytest

from pdjax.api.merge import merge
from pdjax.api.transport import ClientGone, EventStream, while_connected
from pdjax.config.schema import ServerConfig
from pdjax.errors import DeadlineExceeded
from tests.fake_backend import MODEL, WAIT_S, Served, serve

BODIES = {
    "/v1/completions": {"model": MODEL, "prompt": ["A", "B"], "n": 2},
    "/v1/chat/completions": {"model": MODEL, "messages": [{"role": "user", "content": "A"}], "n": 4},
}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serve() as served:
        yield served


@pytest.fixture
def served(server: Served) -> Iterator[Served]:
    server.backend.reset()
    yield server
    server.backend.wait_until_open(0)


def send_request(served: Served, path: str, body: dict) -> socket.socket:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n".encode()
    connection = socket.create_connection(("127.0.0.1", served.port), timeout=WAIT_S)
    connection.sendall(head + content)
    return connection


@pytest.mark.parametrize("path", list(BODIES))
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("hold_at", [0, 1, 3])
def test_a_client_that_leaves_stops_every_sequence_of_its_request(served, path, stream, hold_at):
    served.backend.hold_at = hold_at
    with send_request(served, path, BODIES[path] | {"stream": stream}):
        served.backend.wait_until_open(4)
    served.backend.wait_until_open(0)


def test_a_client_that_leaves_in_mid_stream_stops_the_work(served):
    served.backend.hold_at = 3
    with served.client().completions.create(model=MODEL, prompt="A", stream=True, n=3) as stream:
        assert next(iter(stream)).choices[0].text == "a"
        served.backend.wait_until_open(3)
    served.backend.wait_until_open(0)


def test_a_client_that_leaves_does_not_disturb_the_others(served):
    served.backend.hold_at = 3
    with send_request(served, "/v1/completions", BODIES["/v1/completions"]):
        served.backend.wait_until_open(4)
        served.backend.hold_at = None
        with served.client().completions.create(model=MODEL, prompt="A", stream=True) as stream:
            assert "".join(chunk.choices[0].text for chunk in stream) == "abcdef"
        served.backend.wait_until_open(4)
    served.backend.wait_until_open(0)


def test_a_client_that_leaves_while_it_sends_its_request_costs_nothing(served):
    with socket.create_connection(("127.0.0.1", served.port), timeout=WAIT_S) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
    assert served.http.get("/health").status_code == 200
    assert served.backend.calls == []


def test_a_failing_sequence_stops_the_others_of_its_request(served):
    served.backend.script = lambda prompt: [65] if prompt == [66] else [*b"abcdef"]
    served.backend.hold_at = 4
    response = served.http.post("/v1/completions", json={"model": MODEL, "prompt": ["A", "B", "A"], "n": 2})
    assert response.status_code == 500
    served.backend.wait_until_open(0)


def test_a_request_without_progress_ends_at_its_deadline():
    with serve(ServerConfig(request_timeout_s=0.2)) as served:
        served.backend.hold_at = 0
        for stream in (False, True):
            response = served.http.post("/v1/completions", json={"model": MODEL, "prompt": "A", "stream": stream})
            assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")
        served.backend.hold_at = 2
        response = served.http.post("/v1/completions", json={"model": MODEL, "prompt": "A", "stream": True})
        assert response.status_code == 200 and '"deadline_exceeded"' in response.text and "[DONE]" not in response.text
        served.backend.wait_until_open(0)


def test_a_body_that_never_arrives_ends_at_the_deadline():
    with serve(ServerConfig(request_timeout_s=0.2)) as served, socket.create_connection(("127.0.0.1", served.port), WAIT_S) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
        assert connection.recv(100).startswith(b"HTTP/1.1 504 ")


class Source:
    """Streams that count how many of them are open; each blocks for ever once it has given its events."""

    def __init__(self) -> None:
        self.num_open = 0

    async def stream(self, events: list[str], error: Exception | None = None, ends: bool = False) -> AsyncGenerator[str, None]:
        self.num_open += 1
        try:
            for event in events:
                await asyncio.sleep(0)
                yield event
            if error is not None:
                raise error
            if not ends:
                await asyncio.Event().wait()
        finally:
            self.num_open -= 1


@pytest.mark.parametrize("num_streams", [1, 2, 5])
def test_merged_streams_keep_their_order_and_lose_nothing(num_streams):
    async def run() -> list[tuple[int, str]]:
        source = Source()
        return [event async for event in merge([source.stream(["a", "b", "c"], ends=True) for _ in range(num_streams)])]

    events = asyncio.run(run())
    for index in range(num_streams):
        assert [event for i, event in events if i == index] == ["a", "b", "c"]
    assert len(events) == 3 * num_streams


@pytest.mark.parametrize("num_streams", [1, 3])
@pytest.mark.parametrize("num_read", [0, 1, 2])
def test_closing_merged_streams_closes_every_one(num_streams, num_read):
    async def run() -> int:
        source = Source()
        merged = merge([source.stream(["a", "b"]) for _ in range(num_streams)])
        for _ in range(num_read):
            await anext(merged)
        await merged.aclose()
        return source.num_open

    assert asyncio.run(run()) == 0


@pytest.mark.parametrize("num_others", [0, 1, 3])
def test_the_first_error_closes_the_other_streams_and_comes_out(num_others):
    async def run() -> int:
        source = Source()
        others = [source.stream(["a"]) for _ in range(num_others)]
        with pytest.raises(ValueError, match="broken"):
            async for _ in merge([*others, source.stream(["a"], ValueError("broken"))]):
                pass
        return source.num_open

    assert asyncio.run(run()) == 0


def test_a_reader_that_stalls_holds_its_streams_back():
    async def run() -> int:
        given = 0

        async def endless() -> AsyncGenerator[int, None]:
            nonlocal given
            while True:
                given += 1
                await asyncio.sleep(0)
                yield given

        merged = merge([endless(), endless()])
        await anext(merged)
        for _ in range(1000):
            await asyncio.sleep(0)
        await merged.aclose()
        return given

    assert asyncio.run(run()) <= 6  # two streams: one event read, two queued, one in the hands of each pump


class Client:
    """The ASGI side of a client. `leaves`: set when it closes its connection; `reads`: cleared when it stops reading."""

    def __init__(self) -> None:
        self.leaves, self.reads = asyncio.Event(), asyncio.Event()
        self.reads.set()
        self.messages: list[dict] = []

    async def receive(self) -> dict:
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict) -> None:
        await self.reads.wait()
        self.messages.append(message)


def test_a_client_that_stops_reading_is_cut_off_after_its_deadline(monkeypatch):
    monkeypatch.setattr("pdjax.api.transport.GRACE_S", 0.05)

    async def run() -> tuple[int, list[str]]:
        client, source = Client(), Source()

        async def events() -> AsyncGenerator[bytes, None]:
            async with aclosing(source.stream(["a", "b", "c"], ends=True)) as stream:
                async for event in stream:
                    yield event.encode()
                    client.reads.clear()

        await EventStream(events(), 0.05)({"type": "http"}, client.receive, client.send)
        return source.num_open, [message["type"] for message in client.messages]

    assert asyncio.run(run()) == (0, ["http.response.start", "http.response.body"])


def test_work_is_cancelled_and_has_ended_when_the_client_has_gone():
    async def run() -> list[str]:
        client, log = Client(), []

        async def work() -> None:
            client.leaves.set()
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                log.append("cleaned up")

        with pytest.raises(ClientGone):
            await while_connected(client.receive, work(), WAIT_S)
        return log

    assert asyncio.run(run()) == ["cleaned up"]


def test_finished_work_wins_over_a_client_that_leaves_at_the_same_moment():
    async def run() -> str:
        client = Client()
        client.leaves.set()

        async def work() -> str:
            return "done"

        return await while_connected(client.receive, work(), WAIT_S)

    assert asyncio.run(run()) == "done"


def test_work_that_takes_too_long_is_cancelled(monkeypatch):
    monkeypatch.setattr("pdjax.api.transport.GRACE_S", 0.01)

    async def run() -> None:
        await while_connected(Client().receive, asyncio.Event().wait(), 0.01)

    with pytest.raises(DeadlineExceeded):
        asyncio.run(run())
