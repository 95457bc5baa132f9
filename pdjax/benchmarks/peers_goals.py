"""What the figures of a comparison are held against: goals as ratios to other engines, and the machine's own floors.

Everything here is arithmetic on the JSON that `pdjax.benchmarks.peers` writes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from pdjax.benchmarks.ceilings import QUICKSTART_GFLOP_PER_TOKEN, QUICKSTART_WEIGHT_BYTES
from pdjax.benchmarks.peers_engines import STEP_CONTEXT

PDJAX = "pdjax"


class Row(NamedTuple):
    """One line of the tables. Times are in seconds in the JSON and in milliseconds on the page; `is_rate`: more is better, a second."""

    key: str
    label: str
    is_rate: bool = False


class Goal(NamedTuple):
    """pdjax's figure over `peer`'s must be at most `limit`, or at least that much where the row is a rate."""

    row: str
    peer: str
    limit: float


class Comparison(NamedTuple):
    """`ratio`: pdjax over the peer. `goal` and `is_met` are None where nothing was set out to reach. `is_slower`: pdjax does worse."""

    row: Row
    peer: str
    ratio: float
    goal: float | None
    is_met: bool | None
    is_slower: bool


class Share(NamedTuple):
    """How near a figure comes to the least time that the machine allows: `floor_s` / `measured_s`."""

    label: str
    floor_s: float
    measured_s: float
    goal: float | None

    @property
    def share(self) -> float:
        return self.floor_s / self.measured_s


LENGTHS = (128, 512, 2048)
LONGEST, CACHED = 2048, 1792

ROWS = (
    *(Row(f"ttft_{length}", f"TTFT, {length:,}-token prompt") for length in LENGTHS),
    Row(f"ttft_{LONGEST}_cached", f"TTFT, {LONGEST:,} with {CACHED:,} cached"),
    *(Row(f"beyond_prefill_{length}", f"first token out minus prefill's own time, {length:,}") for length in LENGTHS),
    *(Row(f"second_{length}", f"second token, {length:,}-token prompt") for length in LENGTHS),
    *(Row(f"itl_{length}", f"ITL at {length:,} tokens of context") for length in LENGTHS),
    Row("clients_tokens_per_s", "8 clients x 256 tokens in, 32 out: output tok/s", is_rate=True),
    Row("clients_ttft", "8 clients: TTFT"),
)

_RATIOS: dict[str, dict[str, float]] = {
    "vllm": {
        "ttft_128": 0.62,
        "ttft_512": 0.57,
        "ttft_2048": 0.50,
        "ttft_2048_cached": 0.47,
        "itl_128": 0.47,
        "itl_2048": 0.45,
        "clients_tokens_per_s": 1.6,
    },
    "vllm-pd": {
        "ttft_128": 0.36,
        "ttft_512": 0.49,
        "ttft_2048": 0.42,
        "beyond_prefill_128": 0.05,
        "beyond_prefill_512": 0.05,
        "beyond_prefill_2048": 0.05,
        "itl_128": 0.18,
        "itl_2048": 0.20,
    },
    "llamacpp": {"ttft_128": 0.40, "ttft_512": 0.38, "ttft_2048": 0.42, "itl_128": 2.2, "itl_2048": 1.7},
}
GOALS = tuple(Goal(row, peer, limit) for peer, limits in _RATIOS.items() for row, limit in limits.items())

SHARE_GOALS = {"prefill_512": 0.85, "prefill_2048": 0.75, f"itl_{STEP_CONTEXT}": 0.85}

LAYERS, HIDDEN, KV_BYTES_PER_TOKEN = 30, 576, 46_080
"""Of the quickstart model; KV in float32: 30 layers x 3 heads x 64 x (K and V) x 4 bytes."""


def median_of(run: dict[str, Any], engine: str, row: str) -> float | None:
    """The median of a row; None where it was not measured."""
    stats = run["engines"].get(engine, {}).get("rows", {}).get(row)
    return None if stats is None else stats["median"]


def compare(run: dict[str, Any]) -> list[Comparison]:
    """Every row that pdjax and a peer both have, in the order of ROWS, then of the engines."""
    limits = {(goal.row, goal.peer): goal.limit for goal in GOALS}
    comparisons = []
    for row in ROWS:
        for peer in (engine for engine in run["engines"] if engine != PDJAX):
            own, other = median_of(run, PDJAX, row.key), median_of(run, peer, row.key)
            if own is not None and other is not None:
                comparisons.append(_compare(row, peer, own / other, limits.get((row.key, peer))))
    return comparisons


def _compare(row: Row, peer: str, ratio: float, limit: float | None) -> Comparison:
    if row.is_rate:
        return Comparison(row, peer, ratio, limit, None if limit is None else ratio >= limit, ratio < 1)
    return Comparison(row, peer, ratio, limit, None if limit is None else ratio <= limit, ratio > 1)


def unmeasured_goals(run: dict[str, Any]) -> list[Goal]:
    """Goals that this run says nothing about."""
    measured = {(each.row.key, each.peer) for each in compare(run)}
    return [goal for goal in GOALS if (goal.row, goal.peer) not in measured]


def prefill_gflop(num_tokens: int, num_cached: int = 0) -> float:
    """Arithmetic of the tokens behind `num_cached` of a prompt of `num_tokens`: matrices and causal attention."""
    attention = 2 * (num_tokens**2 - num_cached**2) * HIDDEN * LAYERS / 1e9
    return (num_tokens - num_cached) * QUICKSTART_GFLOP_PER_TOKEN + attention


def decode_bytes(num_context: int) -> int:
    """What one decode step of one sequence reads: all weights and the KV of its context, float32."""
    return QUICKSTART_WEIGHT_BYTES + num_context * KV_BYTES_PER_TOKEN


def shares(run: dict[str, Any]) -> list[Share]:
    """pdjax's figures beside the floors that follow from the ceilings of the same run; empty where either is missing."""
    if run.get("ceilings") is None:
        return []
    ceilings = run["ceilings"]
    gflop_per_s = ceilings["matmul_gflop_per_s"]["best"]
    bytes_per_s = 1e9 * max(ceilings["read_sum_gb_per_s"]["best"], ceilings["read_matvec_gb_per_s"]["best"])
    floors = {}
    for length in LENGTHS:
        floor_s = prefill_gflop(length) / gflop_per_s
        floors[f"ttft_{length}"] = (f"TTFT, {length:,}-token prompt", floor_s)
        floors[f"prefill_{length}"] = (f"the forward of {length:,} tokens alone", floor_s)
    cached_s = prefill_gflop(LONGEST, CACHED) / gflop_per_s
    floors[f"ttft_{LONGEST}_cached"] = (f"TTFT, {LONGEST:,} with {CACHED:,} cached", cached_s)
    for context in sorted({*LENGTHS, STEP_CONTEXT}):
        floors[f"itl_{context}"] = (f"ITL at {context:,} tokens of context", decode_bytes(context) / bytes_per_s)
    measured = ((key, label, floor_s, median_of(run, PDJAX, key)) for key, (label, floor_s) in floors.items())
    return [Share(label, floor_s, value, SHARE_GOALS.get(key)) for key, label, floor_s, value in measured if value is not None]
