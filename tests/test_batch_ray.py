"""Batch jobs over a Ray cluster of several nodes on this machine: nodes leave and join, the driver is killed, each row has one result.

The cluster and every driver are programs of their own, this module as `__main__`. Engines are fakes that note which row they work on, on
which node.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from pdjax.config.load import ConfigError
from pdjax.jobs.backend import Reply, RowBackend, Unreachable
from pdjax.jobs.config import load_job
from pdjax.jobs.job import read_work, run_rows
from pdjax.jobs.ledger import Ledger, look_back
from pdjax.jobs.order import BLOCK_CHARS
from pdjax.jobs.ray_config import RayConfig
from pdjax.jobs.ray_pool import Pool, Seat, prompt_of
from pdjax.jobs.report import Tally
from pdjax.observe.progress import LineBoard, NullProgress

ROOT = Path(__file__).parent.parent
has_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install 'pdjax[ray]'")

NUM_ROWS = 60
NUM_GATED = 20
"""The last rows, which no engine answers before the file `joined` is there."""
DEADLINE_S = 120.0
RAY_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # as there: everything listens on 127.0.0.1 only
}
USAGE = {"prompt_tokens": 10, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}


# Placing, without Ray


def body(prompt: str) -> bytes:
    return json.dumps({"prompt": prompt}).encode()


def test_rows_of_one_document_go_where_it_has_been_computed() -> None:
    async def scenario() -> None:
        pool: Pool[str] = Pool(4, lambda: True)
        seats = [Seat("a", "node-a", "a"), Seat("b", "node-b", "b")]
        for seat in seats:
            await pool.add(seat)
        document = "d" * 10 * BLOCK_CHARS
        first, cost = await pool.take(prompt_of(body(document)))
        pool.computed(first, prompt_of(body(document)))
        await pool.give_back(first, cost)
        second, cost = await pool.take(prompt_of(body(document + "question")))
        assert second is first and cost < BLOCK_CHARS
        other, _ = await pool.take(prompt_of(body("x" * 50)))
        assert other is not first
        assert sum(seat.num_rows for seat in seats) == 2

    asyncio.run(scenario())


def test_a_row_waits_for_a_place_and_then_for_hope() -> None:
    async def scenario() -> None:
        hopes = [True]
        pool: Pool[str] = Pool(1, lambda: hopes[0])
        seat = Seat("a", "node-a", "a")
        await pool.add(seat)
        _, cost = await pool.take(prompt_of(body("x")))
        waiting = [asyncio.create_task(pool.take(prompt_of(body("y")))) for _ in range(2)]
        await asyncio.sleep(0)
        assert not any(task.done() for task in waiting)
        await pool.give_back(seat, cost)
        done, waiting_still = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        assert len(done) == 1 and done.pop().result()[0] is seat
        await pool.remove(seat)
        hopes[0] = False
        await pool.tell()
        [last] = waiting_still
        with pytest.raises(Unreachable, match="no node"):
            await last

    asyncio.run(scenario())


# Configuration


def write_job(folder: Path, text: str) -> Path:
    (folder / "in.jsonl").write_text('"hello"\n')
    file = folder / "job.yaml"
    file.write_text(f"input: in.jsonl\noutput: {folder}/out.jsonl\n{text}")
    return file


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("cluster: ray\nurl: http://127.0.0.1:1", "url and cluster exclude each other"),
        ("ray: {num_cpus: 2}", "no effect without cluster: ray"),
        ("cluster: ray\nray: {address: 'ray://head:10001'}", "run the job on a node of the cluster"),
        ("cluster: ray\nray: {engines_per_node: 0}", "ray.engines_per_node"),
        ("cluster: slurm", "cluster"),
    ],
)
def test_a_cluster_that_makes_no_sense_is_refused_by_name(text: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_job(write_job(tmp_path, text))


def test_a_job_for_ray_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "ray" else known(name, *rest))
    with pytest.raises(ConfigError, match=r"pip install 'pdjax\[ray\]'"):
        load_job(write_job(tmp_path, "cluster: ray"))


@has_ray
def test_the_example_is_a_job_for_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    job = load_job(ROOT / "configs" / "batch" / "ray.yaml")
    assert job.batch.cluster == "ray" and job.engine is not None
    assert job.rows_in_flight == job.batch.max_in_flight * job.batch.ray.max_engines


def test_an_engine_needs_what_is_named_and_nothing_else() -> None:
    assert RayConfig(num_cpus=0, num_gpus=2, resources={"TPU": 4}).needs == {"GPU": 2, "TPU": 4}


# The cluster


class Nodes(NamedTuple):
    """A cluster of a head and another node. What is written to it is done when it has answered."""

    process: subprocess.Popen[str]
    address: str
    folder: str

    def tell(self, word: str) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == f"{word}\n"


def program(folder: str, *words: str, **streams: int) -> subprocess.Popen[str]:
    """`folder`: where Ray keeps its files."""
    environment = {**os.environ, **RAY_SETTINGS, "RAY_TMPDIR": folder}
    command = [sys.executable, "-m", "tests.test_batch_ray", *words]
    return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **streams)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """Its sockets need short paths, hence no folder of pytest's."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        with program(folder, "cluster", stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            assert process.stdin is not None and process.stdout is not None
            processes = [psutil.Process(process.pid)]
            try:
                address = process.stdout.readline().strip()
                assert address, "the cluster did not start"
                yield Nodes(process, address, folder)
                processes += processes[0].children(recursive=True)
                process.stdin.close()
                assert process.wait(60) == 0
            finally:
                for each in processes:
                    if each.is_running():
                        each.kill()
        gone, alive = psutil.wait_procs(processes, timeout=10)
        assert not alive


