"""Shared fixtures: the live systems that tests which kill nothing have in common, which start on first use, and a compile cache."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from tests import live
from tests.model_kit import quick_compilation
from tests.order import GroupScheduling, put_in_order

jax.config.update("jax_num_cpu_devices", 8)
os.environ.setdefault("NUMBA_CACHE_DIR", str(live.COMPILE_CACHE))  # read when numba is imported; processes that tests start inherit it


@pytest.fixture(scope="session")
def live_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where processes leave their output."""
    return tmp_path_factory.mktemp("live")


@pytest.fixture(scope="session")
def pair_system(live_folder: Path) -> Iterator[live.Client]:
    """Router, prefill and decode worker under one supervisor."""
    yield from _client_of(live_folder, "pair", "all", batches__directory=str(live_folder / "batches"))


@pytest.fixture(scope="session")
def unified_system(live_folder: Path) -> Iterator[live.Client]:
    """Router and one worker that computes prompts, in chunks of 64 tokens, and answers."""
    yield from _client_of(live_folder, "unified", "unified", scheduler__max_step_tokens=64)


@pytest.fixture(scope="session")
def programs_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where this process keeps the programs that it compiles. Not for two: one could read what the other has half written."""
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(scope="module")
def compiled_quickly(programs_folder: Path) -> Iterator[None]:
    """For modules of tests that compile more than they compute; see `quick_compilation`."""
    with quick_compilation(programs_folder):
        yield


@pytest.fixture
def pair(pair_system: live.Client) -> Iterator[live.Client]:
    """The prefill/decode system; holds nothing once the test is over."""
    yield pair_system
    live.check_idle(pair_system)


@pytest.fixture
def unified(unified_system: live.Client) -> Iterator[live.Client]:
    """The unified system; holds nothing once the test is over."""
    yield unified_system
    live.check_idle(unified_system)


def _client_of(folder: Path, name: str, role: str, **settings: Any) -> Iterator[live.Client]:
    with live.serving(folder, name, role, **settings) as served:
        client = live.Client(served.await_ready()["url"])
        yield client
        client.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    put_in_order(items)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> GroupScheduling | None:
    return GroupScheduling(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if report.failed and item.get_closest_marker("live"):
        report.sections += [(f"end of the log of {served.name}", served.log_tail()) for served in live.running]
    return report
