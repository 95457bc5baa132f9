"""Faults of the prefill scheduler, its bootstrap queue, its forwards and its chunks."""

from __future__ import annotations

from tests.mutants.base import Mutant

BOOTSTRAP = "scheduler/bootstrap.py"
CHUNKS = "scheduler/chunks.py"
FORWARDS = "scheduler/forwards.py"
OUTBOUND = "scheduler/outbound.py"
PREFILL = "scheduler/prefill.py"
SENDING = "scheduler/sending.py"

MUTANTS = (
    Mutant(
        "a starved request ends the scan",
        BOOTSTRAP,
        """            elif state > KVPoll.BOOTSTRAPPING and self.finalize_bootstrap(ticket):
                ready""",
        """            elif state > KVPoll.BOOTSTRAPPING and not self.finalize_bootstrap(ticket):
                break
            elif state > KVPoll.BOOTSTRAPPING:
                ready""",
        "a failed request behind it is not cleaned up in the same pass",
        (37, 104, 1965),
    ),
    Mutant(
        "an abort keeps the metadata slot",
        PREFILL,
        """        ticket.sender.fail(message)
        self._close(ticket)
""",
        """        ticket.sender.fail(message)
        self._deadlines.remove(ticket.request_id)
""",
        "every abort costs a slot for good",
        (11, 15, 20),
    ),
    Mutant(
        "bootstrap is finalized before it has ended",
        BOOTSTRAP,
        "if self.poll(ticket) <= KVPoll.BOOTSTRAPPING or not",
        "if self.poll(ticket) < KVPoll.BOOTSTRAPPING or not",
        "pages would be sent before decode has said where they start",
        (6, 7, 8),
    ),
    Mutant(
        "a retry is not counted",
        FORWARDS,
        "        ticket.num_retries += 1\n",
        "",
        "a request is computed more than N + 1 times",
        (7, 27, 29),
    ),
    Mutant(
        "sending starts one page too late",
        BOOTSTRAP,
        "ticket.sender.decode_prefix_tokens // self._page_size\n",
        "-(-(ticket.sender.decode_prefix_tokens + 1) // self._page_size)\n",
        "decode never gets the first page that it lacks",
        (2, 3, 4),
    ),
    Mutant(
        "pages are published when they are leased",
        FORWARDS,
        """            return None
        cached =""",
        """            return None
        self._memory.publish(lease, prompt)
        cached =""",
        "others read pages that nobody has computed",
        (3, 5, 7),
    ),
    Mutant(
        "an aborted prompt waits for its step",
        FORWARDS,
        """        outgoing = self._outgoing[request_id]
        outgoing.seq.is_aborted = True
""",
        """        outgoing = self._outgoing[request_id]
""",
        "the result of the step finds nobody",
        (7, 11, 40),
    ),
    Mutant(
        "parked requests are not looked at",
        PREFILL,
        """            self._look_at_outgoing(outgoing)
        for ticket""",
        """            if outgoing.parked is None:
                self._look_at_outgoing(outgoing)
        for ticket""",
        "the end of bootstrap never wakes them",
        (8, 21, 40),
    ),
    Mutant(
        "parked requests keep their pages",
        PREFILL,
        "        while seq is None and ticket.is_bootstrapped and (parked := self._forwards.last_parked()):\n",
        "        while seq is None and ticket.is_bootstrapped and (parked := None):\n",
        "a bootstrapped request waits for one that waits for it",
        (359, 460, 629),
    ),
    Mutant(
        "optimists keep their metadata slots",
        PREFILL,
        "        while self.metadata.num_free == 0 and self.bootstrap.num_starved():\n",
        "        while False:\n",
        "a bootstrapped request waits for one that waits for it",
        (165, 169, 460),
    ),
    Mutant(
        "the metadata row leaves before the last page",
        PREFILL,
        "(ticket.next_page or 0) < self._sending.sendable_pages(outgoing.seq)",
        "(ticket.next_page or 0) + 1 < self._sending.sendable_pages(outgoing.seq)",
        "decode takes the transfer for complete",
        (4, 8, 28),
    ),
    Mutant(
        "a failed request keeps its deadline",
        PREFILL,
        """        self._close(ticket)
        self._outcomes.fail""",
        """        self.bootstrap.maybe_release_metadata_buffer(ticket)
        self._outcomes.fail""",
        "the heap of deadlines grows with every failure",
        (3, 11, 15),
    ),
    Mutant(
        "a prompt that ends with its first token keeps its room",
        PREFILL,
        """        ticket.sender.fail("the answer ended with its first token")
""",
        "",
        "decode holds a reservation for an answer that is over",
        (5, 20, 25),
    ),
    Mutant(
        "the last token of a prompt is taken from the cache",
        FORWARDS,
        "self._memory.lease(prompt, max_cached_tokens(rows, len(prompt)), len(prompt))",
        "self._memory.lease(prompt, len(prompt), len(prompt))",
        "nothing is computed, so nothing chooses the first token",
        (87, 118, 123),
    ),
    Mutant(
        "pages leave before the step that computes them",
        PREFILL,
        "self._forwards[part.seq.answer.request_id], part.start)",
        "self._forwards[part.seq.answer.request_id], part.end)",
        "decode gets what the page held before",
        (5, 12, 13),
    ),
    Mutant(
        "an early send goes on from its own end",
        SENDING,
        "first, ticket.next_page = ticket.next_page, min(end, ticket.next_page + self._max_chunk_pages)",
        "first, ticket.next_page = ticket.next_page, ticket.next_page + self._max_chunk_pages",
        "pages behind the chunk are skipped",
        (0, 3, 19),
    ),
    Mutant(
        "a chunk larger than its budget",
        CHUNKS,
        "        if count < remaining:\n            count = (seq.num_launched + count) // page_size * page_size - seq.num_launched\n",
        "        if count < remaining:\n            count = -(-(seq.num_launched + count) // page_size) * page_size - seq.num_launched\n",
        "a chunk reaches behind the prompt",
        (3, 8, 33),
    ),
    Mutant(
        "a token leaves before bootstrap has ended",
        PREFILL,
        "        elif outgoing.ticket.is_bootstrapped:\n",
        "        elif True:\n",
        "a side effect of a forward that may yet come to nothing",
        (6, 10, 19),
    ),
    Mutant(
        "held chunks stay when their request is gone",
        FORWARDS,
        "        outgoing.held.drop()\n",
        "",
        "copies of pages fill the holding place until nothing can be held",
        (19, 27, 38),
    ),
    Mutant(
        "pages that need not leave keep their holding place",
        OUTBOUND,
        "            self._place.give_back(self._chunks.popleft().num_pages)\n        if",
        "            self._chunks.popleft()\n        if",
        "places of pages that decode has already are lost",
        (16, 34, 39),
    ),
    Mutant(
        "pages are held before they are computed",
        SENDING,
        "yield from self._holds_until(outgoing, end)",
        "yield from self._holds_until(outgoing, len(outgoing.seq.lease.pages))",
        "what leaves later is what the pages held before",
        (16, 21, 28),
    ),
)
