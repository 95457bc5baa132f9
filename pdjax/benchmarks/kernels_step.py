"""What a whole step of a model costs by the TPU compiler's own estimate, part by part. Nothing runs; an estimate is an estimate.

XLA writes the cycles that it expects of each operation into the compiled program. What it cannot know, the kernels, is counted from their
schedules (`kernels_tpu`). The sum is held against what the same compiler expects of one large square matrix product of as many operations:
that ratio needs neither a clock nor a chip.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from pdjax.benchmarks.kernels_target import Chip, devices, tracing_for
from pdjax.engine.mesh import Chips, chips_for
from pdjax.engine.steps import Pieces, StepDimensions, decode_layout, make_decode, make_prefill, prefill_layout
from pdjax.kernels.dispatch import pool_format
from pdjax.kernels.tpu.attention import PallasTpuAttention
from pdjax.kernels.tpu.tuning import tunings_for
from pdjax.models.model import Model
from pdjax.models.shape import ModelShape, weight_specs

LLAMA_3_8B = ModelShape(
    num_layers=32,
    vocab_size=128256,
    embed_dim=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    ffn_dim=14336,
    rope_theta=500000.0,
    norm_eps=1e-5,
    max_context_tokens=8192,
    tied_embeddings=False,
)
PAGE_SIZE = 64
REFERENCE_PRODUCT = 8192
"""Rows and columns of the matrix product that counts as the best rate."""
KERNELS = ("ragged_paged_attention", "paged_decode_attention")

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%([\w.-]+) = ")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) .*\{$")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_BODY = re.compile(r"= .* while\(.*body=%?([\w.-]+)")
_COLLECTIVE = re.compile(r" (all-reduce|all-gather|reduce-scatter|collective-permute)(-start)?\(")


class Work(NamedTuple):
    """A step: `rows` token rows a chunk, or sequences, each at the end of `context` positions."""

    kind: str  # "prefill" or "decode"
    rows: int
    context: int


class StepEstimate(NamedTuple):
    """Cycles of one chip for all layers, by part, without the attention kernel, and what else the compiled program says.

    `operations`: floating-point operations of one chip; `scores`: attention scores of one chip, all layers; `query_rows`: rows of their
    matrices. `pool_copies`: copies of the pool in the program; there are none where it is updated in place.
    """

    chip: str
    tensor_parallel: int
    work: Work
    cycles: dict[str, int]
    num_collectives: int
    num_overlapped: int
    operations: float
    scores: float
    query_rows: float
    weight_bytes: float
    kv_bytes: float
    memory_bytes: int
    pool_copies: int


def estimate_step(chip: Chip, shape: ModelShape, tensor_parallel: int, work: Work, num_pages: int) -> StepEstimate:
    """Compile the layers of a step over `tensor_parallel` chips of a slice. Raises what the compiler raises where it does not fit."""
    chips = chips_for(shape, list(devices(chip)[:tensor_parallel]))
    dtype = jnp.dtype(jnp.bfloat16)
    # Over several chips shard_map tells kernels where they will run.
    with tracing_for(chip) if tensor_parallel == 1 else contextlib.nullcontext():
        compiled = _compile_layers(chip, chips, shape, work, num_pages, dtype)
    text = compiled.as_text()
    cycles, collectives = _cycles_by_part(text, shape.num_layers)
    memory = compiled.memory_analysis()
    pool_shape = f"{shape.num_layers},{num_pages},{PAGE_SIZE},{2 * chips.num_pool_heads // tensor_parallel},{shape.head_dim}]"
    return StepEstimate(
        chip=chip.name,
        tensor_parallel=tensor_parallel,
        work=work,
        cycles=dict(cycles),
        num_collectives=collectives.total(),
        num_overlapped=collectives["started"],
        operations=_operations(shape, work) / tensor_parallel,
        scores=_scores(shape, work) / tensor_parallel,
        query_rows=shape.num_layers * shape.num_heads * work.rows / tensor_parallel,
        weight_bytes=layer_weights(shape) * dtype.itemsize / tensor_parallel,
        kv_bytes=shape.kv_bytes_per_token(dtype.itemsize) * work.rows * work.context / tensor_parallel if work.kind == "decode" else 0.0,
        memory_bytes=memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes,
        pool_copies=sum(pool_shape in line.partition(" = ")[2].partition(" ")[0] for line in text.splitlines() if " copy(" in line),
    )


def reference_rate(chip: Chip) -> float:
    """Operations a cycle that the compiler expects of one large square product in bfloat16."""
    where = SingleDeviceSharding(devices(chip)[0])
    square = jax.ShapeDtypeStruct((REFERENCE_PRODUCT, REFERENCE_PRODUCT), jnp.bfloat16, sharding=where)
    text = jax.jit(jnp.matmul).lower(square, square).compile().as_text()
    return 2 * REFERENCE_PRODUCT**3 / sum(map(int, _CYCLES.findall(text)))


def _compile_layers(chip: Chip, chips: Chips, shape: ModelShape, work: Work, num_pages: int, dtype: jnp.dtype) -> jax.stages.Compiled:
    specs = weight_specs(shape)
    layers = {path.removeprefix("layers/"): spec for path, spec in specs.items() if spec.is_layered}
    weights = {path: chips.abstract(spec, dtype) for path, spec in specs.items()}
    num_heads = chips.local_shape.num_heads
    attention = PallasTpuAttention(tunings_for(chip.kernel_name, shape.head_dim, dtype, num_heads))
    dims = StepDimensions(PAGE_SIZE, -(-shape.max_context_tokens // PAGE_SIZE), 4, work.rows)
    model = Model(chips.local_shape, dtype, chips.chip)
    ends = {path: weight for path, weight in weights.items() if not specs[path].is_layered}
    pieces, begin_args = _pieces(model, attention, dims, work)
    x, rows = jax.tree.map(lambda leaf: _at(leaf, chips.replicated), jax.eval_shape(pieces.begin, ends, *begin_args))
    lies = pool_format(chips.pool, "tpu")
    pool = jax.ShapeDtypeStruct((shape.num_layers, num_pages, PAGE_SIZE, 2 * chips.num_pool_heads, shape.head_dim), dtype, sharding=lies)
    run = chips.over_chips(pieces.layers, {name: spec.of_one_layer() for name, spec in layers.items()})
    jitted = jax.jit(run, donate_argnums=(2, 3), out_shardings=(chips.replicated, lies))
    first = jax.ShapeDtypeStruct((), jnp.int32, sharding=chips.replicated)
    return jitted.lower({name: weights[f"layers/{name}"] for name in layers}, first, x, pool, rows).compile()


def _pieces(model: Model, attention: PallasTpuAttention, dims: StepDimensions, work: Work) -> tuple[Pieces, tuple[Any, ...]]:
    if work.kind == "prefill":
        return make_prefill(model, attention, dims, work.rows), (prefill_layout(dims, work.rows).abstract(),)
    last_token = jax.ShapeDtypeStruct((work.rows + 1,), jnp.int32)
    return make_decode(model, attention, dims, work.rows), (last_token, decode_layout(dims, work.rows).abstract())


def _at(leaf: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _cycles_by_part(text: str, num_layers: int) -> tuple[Counter[str], Counter[str]]:
    """Cycles by part, those of the body of the loop over layers times their number; collectives by "started" (overlapped) or "waited"."""
    bodies = set(_BODY.findall(text))
    cycles: Counter[str] = Counter()
    collectives: Counter[str] = Counter()
    for computation, line in _instructions(text):
        found = _CYCLES.search(line)
        if (collective := _COLLECTIVE.search(line)) and computation in bodies:
            collectives["started" if collective[2] else "waited"] += 1
        if found:
            cycles[_part(line)] += int(found[1]) * (num_layers if computation in bodies else 1)
    return cycles, collectives


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    computation = ""
    for line in text.splitlines():
        if start := _COMPUTATION.match(line):
            computation = start[1]
        elif _INSTRUCTION.match(line):
            yield computation, line


def _part(line: str) -> str:
    """Which part of the step an instruction belongs to, by the scopes of the model's code that it carries."""
    name = match[1] if (match := _OP_NAME.search(line)) else ""
    if _COLLECTIVE.search(line) or "psum" in name:
        return "collectives"
    if "/mlp/" in name:
        return "MLP"
    if "/attention/" in name:
        return "attention"
    return "projections" if name.endswith("dot_general") else "rest"


def layer_weights(shape: ModelShape) -> float:
    """Weights of the products of all layers."""
    heads = shape.num_heads * shape.head_dim
    kv_heads = shape.num_kv_heads * shape.head_dim
    return float(shape.num_layers * shape.embed_dim * (2 * heads + 2 * kv_heads + 3 * shape.ffn_dim))


def _scores(shape: ModelShape, work: Work) -> float:
    """Attention scores of a step, of all heads and layers. The rows of a prefill step are the last ones of the context."""
    visible = work.context * work.rows - (work.rows * (work.rows - 1) / 2 if work.kind == "prefill" else 0)
    return float(shape.num_layers * shape.num_heads * visible)


def _operations(shape: ModelShape, work: Work) -> float:
    return 2 * work.rows * layer_weights(shape) + 4 * shape.head_dim * _scores(shape, work)
