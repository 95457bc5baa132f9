"""The engine: one model on one device, or on several that share its layers, its KV pool, and the programs that run on them.

Every method is called from the worker's engine loop only, but for `read`, which another thread may wait in. Launching never waits
for earlier steps; `read` and `StepHandle.is_ready` are how results come back. Programs run in the order in which they were launched,
which is what makes `gather` safe: it is dispatched before the next step takes the pool over.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from pdjax.config.schema import EngineConfig
from pdjax.engine.batch import DecodeSeq, PrefillSeq, PromptRows, StepOutput
from pdjax.engine.compilation import ALL_PROGRAMS, CompileCounter, ProgramKey, Programs, ProgramTable, Report
from pdjax.engine.library import Library
from pdjax.engine.mesh import Placement, put
from pdjax.engine.pages import padded_pages, padded_rows
from pdjax.engine.sampling import Sampled, SamplerRow, pack_rows
from pdjax.engine.state import HISTORY_CHUNK_TOKENS
from pdjax.engine.steps import Rows, pack_decode, pack_prefill, pack_scores
from pdjax.engine.weights import PlacedWeights, Weights
from pdjax.kernels.base import Attention
from pdjax.models.shape import ModelShape
from pdjax.protocol import MAX_TOP_LOGPROBS


@dataclass(frozen=True)
class StepHandle:
    """A step in flight. `rows[i]` is the sequence of the step that row i of the sampler's result belongs to. `scored`: blocks of prompt
    log probabilities, of whose rows the first `num_scored` count."""

    num_seqs: int
    rows: list[int]
    sampled: Sampled | None
    done: jax.Array
    scored: Sequence[tuple[jax.Array, ...]] = ()
    num_scored: int = 0

    def is_ready(self) -> bool:
        """Whether `Engine.read` would not wait. Never blocks."""
        return self.done.is_ready() and all(block[0].is_ready() for block in self.scored)


class Engine:
    """Runs prefill and decode steps over its pool and moves pages in and out of it."""

    def __init__(
        self,
        shape: ModelShape,
        weights: Weights,
        config: EngineConfig,
        dtype: jnp.dtype = jnp.float32,
        device: Placement | None = None,
        attention: Attention | None = None,
    ):
        """Place the weights and make the pool on `device` (default: JAX's first), or on several. `attention`: default as `choose_attention`
        says.

        `weights`, keyed by the paths of `weight_specs`, have dtype `dtype`, as the pool will unless `config.kv_dtype` says
        otherwise. On CPU the device arrays alias them.
        Raises ValueError where the weights do not fit the shape, or the shape not the number of devices.
        """
        self.shape = shape
        self.config = config
        self._counter = CompileCounter()
        self._count_when_warm = 0
        with self._counter.attributed():
            self._library = Library(shape, weights, config, jnp.dtype(dtype), device or jax.devices()[0], attention)
            self._programs = ProgramTable(self._library.lowered())
            self._state = self._library.new_state()

    @property
    def weights(self) -> PlacedWeights:
        """For engines on other devices, as many as here."""
        return self._library.weights

    @property
    def chunk_sharding(self) -> jax.sharding.Sharding:
        """Where gathered pages lie, and pages to install belong."""
        return self._library.chips.chunk

    def warm_up(self, report: Report, programs: Programs = ALL_PROGRAMS) -> None:
        """Compile every program of the groups `programs`, for every bucket. `report` hears of each."""
        with self._counter.attributed():
            self._programs.compile_all(self._library.keys(programs), report)
        self._count_when_warm = self._counter.count

    def compilations_after_warm_up(self) -> int:
        """Compilations on behalf of this engine since `warm_up` returned, fetches from the persistent cache included. Stays 0."""
        return self._counter.count - self._count_when_warm

    def kv_scales_digest(self) -> str:
        """Of the scales of the pool; empty where its dtype has none. KV means the same to another engine only where theirs is equal."""
        return "" if self._library.kv_scales is None else self._library.kv_scales.digest

    def compiled_programs(self) -> dict[ProgramKey, jax.stages.Compiled]:
        """What has been compiled so far, for those who want to look at cost or memory."""
        return self._programs.compiled()

    def launch_prefill(self, seqs: Sequence[PrefillSeq]) -> StepHandle:
        """Compute the KV of one chunk of each sequence, sample where `output_index` says so and score what `scored` says."""
        num_tokens = sum(len(seq.tokens) for seq in seqs)
        assert 0 < len(seqs) <= self.config.max_prefill_seqs, f"{len(seqs)} sequences in a step of 1..{self.config.max_prefill_seqs}"
        for seq in seqs:
            assert seq.tokens, f"empty chunk at {seq.start} for slot {seq.slot}"
            self._check(seq.slot, seq.start + len(seq.tokens), seq.pages)
        size = _bucket(self.config.prefill_buckets, num_tokens)
        sampled = [i for i, seq in enumerate(seqs) if seq.output_index is not None]
        packed = pack_prefill(self._library.prefill_layouts[size], seqs, sampled)
        with self._counter.attributed():
            ends = self._library.weights.ends
            x, rows = self._programs[ProgramKey("prefill_begin", size)](ends, packed)
            x = self._run_layers(ProgramKey("prefill_layers", size), x, rows)
            hidden, first_hidden = self._programs[ProgramKey("prefill_end", size)](ends, x, packed)
            handle = StepHandle(len(seqs), [], None, hidden)
            if sampled:
                drawn = [SamplerRow(seqs[i].slot, seqs[i].sampling, seqs[i].output_index or 0) for i in sampled]
                handle = self._sample(len(seqs), sampled, first_hidden if len(drawn) == 1 else hidden, drawn)
            return self._with_scores(handle, seqs, x)

    def launch_decode(self, seqs: Sequence[DecodeSeq]) -> StepHandle:
        """Compute one token's KV of each sequence and sample the next token of each."""
        for seq in seqs:
            self._check(seq.slot, seq.position + 1, seq.pages)
        assert seqs, "a decode step without sequences"
        size = _bucket(self.config.decode_buckets, len(seqs))
        packed = pack_decode(self._library.dims, self._library.decode_layouts[size], seqs)
        with self._counter.attributed():
            ends = self._library.weights.ends
            x, rows = self._programs[ProgramKey("decode_begin", size)](ends, self._state.last_token, packed)
            x = self._run_layers(ProgramKey("decode_layers", size), x, rows)
            hidden = self._programs[ProgramKey("decode_end", size)](ends, x)
            drawn = [SamplerRow(seq.slot, seq.sampling, seq.output_index) for seq in seqs]
            return self._sample(len(seqs), list(range(len(seqs))), hidden, drawn)

    def read(self, handle: StepHandle) -> StepOutput:
        """Wait for a step and bring its results to the host. Raises what JAX raises where the step failed."""
        tokens, prompt = np.zeros(handle.num_seqs, np.int32), _prompt_rows(handle)
        if handle.sampled is None:
            handle.done.block_until_ready()
            return StepOutput(tokens, None, None, None, prompt)
        sampled = handle.sampled
        tokens[handle.rows] = np.asarray(sampled.tokens)[: len(handle.rows)]
        if sampled.logprobs is None:
            return StepOutput(tokens, None, None, None, prompt)
        logprobs = np.zeros(handle.num_seqs, np.float32)
        top_ids = np.zeros((handle.num_seqs, MAX_TOP_LOGPROBS), np.int32)
        top_logprobs = np.zeros((handle.num_seqs, MAX_TOP_LOGPROBS), np.float32)
        for target, source in ((logprobs, sampled.logprobs), (top_ids, sampled.top_ids), (top_logprobs, sampled.top_logprobs)):
            target[handle.rows] = np.asarray(source)[: len(handle.rows)]
        return StepOutput(tokens, logprobs, top_ids, top_logprobs, prompt)

    def set_history(self, slot: int, prompt: list[int], output: list[int]) -> None:
        """Tell the sampler what a request with penalties holds so far; forgets what the slot held before."""
        assert 0 <= slot < self.config.max_running, f"slot {slot} outside 0..{self.config.max_running - 1}"
        chunk = HISTORY_CHUNK_TOKENS
        with self._counter.attributed():
            program = self._programs[ProgramKey("history", chunk)]
            for start in range(0, max(len(prompt), len(output), 1), chunk):
                packed, views = self._library.history_layout.new()
                views["slot"][0], views["keep"][0] = slot, start > 0
                for name, tokens in (("prompt", prompt), ("output", output)):
                    part = tokens[start : start + chunk]
                    views[name][: len(part)] = part
                    views[name][len(part) :] = self.shape.vocab_size
                self._state = replace(self._state, history=program(self._state.history, packed))

    def gather(self, pages: list[int]) -> jax.Array:
        """Copy pages out of the pool: `[bucket, layers, page_size, 2 * kv_heads, head_dim]`, of which the first `len(pages)` rows count.

        At most `transfer_buckets[-1]` pages. The copy sees every step launched before, and none launched later.
        """
        size = _bucket(self.config.transfer_buckets, len(pages))
        with self._counter.attributed():
            return self._programs[ProgramKey("gather", size)](self._state.pool, padded_pages(pages, size))

    def install(self, pages: list[int], kv: jax.Array | np.ndarray) -> None:
        """Write the first `len(pages)` rows of a chunk to `pages`. The caller gives `kv` away: a host array may still be read after this
        returns. Rows that are no bucket's number are padded on the host, which waits for `kv`."""
        assert pages and len(kv) >= len(pages), f"{len(kv)} rows of KV for {len(pages)} pages"
        buckets = self.config.transfer_buckets
        if len(kv) not in buckets or len(kv) > buckets[-1]:
            kv = np.asarray(kv)[: len(pages)]
        for start in range(0, len(pages), buckets[-1]):
            part_pages, part = pages[start : start + buckets[-1]], kv if len(kv) in buckets else kv[start : start + buckets[-1]]
            self._install_bucket(part_pages, part)

    def put(self, kv: np.ndarray) -> jax.Array:
        """Move a received chunk to the device. The caller gives `kv` away: the result may alias it."""
        return put(kv, self.chunk_sharding)

    def _install_bucket(self, pages: list[int], kv: jax.Array | np.ndarray) -> None:
        size = len(kv) if len(kv) in self.config.transfer_buckets else _bucket(self.config.transfer_buckets, len(kv))
        with self._counter.attributed():
            on_device = put(kv if len(kv) == size else padded_rows(kv, size), self.chunk_sharding)
            program = self._programs[ProgramKey("install", size)]
            self._state = replace(self._state, pool=program(self._state.pool, padded_pages(pages, size), on_device))

    def _sample(self, num_seqs: int, indices: list[int], hidden: jax.Array, rows: list[SamplerRow]) -> StepHandle:
        """Launch the cheapest sampler that does what all of `rows` ask for."""
        size, state, ends = hidden.shape[1], self._state, self._library.weights.ends
        if all(row.is_plain_greedy for row in rows):
            slots = np.full(size, self._library.dims.padding_slot, np.int32)
            slots[: len(rows)] = [row.slot for row in rows]
            last_token, tokens = self._programs[ProgramKey("greedy", size)](ends, state.last_token, hidden, slots)
            self._state = replace(state, last_token=last_token)
            return _in_flight(num_seqs, indices, Sampled(tokens))
        name = "sample_logprobs" if any(row.sampling.logprobs is not None for row in rows) else "sample"
        packed = pack_rows(self._library.sampler_layouts[size], rows, self._library.dims.padding_slot)
        last_token, history, sampled = self._programs[ProgramKey(name, size)](ends, state.last_token, state.history, hidden, packed)
        self._state = replace(state, last_token=last_token, history=history)
        return _in_flight(num_seqs, indices, sampled)

    def _run_layers(self, key: ProgramKey, x: jax.Array, rows: Rows) -> jax.Array:
        """Run the program's groups of layers, in order, over x [E, T] and the pool, which each takes over from the one before it. Returns
        x [E, T]."""
        program, pool = self._programs[key], self._state.pool
        for group in self._library.layer_groups[key.name]:
            x, pool = program(group.params, group.first, x, pool, rows)
        self._state = replace(self._state, pool=pool)
        return x

    def _with_scores(self, handle: StepHandle, seqs: Sequence[PrefillSeq], rows: jax.Array) -> StepHandle:
        """Launch the scoring of what `seqs` ask for, a block of `rows` [E, T] at a time."""
        num_scored = sum(len(seq.targets) for seq in seqs)
        if not num_scored:
            return handle
        program, ends = self._programs[ProgramKey("score", rows.shape[1])], self._library.weights.ends
        scored = [program(ends, rows, packed) for packed in pack_scores(seqs)]
        for block in scored:
            for array in block:
                array.copy_to_host_async()
        return replace(handle, scored=scored, num_scored=num_scored)

    def _check(self, slot: int, num_tokens: int, pages: list[int]) -> None:
        assert 0 <= slot < self.config.max_running, f"slot {slot} outside 0..{self.config.max_running - 1}"
        assert num_tokens <= len(pages) * self.config.page_size, f"{num_tokens} tokens do not fit into {len(pages)} pages"
        assert len(pages) <= self._library.dims.table_pages, f"{len(pages)} pages in a table of {self._library.dims.table_pages}"


def _bucket(buckets: tuple[int, ...], number: int) -> int:
    assert 0 < number <= buckets[-1], f"{number} is outside the buckets {buckets}"
    return buckets[bisect.bisect_left(buckets, number)]


def _prompt_rows(handle: StepHandle) -> PromptRows | None:
    if not handle.scored:
        return None
    arrays = [np.concatenate([np.asarray(block) for block in blocks]) for blocks in zip(*handle.scored, strict=True)]
    return PromptRows(*(array[: handle.num_scored] for array in arrays))


def _in_flight(num_seqs: int, indices: list[int], sampled: Sampled) -> StepHandle:
    """Start the copies to the host, so that `read` finds them done."""
    for array in sampled:
        if array is not None:
            array.copy_to_host_async()
    return StepHandle(num_seqs, indices, sampled, sampled.tokens)
