"""A request's claim on its transfer, and what a prefill scheduler asks of a transport."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from pdjax.protocol import KVPoll, PromptToken, SequenceRequest


class Sender(Protocol):
    """The part of a transport's sender that the scheduler uses; `pdjax.transfer.base.KVSender` says what each does."""

    def poll(self) -> KVPoll: ...
    @property
    def decode_prefix_tokens(self) -> int: ...
    def can_send(self) -> bool: ...
    def send(self, first_page: int, num_pages: int, kv: Any) -> None: ...
    def finish(self, metadata: bytes) -> None: ...
    def fail(self, message: str) -> None: ...
    def failure(self) -> str | None: ...


class Source(Protocol):
    """Where senders come from; `pdjax.transfer.base.KVSource`."""

    def create_sender(self, room: int) -> Sender: ...
    def take_changed(self) -> list[int]: ...


@dataclass(slots=True, eq=False)
class Ticket:
    """A request's claim on its transfer, from submission to hand-over. Owns the sender and, where it has one, the metadata slot.

    `next_page`: the first page that has not been handed to the sender; None until bootstrap has ended. It survives retries: what has
    been sent is right and is not sent again. `num_retries`: forwards that were lost. `num_cached`: prompt tokens that the first try
    found cached; later tries find what earlier ones have computed, which is no merit of the cache. `ahead_s`: when it may go ahead of
    its bootstrap; None until the queue has looked, and again once a forward is lost. `scored`: prompt tokens whose log probabilities
    are known, from the first row on; a retry goes on behind them.
    """

    request: SequenceRequest
    sender: Sender
    metadata_slot: int | None = None
    next_page: int | None = None
    num_retries: int = 0
    num_cached: int | None = None
    ahead_s: float | None = None
    scored: list[PromptToken] = field(default_factory=list)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def is_bootstrapped(self) -> bool:
        return self.next_page is not None
