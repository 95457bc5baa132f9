"""How much memory a worker takes on each of its chips, worked out from the configuration alone.

Imports no JAX: what does not fit is refused before anything is loaded, on whatever machine the configuration is checked.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from pdjax.checkpoints import open_checkpoint
from pdjax.checkpoints.hub import is_hub_id
from pdjax.config.chips import CHIPS, ChipMemory, ChipName
from pdjax.config.schema import Config
from pdjax.engine.split import check_split, num_pool_heads, values_per_chip
from pdjax.models.shape import ModelShape, WeightSpec, weight_specs

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float8_e4m3fn": 1, "int8": 1}

SCORE_BLOCK_ROWS = 64
"""Rows of a prompt whose logits exist together; as the engine's."""

_HISTORY_BYTES = 5
"""Of one token of the vocabulary in one slot: whether the prompt holds it, and how often the answer does."""

_GIB = 2**30

WorkerRole = Literal["prefill", "decode"]


class MemoryPlan(NamedTuple):
    """Bytes on one chip of one worker; of several ranks in a process each is a worker.

    `pool`: the KV pool. `transit`: copies of pages that have been gathered and not sent, or received and not installed, at most.
    `state`: what the sampler remembers of each request. `activations`: an estimate, see `_activations`. `pool_tokens`: of the whole pool.
    `chip`: None where the configuration names none.
    """

    num_chips: int
    weights: int
    pool: int
    transit: int
    state: int
    activations: int
    num_pages: int
    pool_tokens: int
    chip_name: ChipName | None

    @property
    def total(self) -> int:
        return self.weights + self.pool + self.transit + self.state + self.activations

    @property
    def chip(self) -> ChipMemory | None:
        return None if self.chip_name is None else CHIPS[self.chip_name]

    def lines(self) -> list[str]:
        """The plan for people, one line a part."""
        parts = [
            ("weights", self.weights, ""),
            ("KV pool", self.pool, f"{self.num_pages} pages, {self.pool_tokens} tokens"),
            ("KV on its way", self.transit, "at most"),
            ("sampler state", self.state, ""),
            ("activations", self.activations, "estimate"),
        ]
        lines = [f"{name:<14}{size / _GIB:8.2f} GiB  {remark}".rstrip() for name, size, remark in parts]
        lines.append(f"{'together':<14}{self.total / _GIB:8.2f} GiB")
        if self.chip is not None:
            usable = self.chip.usable_bytes
            lines.append(
                f"{'headroom':<14}{(usable - self.total) / _GIB:8.2f} GiB  of {usable / _GIB:.2f} that programs get of "
                f"the {self.chip.memory_gib:g} GiB of a {self.chip_name}"
            )
        return lines

    def check(self, role: str) -> None:
        """Raises ValueError with what is needed and what there is, where that is too little."""
        if self.chip is None or self.total <= self.chip.usable_bytes:
            return
        parts = {"weights": self.weights, "KV pool": self.pool, "KV on its way": self.transit, "state": self.state}
        listed = ", ".join(f"{name} {size / _GIB:.2f}" for name, size in (parts | {"activations": self.activations}).items())
        raise ValueError(
            f"a {role} worker needs {self.total / _GIB:.2f} GiB on each of its {self.num_chips} chips ({listed}), "
            f"programs get {self.chip.usable_bytes / _GIB:.2f} GiB of the {self.chip.memory_gib:g} GiB of a {self.chip_name}"
        )


def plan_memory(shape: ModelShape, config: Config, role: WorkerRole) -> MemoryPlan:
    """What one chip of one worker holds. Raises ValueError where the model cannot be split over so many chips."""
    number = config.workers(role).tensor_parallel
    check_split(shape, number)
    engine = config.engine
    page_bytes = engine.page_size * _stored(shape, config).kv_bytes_per_token(ITEM_BYTES[config.kv_dtype])
    pool_heads = num_pool_heads(shape, number)
    is_chunk_split = pool_heads == shape.num_kv_heads and config.worker.num_hosts == 1
    return MemoryPlan(
        num_chips=number,
        weights=sum(_weight_bytes(shape, spec, config, number) for spec in weight_specs(shape).values()),
        pool=engine.num_pages * page_bytes * pool_heads // (shape.num_kv_heads * number),
        transit=_pages_in_transit(shape, config, role) * page_bytes // (number if is_chunk_split else 1),
        state=(engine.max_running + 1) * shape.vocab_size * _HISTORY_BYTES,
        activations=_activations(shape, config, number),
        num_pages=engine.num_pages,
        pool_tokens=(engine.num_pages - 1) * engine.page_size,
        chip_name=config.worker.chip,
    )


