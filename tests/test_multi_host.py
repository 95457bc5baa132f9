"""One worker over several processes: the same tokens as one process, and no process that outlives the others."""

from __future__ import annotations

import json
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from pdjax.config.load import ConfigError, load_config
from pdjax.config.schema import Config
from pdjax.engine.batch import DecodeSeq, PrefillSeq
from pdjax.observe.progress import NullProgress
from pdjax.protocol import Sampling
from pdjax.serve import check_role
from pdjax.worker import hosts_link, hosts_meet
from pdjax.worker.hosts import LeaderEngine, follow, telling_failures
from pdjax.worker.hosts_link import (
    Gather,
    GaveUp,
    Hello,
    HostLink,
    HostLost,
    Install,
    LaunchDecode,
    LaunchPrefill,
    Ready,
    SetHistory,
    Stop,
    receive_frame,
    send_frame,
)
from pdjax.worker.hosts_meet import Meeting, join, lead
from tests import multi_host_kit
from tests.live import free_port, wait_until

ROOT = Path(__file__).parent.parent
WAIT_S = 30.0
SAMPLING = Sampling(max_tokens=5, logit_bias={3: -1.5}, stop_token_ids=(7,), seed=9)
COMMANDS = [
    LaunchPrefill(
        [PrefillSeq(1, [4, 5, 6], 2, [8, 9], SAMPLING, None, range(0), []), PrefillSeq(0, [4], 0, [3], SAMPLING, 2, range(0, 1), [5])]
    ),
    LaunchDecode([DecodeSeq(1, None, 5, [8, 9], SAMPLING, 3), DecodeSeq(0, 4, 1, [3], SAMPLING, 1)]),
    SetHistory(1, [1, 2], [3]),
    Gather([5, 6, 7]),
]


class Ends(NamedTuple):
    """Host 0's link to a follower and the follower's to host 0, with what each was told to die of."""

    leader: HostLink
    follower: HostLink
    leader_died: list[str]
    follower_died: list[str]


@contextmanager
def linked(silence_s: float = WAIT_S) -> Iterator[Ends]:
    one, other = _tcp_pair()
    died: tuple[list[str], list[str]] = ([], [])
    leader = HostLink(one, "host 1", died[0].append, silence_s)
    follower = HostLink(other, "host 0", died[1].append, silence_s)
    try:
        yield Ends(leader, follower, *died)
    finally:
        leader.close()
        follower.close()


def _tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        other = socket.create_connection(listener.getsockname())
        return listener.accept()[0], other


