"""The bootstrap queue of a prefill worker: requests whose decode side has not announced itself yet.

A request here holds a sender and no pages. It takes a metadata slot when it leaves: because its bootstrap has ended, or because it
goes ahead of it (optimistic prefill, after sgl-project/sglang PR 26780).

What a pass over the queue costs depends on what has happened since the last one, not on how many wait: the transport tells which rooms
have changed. What it cannot tell, a deadline of its own that has passed, is found by looking at a few requests each time, in turn.
"""

from __future__ import annotations

from collections import deque
from itertools import islice

from pdjax.protocol import KVPoll, SequenceRequest
from pdjax.scheduler.faults import NO_FAULTS, FaultHooks
from pdjax.scheduler.graces import Backoff, Graces
from pdjax.scheduler.metadata import MetadataSlots
from pdjax.scheduler.rotation import Rotation
from pdjax.scheduler.ticket import Source, Ticket
from pdjax.scheduler.timeline import NO_RECORDER, Recorder

LOOKS_A_PASS = 32
"""Waiting requests that are looked at although nothing is known to have happened to them."""


class BootstrapQueue:
    """Keeps order of arrival. Whoever is popped from it holds a metadata slot, or has failed.

    `retries`: forwards that may be lost to one request because decode had not announced itself in time; 0: nobody goes ahead.
    `grace_s`: how long a request waits for its bootstrap before it goes ahead. Announcements mostly come within milliseconds, and a
    request that is bootstrapped when its forward is launched can send its cached prefix before it. `backoff`: the same after a lost
    forward.
    """

    def __init__(
        self,
        source: Source,
        metadata: MetadataSlots,
        page_size: int,
        retries: int = 0,
        faults: FaultHooks = NO_FAULTS,
        recorder: Recorder = NO_RECORDER,
        grace_s: float = 0.0,
        backoff: Backoff = Backoff(),
    ):
        self._source = source
        self._metadata = metadata
        self._page_size = page_size
        self._retries = retries
        self._faults = faults
        self._recorder = recorder
        self._queue: Rotation[Ticket] = Rotation()
        self._by_room: dict[int, Ticket] = {}
        self._unseen: deque[Ticket] = deque()
        self._starved: dict[str, Ticket] = {}
        self._graces = Graces(grace_s, backoff)

    def __len__(self) -> int:
        return len(self._queue)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._queue

    def create_sender(self, request: SequenceRequest) -> None:
        """Open the request's room and queue it. Raises ValueError where the room is taken."""
        sender = self._source.create_sender(request.room)
        self._recorder.begin(request.request_id, "bootstrap_queue")
        self._recorder.open(request.request_id, "bootstrap")
        self._add(Ticket(request, sender))

    def add(self, ticket: Ticket) -> None:
        """Queue a ticket that comes back, after a lost forward or for want of slots. Its metadata slot is given back."""
        self.maybe_release_metadata_buffer(ticket)
        self._recorder.mark(ticket.request_id, "bootstrap_queue")
        self._add(ticket)

    def pop(self, request_id: str) -> Ticket:
        ticket = self._queue.pop(request_id)
        del self._by_room[ticket.request.room]
        self._starved.pop(request_id, None)
        self._graces.discard(request_id)
        return ticket

    def pop_bootstrapped(self) -> tuple[list[Ticket], list[Ticket]]:
        """Take out the requests whose bootstrap is known to have ended: those that are ready, and those that failed.

        A ready request that finds no free metadata slot stays, and the scan goes on behind it: a starved request must not keep a failed
        one from being cleaned up.
        """
        ready: list[Ticket] = []
        failed: list[Ticket] = []
        for ticket in self._to_look_at():
            state = self.poll(ticket)
            if state == KVPoll.FAILED:
                failed.append(self.pop(ticket.request_id))
            elif state > KVPoll.BOOTSTRAPPING and self.finalize_bootstrap(ticket):
                ready.append(self._pop_to_line(ticket))
            elif state > KVPoll.BOOTSTRAPPING:
                self._starved[ticket.request_id] = ticket
                self._graces.discard(ticket.request_id)
        return ready, failed

    def _to_look_at(self) -> list[Ticket]:
        """Each once: of those that starve as many as there are slots, the oldest first; who is new; whose room has changed; and a few."""
        found = {ticket.request_id: ticket for ticket in islice(self._starved.values(), self._metadata.num_free)}
        changed = (self._by_room.get(room) for room in self._source.take_changed())
        for ticket in (*self._unseen, *(ticket for ticket in changed if ticket), *self._queue.next(LOOKS_A_PASS)):
            if ticket.request_id in self._queue:
                found[ticket.request_id] = ticket
        self._unseen.clear()
        return list(found.values())

    def pop_optimistic(self, now_s: float) -> list[Ticket]:
        """Take out every request that may go ahead of its bootstrap by now and for which a metadata slot is free."""
        hopeful = []
        for ticket in list(islice(self._graces.over(now_s).values(), self._metadata.num_free)):
            if self.poll(ticket) == KVPoll.BOOTSTRAPPING and self.ensure_metadata_buffer(ticket):
                hopeful.append(self._pop_to_line(ticket))
        return hopeful

    def next_hopeful_s(self) -> float | None:
        """When the next request's grace ends."""
        return self._graces.next_s()

    def num_starved(self) -> int:
        """Requests whose bootstrap is known to have ended and that wait for a metadata slot only."""
        return len(self._starved)

    def get_num_optimistic_prefill_retries(self) -> int:
        return self._retries

    def has_retries_left(self, ticket: Ticket) -> bool:
        return ticket.num_retries < self.get_num_optimistic_prefill_retries()

    def finalize_bootstrap(self, ticket: Ticket) -> bool:
        """Note where sending starts, once the sender is bootstrapped and a metadata slot is held. False, and nothing changed, otherwise."""
        if ticket.is_bootstrapped:
            return True
        if self.poll(ticket) <= KVPoll.BOOTSTRAPPING or not self.ensure_metadata_buffer(ticket):
            return False
        ticket.next_page = ticket.sender.decode_prefix_tokens // self._page_size
        self._recorder.close(ticket.request_id, "bootstrap")
        return True

    def reset_prefill_retry_time(self, ticket: Ticket) -> None:
        """A retry that is bootstrapped lines up: its time in the line starts anew, and what its last try took stays with that try."""
        self._recorder.mark(ticket.request_id, "waiting")

    def ensure_metadata_buffer(self, ticket: Ticket) -> bool:
        """Whether the ticket holds a metadata slot now."""
        if ticket.metadata_slot is None:
            ticket.metadata_slot = self._metadata.allocate()
        return ticket.metadata_slot is not None

    def maybe_release_metadata_buffer(self, ticket: Ticket) -> None:
        """Give the metadata slot back where one is held."""
        if ticket.metadata_slot is not None:
            self._metadata.free(ticket.metadata_slot)
            ticket.metadata_slot = None

    def should_force_retry(self, ticket: Ticket) -> bool:
        """Whether a test wants this request's first forward to be lost."""
        is_first_try = ticket.num_retries == 0 and ticket.request.num_prior == 0
        return is_first_try and self.get_num_optimistic_prefill_retries() > 0 and self._faults.force_retry(ticket.request_id)

    def poll(self, ticket: Ticket) -> KVPoll:
        """The sender's state; a test may have any look find it failed."""
        state = ticket.sender.poll()
        if state not in (KVPoll.FAILED, KVPoll.SUCCESS) and self._faults.fail_poll():
            ticket.sender.fail("failure injected by a test")
        return ticket.sender.poll()

    def _add(self, ticket: Ticket) -> None:
        self._queue.add(ticket.request_id, ticket)
        self._by_room[ticket.request.room] = ticket
        self._unseen.append(ticket)
        if self.has_retries_left(ticket):
            self._graces.add(ticket)

    def _pop_to_line(self, ticket: Ticket) -> Ticket:
        self._recorder.mark(ticket.request_id, "waiting")
        return self.pop(ticket.request_id)
