"""Faults of the router's policy."""

from __future__ import annotations

from tests.mutants.base import Mutant

MUTANTS = (
    Mutant(
        "a full worker is asked again at once",
        "router/policy.py",
        "usable = [member for member in members if member.instance_id not in tried.full]",
        "usable = members",
        "the router asks for ever",
        (245, 975, 1210),
    ),
    Mutant(
        "a retry leaves out the tokens so far",
        "router/sequence.py",
        "return self.prompt + self.tokens",
        "return self.prompt",
        "the answer starts anew in the middle",
        (15, 30, 46),
    ),
    Mutant(
        "a lost transfer breaks an answer that has just ended",
        "router/merge.py",
        """            self._decode_end = failed
            return
        self.outcome = Broken""",
        """            self._decode_end = failed
        self.outcome = Broken""",
        "decode's word counts more than prefill's, which is still on its way",
        (43, 97, 165),
    ),
    Mutant(
        "a sequence is counted as outstanding for ever",
        "router/fleet.py",
        "            dispatch.member.outstanding_sequences -= 1\n",
        "",
        "the router believes its workers full",
        (0, 3, 4),
    ),
)
