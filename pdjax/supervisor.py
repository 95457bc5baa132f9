"""Keeps a router and its workers running as child processes: starts them, shows their progress, replaces a dead worker, stops all.

The router comes first, since workers need to know where to register; the workers start together. Until everything is ready the
death of any child ends the attempt. Later a dead worker is replaced after a pause that grows while it keeps dying, and the end of
the router ends everything. SIGINT, SIGTERM and SIGHUP stop the system in order; a second one kills at once.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple, TextIO

from pdjax.children import Child, ChildDied, ChildSpec, start_child
from pdjax.observe.progress import Board, LineBoard, TerminalProgress

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Plan(NamedTuple):
    """What to run. `make_workers` is given HOST:PORT of the router's control address. `greeting` is given the router's URL once all are
    ready, waits until the router would serve a request, and returns the text for the user; it raises TimeoutError where that fails."""

    router: ChildSpec
    make_workers: Callable[[str], list[ChildSpec]]
    greeting: Callable[[str], Awaitable[str]]


class Limits(NamedTuple):
    """`start_silence_s`: longest time between two signs of progress of a starting child. `stop_s`, `stop_unready_s`: what a child gets
    between SIGTERM and SIGKILL; one that is not ready has nothing to lose. `restart_pauses_s`: before the first, second, ... restart in a
    row, the last one repeats. `stable_s`: a worker that stayed ready for that long starts again at the first pause."""

    start_silence_s: float = 600.0
    stop_s: float = 5.0
    stop_unready_s: float = 2.0
    restart_pauses_s: tuple[float, ...] = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
    stable_s: float = 60.0


DEFAULT_LIMITS = Limits()


class SystemFailed(Exception):
    """The system cannot go on; the message is for the user."""


def run_system(plan: Plan, board: Board, out: TextIO, limits: Limits = DEFAULT_LIMITS) -> int:
    """Run `plan` until it is stopped (0) or fails (1). Progress and logs go to `board`, the greeting to `out`. Main thread only."""
    return asyncio.run(Supervisor(plan, board, out, limits).run())


class Supervisor:
    """Owns the child processes of one system; none is left when `run` returns."""

    def __init__(self, plan: Plan, board: Board, out: TextIO, limits: Limits):
        self._plan = plan
        self._board = board
        self._limits = limits
        self._out = out
        self._children: dict[str, Child] = {}
        self._stop_requests = 0
        self._stop = asyncio.Event()

    async def run(self) -> int:
        """Start, keep and in the end stop the system; the exit status for the process."""
        handled = self._handle_signals()
        serving = asyncio.create_task(self._serve())
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            failure = await self._end(serving)
        finally:
            stopping.cancel()
            await self._stop_children()
            for number in handled:
                asyncio.get_running_loop().remove_signal_handler(number)
        if failure is not None:
            self._log(f"error: {failure}")
        return 0 if failure is None else 1

    def _handle_signals(self) -> list[signal.Signals]:
        # nohup has SIGHUP ignored on purpose; a shell ignores SIGINT for background jobs, which one still wants to interrupt by number.
        numbers = [number for number in STOP_SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
        for number in numbers:
            asyncio.get_running_loop().add_signal_handler(number, self._on_stop_signal, number)
        return numbers

    async def _end(self, serving: asyncio.Task[None]) -> str | None:
        """Stop starting and replacing children. Why the system failed; None where it was asked to stop."""
        serving.cancel()
        await asyncio.wait({serving})
        if serving.cancelled() or self._stop.is_set():
            return None
        failure = serving.exception()
        assert failure is not None, "serving ends by cancellation or failure only"
        while isinstance(failure, BaseExceptionGroup):
            failure = failure.exceptions[0]
        if not isinstance(failure, SystemFailed):
            raise failure
        return str(failure)

    async def _serve(self) -> None:
        async with asyncio.TaskGroup() as group:
            with self._board:
                facts = await self._start_all(group)
                greeting = await self._greet(facts["url"])
            self._board = LineBoard(sys.stderr)
            print(greeting, file=self._out, flush=True)

    async def _start_all(self, group: asyncio.TaskGroup) -> dict[str, str]:
        """Start everything and leave a task for each child in `group`. The router's facts, once all are ready."""
        router = await self._start(self._plan.router)
        try:
            facts = await router.until_ready(self._limits.start_silence_s)
        except ChildDied as death:
            raise SystemFailed(str(death)) from None
        group.create_task(self._fail_with(router))
        specs = self._plan.make_workers(facts["control"])
        first_starts = [asyncio.get_running_loop().create_future() for _ in specs]
        for spec, first_start in zip(specs, first_starts, strict=True):
            group.create_task(self._keep_running(spec, first_start))
        await asyncio.gather(*first_starts)
        return facts

    async def _greet(self, url: str) -> str:
        try:
            return await self._plan.greeting(url)
        except TimeoutError as error:
            raise SystemFailed(str(error)) from None

    async def _fail_with(self, router: Child) -> None:
        await asyncio.shield(router.exited)
        raise SystemFailed(router.epitaph())

    async def _keep_running(self, spec: ChildSpec, first_start: asyncio.Future[None]) -> None:
        """Start a worker and replace it whenever it ends. A death before `first_start` is done fails the system."""
        deaths_in_a_row = 0
        while True:
            child = await self._start(spec)
            ready_at_s = None
            try:
                await child.until_ready(self._limits.start_silence_s)
                ready_at_s = time.monotonic()
                if not first_start.done():
                    first_start.set_result(None)
                await asyncio.shield(child.exited)
                reason = child.how_it_ended()
            except ChildDied as death:
                if not first_start.done():
                    raise SystemFailed(str(death)) from None
                reason = str(death)
                child.send(signal.SIGKILL)
                await asyncio.shield(child.exited)
            if ready_at_s is not None and time.monotonic() - ready_at_s >= self._limits.stable_s:
                deaths_in_a_row = 0
            pauses_s = self._limits.restart_pauses_s
            pause_s = pauses_s[min(deaths_in_a_row, len(pauses_s) - 1)]
            deaths_in_a_row += 1
            self._log(f"{reason}\n{spec.name} is started again in {pause_s:g} s")
            await asyncio.sleep(pause_s)

    async def _start(self, spec: ChildSpec) -> Child:
        try:
            child = await start_child(spec, TerminalProgress(spec.name, self._board), self._log)
        except OSError as error:
            raise SystemFailed(f"{spec.name} cannot be started: {error}") from None
        self._children[spec.name] = child
        self._log(f"{spec.name} runs as process {child.pid}")
        return child

    async def _stop_children(self) -> None:
        """SIGTERM to all at the same time, SIGKILL to those that take too long. Nothing is left afterwards."""
        children = list(self._children.values())
        for child in children:
            child.send(signal.SIGTERM)
        if self._stop_requests > 1:
            self._kill_children()
        await asyncio.gather(*(self._await_exit(child) for child in children))

    async def _await_exit(self, child: Child) -> None:
        grace_s = self._limits.stop_s if child.ready.done() else self._limits.stop_unready_s
        _, late = await asyncio.wait({child.exited}, timeout=grace_s)
        if late:
            self._log(f"{child.name} did not stop within {grace_s:g} s and is killed")
            child.send(signal.SIGKILL)
            await asyncio.wait({child.exited})

    def _on_stop_signal(self, number: signal.Signals) -> None:
        self._stop_requests += 1
        self._stop.set()
        if self._stop_requests > 1:
            self._kill_children()
        else:
            self._log(f"{signal.Signals(number).name}: stopping")

    def _kill_children(self) -> None:
        for child in self._children.values():
            child.send(signal.SIGKILL)

    def _log(self, line: str) -> None:
        self._board.log(line)
