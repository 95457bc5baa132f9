"""Where log lines go: to the board that also shows progress, one line a record. A supervisor puts the name of the process in front."""

from __future__ import annotations

import logging

from pdjax.observe.progress import Board

QUIET_LOGGERS = ("jax", "jaxlib", "absl", "asyncio", "grpc", "httpx", "uvicorn", "uvicorn.error", "uvicorn.access")
"""Libraries whose information lines say nothing about this system; their warnings stay."""


class BoardHandler(logging.Handler):
    """Shows records on a board, above whatever moves there."""

    def __init__(self, board: Board):
        super().__init__()
        self._board = board

    def emit(self, record: logging.LogRecord) -> None:
        self._board.log(self.format(record))


def configure_logging(level: str, board: Board) -> None:
    """Send every record of at least `level` (a value of `log.level`) to `board`. Once, by an entry point."""
    handler = BoardHandler(board)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
    for name in QUIET_LOGGERS:
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))
