"""Metadata rows: what prefill tells decode about a sequence besides its KV, and the one owner of the slots that hold them.

A row has a fixed size and one encoding, on the wire and in a slot. It names the room it was written for: whoever reads a row checks
that (`for_room`), because a row of another request would put a wrong token into an answer. A freed slot is all zeros, which no
reader takes for a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pdjax.protocol import MAX_TOP_LOGPROBS
from pdjax.scheduler.slots import SlotPool

ROW_MAGIC = 0x504A4D01
"""Marks a written row; the last byte is the version of the encoding."""

_FLAG_LOGPROB = 1
_INT32_MAX, _INT64_MAX = 2**31 - 1, 2**63 - 1

ROW_DTYPE = np.dtype(
    [
        ("magic", "<u4"),
        ("flags", "<u4"),
        ("room", "<i8"),
        ("seed", "<i8"),
        ("first_token", "<i4"),
        ("step", "<i4"),
        ("cached_device_tokens", "<i4"),
        ("cached_host_tokens", "<i4"),
        ("logprob", "<f8"),
        ("num_top", "<u4"),
        ("top_tokens", "<i4", (MAX_TOP_LOGPROBS,)),
        ("top_logprobs", "<f8", (MAX_TOP_LOGPROBS,)),
    ]
)
"""Packed, little-endian: the same bytes on every machine."""

ROW_BYTES = ROW_DTYPE.itemsize


@dataclass(frozen=True, slots=True)
class MetadataRow:
    """One sequence at the moment prefill hands it over. Raises ValueError, naming value and limit, on what the encoding cannot hold.

    `first_token` is output token number `step` (counted from the start of the answer), drawn with `seed`. `logprob` is None where none
    was wanted; `top_logprobs` holds (token, logprob) pairs, best first, and is empty where none were wanted.
    """

    room: int
    first_token: int
    step: int = 0
    seed: int = 0
    cached_device_tokens: int = 0
    cached_host_tokens: int = 0
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        _check("room", self.room, 0, _INT64_MAX)
        _check("seed", self.seed, -_INT64_MAX - 1, _INT64_MAX)
        for name in ("first_token", "step", "cached_device_tokens", "cached_host_tokens"):
            _check(name, getattr(self, name), 0, _INT32_MAX)
        _check("number of top_logprobs", len(self.top_logprobs), 0, MAX_TOP_LOGPROBS)
        for token, _ in self.top_logprobs:
            _check("token of top_logprobs", token, 0, _INT32_MAX)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that prefill did not compute, over all tiers."""
        return self.cached_device_tokens + self.cached_host_tokens

    def for_room(self, room: int) -> MetadataRow:
        """The row itself; raises ValueError, naming both rooms, where it was written for another one."""
        if self.room != room:
            raise ValueError(f"metadata row is of room {self.room}, expected room {room}")
        return self

    def to_bytes(self) -> bytes:
        """ROW_BYTES bytes."""
        return _encode(self).tobytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> MetadataRow:
        """Raises ValueError where `data` has not the size, the magic or the limits of a row."""
        if len(data) != ROW_BYTES:
            raise ValueError(f"a metadata row has {ROW_BYTES} bytes, got {len(data)}")
        return _decode(np.frombuffer(data, ROW_DTYPE)[0])


class MetadataSlots:
    """Rows 0 .. total - 1 of one worker. `num_held + num_free == total` at all times."""

    def __init__(self, total: int):
        self._slots = SlotPool(total, "metadata")
        self._rows = np.zeros(total, ROW_DTYPE)

    @property
    def total(self) -> int:
        return self._slots.total

    @property
    def num_free(self) -> int:
        return self._slots.num_free

    @property
    def num_held(self) -> int:
        return self._slots.num_held

    def allocate(self) -> int | None:
        """Take a slot, which the caller then owns and which holds zeros; None where none is free."""
        return self._slots.allocate()

    def write(self, slot: int, row: MetadataRow) -> None:
        """Overwrite a slot that the caller owns."""
        assert self._slots.is_held(slot), f"metadata slot {slot} is written but not held"
        self._rows[slot] = _encode(row)

    def read(self, slot: int) -> MetadataRow:
        """The row last written to a slot that the caller owns. Raises ValueError where none was written since `allocate`."""
        assert self._slots.is_held(slot), f"metadata slot {slot} is read but not held"
        return _decode(self._rows[slot])

    def free(self, slot: int) -> None:
        """Zero a slot that the caller owns, then give it back."""
        assert self._slots.is_held(slot), f"metadata slot {slot} is freed but not held"
        self._rows[slot] = np.zeros((), ROW_DTYPE)
        self._slots.free(slot)


def _check(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ValueError(f"metadata row: {name} must be in {low}..{high}, got {value}")


def _encode(row: MetadataRow) -> np.ndarray:
    """A scalar array of ROW_DTYPE."""
    cell = np.zeros((), ROW_DTYPE)
    cell["magic"] = ROW_MAGIC
    for name in ("room", "seed", "first_token", "step", "cached_device_tokens", "cached_host_tokens"):
        cell[name] = getattr(row, name)
    if row.logprob is not None:
        cell["flags"] = _FLAG_LOGPROB
        cell["logprob"] = row.logprob
    num_top = cell["num_top"] = len(row.top_logprobs)
    if num_top:
        cell["top_tokens"][:num_top], cell["top_logprobs"][:num_top] = zip(*row.top_logprobs, strict=True)
    return cell


def _decode(cell: np.void) -> MetadataRow:
    """Raises ValueError on anything that `_encode` does not write."""
    magic, flags, num_top = int(cell["magic"]), int(cell["flags"]), int(cell["num_top"])
    if magic != ROW_MAGIC:
        raise ValueError(f"a metadata row starts with {ROW_MAGIC:#010x}, got {magic:#010x}")
    if flags & ~_FLAG_LOGPROB:
        raise ValueError(f"metadata row: unknown flags {flags:#x}")
    _check("number of top_logprobs", num_top, 0, MAX_TOP_LOGPROBS)
    return MetadataRow(
        room=int(cell["room"]),
        first_token=int(cell["first_token"]),
        step=int(cell["step"]),
        seed=int(cell["seed"]),
        cached_device_tokens=int(cell["cached_device_tokens"]),
        cached_host_tokens=int(cell["cached_host_tokens"]),
        logprob=float(cell["logprob"]) if flags & _FLAG_LOGPROB else None,
        top_logprobs=tuple(zip(cell["top_tokens"][:num_top].tolist(), cell["top_logprobs"][:num_top].tolist(), strict=True)),
    )
