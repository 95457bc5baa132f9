"""The servers that are compared: how each is started on this machine, and how it is stopped with all that it started.

One engine runs at a time. Every server listens on 127.0.0.1 at a port that was free, leads a process group of its own and writes to a log file.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from pdjax.benchmarks.client import Endpoint, RequestFailed, get
from pdjax.benchmarks.peers_setup import Peers
from pdjax.errors import PdjaxError

Say = Callable[[str], None]

HOST = "127.0.0.1"
MAX_CONTEXT = 8192
READY_S = 600.0
READY_INTERVAL_S = 0.25
GET_S = 5.0
STOP_S = 20.0
TAIL_BYTES = 2000

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = Path(__file__).resolve().parents[1] / "configs" / "quickstart.yaml"

STEP_CONTEXT = 256
"""The context at which the goal for a decode step of pdjax is set."""

_APART = ("env", "PYTHONSAFEPATH=1")
"""Servers are started in the folder of this repository, which holds no modules of theirs."""

NIXL = '{"kv_connector":"NixlConnector","kv_role":"kv_both","kv_buffer_device":"cpu"}'


class ServerFailed(PdjaxError):
    """A server did not become ready; the message says how it ended and holds its last words."""


class ServerSpec(NamedTuple):
    """`command` starts a server at `port`; it serves once a GET of `ready_path` is answered with 200."""

    name: str
    command: tuple[str, ...]
    port: int
    ready_path: str

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(HOST, self.port, "", is_tls=False)


class Engine(NamedTuple):
    """`key` is what the command line calls it, `title` what the page calls it. `make_servers` gives fresh ports at every call.

    `extra_lens`: prompt lengths that are measured of this engine and no other. `has_clients`: whether several clients at a time are
    put on it, which takes long where no goal asks for it.
    """

    key: str
    title: str
    make_servers: Callable[[Peers], list[ServerSpec]]
    extra_lens: tuple[int, ...] = ()
    has_clients: bool = True


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on now."""
    with socket.create_server((HOST, 0)) as listener:
        return listener.getsockname()[1]


def num_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def _pdjax(peers: Peers) -> list[ServerSpec]:
    """Router, prefill worker and decode worker, as the README starts them."""
    port = free_port()
    command = (sys.executable, "-m", "pdjax.serve", "--config", str(QUICKSTART), "--host", HOST, "--port", str(port))
    return [ServerSpec("pdjax", (*command, "--set", "router.control_port=0"), port, "/ready")]


def _vllm(peers: Peers) -> list[ServerSpec]:
    return [_vllm_server(peers, "vllm", (), ())]


def _vllm_tuned(peers: Peers) -> list[ServerSpec]:
    """On its own vLLM leaves one core to its other processes, of two cores or more, and it advises to preload Intel's OpenMP."""
    variables = ("VLLM_CPU_OMP_THREADS_BIND=nobind", f"OMP_NUM_THREADS={num_cores()}", f"LD_PRELOAD={peers.vllm / 'lib' / 'libiomp5.so'}")
    return [_vllm_server(peers, "vllm-tuned", variables, ())]


def _vllm_pair(peers: Peers) -> list[ServerSpec]:
    """Prefill first, then decode. OpenMP threads that spin while they wait would take the cores from the other server."""
    passive = ("VLLM_CPU_OMP_THREADS_BIND=nobind", f"OMP_NUM_THREADS={num_cores()}", "OMP_WAIT_POLICY=passive", "KMP_BLOCKTIME=0")
    servers = []
    for role in ("prefill", "decode"):
        variables = (*passive, "UCX_TLS=tcp,sm,self", f"VLLM_NIXL_SIDE_CHANNEL_PORT={free_port()}")
        servers.append(_vllm_server(peers, f"vllm-{role}", variables, ("--kv-transfer-config", NIXL)))
    return servers


def _vllm_server(peers: Peers, name: str, variables: tuple[str, ...], options: tuple[str, ...]) -> ServerSpec:
    port = free_port()
    apart = (*_APART, "HF_HUB_OFFLINE=1", "VLLM_NO_USAGE_STATS=1", f"VLLM_CACHE_ROOT={peers.root / 'vllm-cache'}")
    serve = (str(peers.vllm / "bin" / "vllm"), "serve", str(peers.model), "--host", HOST, "--port", str(port))
    length = ("--dtype", "float32", "--max-model-len", str(MAX_CONTEXT), "--enable-prompt-tokens-details")
    return ServerSpec(name, (*apart, "VLLM_CPU_KVCACHE_SPACE=2", *variables, *serve, *length, *options), port, "/health")