class Notes(NamedTuple):
    """Of the fakes: which row began or ended on which node."""

    file: Path

    def read(self) -> list[tuple[str, int, str]]:
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        return [(what, int(row), node) for what, row, node in (line.split() for line in lines)]

    def nodes_at_work(self) -> set[str]:
        return {node for what, _, node in self.read() if what == "begin"}

    def begun(self) -> list[int]:
        return [row for what, row, _ in self.read() if what == "begin"]


def make_job(folder: Path) -> Path:
    """Half the rows share a beginning; every seventh will fail."""
    shared = "s" * 2 * BLOCK_CHARS
    lines = [json.dumps({"custom_id": f"row-{i}", "prompt": f"{shared if i % 2 else ''}{i}"}) for i in range(1, NUM_ROWS + 1)]
    (folder / "in.jsonl").write_text("\n".join(lines) + "\n")
    file = folder / "job.yaml"
    file.write_text(f"input: in.jsonl\noutput: {folder}/out.jsonl\ncluster: ray\nray: {{max_engines: 8}}\nmax_in_flight: 4\n")
    return file


def wait_until(condition: Callable[[], bool], what: str, driver: subprocess.Popen[str]) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end_s, f"waited {DEADLINE_S:g} s for {what}"
        assert driver.poll() is None, f"the driver ended with {driver.returncode} before {what}"
        time.sleep(0.05)


@contextmanager
def driving(nodes: Nodes, job: Path, notes: Notes) -> Iterator[subprocess.Popen[str]]:
    with program(nodes.folder, "drive", nodes.address, str(job), str(notes.file), stdout=subprocess.DEVNULL) as driver:
        try:
            yield driver
        finally:
            driver.kill()


def done_rows(job: Path) -> frozenset[int]:
    loaded = load_job(job)
    return look_back(loaded.paths, read_work(loaded).identity).done


def check_results(job: Path) -> None:
    """Each row once, in the right file, with the answer to its own prompt."""
    paths = load_job(job).paths
    good, bad = ([json.loads(line) for line in path.read_text().splitlines()] for path in (paths.output, paths.errors))
    assert Counter(result["custom_id"] for result in good + bad) == Counter(f"row-{i}" for i in range(1, NUM_ROWS + 1))
    assert {result["custom_id"] for result in bad} == {f"row-{i}" for i in range(7, NUM_ROWS + 1, 7)}
    for result in good + bad:
        assert result["response"]["body"]["to"].lstrip("s") == result["custom_id"].removeprefix("row-")


@has_ray
@pytest.mark.live
def test_a_job_whose_driver_is_killed_goes_on_and_asks_for_no_row_that_is_done(nodes: Nodes, tmp_path: Path) -> None:
    job = make_job(tmp_path)
    first, second = Notes(tmp_path / "first.txt"), Notes(tmp_path / "second.txt")
    with driving(nodes, job, first) as driver:
        wait_until(lambda: len(done_rows(job)) >= 10 and len(first.nodes_at_work()) == 2, "rows on two nodes", driver)
        driver.send_signal(signal.SIGKILL)
        driver.wait(30)
    before = done_rows(job)
    assert 10 <= len(before) <= NUM_ROWS - NUM_GATED
    (tmp_path / "joined").touch()
    with driving(nodes, job, second) as driver:  # takes the place of the engines of the first, which have ended with it
        assert driver.wait(DEADLINE_S) == 0
    assert set(second.begun()) == set(range(1, NUM_ROWS + 1)) - before
    check_results(job)