def _stored(shape: ModelShape, config: Config) -> ModelShape:
    """As its keys and values lie in memory: heads of whole rows."""
    lanes = 1 if config.worker.chip is None else CHIPS[config.worker.chip].lanes
    return shape._replace(head_dim=-(-shape.head_dim // lanes) * lanes)


def memory_report(config: Config, role: str) -> list[str]:
    """What the workers that `--role` is, or starts, take of their chips, in lines for people. Nothing is loaded or fetched.

    Raises ValueError where it is more than there is, or where the model cannot be split over so many chips.
    """
    roles = _worker_roles(config, role)
    if not roles:
        return []
    try:
        shape = _find_shape(config.model.source)
    except (OSError, ValueError) as error:
        return [f"memory: not planned: {error}"]
    lines = []
    for name in roles:
        plan = plan_memory(shape, config, name)
        plan.check(name)
        ranks = config.workers(name).data_parallel
        chips = f"{ranks} ranks of {plan.num_chips}" if ranks > 1 else f"{plan.num_chips}"
        lines += [f"memory of a {name} worker, on each of its chips ({chips}):", *(f"  {line}" for line in plan.lines())]
    return lines


def _weight_bytes(shape: ModelShape, spec: WeightSpec, config: Config, number: int) -> int:
    """Of one weight, on each of `number` chips."""
    values, dtype = values_per_chip(shape, spec, number), config.weights_dtype
    if not spec.is_projection:
        return values * ITEM_BYTES[config.model.dtype]
    scales = 4 * values_per_chip(shape, spec.of_scales(), number) if dtype == "int8" else 0
    return values * ITEM_BYTES[dtype] + scales


def _worker_roles(config: Config, role: str) -> list[WorkerRole]:
    if role == "router":
        return []
    if role == "all":
        counts: dict[WorkerRole, int] = {"prefill": config.prefill.count, "decode": config.decode.count}
        return [name for name, count in counts.items() if count]
    return ["prefill"] if role == "prefill" else ["decode"]


def _find_shape(source: str) -> ModelShape:
    """Raises ValueError or OSError where the model is not here."""
    if is_hub_id(source):
        raise ValueError(f"model source {source!r} is not on this machine; it is fetched when it is served")
    return open_checkpoint(source).shape


def _pages_in_transit(shape: ModelShape, config: Config, role: WorkerRole) -> int:
    """Each running sequence has at most `max_chunks_in_flight` of the largest chunks; prefill holds others for rooms to come."""
    engine, context = config.engine, min(config.model.max_context_tokens, shape.max_context_tokens)
    of_one = min(config.transfer.max_chunks_in_flight * engine.transfer_buckets[-1], -(-context // engine.page_size))
    return engine.max_running * of_one + (config.scheduler.max_held_pages if role == "prefill" else 0)


def _activations(shape: ModelShape, config: Config, number: int) -> int:
    """The larger of what a layer and what the sampler need. Layers, for T tokens, the largest prefill bucket, on one of n chips:

    * the residual stream, its norm, a partial result and their sum: 4 * E * T values, and one of them in float32;
    * attention: q, k and v three times (projected, turned, laid out), and queries and result twice each in
      float32, and the scores of one tile of queries with one block of keys, up to 512 x 256 a head, in float32;
    * or an MLP: gate, up and product, 3 * F / n * T; with experts, of each chosen row its input and output too.

    Sampler: four float32 values a row and token of the vocabulary; rows are a batch, a prefill step's sequences or a block of a prompt.
    """
    engine, item = config.engine, ITEM_BYTES[config.model.dtype]
    tokens = engine.prefill_buckets[-1]
    stream = shape.embed_dim * (4 * item + 4)
    heads, kv_heads = shape.num_heads // number, num_pool_heads(shape, number) // number
    attention = shape.head_dim * (3 * (heads + 2 * kv_heads) * item + 4 * heads * 4)
    scores = min(512, tokens) * 256 * heads * 4
    layers = tokens * stream + max(tokens * attention + scores, tokens * _mlp_values(shape, number) * item)
    rows = max(engine.decode_buckets[-1], engine.max_prefill_seqs, SCORE_BLOCK_ROWS)
    return max(layers, 4 * 4 * rows * shape.vocab_size)


def _mlp_values(shape: ModelShape, number: int) -> int:
    """Of one token."""
    experts = shape.experts
    if experts is None:
        return math.ceil(3 * shape.ffn_dim / number)
    is_by_expert = experts.num_experts % number == 0
    ffn = experts.ffn_dim if is_by_expert else experts.ffn_dim // number
    return experts.num_active * (3 * shape.embed_dim + 3 * ffn) + 3 * experts.shared_ffn_dim // number
