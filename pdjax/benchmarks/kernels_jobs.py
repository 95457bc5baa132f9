"""Programs to compile, each in a process for its target, with results that are kept: what was interrupted goes on, and what has not changed
is not compiled again.

A process is told its jobs by a file and answers in lines on its standard output that begin with `@`: `@{}` when it is ready, then
`@{"index": ..., "record": {...}}` for each job in order. A job whose process dies or hangs fails alone; the next process takes those behind it.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import importlib.metadata
import json
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import xxhash

Record = dict[str, Any]
Command = Callable[[str, Path, Path], list[str]]
"""(group, file with jobs, empty folder) -> the command of a process that works on them."""

_PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda12-pjrt", "nvidia-cuda-nvcc-cu12", "nvidia-cuda-runtime-cu12")
_PACKAGE = Path(__file__).parent.parent
_MARK = "@"
AT_A_TIME = 2
LIMIT_S = 1200.0
"""Of one job, or of a process until it is ready. The longest known takes a minute on an idle machine."""


class Job(NamedTuple):
    """One program. Jobs of a `group` share a process. `case`: JSON. `sources`: patterns of the files and folders
    of the package that the result depends on."""

    group: str
    target: str
    name: str
    case: Record
    sources: tuple[str, ...]

    def key(self) -> str:
        """Of the job, the code and the compilers: equal where the result would be."""
        what = [self.target, self.case, _versions(), _digest(self.sources)]
        return xxhash.xxh3_128_hexdigest(json.dumps(what, sort_keys=True).encode())

    def described(self) -> Record:
        """What begins the job's record."""
        return {"target": self.target, **self.case}