@has_ray
@pytest.mark.live
def test_rows_of_a_lost_node_are_done_by_others_and_a_node_that_joins_takes_its_share(nodes: Nodes, tmp_path: Path) -> None:
    job, notes = make_job(tmp_path), Notes(tmp_path / "notes.txt")
    with driving(nodes, job, notes) as driver:
        wait_until(lambda: len(done_rows(job)) >= 10 and len(notes.nodes_at_work()) == 2, "rows on two nodes", driver)
        nodes.tell("kill")
        known = notes.nodes_at_work()
        nodes.tell("add")
        wait_until(lambda: bool(notes.nodes_at_work() - known), "rows on the new node", driver)
        (tmp_path / "joined").touch()
        assert driver.wait(DEADLINE_S) == 0
    check_results(job)
    # An engine may outlive its node for a moment and end a row that others have begun by then.
    nodes_of: dict[int, set[str]] = defaultdict(set)
    for what, row, node in notes.read():
        if what == "begin":
            nodes_of[row].add(node)
    twice = {row: names for row, names in nodes_of.items() if len(names) > 1}
    assert twice and set.intersection(*twice.values()), f"rows that were in flight on the lost node, and no others, are done again: {twice}"
    assert set(twice) <= {row for what, row, _ in notes.read() if what == "end"}


# Programs


class Fake(RowBackend):
    """Answers after a while. `audit`: where it notes what it does; `joined`: the file that the last rows wait for."""

    def __init__(self, audit: Path, joined: Path, node: str):
        self._audit = audit
        self._joined = joined
        self._node = node

    async def start(self) -> str:
        return "fake"

    async def answer(self, url: str, body: bytes, on_prefilled: Callable[[], None]) -> Reply:
        prompt = json.loads(body)["prompt"]
        number = int(prompt.lstrip("s"))
        self._note("begin", number)
        await asyncio.sleep(0.05)
        on_prefilled()
        await asyncio.sleep(0.15)
        while number > NUM_ROWS - NUM_GATED and not self._joined.exists():
            await asyncio.sleep(0.05)
        self._note("end", number)
        return Reply(400 if number % 7 == 0 else 200, "", json.dumps({"to": prompt, "usage": USAGE}).encode())

    async def close(self) -> None:
        pass

    def _note(self, what: str, row: int) -> None:
        with self._audit.open("a") as file:
            file.write(f"{what} {row} {self._node}\n")


async def load_fake(audit: str) -> RowBackend:
    import ray

    return Fake(Path(audit), Path(audit).with_name("joined"), ray.get_runtime_context().get_node_id())


def drive(address: str, job: str, audit: str) -> None:
    """What `python -m pdjax.batch` does, over fakes."""
    from pdjax.jobs.ray_cluster import RayBackend

    work = read_work(load_job(Path(job)))
    config = work.job.batch.ray.model_copy(update={"address": address})
    with Ledger.open(work.job.paths, work.identity) as ledger:
        load = functools.partial(load_fake, audit)
        backend = RayBackend.connect(config, load, work.job.batch.max_in_flight, NullProgress())
        tally = Tally(LineBoard(sys.stderr), work.source.num_rows, ledger.past.counts)
        asyncio.run(run_rows(work, ledger, backend, tally))


def run_cluster() -> None:
    """Does what it reads: `kill` the second node as a power cut would, `add` another one."""
    from ray.cluster_utils import Cluster

    size = {"num_cpus": 1, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**size, "include_dashboard": False})
    others = [cluster.add_node(**size)]
    print(cluster.address, flush=True)
    for line in iter(sys.stdin.readline, ""):
        if line == "kill\n":
            cluster.remove_node(others.pop(), allow_graceful=False)
        else:
            others.append(cluster.add_node(**size))
        print(line, end="", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    {"drive": drive, "cluster": run_cluster}[sys.argv[1]](*sys.argv[2:])
