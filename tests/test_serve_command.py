"""`python -m pdjax.serve`: its words, its refusals, and what it hands to the processes that it starts."""

from __future__ import annotations

import asyncio
import http.server
import io
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from pdjax import serve
from pdjax.config.load import ConfigError, describe_fields, load_config
from pdjax.config.schema import Config
from pdjax.errors import WorkerFailed
from pdjax.observe.progress import (
    MAX_EVENT_BYTES,
    BarBoard,
    ForegroundProgress,
    LineBoard,
    NullProgress,
    PipeProgress,
    Progress,
    TerminalProgress,
    replay,
)

ROOT = Path(__file__).parent.parent


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pdjax.serve", *words], capture_output=True, text=True, cwd=ROOT, stdin=subprocess.DEVNULL, timeout=120
    )


def test_help_names_every_role_and_every_visible_option() -> None:
    done = command("--help")
    assert (done.returncode, done.stderr) == (0, "")
    for role in serve.ROLES:
        assert f"\n  {role} " in done.stdout
    for option in ("--config", "--role", "--set", "--check", "--help-config", "--host", "--port", "--model"):
        assert f"\n  {option}" in done.stdout
    assert "--child" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 120


def test_help_config_lists_every_field_with_default_and_meaning() -> None:
    done = command("--help-config")
    assert (done.returncode, done.stderr) == (0, "")
    together = " ".join(done.stdout.split())
    for field in describe_fields():
        assert f"{field.name} = {field.default} ({field.type}) {field.description}" in together


def test_check_prints_the_configuration_that_holds(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("engine:\n  num_pages: 99\n")
    done = command("--check", "--config", str(file), "--port", "9000", "--set", "model.name='my model'", "--model", "a: b.gguf")
    assert (done.returncode, done.stderr) == (0, "")
    printed = yaml.safe_load(done.stdout)
    assert list(printed) == list(Config.model_fields)
    assert printed["engine"]["num_pages"] == 99
    assert printed["server"] == {**Config().server.model_dump(), "port": 9000}
    assert (printed["model"]["name"], printed["model"]["source"]) == ("my model", "a: b.gguf")


def test_a_shortcut_and_the_same_field_by_set_follow_their_order() -> None:
    assert serve.make_parser().parse_args(["--port", "1", "--set", "server.port=2"]).overrides == ["server.port=1", "server.port=2"]
    assert serve.make_parser().parse_args(["--set", "server.port=2", "--port", "1"]).overrides == ["server.port=2", "server.port=1"]
    assert serve.make_parser().parse_args([]).overrides == []


@pytest.mark.parametrize("role", serve.ROLES)
def test_a_bad_configuration_ends_with_status_2_and_one_line_a_problem(role: str) -> None:
    done = command("--role", role, "--set", "server.port=70000", "--set", "engine.pages=3")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: command line: unknown field engine.pages; did you mean engine.num_pages?\n"
        "error: command line: server.port must be at most 65535, got 70000\n"
    )


def test_an_unknown_role_ends_with_status_2() -> None:
    done = command("--role", "both")
    assert done.returncode == 2
    assert "invalid choice: 'both'" in done.stderr


