"""`python -m pdjax.serve`: starts a whole system, or one part of it.

This module reads the command line, checks the configuration before anything is loaded or bound, and hands over: to the supervisor for
several processes, to the router or the worker for one. A supervised child runs this module too, with its configuration on standard input.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import logging
import os
import signal
import socket
import sys
import textwrap
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from pdjax.children import ChildSpec, adopt_parent
from pdjax.config.load import ConfigError, describe_fields, dump_config, load_config
from pdjax.config.schema import Config
from pdjax.errors import PdjaxError
from pdjax.observe.logging import configure_logging
from pdjax.observe.progress import ForegroundProgress, LineBoard, PipeProgress, Progress, make_board
from pdjax.supervisor import Plan, run_system

ROLES = ("all", "router", "prefill", "decode", "unified")
SUPERVISED_ROLES = ("all", "unified")
GREETING_DEADLINE_S = 30.0
MAX_PORT = 65535

_logger = logging.getLogger("pdjax.serve")  # also where this module runs as __main__

DESCRIPTION = "Serve a language model with prefill and decode in separate processes, behind an OpenAI-compatible API."

EPILOG = """\
roles:
  all        a router, prefill.count prefill workers and decode.count decode workers, each a process (default)
  unified    a router and one worker that computes prompts and answers: the baseline without disaggregation
  router     the HTTP server; workers register with it and may come and go
  prefill    one worker that computes prompts; registers at worker.router
  decode     one worker that generates answers; computes prompts itself where it has to

examples:
  python -m pdjax.serve                                          the default model on this machine
  python -m pdjax.serve --port 9000 --set prefill.count=2        another port, two prefill workers
  python -m pdjax.serve --config my.yaml --check                 check a file, print every value that holds
  python -m pdjax.serve --role router                            the same system by hand, one terminal each:
  python -m pdjax.serve --role prefill
  python -m pdjax.serve --role decode --set worker.router=127.0.0.1:8001

