"""A system of small programs for tests of the supervisor.

`fake_system.py run PLAN` supervises what the JSON in PLAN describes; the same file, called with `--child FD`, is one child that does what
the word in its configuration line says. Each start of a child leaves a file `NAME.PID` in the plan's folder that holds its configuration.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from pdjax.children import ChildSpec, adopt_parent
from pdjax.observe.progress import PipeProgress, make_board
from pdjax.supervisor import Limits, Plan, run_system

CONTROL = "127.0.0.1:4321"
URL = "http://127.0.0.1:1234"


def run(plan: dict[str, Any]) -> int:
    def child(name: str, control: str) -> ChildSpec:
        settings = {"name": name, "folder": plan["folder"], "does": plan["children"][name], "control": control}
        command = plan.get("command", [sys.executable, __file__])
        return ChildSpec(name, tuple(command), json.dumps(settings).encode())

    async def greeting(url: str) -> str:
        await asyncio.sleep(0)
        if plan.get("deaf_router"):
            raise TimeoutError("the router does not see its workers")
        return f"ready at {url}"

    workers = [name for name in plan["children"] if name != "router"]
    system = Plan(child("router", ""), lambda control: [child(name, control) for name in workers], greeting)
    return run_system(system, make_board(sys.stderr), sys.stdout, Limits(**plan["limits"]))


def note(settings: dict[str, Any], kind: str) -> None:
    target = Path(settings["folder"]) / f"{settings['name']}.{kind}"
    unfinished = target.with_name("." + target.name)
    unfinished.write_text(json.dumps(settings))
    unfinished.rename(target)


def serve_until_stopped(settings: dict[str, Any], progress: PipeProgress) -> int:
    def stop(number: int, frame: FrameType | None) -> None:
        note(settings, f"stopped-by-{signal.Signals(number).name}")
        sys.exit(0)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    note(settings, str(os.getpid()))
    progress.stage("load", 2)
    progress.advance(2, 2, "weights")
    progress.ready(url=URL, control=CONTROL)
    time.sleep(300)
    return 1


def child(progress_fd: int) -> int:
    settings = json.loads(adopt_parent())
    progress = PipeProgress(progress_fd)
    match settings["does"]:
        case "serve":
            return serve_until_stopped(settings, progress)
        case "crash":
            print("about to divide", file=sys.stderr, flush=True)
            print("divided by zero", file=sys.stderr, flush=True)
            return 3
        case "give up":
            progress.failed("there are no weights")
            return 1
        case "ignore signals":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            note(settings, str(os.getpid()))
            progress.ready(url=URL, control=CONTROL)
        case "say nothing":
            note(settings, str(os.getpid()))
    time.sleep(300)
    return 1


if __name__ == "__main__":
    if sys.argv[1] == "run":
        sys.exit(run(json.loads(sys.argv[2])))
    assert sys.argv[-2] == "--child", f"expected --child FD, got {sys.argv}"
    sys.exit(child(int(sys.argv[-1])))