def test_check_loads_neither_jax_nor_a_server() -> None:
    program = (
        "import sys; from pdjax.serve import main; status = main(['--check']); "
        "print(status, [name for name in ('jax', 'grpc', 'uvicorn') if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.stderr == "0 []\n"


@pytest.mark.parametrize(
    ("role", "override", "problem"),
    [
        ("all", "transfer.kind=device_put", "transfer.kind device_put stays inside one process; --role all needs tcp or jax_transfer"),
        (
            "unified",
            "transfer.kind=device_put",
            "transfer.kind device_put stays inside one process; --role unified needs tcp or jax_transfer",
        ),
        ("prefill", "transfer.kind=loopback", "transfer.kind loopback stays inside one process; --role prefill needs tcp or jax_transfer"),
        ("all", "decode.count=0", "decode.count must be at least 1 with --role all, got 0"),
        ("all", "worker.port=9000", "worker.port 9000 cannot serve 2 workers on one machine; use 0, any free port"),
        ("all", "worker.router=h:1", "worker.router h:1 has no meaning with --role all, which starts a router of its own"),
        ("decode", "router.control_port=0", "router.control_port 0 tells a worker nothing; --role decode needs worker.router=HOST:PORT"),
        ("router", "router.control_port=8000", "server.port and router.control_port must differ, both are 8000"),
    ],
)
def test_what_a_role_cannot_do_is_refused(role: str, override: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        serve.check_role(load_config(None, [override]), role)
    assert caught.value.problems == (problem,)


@pytest.mark.parametrize(
    ("role", "overrides"),
    [
        *((role, []) for role in serve.ROLES),
        ("all", ["prefill.count=0"]),
        ("all", ["server.port=0", "router.control_port=0"]),
        ("unified", ["transfer.kind=loopback"]),
        ("router", ["transfer.kind=device_put"]),
        ("decode", ["router.control_port=0", "worker.router=h:1"]),
        ("decode", ["worker.port=9000"]),
    ],
)
def test_what_a_role_can_do_passes(role: str, overrides: list[str]) -> None:
    serve.check_role(load_config(None, overrides), role)


@pytest.mark.parametrize("field", ["server", "control"])
@pytest.mark.parametrize("role", ["all", "router"])
def test_a_busy_port_is_named_before_anything_starts(field: str, role: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ports = {"server": 0, "control": 0, field: port}
        done = command("--role", role, "--port", str(ports["server"]), "--set", f"router.control_port={ports['control']}")
    names = {"server": "server.host and server.port", "control": "router.control_host and router.control_port"}[field]
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"error: cannot listen at 127.0.0.1:{port} ({names}): Address already in use\n"


def test_an_address_of_another_machine_is_refused() -> None:
    done = command("--host", "192.0.2.1")
    assert done.returncode == 1
    assert done.stderr.startswith("error: cannot listen at 192.0.2.1:8000 (server.host and server.port): ")


def test_the_plan_of_all_hands_every_process_the_same_configuration() -> None:
    config = load_config(None, ["prefill.count=2", "decode.count=1", "router.control_port=0", "model.name='ä: b'"])
    plan = serve.make_plan(config, "all")
    assert Config.model_validate_json(plan.router.config_line, strict=True) == config
    assert plan.router.command == (sys.executable, "-m", "pdjax.serve", "--role", "router")
    workers = plan.make_workers("127.0.0.1:4567")
    assert [(worker.name, worker.command[-1]) for worker in workers] == [
        ("prefill-0", "prefill"),
        ("prefill-1", "prefill"),
        ("decode-0", "decode"),
    ]
    joined = config.model_copy(update={"worker": config.worker.model_copy(update={"router": "127.0.0.1:4567"})})
    for worker in workers:
        assert b"\n" not in worker.config_line
        assert Config.model_validate_json(worker.config_line, strict=True) == joined


def test_the_plan_of_unified_is_one_decode_worker() -> None:
    plan = serve.make_plan(load_config(None, ["prefill.count=3", "decode.count=2"]), "unified")
    assert [(worker.name, worker.command[-1]) for worker in plan.make_workers("127.0.0.1:1")] == [("decode-0", "decode")]


@pytest.mark.parametrize(
    ("control", "reached"), [("0.0.0.0:5", "127.0.0.1:5"), ("[::]:5", "[::1]:5"), ("10.0.0.1:5", "10.0.0.1:5"), ("[::1]:5", "[::1]:5")]
)
def test_workers_reach_a_router_that_listens_everywhere(control: str, reached: str) -> None:
    [worker, _] = serve.make_plan(Config(), "all").make_workers(control)
    assert Config.model_validate_json(worker.config_line).worker.router == reached


class SlowRouter(http.server.BaseHTTPRequestHandler):
    """Ready at the third question."""

    questions = 0

    def do_GET(self) -> None:
        is_ready_question = self.path == "/ready"
        type(self).questions += is_ready_question
        self.send_response(503 if is_ready_question and self.questions < 3 else 200)
        self.end_headers()
        self.wfile.write(b"{}" if is_ready_question else b'{"data": [{"id": "some model"}]}')

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def slow_router() -> Iterator[str]:
    SlowRouter.questions = 0
    with http.server.HTTPServer(("127.0.0.1", 0), SlowRouter) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_the_greeting_waits_for_the_router_and_shows_a_command_that_names_the_model(slow_router: str) -> None:
    first, blank, curl, data, end = asyncio.run(serve._greeting(slow_router)).split("\n")
    assert (first, blank, end) == (f"ready at {slow_router}", "", "")
    assert SlowRouter.questions == 3
    assert curl == f"curl -N {slow_router}/v1/chat/completions -H 'Content-Type: application/json' \\"
    body = json.loads(data.removeprefix("  -d '").removesuffix("'"))
    assert body["model"] == "some model" and body["stream"] is True


def test_the_greeting_gives_up_when_the_router_never_sees_its_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "GREETING_DEADLINE_S", 0.3)
    with socket.socket() as unbound:
        unbound.bind(("127.0.0.1", 0))  # bound and not listening: every connection is refused
        with pytest.raises(TimeoutError, match="does not see them"):
            asyncio.run(serve._greeting(f"http://127.0.0.1:{unbound.getsockname()[1]}"))


class Recorder(NullProgress):
    """Remembers the calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def stage(self, name: str, total: int) -> None:
        self.calls.append(("stage", name, total))

    def advance(self, done: int, total: int, detail: str = "") -> None:
        self.calls.append(("advance", done, total, detail))

    def ready(self, **facts: str) -> None:
        self.calls.append(("ready", facts))

    def failed(self, message: str) -> None:
        self.calls.append(("failed", message))


@pytest.mark.parametrize("error", [WorkerFailed("no luck"), OSError("no luck"), ValueError("no luck")])
def test_what_can_go_wrong_becomes_one_line_and_status_1(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def part(config: Config, progress: Progress) -> int:
        raise error

    monkeypatch.setattr(serve, "_load_part", lambda role: part)
    recorder = Recorder()
    assert serve.run_part(Config(), "router", recorder) == 1
    assert recorder.calls == [("failed", "no luck")]


def test_a_bug_is_shown_with_its_trace(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def part(config: Config, progress: Progress) -> int:
        raise KeyError("pages")

    monkeypatch.setattr(serve, "_load_part", lambda role: part)
    recorder = Recorder()
    assert serve.run_part(Config(), "router", recorder) == 1
    assert recorder.calls == [("failed", "internal error: KeyError('pages')")]
    assert caplog.records[0].exc_info is not None


def test_a_pipe_repeats_every_event_on_the_other_side() -> None:
    read_fd, write_fd = os.pipe()
    sender, heard = PipeProgress(write_fd), Recorder()
    sender.stage("compile", 40)
    sender.advance(3, 40, "prefill 512")
    sender.ready(url="http://h:1", control="h:2")
    sender.failed("línea\nwith a break")
    with os.fdopen(read_fd, "rb") as pipe:
        os.close(write_fd)
        for line in pipe:
            replay(line, heard)
    assert heard.calls == [
        ("stage", "compile", 40),
        ("advance", 3, 40, "prefill 512"),
        ("ready", {"url": "http://h:1", "control": "h:2"}),
        ("failed", "línea\nwith a break"),
    ]


def test_progress_goes_on_without_a_listener_and_shortens_what_is_too_long() -> None:
    read_fd, write_fd = os.pipe()
    sender = PipeProgress(write_fd)
    sender.failed("\x00" * 10_000)
    assert len(os.read(read_fd, 1 << 20)) <= MAX_EVENT_BYTES
    os.close(read_fd)
    sender.stage("load", 1)
    sender.ready(address="h:1")


def test_plain_lines_show_each_stage_and_each_quarter_of_it() -> None:
    stream = io.StringIO()
    progress = TerminalProgress("prefill-0", LineBoard(stream))
    progress.stage("compile", 8)
    for done in range(1, 9):
        progress.advance(done, 8, f"shape {done}")
    progress.stage("join", 0)
    progress.advance(1, 0)
    progress.ready(address="h:1")
    assert stream.getvalue().splitlines() == [
        "prefill-0: compile",
        "prefill-0: compile 2/8 shape 2",
        "prefill-0: compile 4/8 shape 4",
        "prefill-0: compile 6/8 shape 6",
        "prefill-0: compile 8/8 shape 8",
        "prefill-0: join",
        "prefill-0: ready",
    ]


def test_bars_show_a_line_for_each_process_and_leave_log_lines_whole() -> None:
    stream = io.StringIO()
    line = "[decode-0] a line [with] brackets, " + "x" * 200
    with BarBoard(Console(file=stream, force_terminal=True, width=100, legacy_windows=False)) as board:
        TerminalProgress("prefill-0", board).stage("load", 10)
        TerminalProgress("prefill-0", board).advance(7, 10, "layer 3")
        TerminalProgress("decode-0", board).stage("compile", 5)
        board.log(line)
    shown = stream.getvalue()
    assert line + "\n" in shown
    for part in ("prefill-0", "load", "7/10", "layer 3", "decode-0", "compile", "0/5"):
        assert part in shown


def test_a_process_in_the_foreground_tells_its_facts_when_it_is_ready() -> None:
    out, err = io.StringIO(), io.StringIO()
    progress = ForegroundProgress("router", LineBoard(err), out)
    progress.stage("load", 1)
    progress.ready(url="http://127.0.0.1:8000", control="127.0.0.1:8001")
    assert out.getvalue() == "router ready: url http://127.0.0.1:8000, control 127.0.0.1:8001\n"
    assert err.getvalue() == "router: load\n"
