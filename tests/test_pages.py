"""The page pool: every page is free or held, never both, never neither."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdjax.scheduler.pages import PagePool

NUM_PAGES = 12


def test_the_null_page_is_never_given_out() -> None:
    pool = PagePool(5)
    assert pool.total == 4
    assert pool.allocate(4) == [1, 2, 3, 4]
    assert pool.allocate(1) is None


def test_a_request_for_too_many_pages_takes_nothing() -> None:
    pool = PagePool(5)
    assert pool.allocate(3) == [1, 2, 3]
    assert pool.allocate(2) is None
    assert (pool.num_free, pool.num_held) == (1, 3)
    assert pool.allocate(1) == [4]


def test_the_page_freed_last_is_given_out_first() -> None:
    pool = PagePool(5)
    pool.allocate(4)
    pool.free([3, 2])
    assert pool.allocate(1) == [2]
    assert pool.allocate(1) == [3]


def test_no_pages_can_always_be_had() -> None:
    pool = PagePool(2)
    assert pool.allocate(1) == [1]
    assert pool.allocate(0) == []


def test_a_pool_without_a_page_to_give_is_refused() -> None:
    with pytest.raises(ValueError, match=r"at least 2 pages.*got 1"):
        PagePool(1)


def test_freeing_a_page_twice_in_one_call_is_caught() -> None:
    pool = PagePool(5)
    pool.allocate(2)
    with pytest.raises(AssertionError, match="page 1 is freed but not held"):
        pool.free([1, 1])


def test_freeing_a_page_that_was_never_given_out_is_caught() -> None:
    with pytest.raises(AssertionError, match="page 2 is freed but not held"):
        PagePool(5).free([2])


@pytest.mark.parametrize("page", [0, 5, -1])
def test_freeing_a_foreign_page_is_caught(page: int) -> None:
    pool = PagePool(5)
    pool.allocate(4)
    with pytest.raises(AssertionError, match=f"page {page} is not one of 1..4"):
        pool.free([page])


class PagePoolMachine(RuleBasedStateMachine):
    """The pool against a set of held pages."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(NUM_PAGES)
        self.held: set[int] = set()

    @rule(n=st.integers(0, NUM_PAGES + 1))
    def allocate(self, n: int) -> None:
        pages = self.pool.allocate(n)
        if n > NUM_PAGES - 1 - len(self.held):
            assert pages is None
            return
        assert pages is not None and len(set(pages)) == n
        assert set(pages) <= set(range(1, NUM_PAGES)) - self.held
        self.held |= set(pages)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free_some(self, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.sampled_from(sorted(self.held)), unique=True))
        self.pool.free(pages)
        self.held -= set(pages)

    @invariant()
    def free_and_held_pages_add_up(self) -> None:
        assert self.pool.num_held == len(self.held)
        assert self.pool.num_free == self.pool.total - len(self.held)


TestPagePoolMachine = PagePoolMachine.TestCase
