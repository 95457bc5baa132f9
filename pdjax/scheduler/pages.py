"""The one owner of free KV pages of a worker.

A page is either free, and then it belongs to the pool, or it is held by exactly one other owner (a sequence or the prefix cache),
which gives it back through `free`, once. Page 0 is the null page: padding rows of page tables point at it and its content means
nothing, so it is never given out.
"""

from __future__ import annotations

from collections.abc import Iterable


class PagePool:
    """Gives out pages 1 .. num_pages - 1, O(1) a page. Deterministic: the page freed last is given out first, new pages in rising order."""

    def __init__(self, num_pages: int):
        """`num_pages` counts the null page too. Raises ValueError where no page would be left."""
        if num_pages < 2:
            raise ValueError(f"a page pool needs at least 2 pages, the null page and one more, got {num_pages}")
        self.total = num_pages - 1
        self._free = list(range(self.total, 0, -1))
        self._is_held = bytearray(num_pages)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        return self.total - len(self._free)

    def allocate(self, n: int) -> list[int] | None:
        """Take `n` pages, which the caller then owns; None, and nothing taken, where fewer are free."""
        assert n >= 0, f"cannot allocate {n} pages"
        if n > len(self._free):
            return None
        cut = len(self._free) - n
        pages = self._free[cut:]
        del self._free[cut:]
        pages.reverse()
        for page in pages:
            self._is_held[page] = 1
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Take back pages that the caller owns. A page that is not held, or not of this pool, is a broken invariant."""
        for page in pages:
            assert 0 < page <= self.total, f"page {page} is not one of 1..{self.total}"
            assert self._is_held[page], f"page {page} is freed but not held"
            self._is_held[page] = 0
            self._free.append(page)
