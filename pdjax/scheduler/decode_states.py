"""The phases of a sequence on a decode worker, the line it waits in, and what the scheduler asks of a transport."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from pdjax.protocol import KVPoll, Peer
from pdjax.scheduler.memory import Lease
from pdjax.scheduler.metadata import MetadataRow
from pdjax.scheduler.sequence import Answer


class Chunk(Protocol):
    first_page: int
    num_pages: int
    kv: object


class Receiver(Protocol):
    """The part of a transport's receiver that the scheduler uses; `pdjax.transfer.base.KVReceiver` says what each does."""

    def poll(self) -> KVPoll: ...
    def take(self) -> Sequence[Chunk]: ...
    def metadata(self) -> bytes: ...
    def abort(self) -> None: ...
    def failure(self) -> str | None: ...
    def is_refused(self) -> bool: ...


class Sink(Protocol):
    """Where receivers come from; `pdjax.transfer.base.KVSink`."""

    def open(self, room: int, source: Peer, decode_prefix_tokens: int) -> Receiver: ...


@dataclass(slots=True, eq=False)
class Receiving:
    """Owns a request slot, a metadata slot, a lease for the prompt and the reserve, and its receiver.

    `num_pages`: the prompt's first pages that are in the pool, those of decode's own cache included. `state`: the room's, as it was
    before the last chunks were taken, so that SUCCESS means that nothing is left to install. `fault`: what was wrong with a chunk.
    """

    answer: Answer
    receiver: Receiver
    slot: int
    metadata_slot: int
    lease: Lease
    num_pages: int
    state: KVPoll = KVPoll.BOOTSTRAPPING
    fault: str | None = None


@dataclass(slots=True, eq=False)
class Running:
    """Owns a request slot and a lease.

    `position`: where the next step writes KV; the tokens before it are in the pool or in flight. `next_token`: the token at `position`
    where the host knows it and the device does not (right after a transfer); None: the device has it from its previous step.
    `admitted`: rises with each admission; under page pressure the youngest is retracted. `is_dropped` is set when it ends, is
    aborted or is retracted; results of steps still in flight are then ignored.
    """

    answer: Answer
    slot: int
    lease: Lease
    position: int
    next_token: int | None
    num_cached: int
    admitted: int
    is_dropped: bool = False

    @property
    def next_index(self) -> int:
        """Index in the answer of the token that the next step samples."""
        return self.answer.index_at(self.position + 1)

    @property
    def is_launched(self) -> bool:
        """Whether the steps in flight reach the answer's last token."""
        return self.next_index >= self.answer.request.sampling.max_tokens


class InstallOrder(NamedTuple):
    """Write `kv`, as it came out of the transport, to `pages` of the pool now."""

    pages: list[int]
    kv: object


class DecodePart(NamedTuple):
    """One sequence's share of a decode step, as it was when the step was launched."""

    seq: Running
    token: int | None
    position: int
    index: int


class WaitingLine:
    """Sequences that hold nothing. Retracted ones go before new ones, the one retracted last first."""

    def __init__(self) -> None:
        self._new: dict[str, Answer] = {}
        self._retracted: OrderedDict[str, Answer] = OrderedDict()

    def __len__(self) -> int:
        return len(self._new) + len(self._retracted)

    @property
    def num_new(self) -> int:
        return len(self._new)

    @property
    def num_retracted(self) -> int:
        return len(self._retracted)

    def add(self, answer: Answer) -> None:
        self._new[answer.request_id] = answer

    def put_back(self, answer: Answer) -> None:
        """Line up a retracted sequence."""
        self._retracted[answer.request_id] = answer
        self._retracted.move_to_end(answer.request_id, last=False)

    def head(self) -> Answer | None:
        return next(iter((self._retracted or self._new).values()), None)

    def is_remote(self, answer: Answer) -> bool:
        """Whether the KV of `answer` comes from a prefill worker; that of a retracted sequence has been there already and is gone."""
        return answer.request.prefill is not None and answer.request_id not in self._retracted

    def remove(self, request_id: str) -> bool:
        """Whether the request stood in line."""
        return (self._retracted.pop(request_id, None) or self._new.pop(request_id, None)) is not None


def received_row(entry: Receiving, num_pages: int) -> MetadataRow:
    """The metadata row of a complete transfer of `num_pages`. Raises ValueError where anything is missing or is not this sequence's."""
    if entry.num_pages != num_pages:
        raise ValueError(f"{entry.num_pages} pages arrived of {num_pages}")
    row = MetadataRow.from_bytes(entry.receiver.metadata()).for_room(entry.answer.request.room)
    if row.step != entry.answer.next_index:
        raise ValueError(f"the first token has index {row.step}, expected {entry.answer.next_index}")
    return row
