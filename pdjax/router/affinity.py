"""Memory of which prefill worker has computed which prompt beginnings, and so probably still caches them.

A guess for placing requests, never a promise: the worker's own radix cache decides what is reused. Pure Python.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


def block_keys(prompt: Sequence[int], block_tokens: int) -> list[int]:
    """One key for each whole block of `prompt`; a key covers its block and everything before it. A last, partial block has none."""
    keys, key = [], 0
    for start in range(0, len(prompt) - block_tokens + 1, block_tokens):
        key = hash((key, *prompt[start : start + block_tokens]))
        keys.append(key)
    return keys


class PrefixMemory:
    """Least recently used blocks are forgotten beyond `max_blocks`; workers that are gone age out the same way."""

    def __init__(self, max_blocks: int):
        if max_blocks < 1:
            raise ValueError(f"a prefix memory needs at least 1 block, got {max_blocks}")
        self.max_blocks = max_blocks
        self._blocks: OrderedDict[tuple[str, int], None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def remember(self, instance_id: str, keys: list[int]) -> None:
        """`instance_id` has computed the blocks of `keys`. Later blocks age first: without its beginning, a block is of no use."""
        for key in reversed(keys):
            self._blocks[instance_id, key] = None
            self._blocks.move_to_end((instance_id, key))
        while len(self._blocks) > self.max_blocks:
            self._blocks.popitem(last=False)

    def num_known(self, instance_id: str, keys: list[int]) -> int:
        """How many of the first `keys` in a row are remembered for `instance_id`."""
        for count, key in enumerate(keys):
            if (instance_id, key) not in self._blocks:
                return count
        return len(keys)
