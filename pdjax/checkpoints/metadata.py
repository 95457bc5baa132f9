"""Typed access to what a model's files say about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

_Kind = TypeVar("_Kind", int, float, str, bool, list, dict)


class Metadata:
    """Values by key. Raises ValueError naming file, key and value where one is missing or of another type; null counts as missing.

    `where`: the file, as it stands in messages. `label`: what such an entry is called there.
    """

    def __init__(self, where: str, values: Mapping[str, Any], label: str = "field"):
        self.where = where
        self.values = values
        self._label = label

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def required(self, key: str, kind: type[_Kind]) -> _Kind:
        value = self.values.get(key)
        if kind is float and type(value) is int:
            return float(value)
        if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
            raise ValueError(f"{self.where}: {self._label} {key} should be of type {kind.__name__} but is {value!r:.80}")
        return value

    def positive(self, key: str) -> int:
        if (value := self.required(key, int)) < 1:
            raise ValueError(f"{self.where}: {self._label} {key} should be positive but is {value}")
        return value

    def optional(self, key: str, default: _Kind) -> _Kind:
        return self.required(key, type(default)) if self.has(key) else default

    def numbers(self, key: str) -> list[float]:
        values = self.required(key, list)
        if not all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values):
            raise ValueError(f"{self.where}: {self._label} {key} should be a list of numbers but is {values!r:.80}")
        return values

    def section(self, key: str) -> Metadata:
        """The object `key`, empty where there is none."""
        return Metadata(f"{self.where}: {key}", self.optional(key, {}), self._label)

    def refuse_unless(self, key: str, default: object, *supported: object) -> None:
        """Raises ValueError where the value, or `default` where it is missing, is none of `supported`."""
        value = self.values.get(key)
        value = default if value is None else value
        if value not in supported:
            raise ValueError(f"{self.where}: {key} {value!r} is not supported; supported is {' or '.join(map(repr, supported))}")
