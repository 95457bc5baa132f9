"""Which test files run in one process and which come first, so that two processes that share them end at the same time.

Files are handed out whole, one after the other. Those that use the live systems of `conftest.py` go to one process together, or each
process would start systems of its own; so do those that compile the same engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

import pytest
from xdist.scheduler import LoadScopeScheduling

SHARED_SYSTEMS = {"pair_system", "unified_system"}
LIVE = "the live systems"
LIVE_FILES = {"test_api_batches", "test_live_answers", "test_live_faults", "test_live_http", "test_live_load", "test_timeline_live"}
ENGINE = "the small engine"
ENGINE_FILES = {"test_engine", "test_prompt_logprobs"}
GROUPS = {LIVE: LIVE_FILES, ENGINE: ENGINE_FILES}

SECONDS = {
    LIVE: 400,
    "test_notebooks": 130,
    "test_live_deaths": 120,
    "test_bench_kernels": 75,
    "test_engine_mesh": 60,
    "test_kernels_gpu_aot": 60,
    "test_kernels_tpu": 60,
    "test_live_system": 60,
    "test_kernels": 50,
    "test_live_llm": 50,
    "test_ranks": 50,
    "test_multi_host": 45,
    "test_simulation": 45,
    "test_kernels_gpu": 40,
    "test_live_mixed_load": 40,
    "test_batch_ray": 35,
    "test_engine_numbers": 35,
    "test_models": 35,
    "test_batch_restart": 30,
    "test_engine_model": 30,
    "test_batch_command": 30,
    ENGINE: 25,
    "test_checkpoints": 25,
    "test_supervisor": 20,
}
"""About how long the longest files take; only the order counts. The others come last, in order of their names."""


def group_of(path: str) -> str:
    """Of a test file."""
    name = PurePath(path).stem
    return next((group for group, files in GROUPS.items() if name in files), name)


def put_in_order(items: list[pytest.Item]) -> None:
    """Longest groups first, the tests of a file as they stand in it. Raises UsageError where a file belongs to the live ones and is not
    told above: a scheduler knows names only."""
    for item in items:
        if isinstance(item, pytest.Function) and SHARED_SYSTEMS & set(item.fixturenames) and group_of(item.path.name) != LIVE:
            raise pytest.UsageError(f"{item.path.name} uses the live systems and is missing in LIVE_FILES of {__name__}")
    items.sort(key=lambda item: _rank(item.path.name))


def _rank(path: str) -> Sequence[int | str]:
    group = group_of(path)
    return -SECONDS.get(group, 0), group, path


class GroupScheduling(LoadScopeScheduling):
    """Hands out groups instead of files."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid.partition("::")[0])