Ctrl-C or SIGTERM stops in order. Exit status: 0 stopped, 1 failed, 2 bad configuration.
"""


class _SetField(argparse.Action):
    """A shortcut for one field: `--port 9000` is `--set server.port=9000`. The last word on a field wins, shortcut or not."""

    def __init__(
        self,
        option_strings: Sequence[str],
        dest: str,
        const: str,
        metavar: str,
        type: Callable[[str], str] | None = None,
        help: str = "same as --set {const}={metavar}",
    ):
        text = help.format(const=const, metavar=metavar)
        super().__init__(option_strings, argparse.SUPPRESS, const=const, type=type, metavar=metavar, help=text)

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        namespace.overrides = [*namespace.overrides, f"{self.const}={values}"]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pdjax.serve",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(overrides=[])
    what = parser.add_argument_group("what to run")
    what.add_argument("--role", choices=ROLES, default="all", help="which part of the system this command is; default: all")
    what.add_argument("--check", action="store_true", help="check the configuration, print it and the memory it takes, and exit")
    settings = parser.add_argument_group("configuration")
    settings.add_argument("--config", metavar="FILE", help="YAML file; default: configs/quickstart.yaml")
    settings.add_argument(
        "--set", metavar="SECTION.FIELD=VALUE", dest="overrides", action="append", help="one field, overrides the file; may be repeated"
    )
    settings.add_argument("--help-config", action="store_true", help="list every field with its type, default and meaning, and exit")
    shortcuts = parser.add_argument_group("shortcuts")
    shortcuts.add_argument("--host", action=_SetField, const="server.host", metavar="ADDRESS", type=json.dumps)
    shortcuts.add_argument("--port", action=_SetField, const="server.port", metavar="PORT")
    shortcuts.add_argument("--model", action=_SetField, const="model.source", metavar="SOURCE", type=json.dumps)
    shortcuts.add_argument(
        "--random-weights",
        action=_SetField,
        const="model.source",
        metavar="SHAPE",
        type=lambda shape: json.dumps(f"random:{shape}"),
        help="same as --set {const}=random:{metavar}",
    )
    shortcuts.add_argument("--optimistic-prefill-retries", action=_SetField, const="scheduler.optimistic_prefill_retries", metavar="N")
    parser.add_argument("--child", type=int, metavar="FD", help=argparse.SUPPRESS)
    return parser


def config_help() -> str:
    """Every field, section by section."""
    lines = ["Fields for a configuration file and for --set:"]
    for section, fields in itertools.groupby(describe_fields(), key=lambda field: field.name.partition(".")[0]):
        lines += ["", section]
        for field in fields:
            lines.append(f"  {field.name} = {field.default}  ({field.type})")
            lines += textwrap.wrap(field.description, width=100, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


def check_role(config: Config, role: str) -> None:
    """Refuse what the fields allow but `role` cannot do. Raises ConfigError with every problem."""
    problems = []
    is_between_processes = config.transfer.kind in ("tcp", "jax_transfer")
    if role != "router" and not is_between_processes and not (role == "unified" and config.transfer.kind == "loopback"):
        problems.append(f"transfer.kind {config.transfer.kind} stays inside one process; --role {role} needs tcp or jax_transfer")
    workers = config.prefill.count + config.decode.count
    if role == "all" and config.decode.count < 1:
        problems.append(f"decode.count must be at least 1 with --role all, got {config.decode.count}")
    if role == "all" and config.worker.port and workers > 1:
        problems.append(f"worker.port {config.worker.port} cannot serve {workers} workers on one machine; use 0, any free port")
    ranks = config.workers("prefill" if role == "prefill" else "decode").data_parallel
    if role != "router" and config.worker.port and config.worker.port + ranks - 1 > MAX_PORT:
        problems.append(f"worker.port {config.worker.port} leaves no ports for {ranks} ranks, the last is {MAX_PORT}")
    if role in (*SUPERVISED_ROLES, "router") and config.server.port == config.router.control_port != 0:
        problems.append(f"server.port and router.control_port must differ, both are {config.server.port}")
    if role in SUPERVISED_ROLES and config.worker.router is not None:
        problems.append(f"worker.router {config.worker.router} has no meaning with --role {role}, which starts a router of its own")
    if role in ("prefill", "decode") and config.worker.router is None and config.router.control_port == 0:
        problems.append(f"router.control_port 0 tells a worker nothing; --role {role} needs worker.router=HOST:PORT")
    problems += _host_problems(config, role)
    if problems:
        raise ConfigError(problems)


def _host_problems(config: Config, role: str) -> list[str]:
    """What keeps a worker from being run by several processes."""
    number = config.worker.num_hosts
    if number == 1 or role == "router":
        return []
    if role in SUPERVISED_ROLES:
        return [f"worker.num_hosts {number} has no meaning with --role {role}, whose workers are one process each; start each host's yourself"]
    workers = config.workers("prefill" if role == "prefill" else "decode")
    problems = []
    if config.worker.coordinator is None:
        problems.append(f"worker.num_hosts {number} needs worker.coordinator, HOST:PORT of host 0")
    if config.worker.host_index >= number:
        problems.append(f"worker.host_index {config.worker.host_index} is none of worker.num_hosts {number}, which count from 0")
    if workers.data_parallel > 1:
        problems.append(
            f"{role}.data_parallel {workers.data_parallel} needs a process that owns all its chips, worker.num_hosts is {number}; use 1"
        )
    if workers.tensor_parallel % number:
        problems.append(f"{role}.tensor_parallel {workers.tensor_parallel} cannot be shared evenly by worker.num_hosts {number}")
    if config.transfer.kind != "tcp":
        problems.append(f"transfer.kind {config.transfer.kind} needs a worker on one host, worker.num_hosts is {number}; use tcp")
    return problems


def check_addresses(config: Config) -> None:
    """Whether the router's two addresses can be bound. Raises OSError naming field, address and reason."""
    for host, port, fields in (
        (config.server.host, config.server.port, "server.host and server.port"),
        (config.router.control_host, config.router.control_port, "router.control_host and router.control_port"),
    ):
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
        except OSError as error:
            raise OSError(f"cannot listen at {host}:{port} ({fields}): {error.strerror}") from None


def make_plan(config: Config, role: str) -> Plan:
    """The processes of `--role all` or `--role unified`."""
    counts = {"prefill": config.prefill.count, "decode": config.decode.count} if role == "all" else {"decode": 1}

    def make_workers(control: str) -> list[ChildSpec]:
        joined = config.model_copy(update={"worker": config.worker.model_copy(update={"router": _reachable(control)})})
        return [_child(f"{kind}-{index}", kind, joined) for kind, count in counts.items() for index in range(count)]

    return Plan(_child("router", "router", config), make_workers, _greeting)


def _child(name: str, role: str, config: Config) -> ChildSpec:
    command = (sys.executable, "-m", "pdjax.serve", "--role", role)
    return ChildSpec(name, command, config.model_dump_json().encode())


def _reachable(address: str) -> str:
    """`address` as processes of this machine reach it: a wildcard host becomes the loopback address."""
    host, _, port = address.rpartition(":")
    return {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "[::]": "[::1]"}.get(host, host) + f":{port}"


