"""Metadata rows: an exact round trip, and every damaged, foreign or unwritten row refused."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdjax.scheduler.metadata import ROW_BYTES, ROW_MAGIC, MetadataRow, MetadataSlots

INT32 = st.integers(0, 2**31 - 1)
LOGPROB = st.floats(allow_nan=False, max_value=0.0)
ROWS = st.builds(
    MetadataRow,
    room=st.integers(0, 2**63 - 1),
    first_token=INT32,
    step=INT32,
    seed=st.integers(-(2**63), 2**63 - 1),
    cached_device_tokens=INT32,
    cached_host_tokens=INT32,
    logprob=st.none() | LOGPROB,
    top_logprobs=st.lists(st.tuples(INT32, LOGPROB), max_size=20).map(tuple),
)
ROW = MetadataRow(room=7, first_token=42, step=3, seed=11, cached_device_tokens=32, cached_host_tokens=16, logprob=-0.5)


@given(ROWS)
def test_a_row_survives_the_trip_through_bytes(row: MetadataRow) -> None:
    data = row.to_bytes()
    assert len(data) == ROW_BYTES
    assert MetadataRow.from_bytes(data) == row


def test_the_encoding_is_little_endian_and_packed() -> None:
    row = MetadataRow(
        room=2**62 + 1,
        first_token=9,
        step=2,
        seed=-5,
        cached_device_tokens=48,
        cached_host_tokens=64,
        logprob=-1.5,
        top_logprobs=((9, -1.5), (8, -2.0)),
    )
    by_hand = struct.pack("<IIqqiiiidI", ROW_MAGIC, 1, 2**62 + 1, -5, 9, 2, 48, 64, -1.5, 2)
    by_hand += struct.pack("<20i", 9, 8, *[0] * 18) + struct.pack("<20d", -1.5, -2.0, *[0.0] * 18)
    assert row.to_bytes() == by_hand


def test_no_logprob_and_a_logprob_of_zero_are_told_apart() -> None:
    without, certain = MetadataRow(room=1, first_token=2), MetadataRow(room=1, first_token=2, logprob=0.0)
    assert MetadataRow.from_bytes(without.to_bytes()).logprob is None
    assert MetadataRow.from_bytes(certain.to_bytes()).logprob == 0.0


def test_cached_tokens_add_up_over_the_tiers() -> None:
    assert ROW.cached_tokens == 48


@pytest.mark.parametrize("size", [0, ROW_BYTES - 1, ROW_BYTES + 1])
def test_a_row_of_the_wrong_size_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"has {ROW_BYTES} bytes, got {size}"):
        MetadataRow.from_bytes(ROW.to_bytes().ljust(size, b"\0")[:size])


def test_a_row_of_another_version_is_refused_with_both_values() -> None:
    data = bytearray(ROW.to_bytes())
    data[0] += 1
    with pytest.raises(ValueError, match="0x504a4d01, got 0x504a4d02"):
        MetadataRow.from_bytes(bytes(data))


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (4, b"\2\0\0\0", "unknown flags 0x2"),
        (8, b"\xff" * 8, "room must be in 0..9223372036854775807, got -1"),
        (24, b"\xff" * 4, "first_token must be in 0..2147483647, got -1"),
        (48, b"\x15\0\0\0", "number of top_logprobs must be in 0..20, got 21"),
    ],
)
def test_a_damaged_field_is_refused_with_its_name(offset: int, value: bytes, message: str) -> None:
    data = bytearray(ROW.to_bytes())
    data[offset : offset + len(value)] = value
    with pytest.raises(ValueError, match=message):
        MetadataRow.from_bytes(bytes(data))


def test_a_row_that_the_encoding_cannot_hold_is_refused_with_value_and_limit() -> None:
    with pytest.raises(ValueError, match=r"first_token must be in 0\.\.2147483647, got 2147483648"):
        MetadataRow(room=1, first_token=2**31)
    with pytest.raises(ValueError, match=r"number of top_logprobs must be in 0\.\.20, got 21"):
        MetadataRow(room=1, first_token=2, top_logprobs=((3, -1.0),) * 21)


def test_a_row_of_another_room_is_refused_with_both_rooms() -> None:
    assert ROW.for_room(7) is ROW
    with pytest.raises(ValueError, match="of room 7, expected room 8"):
        ROW.for_room(8)


def test_a_freed_slot_holds_nothing_for_its_next_owner() -> None:
    slots = MetadataSlots(1)
    slot = slots.allocate()
    assert slot == 0
    slots.write(slot, ROW)
    assert slots.read(slot) == ROW
    slots.free(slot)
    assert slots.allocate() == slot
    with pytest.raises(ValueError, match="got 0x00000000"):
        slots.read(slot)


def test_a_slot_is_zeroed_before_it_can_be_given_out_again() -> None:
    slots = MetadataSlots(2)
    slots.allocate()
    slots.write(0, ROW)
    slots.free(0)
    assert not slots._rows.tobytes().strip(b"\0")


def test_using_a_slot_that_is_not_held_is_caught() -> None:
    slots = MetadataSlots(2)
    with pytest.raises(AssertionError, match="slot 1 is written but not held"):
        slots.write(1, ROW)
    with pytest.raises(AssertionError, match="slot 1 is read but not held"):
        slots.read(1)
    with pytest.raises(AssertionError, match="slot 1 is freed but not held"):
        slots.free(1)


class MetadataSlotsMachine(RuleBasedStateMachine):
    """Three slots against a dictionary: no row is ever seen by another owner of its slot."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = MetadataSlots(3)
        self.rows: dict[int, MetadataRow | None] = {}

    @rule()
    def allocate(self) -> None:
        slot = self.slots.allocate()
        assert (slot is None) == (len(self.rows) == 3)
        if slot is not None:
            assert slot not in self.rows
            self.rows[slot] = None

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), row=ROWS)
    def write(self, data: st.DataObject, row: MetadataRow) -> None:
        slot = data.draw(st.sampled_from(sorted(self.rows)))
        self.slots.write(slot, row)
        self.rows[slot] = row

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.rows)))
        self.slots.free(slot)
        del self.rows[slot]

    @invariant()
    def every_owner_reads_its_own_row(self) -> None:
        for slot, row in self.rows.items():
            if row is None:
                with pytest.raises(ValueError, match="got 0x00000000"):
                    self.slots.read(slot)
            else:
                assert self.slots.read(slot) == row
        assert self.slots.num_held == len(self.rows)
        assert self.slots.num_held + self.slots.num_free == self.slots.total


TestMetadataSlotsMachine = MetadataSlotsMachine.TestCase
