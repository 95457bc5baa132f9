"""Prefix cache: KV pages of finished prompts, found again by the tokens that they were computed from.

The tree has one page a node. An edge that held a run of pages would save some memory, but it has to be split when prompts part in
its middle, and then a lock on a node no longer says which pages it protects. With one page a node a node never changes its meaning,
and the cost is one dictionary look-up a page, next to nothing beside computing the page.

Ownership. A page has one owner at any time: the pool (free), a sequence, or this tree. `insert` is the only way into the tree and
`evict` and `reset` are the only ways out, straight back to the pool. A sequence may read pages of the tree as long as it holds a lock
on the node that `match` returned; it never frees them.

Recency. All nodes that nobody has locked stand in one ordered dictionary, least recently used first. Whoever touches a node touches
its ancestors after it, so an ancestor always stands behind its descendants. A lock covers all ancestors too, so whatever hangs below
an unlocked node is unlocked. The first node of the order is therefore always a leaf, and eviction takes it without any search.
"""

from __future__ import annotations

import abc
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pdjax.scheduler.pages import PagePool

TOKEN_BYTES = array("i").itemsize


@dataclass(eq=False, slots=True)
class RadixNode:
    """One cached page. To callers only a handle, good until its page is evicted; a locked one is never evicted.

    `key`: the page's tokens as int32 bytes, which take a sixth of the memory of a tuple and know their hash.
    `num_locks` counts locks on this node and on all below it. The root has no page and is never evicted.
    """

    key: bytes
    page: int
    parent: RadixNode | None
    num_locks: int = 0
    children: dict[bytes, RadixNode] = field(default_factory=dict)


class PrefixMatch(NamedTuple):
    """The cached start of a prompt: `pages` in prompt order, still owned by the cache, and the node to lock while they are in use."""

    pages: list[int]
    node: RadixNode


class PrefixCache(abc.ABC):
    """What the schedulers ask of a prefix cache. Called by the engine loop only; nothing blocks and no method fails in service."""

    @abc.abstractmethod
    def match(self, tokens: Sequence[int]) -> PrefixMatch:
        """Find the longest cached prefix of `tokens` in full pages and mark it as used now. Changes nothing else.

        Who needs at least one token to compute passes `tokens[:-1]`. The match is safe to use only until the next `evict` unless it
        is locked.
        """

    @abc.abstractmethod
    def lock(self, node: RadixNode) -> None:
        """Keep `node` and its ancestors from eviction. Locks count: each needs an `unlock` of its own."""

    @abc.abstractmethod
    def unlock(self, node: RadixNode) -> None:
        """Undo one `lock`. Nodes that nobody else has locked count as used now."""

    @abc.abstractmethod
    def insert(self, tokens: Sequence[int], pages: Sequence[int]) -> list[int]:
        """Hand over `pages`, one for each full page of `tokens`, and return the ones that the caller still owns.

        Page by page: where the tree has none for these tokens, it takes over the caller's. Where it has the very same page (the
        caller's own match), nothing changes. Where it has another one, the caller's is a duplicate: it is returned, and the caller
        goes on owning it and frees it. A page that is not returned must not be freed by the caller.

        The prefix that the caller matched must still be locked. What is taken over is not locked: a caller that goes on using the
        pages calls `match` and `lock` before anything else can evict.
        """

    @abc.abstractmethod
    def evict(self, num_pages: int) -> int:
        """Give least recently used unlocked pages back to the pool, `num_pages` or as many as there are. Returns how many."""

    @abc.abstractmethod
    def reset(self) -> None:
        """Give every page back to the pool. Nothing may be locked. Handles from before are void."""

    @property
    @abc.abstractmethod
    def num_pages(self) -> int:
        """Pages that the cache owns."""

    @property
    @abc.abstractmethod
    def num_evictable_pages(self) -> int:
        """Pages that `evict` could give back now."""