class Recorder:
    """An engine that writes down what it is asked for."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.read_error: Exception | None = None

    def launch_prefill(self, seqs: list[PrefillSeq]) -> str:
        self.calls.append(("prefill", seqs))
        return "handle"

    def launch_decode(self, seqs: list[DecodeSeq]) -> str:
        self.calls.append(("decode", seqs))
        return "handle"

    def read(self, handle: str) -> None:
        if self.read_error is not None:
            raise self.read_error

    def set_history(self, slot: int, prompt: list[int], output: list[int]) -> None:
        self.calls.append(("history", slot, prompt, output))

    def gather(self, pages: list[int]) -> None:
        self.calls.append(("gather", pages))

    def install(self, pages: list[int], kv: np.ndarray) -> None:
        self.calls.append(("install", pages, str(kv.dtype), kv.tolist()))


def test_a_follower_does_what_the_leader_does_in_the_same_order() -> None:
    here, there, died = Recorder(), Recorder(), []
    with linked() as ends:
        following = threading.Thread(target=follow, args=(there, ends.follower, died.append))
        following.start()
        engine = LeaderEngine(here, [ends.leader])
        engine.await_hosts()
        chunk = np.arange(3 * 2 * 4 * 2 * 8, dtype=np.float32).reshape(3, 2, 4, 2, 8)
        engine.launch_prefill(COMMANDS[0].seqs)
        engine.install([4, 9], engine.put(chunk))
        engine.set_history(1, [1, 2], [3])
        engine.launch_decode(COMMANDS[1].seqs)
        engine.gather([5, 6, 7])
        engine.install([2], chunk.astype(jax.numpy.bfloat16))
        stopping = threading.Thread(target=engine.stop_hosts)
        stopping.start()
        following.join(WAIT_S)
        assert not following.is_alive()
        ends.follower.close()
        stopping.join(WAIT_S)
        assert (ends.leader_died, ends.follower_died, died) == ([], [], [])
    assert [call[0] for call in here.calls] == ["prefill", "install", "history", "decode", "gather", "install"]
    assert there.calls == here.calls
    assert here.calls[1] == ("install", [4, 9], "float32", chunk[:2].tolist())


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: type(command).__name__)
def test_a_command_arrives_as_it_was_sent(command: hosts_link.Message) -> None:
    with linked() as ends:
        ends.leader.send(command)
        frame = ends.follower.receive(WAIT_S)
    assert (frame.message, len(frame.payload)) == (command, 0)


def test_a_connection_that_closes_is_a_lost_host_and_nothing_can_be_sent_any_more() -> None:
    with linked() as ends:
        ends.follower.close()
        wait_until(lambda: bool(ends.leader_died), "the leader to notice")
        assert ends.leader_died == ["host 1 is gone: it closed the connection"]
        with pytest.raises(HostLost, match="host 1 is gone"):
            ends.leader.send(Ready())


def test_a_host_that_says_nothing_is_lost_although_its_connection_stands() -> None:
    one, other = _tcp_pair()
    died: list[str] = []
    link = HostLink(one, "host 1", died.append, silence_s=0.2)
    wait_until(lambda: bool(died), "the silence to be noticed")
    assert died == ["host 1 is gone: it said nothing for 0.2 s"]
    link.close()
    other.close()


def test_an_idle_link_stays() -> None:
    with linked(silence_s=0.5) as ends:
        with pytest.raises(queue.Empty):
            ends.follower.receive(1.5)
        assert (ends.leader_died, ends.follower_died) == ([], [])


def test_the_reason_for_which_one_host_gives_up_reaches_the_other() -> None:
    with linked() as ends:
        with pytest.raises(ValueError, match="no weights"), telling_failures([ends.follower]):
            raise ValueError("no weights")
        wait_until(lambda: bool(ends.leader_died), "the leader to hear of it")
        assert ends.leader_died == ["host 1 is gone: no weights"]
        assert ends.follower_died == []


def test_a_step_that_fails_on_a_follower_ends_it() -> None:
    engine, died = Recorder(), []
    engine.read_error = RuntimeError("out of memory")
    with linked() as ends:
        following = threading.Thread(target=follow, args=(engine, ends.follower, died.append))
        following.start()
        ends.leader.send(COMMANDS[0])
        wait_until(lambda: bool(died), "the error to show")
        assert died == ["a step failed on this host: RuntimeError('out of memory')"]
        ends.leader.send(Stop())
        following.join(WAIT_S)
        assert not following.is_alive()


def test_a_leader_that_nobody_listens_to_waits_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts_link, "STUCK_S", 0.3)
    one, other = _tcp_pair()
    died: list[str] = []
    link = HostLink(one, "host 1", died.append, silence_s=WAIT_S)
    payload = memoryview(bytes(64 << 20))
    with pytest.raises(HostLost):
        for _ in range(8):  # more than sockets and queue hold
            link.send(Install([1], (1, 1, 1, 1, 1), "float32"), payload)
    assert died == ["host 1 is gone: it has not taken a command for 0.3 s"]
    other.close()
    link.close()


@pytest.mark.parametrize("junk", [b"GET / HTTP/1.1\r\n\r\n" + bytes(64), b"\xff" * 64])
def test_bytes_that_are_no_frame_are_refused(junk: bytes) -> None:
    one, other = _tcp_pair()
    with one, other:
        other.sendall(junk)
        one.settimeout(WAIT_S)
        with pytest.raises(ValueError):
            receive_frame(one)


def test_a_host_that_is_set_up_otherwise_is_refused_with_both_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts_meet, "MEET_S", 2.0)
    config = Config.model_validate({"worker": {"num_hosts": 2, "coordinator": f"127.0.0.1:{free_port()}"}})
    here = Meeting.of(config, "decode", "abc")
    there = Meeting.of(config.model_copy(update={"engine": config.engine.model_copy(update={"num_pages": 99})}), "decode", "abd")
    failures: list[Exception] = []

    def leading() -> None:
        try:
            lead(here, NullProgress(), failures.append)
        except HostLost as error:
            failures.append(error)

    leader = threading.Thread(target=leading)
    leader.start()
    with pytest.raises(HostLost, match="model is abc on host 0, abd on host 1; engine.num_pages is 768 on host 0, 99 on host 1"):
        join(there._replace(host_index=1), NullProgress(), failures.append)
    with pytest.raises(HostLost, match="host_index 2 is none of 2 hosts"):
        join(here._replace(host_index=2), NullProgress(), failures.append)
    leader.join(WAIT_S)
    assert [str(error) for error in failures] == [f"host 1 did not come to {here} within 2 s"]


def test_a_leader_takes_nobody_but_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts_meet, "MEET_S", 2.0)
    meeting = Meeting("127.0.0.1", free_port(), 2, 0, 2, {})
    failures: list[str] = []

    def leading() -> None:
        try:
            lead(meeting, NullProgress(), failures.append)
        except HostLost as error:
            failures.append(str(error))

    leader = threading.Thread(target=leading)
    leader.start()
    wait_until(lambda: _answer(meeting, Ready()) == GaveUp("it is no host of this worker"), "the leader to listen")
    assert _answer(meeting, Hello(0, {})) == GaveUp("host_index 0 is none of 2 hosts, which count from 0")
    leader.join(WAIT_S)
    assert failures == [f"host 1 did not come to {meeting} within 2 s"]


def _answer(meeting: Meeting, message: hosts_link.Message) -> hosts_link.Message | None:
    try:
        with socket.create_connection((meeting.host, meeting.port), timeout=WAIT_S) as connection:
            send_frame(connection, message)
            return receive_frame(connection).message
    except ConnectionRefusedError:
        return None


@pytest.mark.parametrize(
    ("role", "overrides", "problem"),
    [
        ("all", [], "worker.num_hosts 2 has no meaning with --role all, whose workers are one process each; start each host's yourself"),
        ("decode", ["decode.tensor_parallel=3"], "decode.tensor_parallel 3 cannot be shared evenly by worker.num_hosts 2"),
        ("prefill", ["worker.host_index=2"], "worker.host_index 2 is none of worker.num_hosts 2, which count from 0"),
        ("decode", ["worker.coordinator=null"], "worker.num_hosts 2 needs worker.coordinator, HOST:PORT of host 0"),
        (
            "decode",
            ["transfer.kind=jax_transfer", "decode.tensor_parallel=1"],
            "transfer.kind jax_transfer needs a worker on one host, worker.num_hosts is 2; use tcp",
        ),
    ],
)
def test_hosts_that_cannot_work_together_are_refused_before_anything_starts(role: str, overrides: list[str], problem: str) -> None:
    base = ["worker.num_hosts=2", "worker.coordinator=host-a:8476", f"{'decode' if role == 'all' else role}.tensor_parallel=4"]
    with pytest.raises(ConfigError) as caught:
        check_role(load_config(None, [*base, *overrides]), role)
    assert problem in caught.value.problems


class Hosts:
    """Both processes of `tests.multi_host_kit`."""

    def __init__(self, folder: Path, what: str):
        port = free_port()
        self._files = [(folder / f"{index}.out", folder / f"{index}.err") for index in range(2)]
        self.processes = [self._start(index, port, what) for index in range(2)]

    def _start(self, index: int, port: int, what: str) -> subprocess.Popen[bytes]:
        out, err = self._files[index]
        with out.open("w") as out_file, err.open("w") as err_file:
            command = [sys.executable, "-m", "tests.multi_host_kit", str(index), str(port), what]
            return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out_file, stderr=err_file)

    def answer(self, start: str, end: str) -> Any:
        """The first line between these words that host 0 has printed, once it has; other lines are the collectives'."""
        lines: list[str] = []

        def has_come() -> bool:
            lines[:] = [line for line in self._files[0][0].read_text().splitlines() if line.startswith(start) and line.endswith(end)]
            return bool(lines) or any(process.poll() for process in self.processes)

        wait_until(has_come, "host 0 to answer", 120)
        assert lines, self.errors(0) + self.errors(1)
        return json.loads(lines[0])

    def errors(self, index: int) -> str:
        return self._files[index][1].read_text()

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def hosts(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Hosts]:
    running = Hosts(tmp_path, request.param)
    yield running
    running.end()


