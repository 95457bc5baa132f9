"""Faults of the decode scheduler."""

from __future__ import annotations

from tests.mutants.base import Mutant

DECODE = "scheduler/decode.py"
RECEPTIONS = "scheduler/receptions.py"
SEQUENCE = "scheduler/sequence.py"
STATES = "scheduler/decode_states.py"

MUTANTS = (
    Mutant(
        "a lease is released twice",
        DECODE,
        """        self.memory.publish(seq.lease, answer.tokens[:-1])
""",
        """        self.memory.publish(seq.lease, answer.tokens[:-1])
        self.memory.release(seq.lease)
""",
        "its pages are given to two owners",
        (3, 4, 5),
    ),
    Mutant(
        "results of ended sequences are taken in",
        DECODE,
        """        if not part.seq.is_dropped:
            if part.token""",
        """        if True:
            if part.token""",
        "a token follows the end of the answer",
        (3, 7, 13),
    ),
    Mutant(
        "the tokens of earlier attempts do not count",
        SEQUENCE,
        "return self.request.num_prior + position - len(self.request.prompt)",
        "return position - len(self.request.prompt)",
        "an answer that goes on elsewhere starts at index 0 again",
        (15, 30, 46),
    ),
    Mutant(
        "a retraction loses a token",
        DECODE,
        "self._line.put_back(replace(seq.answer))",
        "self._line.put_back(replace(seq.answer, tokens=seq.answer.tokens[:-1]))",
        "a token that the client has is made again",
        (27, 50, 57),
    ),
    Mutant(
        "a retracted sequence is fetched again",
        STATES,
        "return answer.request.prefill is not None and answer.request_id not in self._retracted",
        "return answer.request.prefill is not None",
        "its room has ended long ago",
        (1, 57, 100),
    ),
    Mutant(
        "a retraction publishes the page that is being written",
        DECODE,
        "        num_computed = min(seq.position, len(seq.answer.tokens))\n",
        "        num_computed = len(seq.answer.tokens)\n",
        "the KV of the last token need not exist",
        (269, 590, 1949),
    ),
    Mutant(
        "a metadata row of another room is taken",
        STATES,
        ".for_room(entry.answer.request.room)",
        "",
        "a token of another request gets into the answer",
        (670, 752, 756),
    ),
    Mutant(
        "the index of the first token is not looked at",
        STATES,
        "if row.step != entry.answer.next_index:",
        "if False:",
        "a stale row becomes a token",
        (657, 1476, 1814),
    ),
    Mutant(
        "chunks are installed in any order",
        RECEPTIONS,
        "if chunk.first_page != entry.num_pages or end >",
        "if end >",
        "a lost chunk leaves a hole",
        (40, 48, 50),
    ),
    Mutant(
        "missing pages are not noticed",
        STATES,
        "if entry.num_pages != num_pages:",
        "if False:",
        "decode would read pages that never arrived",
        (48, 101, 124),
    ),
    Mutant(
        "a refused reservation keeps its metadata slot",
        DECODE,
        """        if lease is None:
            self.metadata.free(metadata_slot)
            return False
""",
        """        if lease is None:
            return False
""",
        "every try to admit costs a slot",
        (2, 6, 10),
    ),
)
