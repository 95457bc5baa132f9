"""How long `python -m pdjax.serve` takes until it says that it is ready: with an empty compilation cache, and again with a full one."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import IO

from pdjax.benchmarks.fleet import SystemFailed
from pdjax.benchmarks.growth_report import Chart, Curve, Goal, PartReport

COLD_GOAL_S, WARM_GOAL_S = 40.0, 15.0
WARM_STARTS = 1
START_S = 300.0
STOP_S = 15.0
READY_WORDS = "ready at "

Tell = Callable[[str], None]


def run(tell: Tell, overrides: tuple[str, ...] = ()) -> PartReport:
    """Raises SystemFailed where the system does not start."""
    with tempfile.TemporaryDirectory(prefix="pdjax-growth-") as folder:
        command = start_command((*overrides, f"engine.compile_cache={folder}"))
        times_s = []
        for number in range(1 + WARM_STARTS):
            tell("start: warm" if number else "start: cold")
            times_s.append(time_to_ready(command))
    return build(times_s)


def start_command(overrides: tuple[str, ...]) -> list[str]:
    """The quickstart system on free ports."""
    words = ("server.port=0", "router.control_port=0", "log.level=warning", *overrides)
    return [sys.executable, "-m", "pdjax.serve", *(part for word in words for part in ("--set", word))]


def time_to_ready(command: list[str], timeout_s: float = START_S) -> float:
    """Seconds from before the process exists to its word that it is ready; then it is stopped. Raises SystemFailed."""
    start_s = time.perf_counter()
    with _running(command) as (process, last_words):
        assert process.stdout is not None, "started with a pipe for stdout"
        watchdog = threading.Timer(timeout_s, process.terminate)
        watchdog.start()
        try:
            for line in process.stdout:
                if line.startswith(READY_WORDS):
                    return time.perf_counter() - start_s
        finally:
            watchdog.cancel()
        raise SystemFailed(f"the system did not get ready within {timeout_s:g} s: {last_words()}")


@contextlib.contextmanager
def _running(command: list[str]) -> Iterator[tuple[subprocess.Popen[str], Callable[[], str]]]:
    """The process, and what gives the last line of its log. It leads a group of its own and has ended on leaving."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True, process_group=0)
        try:
            yield process, lambda: _last_line(log)
        finally:
            _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.stdout is not None, "started with a pipe for stdout"
    process.stdout.close()


def _last_line(log: IO[str]) -> str:
    log.seek(0)
    return (log.read().strip().splitlines() or ["it said nothing"])[-1]


def build(times_s: list[float]) -> PartReport:
    """`times_s`: the cold start, then the warm ones."""
    cold_s, *warm_s = times_s
    goals = (
        Goal("cold start to ready, s", cold_s, COLD_GOAL_S),
        Goal("slowest warm start to ready, s", max(warm_s), WARM_GOAL_S),
    )
    points = [(float(number), each) for number, each in enumerate(times_s, 1)]
    note = "The first start finds an empty compilation cache, the others what it has left there."
    chart = Chart("from command to ready", "start", "s", (Curve("until ready", points),))
    return PartReport("start", (chart,), goals, (note,))