@pytest.mark.live
@pytest.mark.parametrize("hosts", ["answers"], indirect=True)
def test_two_processes_answer_as_one_does_and_end_in_order(hosts: Hosts) -> None:
    expected = multi_host_kit.answers(multi_host_kit.make_engine(jax.devices()[:1]))
    assert len(set(expected["greedy"])) > 3, "an answer that says something"
    found = hosts.answer("{", "}")
    assert (found["greedy"], found["drawn"]) == (expected["greedy"], expected["drawn"])
    np.testing.assert_allclose(found["logprobs"], expected["logprobs"], atol=2e-3)
    assert [process.wait(WAIT_S) for process in hosts.processes] == [0, 0]


@pytest.mark.live
@pytest.mark.parametrize(("hosts", "victim"), [("endless", 1), ("endless", 0)], indirect=["hosts"])
def test_the_death_of_one_host_ends_the_other(hosts: Hosts, victim: int) -> None:
    """In the middle of steps, whose collectives then wait for ever."""
    assert len(hosts.answer("[", "]")) == 8
    hosts.processes[victim].send_signal(signal.SIGKILL)
    status = hosts.processes[1 - victim].wait(WAIT_S)
    if victim == 1:
        assert status == 1
        assert "error: host 1 is gone: " in hosts.errors(0)
    else:
        assert status != 0  # JAX's own watch over host 0 may be faster, and aborts
