"""Shared fixtures: the live systems that tests which kill nothing have in common. They start on first use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from tests import live

jax.config.update("jax_num_cpu_devices", 8)


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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if report.failed and item.get_closest_marker("live"):
        report.sections += [(f"end of the log of {served.name}", served.log_tail()) for served in live.running]
    return report
