"""Traces of requests in the format of the Mooncake project, scaled to a smaller machine and turned into prompts.

One JSON object a line: `timestamp` in milliseconds, `input_length` and `output_length` in tokens, and `hash_ids`, one for each block of 512
input tokens, the last of which may be shorter. Equal ids stand for equal tokens behind equal beginnings: what a prefix cache finds.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pdjax.benchmarks.serve import FIRST_TOKEN_ID

BLOCK_TOKENS = 512
SAMPLE = Path(__file__).parent / "traces" / "mooncake_conversation_200.jsonl"
"""The first 200 requests of a trace of conversations; traces/README.md says whose."""


class TraceRequest(NamedTuple):
    """One request as recorded. `blocks`: the id of each block of `block_tokens` input tokens, the last one may be shorter."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]


class Scale(NamedTuple):
    """`lengths` and `outputs`: factors on input and output tokens. `time`: factor on arrival times; above 1 they come more slowly."""

    lengths: float
    outputs: float
    time: float


class Replayed(NamedTuple):
    """One request to send: `arrival_s` after the start, `output_tokens` to ask for."""

    arrival_s: float
    prompt: list[int]
    output_tokens: int


def read_trace(path: Path) -> list[TraceRequest]:
    """Raises ValueError naming the line of what is no request, OSError where `path` cannot be read."""
    requests = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                requests.append(_parse(json.loads(line)))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}, line {number}: {_in_words(error)}") from None
    if not requests:
        raise ValueError(f"{path} holds no requests")
    if any(later.arrival_s < sooner.arrival_s for sooner, later in itertools.pairwise(requests)):
        raise ValueError(f"{path}: timestamps must not fall from line to line")
    return requests


def _parse(row: dict[str, Any]) -> TraceRequest:
    lengths = int(row["input_length"]), int(row["output_length"])
    request = TraceRequest(row["timestamp"] / 1e3, *lengths, tuple(map(int, row["hash_ids"])))
    if request.input_tokens < 1 or request.output_tokens < 1:
        raise ValueError(f"lengths must be at least 1, got {request.input_tokens} and {request.output_tokens}")
    expected = -(-request.input_tokens // BLOCK_TOKENS)
    if len(request.blocks) != expected:
        raise ValueError(f"{request.input_tokens} input tokens have {expected} blocks of {BLOCK_TOKENS}, got {len(request.blocks)} hash_ids")
    return request


def _in_words(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)


def spread_arrivals(requests: Sequence[TraceRequest]) -> list[TraceRequest]:
    """Requests with one timestamp are spread evenly until the next one: traces are recorded in steps of seconds, and what came in one step
    did not come at once. Those of the last step are spread as those of the step before it."""
    steps = [list(group) for _, group in itertools.groupby(requests, key=lambda request: request.arrival_s)]
    starts_s = [step[0].arrival_s for step in steps]
    lengths_s = [after - before for before, after in itertools.pairwise(starts_s)]
    lengths_s.append(lengths_s[-1] if lengths_s else 0.0)
    return [
        request._replace(arrival_s=start_s + length_s * place / len(step))
        for step, start_s, length_s in zip(steps, starts_s, lengths_s, strict=True)
        for place, request in enumerate(step)
    ]


def replay_of(requests: Iterable[TraceRequest], scale: Scale, seed: str, vocab: int) -> list[Replayed]:
    """Prompts and times to replay. `seed` decides the tokens; equal blocks have equal tokens within one replay."""
    vocabulary = _Blocks(scale.lengths, seed, vocab)
    return [
        Replayed(request.arrival_s * scale.time, vocabulary.prompt(request), max(1, round(request.output_tokens * scale.outputs)))
        for request in requests
    ]


class _Blocks:
    """The tokens of blocks. The borders of blocks are scaled, not their lengths, so that rounding errors do not add up."""

    def __init__(self, scale: float, seed: str, vocab: int):
        self._scale = scale
        self._seed = seed
        self._vocab = vocab

    def prompt(self, request: TraceRequest) -> list[int]:
        """At least one token. What a prompt shares with others ends where its last equal block ends."""
        num_tokens = max(1, round(request.input_tokens * self._scale))
        tokens: list[int] = []
        for place, block in enumerate(request.blocks):
            end = round((place + 1) * BLOCK_TOKENS * self._scale)
            tokens += self._tokens(block, min(end, num_tokens) - len(tokens))
        return tokens if len(tokens) == num_tokens else tokens + self._tokens(request.blocks[-1], num_tokens - len(tokens))

    def _tokens(self, block: int, count: int) -> list[int]:
        rng = random.Random(f"{self._seed} {block}")
        return [rng.randrange(FIRST_TOKEN_ID, self._vocab) for _ in range(max(0, count))]


def span_s(arrivals_s: Sequence[float]) -> float:
    """How long it takes from the first arrival to the one that would follow the last, at the mean distance."""
    if len(arrivals_s) < 2:
        return 0.0
    return (arrivals_s[-1] - arrivals_s[0]) * len(arrivals_s) / (len(arrivals_s) - 1)
