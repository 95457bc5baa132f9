"""Which pair of workers computes a sequence. Pure Python; all decisions are deterministic in the fleet's state."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pdjax.errors import NoWorker, OverCapacity
from pdjax.router.affinity import PrefixMemory, block_keys
from pdjax.router.fleet import Fleet, Member, Role
from pdjax.router.merge import Side

log = logging.getLogger(__name__)

MAX_REMEMBERED_BLOCKS = 1 << 17
"""With pages of 16 tokens the beginnings of 2 million tokens of prompts, about 20 MB."""
MAX_LOGGED_MISMATCHES = 1024


@dataclass(slots=True)
class Tried:
    """What earlier attempts at one sequence have shown, by instance id.

    `failed` workers go last. `full` ones are left out until `full` is cleared. `refused` pairs are never tried again. All attempts stay
    with the weights of the first, `fingerprint`: an answer continued by another model would be wrong.
    """

    failed: set[str] = field(default_factory=set)
    full: set[str] = field(default_factory=set)
    refused: set[tuple[str, str]] = field(default_factory=set)
    fingerprint: str | None = None


class Pair(NamedTuple):
    """Who computes the prompt (None: decode itself), who goes on, and how many prompt tokens prefill is expected to compute."""

    prefill: Member | None
    decode: Member
    prefill_tokens: int

    def worker(self, side: Side) -> Member:
        """Who does the part of `side`."""
        return self.prefill if side is Side.PREFILL and self.prefill is not None else self.decode


class PairPolicy:
    """Chooses pairs from `fleet`; remembers prompts that were computed, in a bounded place."""

    def __init__(self, fleet: Fleet, max_remembered_blocks: int = MAX_REMEMBERED_BLOCKS):
        self.fleet = fleet
        self._memory = PrefixMemory(max_remembered_blocks)
        self._logged: set[tuple[str, str]] = set()

    def choose_pair(self, prompt: Sequence[int], tried: Tried) -> Pair:
        """The pair with the least work ahead; without a usable prefill worker, a decode worker that computes the prompt too.

        Raises NoWorker where no decode worker takes work, OverCapacity where every worker of a role has refused for lack of room.
        """
        decodes = self._usable_decodes(tried)
        prefills = self._usable("prefill", tried)
        costs = self._prefill_costs(prompt, prefills)
        pairs = [(prefill, decode) for prefill in prefills for decode in decodes if self._fit(prefill, decode, tried)]
        if not pairs:
            return Pair(None, self._best_decode(prompt, decodes, tried), 0)

        def rank(pair: tuple[Member, Member]) -> tuple:
            prefill, decode = pair
            num_doubtful = _is_doubtful(prefill, tried) + _is_doubtful(decode, tried)
            cost = prefill.outstanding_tokens + costs[prefill.instance_id]
            return num_doubtful, cost, prefill.order, _decode_rank(decode, len(prompt))

        prefill, decode = min(pairs, key=rank)
        return Pair(prefill, decode, costs[prefill.instance_id])

    def choose_decode(self, prompt: Sequence[int], tried: Tried) -> Pair:
        """A decode worker that computes the prompt itself. Raises as `choose_pair`."""
        return Pair(None, self._best_decode(prompt, self._usable_decodes(tried), tried), 0)

    def computed(self, prefill: Member, prompt: Sequence[int]) -> None:
        """`prefill` has computed `prompt`: prompts that begin alike had better go there too."""
        self._memory.remember(prefill.instance_id, block_keys(prompt, prefill.info.layout.page_size))

    def _usable_decodes(self, tried: Tried) -> list[Member]:
        decodes = self._usable("decode", tried)
        if not decodes:
            raise NoWorker("no decode worker is ready")
        return decodes

    def _usable(self, role: Role, tried: Tried) -> list[Member]:
        members = [
            member
            for member in self.fleet.available(role)
            if tried.fingerprint is None or member.info.layout.model_fingerprint == tried.fingerprint
        ]
        usable = [member for member in members if member.instance_id not in tried.full]
        if members and not usable:
            raise OverCapacity(f"every {role} worker is full ({len(members)} of them)")
        return usable

    def _prefill_costs(self, prompt: Sequence[int], prefills: list[Member]) -> dict[str, int]:
        """Prompt tokens that each worker would have to compute, by instance id; at least 1, since the last one always is."""
        keys = {size: block_keys(prompt, size) for size in {member.info.layout.page_size for member in prefills}}
        costs = {}
        for member in prefills:
            page_size = member.info.layout.page_size
            known = self._memory.num_known(member.instance_id, keys[page_size]) * page_size
            costs[member.instance_id] = max(len(prompt) - known, 1)
        return costs

    def _fit(self, prefill: Member, decode: Member, tried: Tried) -> bool:
        ids = (prefill.instance_id, decode.instance_id)
        if ids in tried.refused:
            return False
        mismatch = prefill.info.layout.mismatch(decode.info.layout) if prefill.info.layout != decode.info.layout else None
        if mismatch is not None and ids not in self._logged:
            if len(self._logged) >= MAX_LOGGED_MISMATCHES:
                self._logged.clear()
            self._logged.add(ids)
            log.error(
                "prefill worker %s and decode worker %s are never paired, their layouts differ (prefill here, decode there): %s",
                prefill.info.peer.address, decode.info.peer.address, mismatch,
            )  # fmt: skip
        return mismatch is None

    @staticmethod
    def _best_decode(prompt: Sequence[int], decodes: list[Member], tried: Tried) -> Member:
        return min(decodes, key=lambda member: (_is_doubtful(member, tried), _decode_rank(member, len(prompt))))


def _is_doubtful(member: Member, tried: Tried) -> bool:
    return member.is_suspect or member.instance_id in tried.failed


def _decode_rank(decode: Member, num_tokens: int) -> tuple:
    """Smallest is best: room for the prompt, then free request slots, then free pages, then the longest member."""
    has_room = decode.free_slots > 0 and decode.free_pages * decode.info.layout.page_size >= num_tokens
    return not has_room, -decode.free_slots, -decode.free_pages, decode.order
