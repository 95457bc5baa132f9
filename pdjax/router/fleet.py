"""Which workers there are, which of them are well, and what this router has given each to do.

Pure Python: no asyncio, no sockets; time comes from the clock given at construction.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from pdjax.protocol import WorkerInfo, WorkerLoad

Role = Literal["prefill", "decode"]

MAX_REPLACED = 1024
"""Instance ids of replaced workers that are remembered, so that a late word from one of them does not push out its successor."""


class Presence(enum.Enum):
    JOINED = "joined"
    LOST = "lost"
    """Its membership stream broke. It takes no new work; it may live and join again."""
    LEFT = "left"
    """It said that it shuts down. What it already works on may still end well."""
    REPLACED = "replaced"
    """Another process answers at its address: it is dead."""


class Health(enum.Enum):
    READY = "ready"
    LOADING = "loading"
    SUSPECT = "suspect"
    SILENT = "silent"


@dataclass(slots=True, eq=False)
class Member:
    """One process start of one worker. Changed by `Fleet` only; `link` numbers the membership streams it came over."""

    info: WorkerInfo
    order: int
    heard_s: float
    link: int
    presence: Presence = Presence.JOINED
    load: WorkerLoad = WorkerLoad(ready=False)
    is_suspect: bool = False
    outstanding_sequences: int = 0
    outstanding_tokens: int = 0
    unreported_tokens: int = 0
    """Tokens handed over since the last heartbeat, which `load` therefore may not show yet."""

    @property
    def instance_id(self) -> str:
        return self.info.peer.instance_id

    @property
    def free_slots(self) -> int:
        """Request slots that nobody claims; negative where sequences wait. Load reports lag, hence the larger of both counts."""
        return self.info.max_running - max(self.load.running + self.load.waiting, self.outstanding_sequences)

    @property
    def free_pages(self) -> int:
        return self.load.free_pages - -(-self.unreported_tokens // self.info.layout.page_size)


@dataclass(slots=True, eq=False, frozen=True)
class Dispatch:
    """One sequence in the hands of one worker. Outstanding until `Fleet.release`."""

    member: Member
    tokens: int


class Limits(NamedTuple):
    """Smallest limits of any worker: what every pair can serve."""

    max_context_tokens: int
    max_prompt_tokens: int


class Fleet:
    """The only owner of membership and of outstanding work. One thread only.

    `heartbeat_timeout_s`: silence after which a worker counts as gone. `stall_timeout_s`: how long a sequence may hear nothing from
    a worker that has left in order.
    """

    def __init__(self, clock: Callable[[], float], heartbeat_timeout_s: float, stall_timeout_s: float):
        self.clock = clock
        self.heartbeat_timeout_s = heartbeat_timeout_s
        self.stall_timeout_s = stall_timeout_s
        self._members: dict[str, Member] = {}
        self._by_address: dict[str, Member] = {}
        self._replaced: OrderedDict[str, str] = OrderedDict()
        self._open: set[Dispatch] = set()
        self._joined = 0
        self._limits: Limits | None = None

    def join(self, info: WorkerInfo) -> Member:
        """Take in a worker, or take one back whose stream broke. Another instance behind the same address is out at once.

        Raises ValueError where this instance has been replaced itself.
        """
        instance_id, address = info.peer.instance_id, info.peer.address
        if instance_id in self._replaced:
            raise ValueError(f"worker {instance_id} at {address} has been replaced by {self._replaced[instance_id]}")
        self._joined += 1
        previous = self._by_address.get(address)
        if previous is not None and previous.instance_id != instance_id:
            self._replace(previous, instance_id)
        member = self._members.get(instance_id)
        if member is None:
            member = Member(info, order=self._joined, heard_s=self.clock(), link=self._joined)
        else:
            self._by_address.pop(member.info.peer.address, None)
            member.info, member.heard_s, member.link = info, self.clock(), self._joined
            member.presence, member.load, member.is_suspect = Presence.JOINED, WorkerLoad(ready=False), False
        self._members[instance_id] = self._by_address[address] = member
        self._note_limits()
        return member

    def heartbeat(self, instance_id: str, load: WorkerLoad) -> bool:
        """A sign of life. False where the worker is not (or no longer) a member and should join anew."""
        member = self._members.get(instance_id)
        if member is None or member.presence is not Presence.JOINED:
            return False
        member.load, member.heard_s, member.is_suspect, member.unreported_tokens = load, self.clock(), False, 0
        return True

    def leave(self, instance_id: str) -> None:
        """The worker shuts down in order: no new work, running work may end."""
        if (member := self._members.get(instance_id)) is not None:
            member.presence, member.heard_s = Presence.LEFT, self.clock()
            self._note_limits()

    def lose(self, instance_id: str, link: int) -> None:
        """The membership stream numbered `link` broke; without effect where the worker has come back over another one or has left."""
        member = self._members.get(instance_id)
        if member is not None and member.link == link and member.presence is Presence.JOINED:
            member.presence = Presence.LOST
            self._note_limits()

    def suspect(self, member: Member) -> None:
        """A call to `member` failed: others go first until its next heartbeat."""
        member.is_suspect = True

    def prune(self) -> None:
        """Forget workers that are out for good and hold nothing of ours."""
        now = self.clock()
        for member in list(self._members.values()):
            is_out = member.presence is Presence.LEFT or (member.presence is Presence.LOST and now >= self.gone_at(member, member.heard_s))
            if is_out and not member.outstanding_sequences:
                self._forget(member)

    def dispatch(self, member: Member, tokens: int) -> Dispatch:
        """Count `tokens` of work as outstanding on `member` until the result is released."""
        dispatch = Dispatch(member, tokens)
        self._open.add(dispatch)
        member.outstanding_sequences += 1
        member.outstanding_tokens += tokens
        member.unreported_tokens += tokens
        return dispatch

    def release(self, dispatch: Dispatch) -> None:
        """The worker has nothing more to do for it. Idempotent."""
        if dispatch in self._open:
            self._open.remove(dispatch)
            dispatch.member.outstanding_sequences -= 1
            dispatch.member.outstanding_tokens -= dispatch.tokens

    @property
    def num_outstanding(self) -> int:
        """Dispatches not yet released, those to workers that are gone included."""
        return len(self._open)

    def available(self, role: Role) -> list[Member]:
        """Workers that new work may go to, in the order of joining; suspects are among them."""
        takes_work = (Health.READY, Health.SUSPECT)
        return [member for member in self._members.values() if member.info.role == role and self.health(member) in takes_work]

    def health(self, member: Member) -> Health:
        if member.presence is not Presence.JOINED or self.clock() >= member.heard_s + self.heartbeat_timeout_s:
            return Health.SILENT
        if not member.load.ready:
            return Health.LOADING
        return Health.SUSPECT if member.is_suspect else Health.READY

    def is_ready(self) -> bool:
        """Whether a decode worker is well; decode workers also compute prompts, so no prefill worker is needed to serve."""
        return any(self.health(member) is Health.READY for member in self.available("decode"))

    def gone_at(self, member: Member, last_event_s: float) -> float:
        """When a sequence on `member` is to be given up, if neither a heartbeat nor an event of that sequence comes before."""
        if member.presence is Presence.REPLACED:
            return float("-inf")
        timeout_s = self.stall_timeout_s if member.presence is Presence.LEFT else self.heartbeat_timeout_s
        return max(member.heard_s, last_event_s) + timeout_s

    def members(self) -> list[Member]:
        """Everybody not yet forgotten, in the order of joining."""
        return list(self._members.values())

    def count(self, role: Role, health: Health) -> int:
        return sum(member.info.role == role and self.health(member) is health for member in self._members.values())

    def limits(self) -> Limits | None:
        """Smallest limits in the fleet; where it is empty, those of its last members; None before the first has joined."""
        return self._limits

    def _replace(self, member: Member, successor: str) -> None:
        member.presence = Presence.REPLACED
        self._forget(member)
        self._replaced[member.instance_id] = successor
        if len(self._replaced) > MAX_REPLACED:
            self._replaced.popitem(last=False)

    def _forget(self, member: Member) -> None:
        del self._members[member.instance_id]
        if self._by_address.get(member.info.peer.address) is member:
            del self._by_address[member.info.peer.address]

    def _note_limits(self) -> None:
        infos = [member.info for member in self._members.values() if member.presence is Presence.JOINED]
        if infos:
            self._limits = Limits(min(info.max_context_tokens for info in infos), min(info.max_prompt_tokens for info in infos))