class Results:
    """Records by the key of their job, a file each. Only what compiled is kept: a failure is tried again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, job: Job) -> Record | None:
        path = self._path(job)
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def keep(self, job: Job, record: Record) -> None:
        path = self._path(job)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_text(json.dumps(record), encoding="utf-8")
        unfinished.replace(path)

    def _path(self, job: Job) -> Path:
        return self._folder / f"{job.key()}.json"


class Progress:
    """Says what is done and about how long the rest takes. Threads may share it."""

    def __init__(self, num_jobs: int, num_kept: int, say: Callable[[str], None]) -> None:
        self._num_jobs, self._say = num_jobs, say
        self._num_done = num_kept
        self._lock = threading.Lock()
        self._begun, self._num_kept = time.monotonic(), num_kept
        if num_kept:
            say(f"{num_kept} of {num_jobs} programs are known from before")

    def done(self, job: Job, record: Record, seconds: float) -> None:
        with self._lock:
            self._num_done += 1
            fresh, left = self._num_done - self._num_kept, self._num_jobs - self._num_done
            rest_s = (time.monotonic() - self._begun) / fresh * left
            failed = f" FAILED: {record['reason']}" if "reason" in record else ""
            self._say(f"[{self._num_done}/{self._num_jobs}] {job.name}, {seconds:.0f} s{failed}{f'; {_about(rest_s)} left' if left else ''}")


def run_jobs(jobs: Sequence[Job], results: Results, command: Command, say: Callable[[str], None]) -> list[Record]:
    """The record of every job, in order: `Job.described` with what its process found, or with the `reason` why there is nothing."""
    records = [results.find(job) for job in jobs]
    waiting: dict[str, list[int]] = {}
    for index, (job, record) in enumerate(zip(jobs, records, strict=True)):
        if record is None:
            waiting.setdefault(job.group, []).append(index)
    progress = Progress(len(jobs), sum(record is not None for record in records), say)
    processes = _Processes(command)

    def run_group(group: str) -> None:
        left = waiting[group]

        def finish(nth: int, found: Record, seconds: float) -> None:
            job = jobs[left[nth]]
            records[left[nth]] = record = job.described() | found
            if "reason" not in record:
                results.keep(job, record)
            progress.done(job, record, seconds)

        while left and not processes.are_over:
            left = left[processes.run(group, [jobs[index] for index in left], finish) :]

    with concurrent.futures.ThreadPoolExecutor(AT_A_TIME) as pool:
        try:
            list(pool.map(run_group, sorted(waiting, key=lambda group: -len(waiting[group]))))
        finally:
            processes.end()
    return [record for record in records if record is not None]


class _Processes:
    """The processes at work. `end` may be called by another thread than those in `run`."""

    def __init__(self, command: Command) -> None:
        self._command = command
        self._lock = threading.Lock()
        self._live: set[subprocess.Popen[str]] = set()
        self.are_over = False

    def end(self) -> None:
        """Kill those at work, and start no more."""
        with self._lock:
            self.are_over = True
            for process in self._live:
                process.kill()

    def run(self, group: str, jobs: list[Job], finish: Callable[[int, Record, float], None]) -> int:
        """Run a process to its end; returns how many of the jobs, from the first on, are finished: all, or up to one that ended it."""
        with tempfile.TemporaryDirectory() as folder:
            todo, work, errors = Path(folder) / "jobs.json", Path(folder) / "work", Path(folder) / "stderr"
            todo.write_text(json.dumps([job.case for job in jobs]))
            work.mkdir()
            with errors.open("w") as stderr, self._running(self._command(group, todo, work), stderr) as process:
                num_done, is_ready, begun = _follow(process, finish)
            if self.are_over or num_done == len(jobs):
                return len(jobs)
            reason = f"its process ended with status {process.returncode}: {_last_line(errors)}"
        num_finished = num_done + 1 if is_ready else len(jobs)
        for index in range(num_done, num_finished):
            finish(index, {"reason": reason}, time.monotonic() - begun)
        return num_finished

    @contextlib.contextmanager
    def _running(self, command: list[str], stderr: TextIO) -> Iterator[subprocess.Popen[str]]:
        """In a session of its own: an interrupt reaches this process, which then ends those. Waits for its end."""
        with self._lock:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, start_new_session=True)
            self._live.add(process)
            if self.are_over:
                process.kill()
        try:
            yield process
        except BaseException:
            process.kill()
            raise
        finally:
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
            with self._lock:
                self._live.discard(process)


def _follow(process: subprocess.Popen[str], finish: Callable[[int, Record, float], None]) -> tuple[int, bool, float]:
    """Hear a process out: how many jobs it finished, whether it was ready for any, and when it last said something."""
    assert process.stdout is not None
    num_done, is_ready, begun = 0, False, time.monotonic()
    for message in _messages(process, process.stdout):
        now = time.monotonic()
        if is_ready:
            assert message["index"] == num_done, f"job {message['index']} finished, expected {num_done}"
            finish(num_done, message["record"], now - begun)
            num_done += 1
        is_ready, begun = True, now
    return num_done, is_ready, begun


def _messages(process: subprocess.Popen[str], lines: TextIO) -> Iterable[Record]:
    """What the process says. One that says nothing for `LIMIT_S` is killed."""
    guard = _Guard(process)
    try:
        for line in lines:
            if line.startswith(_MARK):
                guard.renew()
                yield json.loads(line[len(_MARK) :])
    finally:
        guard.end()


class _Guard:
    """Kills a process that says nothing for `LIMIT_S`. Its thread is gone when `end` returns."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._begin()

    def renew(self) -> None:
        self.end()
        self._begin()

    def end(self) -> None:
        self._timer.cancel()
        self._timer.join()

    def _begin(self) -> None:
        self._timer = threading.Timer(LIMIT_S, self._process.kill)
        self._timer.start()


def work_on(path: Path, figures: Callable[[Record], Record]) -> None:
    """The process's side: `figures` of every case in the file, told as they come. What it raises becomes the job's `reason`."""
    print(_MARK + "{}", flush=True)
    for index, case in enumerate(json.loads(path.read_text())):
        try:
            record = figures(case)
        except Exception as error:  # what the compiler raises, of many kinds, is the result
            record = {"reason": _one_line(error)}
        print(_MARK + json.dumps({"index": index, "record": record}, default=str), flush=True)


def _one_line(error: Exception) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


def _last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").split("\n")
    return next((line[:200] for line in reversed(lines) if line.strip()), "it said nothing")


def _about(seconds: float) -> str:
    return f"about {seconds / 60:.0f} min" if seconds >= 90 else f"about {seconds:.0f} s"


@functools.cache
def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = ""
    return found


@functools.cache
def _digest(sources: tuple[str, ...]) -> str:
    """Of the files that the patterns name, and of those below the folders that they name."""
    digest = xxhash.xxh3_128()
    found = [path for pattern in sources for path in sorted(_PACKAGE.glob(pattern))]
    assert found, f"no file in {_PACKAGE} is named by {sources}"
    for path in found:
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(f"{file.relative_to(_PACKAGE)}\0".encode() + file.read_bytes())
    return digest.hexdigest()
