"""Faults of the owners of pages: leases and the radix tree."""

from __future__ import annotations

from tests.mutants.base import Mutant

MEMORY = "scheduler/memory.py"
RADIX = "scheduler/radix.py"

MUTANTS = (
    Mutant(
        "duplicates are freed and go on being read",
        MEMORY,
        "        lease.pages[:full] = match.pages\n",
        "",
        "the page table leads through pages of others",
        (61, 91, 100),
    ),
    Mutant(
        "a released lease keeps its lock",
        MEMORY,
        """        self.pool.free(lease.private)
        self.cache.unlock(lease.node)
""",
        """        self.pool.free(lease.private)
""",
        "the tree can never evict those pages",
        (0, 3, 5),
    ),
    Mutant(
        "a lease that is not to be had keeps its lock",
        MEMORY,
        """        if private is None:
            self.cache.unlock(match.node)
""",
        """        if private is None:
""",
        "every try to admit locks the prefix once more",
        (31, 36, 42),
    ),
    Mutant(
        "evicted pages can still be found",
        RADIX,
        "            del parent.children[node.key]\n",
        "",
        "a prompt reads a page that belongs to somebody else",
        (0, 3, 4),
    ),
    Mutant(
        "locked pages can be evicted",
        RADIX,
        """            if member.num_locks == 0:
                del self._unlocked[member]
""",
        "",
        "a page is taken from under a sequence that reads it",
        (0, 3, 4),
    ),
    Mutant(
        "the last page of a lease is rounded away",
        MEMORY,
        "return -(-num_tokens // self.page_size)",
        "return num_tokens // self.page_size",
        "tokens behind the last page border have no page",
        (5, 7, 8),
    ),
)
