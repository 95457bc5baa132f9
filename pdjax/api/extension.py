"""How endpoints with work of their own behind them join the application, such as batches."""

from __future__ import annotations

import abc

from fastapi import FastAPI

from pdjax.api.service import Service


class Extension(abc.ABC):
    """For one application, in its event loop. Endpoints answer between `start` and `stop`."""

    @abc.abstractmethod
    def install(self, app: FastAPI, service: Service) -> None:
        """Add the endpoints. Called once, before `start`."""

    @abc.abstractmethod
    async def start(self) -> None:
        """Begin the work behind them. Raises ValueError or OSError where that cannot be."""

    @abc.abstractmethod
    async def stop(self) -> None:
        """Stop that work where it is. Idempotent, also after a `start` that failed or never was."""