def _llamacpp(peers: Peers) -> list[ServerSpec]:
    port, cores = free_port(), str(num_cores())
    command = (*_APART, str(peers.llamacpp / "bin" / "python"), "-m", "llama_cpp.server", "--model", str(peers.gguf), "--host", HOST)
    options = ("--port", str(port), "--n_ctx", str(MAX_CONTEXT), "--n_threads", cores, "--n_threads_batch", cores)
    # Its own default ends a running answer when the next request comes.
    return [ServerSpec("llamacpp", (*command, *options, "--interrupt_requests", "false"), port, "/v1/models")]


ENGINES = {
    engine.key: engine
    for engine in (
        Engine("pdjax", "pdjax", _pdjax, (STEP_CONTEXT,)),
        Engine("vllm", "vLLM CPU, one server", _vllm),
        Engine("vllm-tuned", "vLLM CPU, one server, all cores", _vllm_tuned),
        Engine("vllm-pd", "vLLM CPU, 1P1D over NIXL", _vllm_pair, has_clients=False),
        Engine("llamacpp", "llama.cpp, Q4_1", _llamacpp, has_clients=False),
    )
}
"""In the order in which they run."""


def shown(command: Sequence[str], peers: Peers) -> str:
    """`command` for a reader: without the paths of this machine."""
    text = shlex.join(command)
    for path, name in ((peers.gguf, peers.gguf.name), (QUICKSTART, "configs/quickstart.yaml"), (sys.executable, "python")):
        text = text.replace(str(path), name)
    return text.replace(f"{peers.root}/", "")


@contextlib.asynccontextmanager
async def running(servers: Sequence[ServerSpec], logs: Path, say: Say) -> AsyncIterator[float]:
    """Start all `servers`; gives the seconds until all were ready. On leaving none of their processes is left. Raises ServerFailed."""
    processes: list[_Server] = []
    start_s = time.monotonic()
    try:
        for spec in servers:
            processes.append(await _start(spec, logs / f"{spec.name}.log"))
        for process in processes:
            await process.until_ready(start_s + READY_S)
        ready_s = time.monotonic() - start_s
        say(f"{', '.join(spec.name for spec in servers)}: ready after {ready_s:.1f} s")
        yield ready_s
    finally:
        await asyncio.shield(asyncio.gather(*(process.stop() for process in processes)))


async def _start(spec: ServerSpec, log: Path) -> _Server:
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *spec.command, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output, cwd=ROOT, process_group=0
        )
    return _Server(spec, process, log)


class _Server:
    """A server process and all that it starts in its process group."""

    def __init__(self, spec: ServerSpec, process: asyncio.subprocess.Process, log: Path):
        self._spec = spec
        self._process = process
        self._log = log

    async def until_ready(self, deadline_s: float) -> None:
        """Raises ServerFailed where the process ends before it serves, or does not serve at `deadline_s` of the monotonic clock."""
        while not await self._is_ready():
            if self._process.returncode is not None:
                raise ServerFailed(f"{self._spec.name} ended with exit status {self._process.returncode}\n{self._last_words()}")
            if time.monotonic() > deadline_s:
                raise ServerFailed(f"{self._spec.name} was not ready after {READY_S:.0f} s\n{self._last_words()}")
            await asyncio.sleep(READY_INTERVAL_S)

    async def stop(self) -> None:
        """In order first; what is left of the process group after STOP_S is killed."""
        if self._process.returncode is None:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), STOP_S)
        self._signal(signal.SIGKILL)
        await self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    async def _is_ready(self) -> bool:
        try:
            status, _ = await get(self._spec.endpoint, self._spec.ready_path, GET_S)
        except RequestFailed:
            return False
        return status == 200

    def _last_words(self) -> str:
        return f"its log is {self._log} and ends:\n{self._log.read_bytes()[-TAIL_BYTES:].decode('utf-8', 'replace')}"