class RadixCache(PrefixCache):
    """Every operation costs O(pages of its argument), however many nodes the tree has. Deterministic."""

    def __init__(self, pool: PagePool, page_size: int):
        """`page_size` in tokens. The pages of the tree come from `pool` and go back to it. Raises ValueError on a page size below 1."""
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1 token, got {page_size}")
        self._pool = pool
        self._page_size = page_size
        self._root = _new_root()
        self._unlocked: OrderedDict[RadixNode, None] = OrderedDict()
        self._is_owned = bytearray(pool.total + 1)
        self._num_pages = 0

    @property
    def num_pages(self) -> int:
        return self._num_pages

    @property
    def num_evictable_pages(self) -> int:
        return len(self._unlocked)

    def match(self, tokens: Sequence[int]) -> PrefixMatch:
        node, pages = self._root, []
        for key in self._keys(tokens):
            child = node.children.get(key)
            if child is None:
                break
            node = child
            pages.append(node.page)
        self._touch(node)
        return PrefixMatch(pages, node)

    def lock(self, node: RadixNode) -> None:
        for member in self._path_up(node):
            if member.num_locks == 0:
                del self._unlocked[member]
            member.num_locks += 1

    def unlock(self, node: RadixNode) -> None:
        for member in self._path_up(node):
            assert member.num_locks > 0, f"page {member.page} is unlocked but not locked"
            member.num_locks -= 1
            if member.num_locks == 0:
                self._unlocked[member] = None

    def insert(self, tokens: Sequence[int], pages: Sequence[int]) -> list[int]:
        num_full = len(tokens) // self._page_size
        assert len(pages) == num_full, f"{len(tokens)} tokens fill {num_full} pages of {self._page_size}, got {len(pages)} pages"
        node, duplicates = self._root, []
        for key, page in zip(self._keys(tokens), pages, strict=True):
            child = node.children.get(key)
            if child is None:
                child = self._add(node, key, page)
            elif child.page != page:
                assert not self._is_owned[page], f"page {page} is handed over twice"
                duplicates.append(page)
            node = child
        self._touch(node)
        return duplicates

    def evict(self, num_pages: int) -> int:
        assert num_pages >= 0, f"cannot evict {num_pages} pages"
        freed = []
        while len(freed) < num_pages and self._unlocked:
            node, _ = self._unlocked.popitem(last=False)
            parent = node.parent
            assert parent is not None and not node.children, f"page {node.page} is first in line but no leaf"
            del parent.children[node.key]
            node.parent = None
            self._is_owned[node.page] = 0
            freed.append(node.page)
        self._num_pages -= len(freed)
        self._pool.free(freed)
        return len(freed)

    def reset(self) -> None:
        assert len(self._unlocked) == self._num_pages, f"{self._num_pages - len(self._unlocked)} pages are locked"
        self.evict(self._num_pages)
        self._root = _new_root()

    def _keys(self, tokens: Sequence[int]) -> Iterator[bytes]:
        """The tokens of each full page, as int32 bytes."""
        step = self._page_size * TOKEN_BYTES
        data = array("i", tokens).tobytes()
        return (data[start : start + step] for start in range(0, len(data) - step + 1, step))

    def _add(self, parent: RadixNode, key: bytes, page: int) -> RadixNode:
        """A new unlocked leaf, which the caller has to touch: until then it may stand behind its parent."""
        assert not self._is_owned[page], f"page {page} is handed over twice"
        node = RadixNode(key, page, parent)
        parent.children[key] = node
        self._is_owned[page] = 1
        self._num_pages += 1
        self._unlocked[node] = None
        return node

    def _touch(self, node: RadixNode) -> None:
        """Make `node` and its ancestors the most recently used, ancestors last."""
        for member in self._path_up(node):
            if member.num_locks == 0:
                self._unlocked.move_to_end(member)

    def _path_up(self, node: RadixNode) -> Iterator[RadixNode]:
        """`node` and its ancestors without the root."""
        while node is not self._root:
            parent = node.parent
            assert parent is not None, f"page {node.page} has been evicted; its node is void"
            yield node
            node = parent


class NullCache(PrefixCache):
    """The twin for a worker without prefix cache: it never holds anything, so callers keep and free all their pages."""

    def __init__(self) -> None:
        self._root = _new_root()

    @property
    def num_pages(self) -> int:
        return 0

    @property
    def num_evictable_pages(self) -> int:
        return 0

    def match(self, tokens: Sequence[int]) -> PrefixMatch:
        return PrefixMatch([], self._root)

    def lock(self, node: RadixNode) -> None:
        assert node is self._root, f"page {node.page} is not of this cache"

    def unlock(self, node: RadixNode) -> None:
        assert node is self._root, f"page {node.page} is not of this cache"

    def insert(self, tokens: Sequence[int], pages: Sequence[int]) -> list[int]:
        return list(pages)

    def evict(self, num_pages: int) -> int:
        return 0

    def reset(self) -> None:
        pass


def _new_root() -> RadixNode:
    return RadixNode(b"", 0, None)
