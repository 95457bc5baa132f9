"""Which signals ask a process to stop."""

from __future__ import annotations

import signal


def stop_signals() -> list[signal.Signals]:
    """SIGTERM, and SIGINT where the parent has not had it ignored: a supervisor passes Ctrl-C on as SIGTERM."""
    return [number for number in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(number) is not signal.SIG_IGN]
