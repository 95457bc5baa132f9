"""How the hosts of one worker find each other: at host 0, which checks that all are set up alike, and then in `jax.distributed`."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Callable
from typing import NamedTuple

import jax

from pdjax.config.schema import Config
from pdjax.observe.progress import Progress
from pdjax.version import __version__
from pdjax.worker.hosts_link import GaveUp, Hello, HostLink, HostLost, Welcome, receive_frame, send_frame

log = logging.getLogger(__name__)

MEET_S = 600.0
"""How long the first host waits for the last one."""

_HELLO_S = 5.0
_RETRY_S = 0.2

OnLost = Callable[[str], None]


class Meeting(NamedTuple):
    """Where and with whom a host meets.

    `host`, `port`: of host 0. `width`: chips of the worker, on all hosts together. `settings`: what must be the same on every host, by name,
    or their programs would differ.
    """

    host: str
    port: int
    num_hosts: int
    host_index: int
    width: int
    settings: dict[str, str]

    @classmethod
    def of(cls, config: Config, role: str, fingerprint: str) -> Meeting:
        """`fingerprint`: of the model."""
        worker = config.worker
        assert worker.coordinator is not None, f"{worker.num_hosts} hosts without worker.coordinator"
        host, _, port = worker.coordinator.rpartition(":")
        width = config.workers(role).tensor_parallel
        settings = {
            "role": role,
            "model": fingerprint,
            "model.dtype": config.model.dtype,
            "model.max_context_tokens": config.model.max_context_tokens,
            "worker.num_hosts": worker.num_hosts,
            f"{role}.tensor_parallel": width,
            "version of pdjax": __version__,
            "version of jax": jax.__version__,
            **{f"engine.{name}": value for name, value in config.engine.model_dump(exclude={"compile_cache"}).items()},
        }
        in_words = {name: str(value) for name, value in settings.items()}
        return cls(host.strip("[]"), int(port), worker.num_hosts, worker.host_index, width, in_words)

    def __str__(self) -> str:
        return _address(self.host, self.port)


def lead(meeting: Meeting, progress: Progress, on_lost: OnLost) -> list[HostLink]:
    """Host 0: wait for the other hosts, and meet them in `jax.distributed`. One link a host, in their order.

    Raises OSError where the meeting's address cannot be listened at, HostLost where a host does not come within `MEET_S`.
    """
    others = range(1, meeting.num_hosts)
    progress.stage("hosts", meeting.num_hosts)
    with contextlib.ExitStack() as undo:
        connections = _gather(meeting, progress, undo)
        address = _address(meeting.host, _free_port(meeting.host))
        for connection in connections.values():
            send_frame(connection, Welcome(address))
        undo.pop_all()
    links = [HostLink(connections[index], f"host {index}", on_lost) for index in others]
    _start_jax(address, meeting)
    return links


def join(meeting: Meeting, progress: Progress, on_lost: OnLost) -> HostLink:
    """Any other host: find host 0, and meet all in `jax.distributed`.

    Raises HostLost where host 0 cannot be found within `MEET_S`, or refuses this host.
    """
    progress.stage("hosts", 0)
    with contextlib.ExitStack() as undo:
        connection = undo.enter_context(_connected(meeting))
        connection.settimeout(MEET_S)
        try:
            send_frame(connection, Hello(meeting.host_index, meeting.settings))
            answer = receive_frame(connection).message
        except (OSError, ValueError) as error:
            raise HostLost(f"host 0 at {meeting} is gone: {error}") from error
        if not isinstance(answer, Welcome):
            raise HostLost(f"host 0 at {meeting} does not take this host: {answer.reason if isinstance(answer, GaveUp) else answer}")
        undo.pop_all()
    link = HostLink(connection, "host 0", on_lost)
    _start_jax(answer.address, meeting)
    return link


def devices_of_hosts(meeting: Meeting) -> list[jax.Device]:
    """As many devices as the worker is wide, evenly from all processes, those of one side by side.

    Raises ValueError where a process has fewer.
    """
    share = meeting.width // meeting.num_hosts
    devices = []
    for index in range(meeting.num_hosts):
        of_host = [device for device in jax.devices() if device.process_index == index]
        if len(of_host) < share:
            raise ValueError(
                f"host {index} has {len(of_host)} devices; tensor_parallel {meeting.width} over {meeting.num_hosts} hosts takes {share} of each"
            )
        devices += of_host[:share]
    return devices


def _gather(meeting: Meeting, progress: Progress, undo: contextlib.ExitStack) -> dict[int, socket.socket]:
    """The connections of all other hosts, by index; `undo` closes them."""
    connections: dict[int, socket.socket] = {}
    end_s = time.monotonic() + MEET_S
    with socket.create_server((meeting.host, meeting.port), family=_family(meeting.host)) as listener:
        while len(connections) < meeting.num_hosts - 1:
            listener.settimeout(max(0.001, end_s - time.monotonic()))
            try:
                connection, peer = listener.accept()
            except TimeoutError:
                missing = ", ".join(str(index) for index in range(1, meeting.num_hosts) if index not in connections)
                raise HostLost(f"host {missing} did not come to {meeting} within {MEET_S:g} s") from None
            undo.callback(connection.close)
            index = _greeted(connection, meeting, connections)
            if index is not None:
                connections[index] = connection
                progress.advance(len(connections) + 1, meeting.num_hosts, f"host {index} at {peer[0]}")
    return connections


def _greeted(connection: socket.socket, meeting: Meeting, others: dict[int, socket.socket]) -> int | None:
    """The index of a host that may take part; None for others, which have been told why."""
    connection.settimeout(_HELLO_S)
    try:
        hello = receive_frame(connection).message
        reason = _refusal(hello, meeting, others) if isinstance(hello, Hello) else "it is no host of this worker"
        if isinstance(hello, Hello) and reason is None:
            return hello.host_index
        log.warning("a host was refused: %s", reason)
        send_frame(connection, GaveUp(reason or ""))
    except (OSError, ValueError) as error:
        log.warning("a connection that was no host's was closed: %s", error)
    connection.close()
    return None


def _refusal(hello: Hello, meeting: Meeting, others: dict[int, socket.socket]) -> str | None:
    here, there = meeting.settings, hello.settings
    listed = [
        f"{name} is {here.get(name)} on host 0, {there.get(name)} on host {hello.host_index}"
        for name in {**here, **there}
        if here.get(name) != there.get(name)
    ]
    if listed:
        return f"hosts of one worker must be set up alike: {'; '.join(listed)}"
    if not 1 <= hello.host_index < meeting.num_hosts:
        return f"host_index {hello.host_index} is none of {meeting.num_hosts} hosts, which count from 0"
    return f"host_index {hello.host_index} is taken" if hello.host_index in others else None


def _connected(meeting: Meeting) -> socket.socket:
    """Host 0 may start later than this one."""
    end_s = time.monotonic() + MEET_S
    while True:
        try:
            return socket.create_connection((meeting.host, meeting.port), timeout=_HELLO_S)
        except OSError as error:
            if time.monotonic() >= end_s:
                raise HostLost(f"host 0 could not be reached at {meeting} for {MEET_S:g} s: {error}") from error
            time.sleep(_RETRY_S)


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _family(host: str) -> socket.AddressFamily:
    return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]


def _free_port(host: str) -> int:
    with socket.create_server((host, 0), family=_family(host)) as probe:
        return int(probe.getsockname()[1])


def _start_jax(address: str, meeting: Meeting) -> None:
    """The death of a host is for the links to notice: JAX would say less, and later."""
    jax.config.update("jax_num_cpu_devices", meeting.width // meeting.num_hosts)
    jax.config.update("jax_enable_recoverability", True)
    jax.distributed.initialize(
        address,
        meeting.num_hosts,
        meeting.host_index,
        coordinator_bind_address=address,
        cluster_detection_method="deactivate",
    )