async def _greeting(url: str) -> str:
    """Wait until the router would serve a request, which it learns from the workers' heartbeats, and make the lines for the user."""
    scheme, _, address = url.partition("://")
    base = f"{scheme}://{_reachable(address.rstrip('/'))}"
    try:
        async with asyncio.timeout(GREETING_DEADLINE_S):
            while await asyncio.to_thread(_get, f"{base}/ready") is None:
                await asyncio.sleep(0.1)
            models = await asyncio.to_thread(_get, f"{base}/v1/models")
    except TimeoutError:
        raise TimeoutError(f"the workers are ready, but the router at {base} does not see them after {GREETING_DEADLINE_S:g} s") from None
    model = json.loads(models)["data"][0]["id"] if models is not None else "default"
    question = {"model": model, "stream": True, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
    return "\n".join(
        [
            f"ready at {base}",
            "",
            f"curl -N {base}/v1/chat/completions -H 'Content-Type: application/json' \\",
            f"  -d '{json.dumps(question)}'",
            "",
        ]
    )


def _get(url: str) -> bytes | None:
    """The body of a GET, None where there is none yet. Proxies are for other machines."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=2.0) as response:
            return response.read()
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return None


def run_check(config: Config, role: str) -> int:
    """Print what holds, as YAML, and below it, as comments, the memory that it takes."""
    from pdjax.worker.memory_plan import memory_report  # not above: a process that serves has no use for it

    try:
        report = memory_report(config, role)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(dump_config(config), end="")
    for line in report:
        print(f"# {line}")
    return 0


def run_supervised(config: Config, role: str) -> int:
    """Run a whole system as child processes of this one."""
    board = make_board(sys.stderr)
    configure_logging(config.log.level, board)
    try:
        check_addresses(config)
    except OSError as error:
        board.log(f"error: {error}")
        return 1
    return run_system(make_plan(config, role), board, sys.stdout)


def run_foreground(config: Config, role: str) -> int:
    """Run one part of a system in this process, for a terminal."""
    board = make_board(sys.stderr)
    configure_logging(config.log.level, board)
    progress = ForegroundProgress(role, board, sys.stdout)
    try:
        if role == "router":
            check_addresses(config)
    except OSError as error:
        progress.failed(str(error))
        return 1
    with board:
        return run_part(config, role, progress)


def run_child(role: str, progress_fd: int) -> int:
    """Run one part of a system under a supervisor."""
    progress = PipeProgress(progress_fd)
    # Ctrl-C is the supervisor's; it tells its children by SIGTERM.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    config = Config.model_validate_json(adopt_parent(), strict=True)
    configure_logging(config.log.level, LineBoard(sys.stderr))
    return run_part(config, role, progress)


def run_part(config: Config, role: str, progress: Progress) -> int:
    """Run the router or one worker until it is stopped. What can go wrong with good code becomes one line and exit status 1."""
    try:
        return _load_part(role)(config, progress)
    except KeyboardInterrupt:  # before the part handles signals itself
        return 0
    except (PdjaxError, OSError, ValueError) as error:
        _logger.debug("the %s failed", role, exc_info=True)
        progress.failed(str(error))
        return 1
    except Exception as error:
        _logger.exception("the %s failed", role)
        progress.failed(f"internal error: {error!r}")
        return 1


def _load_part(role: str) -> Callable[[Config, Progress], int]:
    """Imported here, by the process that runs it: a router does without JAX, and `--check` without both."""
    if role == "router":
        from pdjax.batches.endpoints import batch_extension
        from pdjax.router.main import run_router

        return lambda config, progress: run_router(config, progress, [batch_extension(config)])
    from pdjax.worker.main import run_worker

    return lambda config, progress: run_worker(config, role, progress)


def main(arguments: Sequence[str] | None = None) -> int:
    options = make_parser().parse_args(arguments)
    if options.help_config:
        print(config_help())
        return 0
    if options.child is not None:
        return run_child(options.role, options.child)
    try:
        config = load_config(options.config, options.overrides)
        check_role(config, options.role)
    except ConfigError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        return 2
    if options.check:
        return run_check(config, options.role)
    if options.role in SUPERVISED_ROLES:
        return run_supervised(config, options.role)
    return run_foreground(config, options.role)


def _leave(status: int) -> NoReturn:
    """End the process at once. What had to stop in order has stopped; taking the interpreter with JAX and a model apart would keep
    the user waiting for seconds, to no effect."""
    logging.shutdown()
    with contextlib.suppress(BrokenPipeError):  # `--help-config | head`
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    _leave(main())
