"""Slot pools: lowest free slot first, each slot given back once."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdjax.scheduler.slots import SlotPool

TOTAL = 6


def test_the_lowest_free_slot_is_given_out_first() -> None:
    pool = SlotPool(4, "request")
    assert [pool.allocate() for _ in range(5)] == [0, 1, 2, 3, None]
    pool.free(2)
    pool.free(0)
    assert [pool.allocate() for _ in range(3)] == [0, 2, None]


def test_a_pool_without_slots_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="metadata: at least 1 slot is needed, got 0"):
        SlotPool(0, "metadata")


def test_freeing_a_slot_twice_is_caught() -> None:
    pool = SlotPool(2, "request")
    pool.allocate()
    pool.free(0)
    with pytest.raises(AssertionError, match="request slot 0 is freed but not held"):
        pool.free(0)


@pytest.mark.parametrize("slot", [-1, 2])
def test_freeing_a_foreign_slot_is_caught(slot: int) -> None:
    pool = SlotPool(2, "request")
    pool.allocate()
    pool.allocate()
    assert not pool.is_held(slot)
    with pytest.raises(AssertionError, match=f"request slot {slot} is not one of 0..1"):
        pool.free(slot)


class SlotPoolMachine(RuleBasedStateMachine):
    """The pool against a set of held slots."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = SlotPool(TOTAL, "test")
        self.held: set[int] = set()

    @rule()
    def allocate(self) -> None:
        free = set(range(TOTAL)) - self.held
        slot = self.pool.allocate()
        assert slot == min(free, default=None)
        if slot is not None:
            self.held.add(slot)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.held)))
        self.pool.free(slot)
        self.held.remove(slot)

    @invariant()
    def free_and_held_slots_add_up(self) -> None:
        assert self.pool.num_held == len(self.held)
        assert self.pool.num_free + self.pool.num_held == self.pool.total
        assert [slot for slot in range(TOTAL) if self.pool.is_held(slot)] == sorted(self.held)


TestSlotPoolMachine = SlotPoolMachine.TestCase
