"""Hooks by which tests make the schedulers go wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class FaultHooks(NamedTuple):
    """Asked at run time. `force_retry(request_id)`: treat the end of this request's first forward as a miss, whatever bootstrap says.
    `fail_poll()`: let this look at a sender find it failed."""

    force_retry: Callable[[str], bool] = lambda request_id: False
    fail_poll: Callable[[], bool] = lambda: False


NO_FAULTS = FaultHooks()
