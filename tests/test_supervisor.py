"""The supervisor, over small real processes: what it starts it shows, keeps and ends, whatever happens."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parent.parent
PROGRAM = Path(__file__).parent / "fake_system.py"
DEADLINE_S = 60.0
QUICK = {"stop_s": 20.0, "stop_unready_s": 0.2, "restart_pauses_s": [0.01, 0.02]}
SERVING = {"router": "serve", "prefill-0": "serve", "decode-0": "serve"}


def wait_until(condition: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end_s, f"waited {DEADLINE_S} s for {what}"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class System:
    """A supervisor in a process of its own, at the head of its own process group, as a shell starts it."""

    def __init__(self, folder: Path, children: dict[str, str], limits: dict[str, Any], **more: Any):
        self.folder = folder
        self._out, self._err = (folder / "out.txt"), (folder / "err.txt")
        plan = {"folder": str(folder), "children": children, "limits": {**QUICK, **limits}, **more}
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = subprocess.Popen(
                [sys.executable, str(PROGRAM), "run", json.dumps(plan)],
                stdout=out,
                stderr=err,
                stdin=subprocess.DEVNULL,
                process_group=0,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def starts_of(self, name: str) -> list[int]:
        return [int(file.suffix[1:]) for file in self.folder.glob(f"{name}.*") if file.suffix[1:].isdecimal()]

    def all_pids(self) -> list[int]:
        return self.starts_of("*")

    def await_ready(self) -> None:
        wait_until(lambda: self.out.endswith("\n") or self.process.poll() is not None, "the system")
        assert self.process.poll() is None, self.err

    def await_end(self) -> int:
        status = self.process.wait(DEADLINE_S)
        assert not [pid for pid in self.all_pids() if is_running(pid)], "children outlived their supervisor"
        return status

    def end_for_good(self) -> None:
        self.process.kill()
        self.process.wait()
        for pid in self.all_pids():
            if is_running(pid) and str(PROGRAM) in psutil.Process(pid).cmdline():
                os.kill(pid, signal.SIGKILL)


Start = Callable[..., System]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    systems: list[System] = []

    def start_system(children: dict[str, str], limits: dict[str, Any] | None = None, **more: Any) -> System:
        systems.append(System(tmp_path, children, limits or {}, **more))
        return systems[-1]

    yield start_system
    for system in systems:
        system.end_for_good()


def test_the_workers_are_told_where_the_router_takes_registrations(start: Start) -> None:
    system = start(SERVING)
    system.await_ready()
    assert system.out == "ready at http://127.0.0.1:1234\n"
    for name, control in (("router", ""), ("prefill-0", "127.0.0.1:4321"), ("decode-0", "127.0.0.1:4321")):
        [pid] = system.starts_of(name)
        assert json.loads((system.folder / f"{name}.{pid}").read_text())["control"] == control
        assert f"{name} runs as process {pid}" in system.err
        assert f"{name}: load 2/2 weights\n" in system.err
    system.process.send_signal(signal.SIGTERM)
    assert system.await_end() == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_each_stop_signal_stops_everything_in_order(number: signal.Signals, start: Start) -> None:
    system = start(SERVING)
    system.await_ready()
    system.process.send_signal(number)
    assert system.await_end() == 0
    assert {file.name for file in system.folder.glob("*.stopped-*")} == {f"{name}.stopped-by-SIGTERM" for name in SERVING}


def test_ctrl_c_in_a_terminal_reaches_the_children_through_the_supervisor_only(start: Start) -> None:
    system = start(SERVING)
    system.await_ready()
    os.killpg(system.process.pid, signal.SIGINT)  # what a terminal does to its foreground group
    assert system.await_end() == 0
    assert {file.name for file in system.folder.glob("*.stopped-*")} == {f"{name}.stopped-by-SIGTERM" for name in SERVING}


def test_a_child_that_ignores_sigterm_is_killed(start: Start) -> None:
    system = start({**SERVING, "decode-0": "ignore signals"}, {"stop_s": 0.2})
    system.await_ready()
    system.process.send_signal(signal.SIGINT)
    assert system.await_end() == 0
    assert "decode-0 did not stop within 0.2 s and is killed" in system.err


def test_a_second_signal_kills_at_once(start: Start) -> None:
    system = start({**SERVING, "decode-0": "ignore signals"}, {"stop_s": 10 * DEADLINE_S})
    system.await_ready()
    system.process.send_signal(signal.SIGINT)
    wait_until(lambda: "SIGINT: stopping" in system.err, "the first signal to be taken")
    system.process.send_signal(signal.SIGINT)
    assert system.await_end() == 0


def test_a_signal_during_the_start_stops_what_has_been_started(start: Start) -> None:
    system = start({**SERVING, "decode-0": "say nothing"})
    wait_until(lambda: len(system.all_pids()) == 3, "three processes")
    system.process.send_signal(signal.SIGINT)
    assert system.await_end() == 0
    assert system.out == ""


@pytest.mark.parametrize("name", SERVING)
def test_a_crash_during_the_start_ends_the_system_with_status_and_last_words(name: str, start: Start) -> None:
    system = start({**SERVING, name: "crash"})
    assert system.await_end() == 1
    assert f"error: {name} ended with exit status 3\n  about to divide\n  divided by zero\n" in system.err
    assert system.out == ""


def test_a_child_that_gives_up_has_its_reason_shown(start: Start) -> None:
    system = start({**SERVING, "prefill-0": "give up"})
    assert system.await_end() == 1
    assert "error: prefill-0 ended with exit status 1\n  there are no weights\n" in system.err


def test_a_start_without_any_sign_of_life_fails(start: Start) -> None:
    system = start({**SERVING, "prefill-0": "say nothing"}, {"start_silence_s": 2.0})
    assert system.await_end() == 1
    assert "error: prefill-0 told nothing for 2 s while starting" in system.err


def test_a_router_that_does_not_see_its_workers_fails_the_start(start: Start) -> None:
    system = start(SERVING, deaf_router=True)
    assert system.await_end() == 1
    assert "error: the router does not see its workers" in system.err


def test_a_program_that_cannot_be_started_is_named(start: Start) -> None:
    system = start(SERVING, command=["/nonexistent/python"])
    assert system.await_end() == 1
    assert "error: router cannot be started: [Errno 2]" in system.err


def test_a_dead_worker_is_replaced_while_the_others_stay(start: Start) -> None:
    system = start(SERVING)
    system.await_ready()
    [first], [other] = system.starts_of("prefill-0"), system.starts_of("decode-0")
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: len(system.starts_of("prefill-0")) == 2, "a second prefill worker")
    assert "prefill-0 was killed by SIGKILL\nprefill-0 is started again in 0.01 s" in system.err
    [second] = set(system.starts_of("prefill-0")) - {first}
    os.kill(second, signal.SIGKILL)
    wait_until(lambda: len(system.starts_of("prefill-0")) == 3, "a third prefill worker")
    assert "prefill-0 is started again in 0.02 s" in system.err
    assert system.starts_of("decode-0") == [other] and is_running(other)
    system.process.send_signal(signal.SIGTERM)
    assert system.await_end() == 0


def test_the_death_of_the_router_ends_the_system_with_an_error(start: Start) -> None:
    system = start(SERVING)
    system.await_ready()
    os.kill(system.starts_of("router")[0], signal.SIGKILL)
    assert system.await_end() == 1
    assert "error: router was killed by SIGKILL" in system.err


def test_children_end_when_their_supervisor_is_killed(start: Start) -> None:
    system = start(SERVING)
    system.await_ready()
    pids = system.all_pids()
    assert len(pids) == 3 and all(is_running(pid) for pid in pids)
    system.process.kill()
    wait_until(lambda: not any(is_running(pid) for pid in pids), "the children to end")
    assert len(list(system.folder.glob("*.stopped-by-SIGTERM"))) == 3


def test_children_that_ignore_signals_end_too_when_their_supervisor_is_killed(start: Start) -> None:
    system = start({"router": "serve", "decode-0": "ignore signals"})
    system.await_ready()
    system.process.kill()
    wait_until(lambda: not any(is_running(pid) for pid in system.all_pids()), "the children to end")
