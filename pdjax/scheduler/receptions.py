"""The transfers that a decode worker waits for, and what each of them holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pdjax.protocol import KVPoll
from pdjax.scheduler.decode_states import InstallOrder, Receiving, Sink, received_row
from pdjax.scheduler.memory import KVMemory, Lease
from pdjax.scheduler.metadata import MetadataRow, MetadataSlots
from pdjax.scheduler.sequence import Answer
from pdjax.scheduler.slots import SlotPool
from pdjax.scheduler.timeline import Recorder


class TransferFault(NamedTuple):
    """Why a transfer came to nothing. `kind`: as of `Failed`."""

    kind: str
    message: str


class Receptions:
    """Sequences whose KV is on its way. Owns their request slots, metadata slots, leases and receivers."""

    def __init__(self, memory: KVMemory, slots: SlotPool, metadata: MetadataSlots, sink: Sink, recorder: Recorder):
        self._memory = memory
        self._slots = slots
        self._metadata = metadata
        self._sink = sink
        self._recorder = recorder
        self._receiving: dict[str, Receiving] = {}

    def __len__(self) -> int:
        return len(self._receiving)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._receiving

    def __iter__(self) -> Iterator[Receiving]:
        """Of those that there are now, whatever ends meanwhile."""
        return iter(list(self._receiving.values()))

    def open(self, answer: Answer, slot: int, metadata_slot: int, lease: Lease) -> None:
        """Announce the sequence to its prefill worker. Takes over what is handed in."""
        request = answer.request
        assert request.prefill is not None, f"{request.request_id} has no prefill worker to hear from"
        self._recorder.mark(request.request_id, "transfer")
        receiver = self._sink.open(request.room, request.prefill, lease.num_shared * self._memory.page_size)
        self._receiving[request.request_id] = Receiving(answer, receiver, slot, metadata_slot, lease, lease.num_shared)

    def installs(self) -> Iterator[InstallOrder]:
        """Chunks that have arrived; one that is not due is a fault of its transfer."""
        for entry in self:
            entry.state = entry.receiver.poll()
            for chunk in entry.receiver.take():
                end = chunk.first_page + chunk.num_pages
                if chunk.first_page != entry.num_pages or end > self._memory.pages_for(len(entry.answer.tokens)):
                    entry.fault = f"pages {chunk.first_page}..{end} arrived where page {entry.num_pages} was due"
                    break
                entry.num_pages = end
                self._recorder.note(entry.answer.request_id, "receive", "receives", chunk.num_pages)
                yield InstallOrder(entry.lease.pages[chunk.first_page : end], chunk.kv)

    def result(self, entry: Receiving) -> MetadataRow | TransferFault | None:
        """The row of a transfer that is complete and right, what is wrong with it, or None where it goes on."""
        if entry.fault is not None or entry.state == KVPoll.FAILED:
            kind = "rejected" if entry.receiver.is_refused() else "transfer"
            return TransferFault(kind, entry.fault or entry.receiver.failure() or "transfer failed")
        if entry.state != KVPoll.SUCCESS:
            return None
        try:
            return received_row(entry, self._memory.pages_for(len(entry.answer.tokens)))
        except ValueError as error:
            return TransferFault("transfer", str(error))

    def close(self, entry: Receiving) -> None:
        """The transfer is complete. Request slot and lease are the caller's now."""
        del self._receiving[entry.answer.request_id]
        self._metadata.free(entry.metadata_slot)

    def abort(self, request_id: str) -> None:
        """Let go of the transfer and of all that it holds."""
        entry = self._receiving[request_id]
        self.close(entry)
        entry.receiver.abort()
        self._memory.release(entry.lease)
        self._slots.free(entry.slot)
