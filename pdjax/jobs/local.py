"""A system of its own for a job: router, prefill and decode in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from prometheus_client import CollectorRegistry

from pdjax.api.chat_template import ChatTemplate
from pdjax.api.service import Service
from pdjax.api.tokenizer import Tokenizer
from pdjax.config.schema import Config
from pdjax.jobs.answers import ServiceAnswers
from pdjax.jobs.backend import Reply, RowBackend
from pdjax.local_system import LocalSystem
from pdjax.observe.http_metrics import HttpMetrics
from pdjax.observe.progress import Progress


class LocalBackend(RowBackend):
    """Owns the system."""

    def __init__(self, system: LocalSystem, answers: ServiceAnswers):
        """Use `load`."""
        self._system = system
        self._answers = answers

    @classmethod
    def load(cls, config: Config, timeout_s: float, loop: asyncio.AbstractEventLoop, progress: Progress) -> LocalBackend:
        """Blocks until everything is compiled; everything else then runs in `loop`. Raises ValueError as `LocalSystem.load`."""
        system = LocalSystem.load(config, loop, progress)
        data = system.checkpoint.tokenizer_data()
        metrics = HttpMetrics(CollectorRegistry())
        service = Service(system.router, Tokenizer(data), ChatTemplate.from_data(data), config.server, metrics)
        return cls(system, ServiceAnswers(service, config.server.max_body_bytes, timeout_s))

    async def start(self) -> str:
        await self._system.start()
        return self._system.router.model_card().name

    async def answer(self, url: str, body: bytes, on_prefilled: Callable[[], None]) -> Reply:
        return await self._answers.answer(url, body, on_prefilled)

    async def close(self) -> None:
        await self._system.stop()
