"""Where log lines go: standard error, one line a record. A supervisor puts the name of the process in front."""

from __future__ import annotations

import logging
import sys

QUIET_LOGGERS = ("jax", "jaxlib", "absl", "asyncio", "grpc", "httpx", "uvicorn.access")
"""Libraries whose information lines say nothing about this system; their warnings stay."""


def configure_logging(level: str) -> None:
    """Send every record of at least `level` (a value of `log.level`) to standard error. Once, by an entry point."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
    for name in QUIET_LOGGERS:
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))
