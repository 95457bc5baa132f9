"""Row 27: one long prompt while fifty streams decode. The streams go on, because no step of theirs holds a row of the prompt."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.goldens import load_goldens
from tests.live import Client, check_idle, serving, wait_until

pytestmark = pytest.mark.live

GOLDENS = {golden.name: golden for golden in load_goldens()}
LONG, SOURCE = GOLDENS["tokens-513"], GOLDENS["long"].prompt_ids
NUM_STREAMS = 50
PROMPT_TOKENS = 16
ANSWER_TOKENS = 24
SLOTS = NUM_STREAMS + 2
"""The long prompt finds a slot at once, whatever the streams do."""
CHUNK = 64
PROMPTS = [SOURCE[first : first + PROMPT_TOKENS] for first in range(3, 3 + NUM_STREAMS * PROMPT_TOKENS, PROMPT_TOKENS)]
SETTINGS = {
    "engine__num_pages": 256,
    "engine__max_running": SLOTS,
    "engine__prefill_buckets": [CHUNK],
    "engine__decode_buckets": [SLOTS],
    "scheduler__max_step_tokens": CHUNK,
}


@pytest.fixture(scope="module")
def wide(live_folder: Path) -> Iterator[Client]:
    """Prefill and decode as two processes, with a slot for everybody."""
    with serving(live_folder, "wide", "all", **SETTINGS) as served:
        client = Client(served.await_ready()["url"])
        yield client
        client.close()


class Listeners:
    """Fifty streams, each read in a thread of its own. `ids` grow as tokens come."""

    def __init__(self, client: Client):
        self.ids: list[list[int]] = [[] for _ in PROMPTS]
        self._errors: list[Exception] = []
        pairs = zip(PROMPTS, self.ids, strict=True)
        self._threads = [threading.Thread(target=self._read, args=(client, prompt, ids)) for prompt, ids in pairs]
        for thread in self._threads:
            thread.start()

    def lengths(self) -> list[int]:
        return [len(ids) for ids in self.ids]

    def join(self) -> list[list[int]]:
        """Every answer, once all have ended; raises what broke a stream."""
        for thread in self._threads:
            thread.join(120.0)
            assert not thread.is_alive(), "a stream does not end"
        if self._errors:
            raise self._errors[0]
        return self.ids

    def _read(self, client: Client, prompt: list[int], ids: list[int]) -> None:
        try:
            for token in client.stream(prompt, ANSWER_TOKENS, ignore_eos=True):
                ids.append(token)
        except Exception as error:  # told by `join`
            self._errors.append(error)


def num_prompt_steps(client: Client, role: str) -> float:
    """Chunks of prompts that the workers of a role have computed."""
    return client.sample("pdjax_worker_stage_ends_total", role=role, stage="chunk")


def test_fifty_streams_go_on_while_a_long_prompt_is_computed(wide: Client) -> None:
    streams = Listeners(wide)
    wait_until(lambda: min(streams.lengths()) > 0, "the first token of every stream", 120.0)
    before = streams.lengths()
    assert max(before) < ANSWER_TOKENS, "a stream has ended before the long prompt came"
    long = wide.stream(LONG.prompt_ids, 24)
    first = next(long)
    after = streams.lengths()
    answer = [first, *long]
    together = streams.join()
    check_idle(wide)

    assert answer == LONG.output_ids
    gained = [now - then for now, then in zip(after, before, strict=True)]
    assert min(gained) > 0, f"tokens of each stream while the long prompt was computed: {gained}"
    assert num_prompt_steps(wide, "prefill") >= NUM_STREAMS + len(LONG.prompt_ids) / CHUNK
    assert num_prompt_steps(wide, "decode") == 0, "a step of decode computed a part of a prompt"
    assert Listeners(wide).join() == together
    check_idle(wide)
