"""The KV memory of one worker: pages and prefix tree together, seen as leases.

A page has one owner at any time: the pool (free), the tree (published), or one lease (private). A lease reads the published pages
under its lock and owns the private ones behind them.

Freeing never waits for the device. Whoever gets a page next writes it in a program that is dispatched later, so every step and
gather that was dispatched while the old owner held the page still sees the old content.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdjax.scheduler.pages import PagePool
from pdjax.scheduler.radix import PrefixCache, RadixNode


@dataclass(slots=True, eq=False)
class Lease:
    """The pages of one sequence, in order of position. The first `num_shared` belong to the tree and are locked by `node`."""

    pages: list[int]
    num_shared: int
    node: RadixNode
    is_released: bool = False

    @property
    def private(self) -> list[int]:
        return self.pages[self.num_shared :]


class KVMemory:
    """Gives leases out and takes them back. All methods are for the engine loop only."""

    def __init__(self, pool: PagePool, cache: PrefixCache, page_size: int):
        self.pool = pool
        self.cache = cache
        self.page_size = page_size

    @property
    def capacity_tokens(self) -> int:
        return self.pool.total * self.page_size

    @property
    def num_private(self) -> int:
        """Pages that sequences own, the tree's left out."""
        return self.pool.num_held - self.cache.num_pages

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def lease(self, tokens: Sequence[int], max_prefix_tokens: int, num_tokens: int, spare_pages: int = 0) -> Lease | None:
        """Lock the longest published prefix of `tokens` within `max_prefix_tokens` and take private pages up to `num_tokens`.

        None, and nothing taken, where that would leave fewer than `spare_pages` free even after eviction.
        """
        match = self.cache.match(tokens[: max_prefix_tokens // self.page_size * self.page_size])
        self.cache.lock(match.node)
        missing = self.pages_for(num_tokens) - len(match.pages)
        assert missing >= 0, f"prefix of {len(match.pages)} pages exceeds the {num_tokens} tokens asked for"
        private = self._allocate(missing, spare_pages)
        if private is None:
            self.cache.unlock(match.node)
            return None
        return Lease(match.pages + private, len(match.pages), match.node)

    def extend(self, lease: Lease, num_tokens: int) -> bool:
        """Make `lease` cover `num_tokens`; False, and nothing changed, where the pages are not to be had."""
        missing = self.pages_for(num_tokens) - len(lease.pages)
        if missing <= 0:
            return True
        more = self._allocate(missing, 0)
        if more is None:
            return False
        lease.pages.extend(more)
        return True

    def publish(self, lease: Lease, tokens: Sequence[int]) -> None:
        """Give the full pages of `tokens`, all of them computed or installed, to the tree; the lease goes on reading them.

        Where the tree holds a page of the same tokens already, the lease changes over to it and its own copy is freed.
        """
        full = len(tokens) // self.page_size
        if full <= lease.num_shared:
            return
        aligned = tokens[: full * self.page_size]
        duplicates = self.cache.insert(aligned, lease.pages[:full])
        match = self.cache.match(aligned)
        if not match.pages:  # no prefix cache: every page stays private
            return
        assert len(match.pages) == full, f"published {full} pages, the tree knows {len(match.pages)}"
        self.cache.lock(match.node)
        self.cache.unlock(lease.node)
        self.pool.free(duplicates)
        lease.pages[:full] = match.pages
        lease.num_shared, lease.node = full, match.node

    def release(self, lease: Lease) -> None:
        """Take the lease back, once: private pages are free, published ones stay in the tree until they are evicted."""
        assert not lease.is_released, "a lease is released twice"
        lease.is_released = True
        self.pool.free(lease.private)
        self.cache.unlock(lease.node)

    def check(self, leases: Sequence[Lease]) -> None:
        """Assert that every page has exactly one owner, given all leases there are."""
        private = [page for lease in leases for page in lease.private]
        published = self.cache.num_pages
        assert self.pool.num_free + len(private) + published == self.pool.total, (
            f"{self.pool.num_free} free, {len(private)} private and {published} published pages of {self.pool.total}"
        )
        assert len(set(private)) == len(private), f"a page is in two leases: {sorted(private)}"

    def _allocate(self, count: int, spare_pages: int) -> list[int] | None:
        short = count + spare_pages - self.pool.num_free
        if short > 0:
            if short > self.cache.num_evictable_pages:
                return None
            self.cache.evict(short)
        return self.pool.allocate(count)
