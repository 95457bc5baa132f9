"""The prefix cache: against hand-made cases and against a brute-force model, with every page accounted for."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdjax.scheduler.pages import PagePool
from pdjax.scheduler.radix import NullCache, PrefixCache, PrefixMatch, RadixCache

A, B, C, D = (1, 1), (2, 2), (3, 3), (4, 4)


def prompt(*pages: tuple[int, int]) -> list[int]:
    return [token for page in pages for token in page]


def filled(*prompts: list[int], num_pages: int = 20) -> tuple[PagePool, RadixCache]:
    """A cache with page size 2 that took over pages for each prompt, in order; duplicates went back to the pool."""
    pool = PagePool(num_pages)
    cache = RadixCache(pool, page_size=2)
    for tokens in prompts:
        pages = pool.allocate(len(tokens) // 2)
        assert pages is not None
        pool.free(cache.insert(tokens, pages))
    return pool, cache


def pages_of(cache: PrefixCache, tokens: list[int]) -> list[int]:
    return cache.match(tokens).pages


def test_an_empty_cache_matches_nothing() -> None:
    _, cache = filled()
    assert pages_of(cache, prompt(A, B)) == []
    assert pages_of(cache, []) == []
    assert (cache.num_pages, cache.num_evictable_pages) == (0, 0)


def test_the_longest_prefix_in_full_pages_is_found() -> None:
    _, cache = filled(prompt(A, B, C))
    assert pages_of(cache, prompt(A, B, C)) == [1, 2, 3]
    assert pages_of(cache, prompt(A, B, C, D)) == [1, 2, 3]
    assert pages_of(cache, prompt(A, B, D)) == [1, 2]
    assert pages_of(cache, prompt(A, B, C)[:-1]) == [1, 2]
    assert pages_of(cache, prompt(A)[:-1]) == []
    assert pages_of(cache, prompt(B, C)) == []


def test_prompts_that_part_share_the_pages_before_the_fork() -> None:
    pool, cache = filled(prompt(A, B, C), prompt(A, B, D))
    assert pages_of(cache, prompt(A, B, C)) == [1, 2, 3]
    assert pages_of(cache, prompt(A, B, D)) == [1, 2, 6]
    assert (cache.num_pages, pool.num_held) == (4, 4)


def test_equal_pages_after_different_prefixes_are_different_pages() -> None:
    _, cache = filled(prompt(A, C), prompt(B, C))
    assert pages_of(cache, prompt(A, C)) == [1, 2]
    assert pages_of(cache, prompt(B, C)) == [3, 4]


def test_tokens_of_an_incomplete_page_stay_with_the_caller() -> None:
    pool = PagePool(20)
    cache = RadixCache(pool, page_size=2)
    assert cache.insert([1, 1, 2], [5]) == []
    assert pages_of(cache, [1, 1, 2]) == [5]
    with pytest.raises(AssertionError, match="3 tokens fill 1 pages of 2, got 2 pages"):
        cache.insert([1, 1, 2], [5, 6])


def test_the_callers_own_match_is_no_duplicate() -> None:
    pool, cache = filled(prompt(A, B))
    match = cache.match(prompt(A, B, C))
    cache.lock(match.node)
    new = pool.allocate(1)
    assert new is not None
    assert cache.insert(prompt(A, B, C), match.pages + new) == []
    cache.unlock(match.node)
    assert pages_of(cache, prompt(A, B, C)) == [1, 2, 3]
    assert cache.num_pages == pool.num_held == 3


def test_duplicates_are_returned_page_by_page_and_the_rest_is_kept() -> None:
    pool, cache = filled(prompt(A, B))
    pages = pool.allocate(3)
    assert pages == [3, 4, 5]
    assert cache.insert(prompt(A, B, C), pages) == [3, 4]
    assert pages_of(cache, prompt(A, B, C)) == [1, 2, 5]


def test_a_page_handed_over_twice_is_caught() -> None:
    _, cache = filled(prompt(A, B))
    with pytest.raises(AssertionError, match="page 2 is handed over twice"):
        cache.insert(prompt(A, C), [1, 2])
    with pytest.raises(AssertionError, match="page 2 is handed over twice"):
        cache.insert(prompt(A, B), [2, 1])


def test_the_least_recently_used_leaf_goes_first() -> None:
    _, cache = filled(prompt(A), prompt(B), prompt(C))
    cache.match(prompt(A))
    assert cache.evict(1) == 1
    assert [pages_of(cache, prompt(page)) for page in (A, B, C)] == [[1], [], [3]]
    assert cache.evict(1) == 1  # A was touched before C in the line above
    assert [pages_of(cache, prompt(page)) for page in (A, C)] == [[], [3]]


def test_eviction_eats_a_branch_from_its_end() -> None:
    pool, cache = filled(prompt(A, B, C))
    assert cache.evict(2) == 2
    assert pages_of(cache, prompt(A, B, C)) == [1]
    assert cache.num_pages == pool.num_held == 1


def test_an_old_leaf_goes_before_a_fresh_one_and_its_parent_after_both() -> None:
    _, cache = filled(prompt(A, B), prompt(A, C))
    cache.match(prompt(A, B))
    cache.evict(1)
    assert pages_of(cache, prompt(A, C)) == [1]
    cache.evict(1)
    assert pages_of(cache, prompt(A, B)) == [1]


def test_evicting_more_than_there_is_says_how_much_came_free() -> None:
    pool, cache = filled(prompt(A, B))
    assert cache.evict(5) == 2
    assert cache.evict(5) == 0
    assert pool.num_held == cache.num_pages == 0


def test_a_locked_node_keeps_itself_and_its_ancestors() -> None:
    _, cache = filled(prompt(A, B, C), prompt(D))
    node = cache.match(prompt(A, B)).node
    cache.lock(node)
    assert cache.num_evictable_pages == 2  # C and D
    assert cache.evict(10) == 2
    assert pages_of(cache, prompt(A, B, C)) == [1, 2]
    cache.unlock(node)
    assert cache.num_evictable_pages == 2
    assert cache.evict(10) == 2


def test_locks_count() -> None:
    _, cache = filled(prompt(A, B))
    deep, shallow = cache.match(prompt(A, B)).node, cache.match(prompt(A)).node
    cache.lock(deep)
    cache.lock(deep)
    cache.lock(shallow)
    cache.unlock(deep)
    assert cache.num_evictable_pages == 0
    cache.unlock(deep)
    assert cache.num_evictable_pages == 1
    cache.unlock(shallow)
    assert cache.num_evictable_pages == 2
    with pytest.raises(AssertionError, match="page 1 is unlocked but not locked"):
        cache.unlock(shallow)


def test_an_unlocked_prefix_counts_as_just_used() -> None:
    _, cache = filled(prompt(A), prompt(B))
    node = cache.match(prompt(A)).node
    cache.lock(node)
    cache.match(prompt(B))
    cache.unlock(node)
    cache.evict(1)
    assert pages_of(cache, prompt(B)) == []
    assert pages_of(cache, prompt(A)) == [1]


def test_the_empty_match_can_be_locked_and_unlocked() -> None:
    _, cache = filled(prompt(A))
    match = cache.match(prompt(B))
    cache.lock(match.node)
    assert cache.evict(1) == 1
    cache.unlock(match.node)


def test_locking_a_node_whose_page_was_evicted_is_caught() -> None:
    _, cache = filled(prompt(A))
    node = cache.match(prompt(A)).node
    cache.evict(1)
    with pytest.raises(AssertionError, match="page 1 has been evicted"):
        cache.lock(node)


def test_pages_inserted_below_a_lock_can_be_evicted_and_the_lock_undone() -> None:
    pool, cache = filled(prompt(A))
    node = cache.match(prompt(A)).node
    cache.lock(node)
    pages = pool.allocate(1)
    assert pages == [2]
    cache.insert(prompt(A, B), [1, 2])
    assert cache.evict(10) == 1
    cache.unlock(node)
    assert cache.evict(10) == 1


def test_reset_gives_everything_back_and_voids_old_handles() -> None:
    pool, cache = filled(prompt(A, B), prompt(A, C), prompt(D))
    node = cache.match(prompt(A, B)).node
    cache.reset()
    assert pool.num_held == cache.num_pages == cache.num_evictable_pages == 0
    assert pages_of(cache, prompt(A, B)) == []
    with pytest.raises(AssertionError, match="evicted"):
        cache.lock(node)


def test_reset_with_a_lock_held_is_caught() -> None:
    _, cache = filled(prompt(A, B))
    cache.lock(cache.match(prompt(A)).node)
    with pytest.raises(AssertionError, match="1 pages are locked"):
        cache.reset()


def test_a_page_size_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 token, got 0"):
        RadixCache(PagePool(4), page_size=0)


def test_the_null_cache_leaves_every_page_with_its_caller() -> None:
    cache = NullCache()
    match = cache.match(prompt(A, B))
    assert match.pages == []
    cache.lock(match.node)
    assert cache.insert(prompt(A, B), [1, 2]) == [1, 2]
    assert cache.match(prompt(A, B)).pages == []
    cache.unlock(match.node)
    assert cache.evict(3) == cache.num_pages == cache.num_evictable_pages == 0
    cache.reset()


def test_a_million_nodes_are_filled_used_and_drained() -> None:
    """Wide and deep at once: 1,000 chains of 1,000 pages of one token. Anything that scans the tree would run for hours here."""
    chains, depth = 1000, 1000
    pool = PagePool(chains * depth + 1)
    cache = RadixCache(pool, page_size=1)
    for chain in range(chains):
        pages = pool.allocate(depth)
        assert pages is not None
        assert cache.insert(range(chain, chain + depth), pages) == []
    assert pool.num_free == 0 and cache.num_pages == chains * depth
    kept = cache.match(range(depth))
    cache.lock(kept.node)
    for chain in range(1, chains):
        assert cache.evict(depth) == depth
        assert cache.match(range(chain, chain + depth)).pages == []
    assert cache.num_evictable_pages == 0 and cache.num_pages == depth
    cache.unlock(kept.node)
    cache.reset()
    assert pool.num_free == chains * depth


PAGE_SIZE = 2
TOKENS = st.lists(st.integers(0, 1), max_size=9)
POOL_PAGES = 16


class RadixMachine(RuleBasedStateMachine):
    """The cache against a dictionary from each cached prefix to its page, with recency kept as a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(POOL_PAGES)
        self.cache = RadixCache(self.pool, PAGE_SIZE)
        self.pages: dict[tuple[int, ...], int] = {}
        self.order: list[tuple[int, ...]] = []  # prefixes, least recently used first
        self.locks: list[tuple[tuple[int, ...], PrefixMatch]] = []
        self.requests: list[tuple[list[int], tuple[int, ...], PrefixMatch, list[int]]] = []

    def prefixes(self, tokens: list[int] | tuple[int, ...]) -> list[tuple[int, ...]]:
        """All prefixes in full pages, longest first."""
        longest = len(tokens) // PAGE_SIZE
        return [tuple(tokens[: n * PAGE_SIZE]) for n in range(longest, 0, -1)]

    def touch(self, prefix: tuple[int, ...]) -> None:
        for member in self.prefixes(prefix):
            self.order.remove(member)
            self.order.append(member)

    def expected_match(self, tokens: list[int]) -> tuple[int, ...]:
        return next((prefix for prefix in self.prefixes(tokens) if prefix in self.pages), ())

    def is_locked(self, prefix: tuple[int, ...]) -> bool:
        holders = [held for held, _ in self.locks] + [held for _, held, _, _ in self.requests]
        return any(held[: len(prefix)] == prefix for held in holders)

    def match(self, tokens: list[int]) -> tuple[tuple[int, ...], PrefixMatch]:
        prefix, match = self.expected_match(tokens), self.cache.match(tokens)
        assert match.pages == [self.pages[p] for p in reversed(self.prefixes(prefix))]
        self.touch(prefix)
        return prefix, match

    @rule(tokens=TOKENS)
    def match_only(self, tokens: list[int]) -> None:
        self.match(tokens)

    @rule(tokens=TOKENS)
    def lock(self, tokens: list[int]) -> None:
        prefix, match = self.match(tokens)
        self.cache.lock(match.node)
        self.locks.append((prefix, match))

    @precondition(lambda self: self.locks)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        prefix, match = self.locks.pop(data.draw(st.integers(0, len(self.locks) - 1)))
        self.cache.unlock(match.node)
        self.model_unlock(prefix)

    def model_unlock(self, prefix: tuple[int, ...]) -> None:
        for member in self.prefixes(prefix):
            if not self.is_locked(member):
                self.order.remove(member)
                self.order.append(member)

    @rule(tokens=TOKENS)
    def start_request(self, tokens: list[int]) -> None:
        """Match, lock, and allocate the pages for the rest, evicting where the pool is short."""
        prefix, match = self.match(tokens)
        self.cache.lock(match.node)
        needed = len(tokens) // PAGE_SIZE - len(match.pages)
        self.requests.append((tokens, prefix, match, []))
        self.model_evict(max(0, needed - self.pool.num_free))
        own = self.pool.allocate(needed)
        if own is None:
            self.requests.pop()
            self.cache.unlock(match.node)
            self.model_unlock(prefix)
            return
        self.requests[-1][3].extend(own)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), keep=st.booleans())
    def end_request(self, data: st.DataObject, keep: bool) -> None:
        """Finish (the pages go into the cache) or abort (they go back to the pool)."""
        tokens, prefix, match, own = self.requests.pop(data.draw(st.integers(0, len(self.requests) - 1)))
        if keep:
            duplicates = []
            for member, page in zip(reversed(self.prefixes(tokens)), match.pages + own, strict=True):
                if member not in self.pages:
                    self.pages[member] = page
                    self.order.append(member)
                elif self.pages[member] != page:
                    duplicates.append(page)
            assert self.cache.insert(tokens, match.pages + own) == duplicates
            self.touch(self.expected_match(tokens))
            self.pool.free(duplicates)
        else:
            self.pool.free(own)
        self.cache.unlock(match.node)
        self.model_unlock(prefix)

    def model_evict(self, num_pages: int) -> None:
        victims: list[tuple[int, ...]] = []
        while len(victims) < num_pages:
            leaves = [
                prefix
                for prefix in self.order
                if not self.is_locked(prefix) and not any(len(p) > len(prefix) and p[: len(prefix)] == prefix for p in self.order)
            ]
            if not leaves:
                break
            victims.append(leaves[0])
            self.order.remove(leaves[0])
            del self.pages[leaves[0]]
        assert self.cache.evict(num_pages) == len(victims)

    @rule(num_pages=st.integers(0, 4))
    def evict(self, num_pages: int) -> None:
        self.model_evict(num_pages)

    @precondition(lambda self: not self.locks and not self.requests)
    @rule()
    def reset(self) -> None:
        self.cache.reset()
        self.pages.clear()
        self.order.clear()

    @invariant()
    def every_page_has_exactly_one_owner(self) -> None:
        owned = list(self.pages.values()) + [page for _, _, _, own in self.requests for page in own]
        assert len(owned) == len(set(owned)) == self.pool.num_held
        assert self.cache.num_pages == len(self.pages)

    @invariant()
    def evictable_pages_are_those_that_nobody_locked(self) -> None:
        assert self.cache.num_evictable_pages == sum(not self.is_locked(prefix) for prefix in self.pages)

    def teardown(self) -> None:
        for _, match in self.locks:
            self.cache.unlock(match.node)
        for _, _, match, own in self.requests:
            self.cache.unlock(match.node)
            self.pool.free(own)
        self.cache.reset()
        assert self.pool.num_held == 0


TestRadixMachine = RadixMachine.TestCase
TestRadixMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
