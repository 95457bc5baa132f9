"""The bootstrap queue of a prefill worker: requests whose decode side has not announced itself yet.

A request here holds a sender and nothing else: no pages, no slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pdjax.protocol import KVPoll, SequenceRequest
from pdjax.scheduler.metadata import MetadataSlots


class Sender(Protocol):
    """The part of a transport's sender that the scheduler uses; `pdjax.transfer.base.KVSender` says what each does."""

    def poll(self) -> KVPoll: ...
    @property
    def decode_prefix_tokens(self) -> int: ...
    def can_send(self) -> bool: ...
    def finish(self, metadata: bytes) -> None: ...
    def fail(self, message: str) -> None: ...
    def failure(self) -> str | None: ...


class Source(Protocol):
    """Where senders come from; `pdjax.transfer.base.KVSource`."""

    def create_sender(self, room: int) -> Sender: ...


@dataclass(slots=True, eq=False)
class Bootstrapping:
    request: SequenceRequest
    sender: Sender


@dataclass(slots=True, eq=False)
class Waiting:
    """Bootstrap is done. Owns a metadata slot; sending starts behind `decode_prefix_pages` pages, which decode already holds."""

    request: SequenceRequest
    sender: Sender
    metadata_slot: int
    decode_prefix_pages: int


class BootstrapQueue:
    """Keeps order of arrival. Whoever is popped from it owns its sender and metadata slot from then on."""

    def __init__(self, source: Source, metadata: MetadataSlots, page_size: int):
        self._source = source
        self._metadata = metadata
        self._page_size = page_size
        self._queue: dict[str, Bootstrapping] = {}

    def __len__(self) -> int:
        return len(self._queue)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._queue

    def create_sender(self, request: SequenceRequest) -> None:
        """Open the request's room and queue it. Raises ValueError where the room is taken."""
        self._queue[request.request_id] = Bootstrapping(request, self._source.create_sender(request.room))

    def pop(self, request_id: str) -> Bootstrapping:
        return self._queue.pop(request_id)

    def pop_bootstrapped(self) -> tuple[list[Waiting], list[Bootstrapping]]:
        """Take out every request whose bootstrap has ended: those that are ready, and those that failed.

        A ready request that finds no free metadata slot stays, and the scan goes on behind it: a starved request must not keep a failed
        one from being cleaned up.
        """
        ready: list[Waiting] = []
        failed: list[Bootstrapping] = []
        for entry in list(self._queue.values()):
            state = entry.sender.poll()
            if state == KVPoll.FAILED:
                failed.append(self.pop(entry.request.request_id))
            elif state > KVPoll.BOOTSTRAPPING and (waiting := self.finalize_bootstrap(entry)):
                self.pop(entry.request.request_id)
                ready.append(waiting)
        return ready, failed

    def finalize_bootstrap(self, entry: Bootstrapping) -> Waiting | None:
        """Take the metadata slot and fix where sending starts; None, and nothing taken, where no slot is free."""
        slot = self._metadata.allocate()
        if slot is None:
            return None
        return Waiting(entry.request, entry.sender, slot, entry.sender.decode_prefix_tokens // self._page_size)
