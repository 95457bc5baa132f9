"""Looking at a few of many each time, in turn."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

T = TypeVar("T")


class Rotation(Generic[T]):
    """Items by key, looked at in turn. What a look costs does not depend on how many there are."""

    def __init__(self) -> None:
        self._items: OrderedDict[str, T] = OrderedDict()

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, key: str) -> bool:
        return key in self._items

    def add(self, key: str, item: T) -> None:
        self._items[key] = item

    def pop(self, key: str) -> T:
        """Raises KeyError where nothing has this key."""
        return self._items.pop(key)

    def next(self, number: int) -> list[T]:
        """The `number` items that were looked at longest ago, or all, each once."""
        looked_at = []
        for _ in range(min(number, len(self._items))):
            key, item = next(iter(self._items.items()))
            self._items.move_to_end(key)
            looked_at.append(item)
        return looked_at
