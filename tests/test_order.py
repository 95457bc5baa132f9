"""The order of the test files and the groups that processes take whole."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.order import GROUPS, LIVE, SECONDS, SHARED_SYSTEMS, group_of, put_in_order

NAMES = {file.stem for file in Path(__file__).parent.glob("test_*.py")}


class FakeFunction(SimpleNamespace):
    """What the order looks at of a test."""


def test_every_file_that_is_named_exists() -> None:
    grouped = set().union(*GROUPS.values())
    assert (SECONDS.keys() | grouped) - GROUPS.keys() <= NAMES
    assert not grouped & SECONDS.keys(), "a file of a group has no place of its own"


def test_the_longest_groups_come_first_and_the_tests_of_a_file_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytest, "Function", FakeFunction)
    files = "slots engine slots pages live_http notebooks live_answers live_http"
    names = [f"test_{file}" for file in files.split()]
    items = [FakeFunction(path=Path(f"tests/{name}.py"), fixturenames=[], number=number) for number, name in enumerate(names)]
    put_in_order(items)  # type: ignore[arg-type]
    assert [item.number for item in items] == [6, 4, 7, 5, 1, 3, 0, 2]


@pytest.mark.parametrize("fixture", sorted(SHARED_SYSTEMS))
def test_a_file_that_uses_a_live_system_and_is_not_told_is_an_error_by_name(fixture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytest, "Function", FakeFunction)
    items = [FakeFunction(path=Path("tests/test_slots.py"), fixturenames=["pair", fixture])]
    with pytest.raises(pytest.UsageError, match=r"test_slots.py uses the live systems and is missing in LIVE_FILES of tests.order"):
        put_in_order(items)  # type: ignore[arg-type]
    assert group_of("tests/test_live_http.py") == LIVE != group_of("tests/test_slots.py")
