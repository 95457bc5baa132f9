"""What runs on the nodes of a Ray cluster: one engine of its own in an asynchronous actor."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import NamedTuple

from pdjax.config.schema import Config
from pdjax.jobs.backend import Reply, RowBackend
from pdjax.observe.progress import NullProgress

Load = Callable[[], Awaitable[RowBackend]]
"""Makes a backend in the event loop that it is called in. Ray carries it to the nodes."""


class Prefilled(NamedTuple):
    """The prompt is in this engine's prefix cache."""


class RayEngine:
    """The actor. `start` once, then any number of `answer` at the same time."""

    def __init__(self, load: Load):
        self._load = load
        self._backend: RowBackend | None = None

    async def start(self) -> str:
        """Be ready for rows; gives the name of the served model. Raises what `Load` and `RowBackend.start` raise."""
        self._backend = await self._load()
        return await self._backend.start()

    async def answer(self, url: str, body: bytes) -> AsyncGenerator[Prefilled | Reply, None]:
        """`RowBackend.answer` as a stream: perhaps `Prefilled`, then the reply."""
        assert self._backend is not None, "an engine is asked before it has started"
        is_prefilled = asyncio.Event()
        answering = asyncio.ensure_future(self._backend.answer(url, body, is_prefilled.set))
        watching = asyncio.ensure_future(is_prefilled.wait())
        try:
            await asyncio.wait((answering, watching), return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                yield Prefilled()
            yield await answering
        finally:
            answering.cancel()
            watching.cancel()
            await asyncio.gather(answering, watching, return_exceptions=True)


async def load_local(config: str, timeout_s: float) -> RowBackend:
    """A prefill and a decode worker in this process. `config`: a `Config` as JSON; loading and compiling is done in a thread."""
    from pdjax.jobs.local import LocalBackend  # brings in JAX, which the driver does without

    loop = asyncio.get_running_loop()
    return await asyncio.to_thread(LocalBackend.load, Config.model_validate_json(config), timeout_s, loop, NullProgress())
