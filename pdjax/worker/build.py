"""Puts a worker together from its configuration. Shared by worker processes and by the one-process Python API."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from pdjax.checkpoints import Checkpoint
from pdjax.config.environment import early_send_override, should_fail_poll, should_force_retry
from pdjax.config.schema import Config
from pdjax.engine.base import StepEngine
from pdjax.engine.compilation import Programs
from pdjax.engine.engine import Engine
from pdjax.engine.kv_scales import KVScales
from pdjax.engine.library import Library
from pdjax.engine.mesh import Placement
from pdjax.engine.weights import RestoredWeights, StreamedWeights, Weights
from pdjax.models.shape import ModelShape
from pdjax.observe.progress import Progress
from pdjax.protocol import Layout, Peer, WorkerInfo
from pdjax.scheduler.bootstrap import BootstrapQueue
from pdjax.scheduler.decode import DecodeLimits, DecodeScheduler
from pdjax.scheduler.faults import FaultHooks
from pdjax.scheduler.memory import KVMemory
from pdjax.scheduler.metadata import MetadataSlots
from pdjax.scheduler.pages import PagePool
from pdjax.scheduler.prefill import PrefillLimits, PrefillScheduler
from pdjax.scheduler.radix import NullCache, RadixCache
from pdjax.scheduler.slots import SlotPool
from pdjax.scheduler.timeline import ClockRecorder
from pdjax.transfer.base import Emulation, KVSink, KVSource, TransferLimits, Wake
from pdjax.worker.decode import DecodeRole
from pdjax.worker.optimism import optimistic_retries
from pdjax.worker.prefill import PrefillRole, no_early_sends

OPTIMISM_GRACE_S = 0.005
"""What a prompt waits for its bootstrap before it goes ahead. Announcements of an idle decode worker come within 3-5 ms; a request that
is bootstrapped in time loses nothing and holds no copy of its pages."""


def load_weights(checkpoint: Checkpoint, config: Config, progress: Progress) -> Weights:
    """On CPU into memory, which engines then share; elsewhere, and where they are stored narrower, an engine reads them as it places them, or
    its devices read their own parts."""
    progress.stage("load", 0)
    dtype = np.dtype(config.model.dtype)
    is_narrower = config.weights_dtype != config.model.dtype
    if jax.default_backend() == "cpu" and not is_narrower:
        return checkpoint.load_weights(dtype, progress.advance)
    restore = checkpoint.restorer(dtype)
    if restore is not None and not is_narrower:
        return RestoredWeights(checkpoint.shape, restore, progress.advance)
    return StreamedWeights(checkpoint.shape, dtype, checkpoint.read_into, progress.advance)


def load_engines(
    checkpoint: Checkpoint, weights: Weights, config: Config, programs: Programs, places: Sequence[Placement], progress: Progress
) -> list[Engine]:
    """An engine at each place, of as many devices each, whose every program is compiled.

    Weights are read once: engines share those on the host, and copy those on devices from the first engine's. Programs belong to their
    devices, so each engine compiles its own, all at the same time.
    """
    shape, dtype = _served_shape(checkpoint, config), np.dtype(config.model.dtype)
    engines = [Engine(shape, weights, config.engine, dtype, places[0])]
    shared = weights if isinstance(weights, dict) else engines[0].weights
    engines += [Engine(shape, shared, config.engine, dtype, place) for place in places[1:]]
    progress.stage("compile", 0)
    reports = _Together(progress, len(engines))
    with concurrent.futures.ThreadPoolExecutor(len(engines), thread_name_prefix="compile") as pool:
        warming = [pool.submit(engine.warm_up, reports.of(rank), programs) for rank, engine in enumerate(engines)]
    for each in warming:
        each.result()
    return engines


def find_kv_scales(checkpoint: Checkpoint, config: Config, placement: Placement, progress: Progress) -> KVScales:
    """Those that an engine with an int8 pool would find. Makes no pool."""
    weights, dtype = load_weights(checkpoint, config, progress), np.dtype(config.model.dtype)
    engine = config.engine.model_copy(update={"kv_dtype": "int8", "kv_scales": None})
    scales = Library(_served_shape(checkpoint, config), weights, engine, dtype, placement, None).kv_scales
    assert scales is not None, "an int8 pool without scales"
    return scales


class _Together:
    """The progress of several engines that compile at the same time, as one. Any thread may call."""

    def __init__(self, progress: Progress, number: int):
        self._progress = progress
        self._lock = threading.Lock()
        self._done, self._totals = [0] * number, [0] * number

    def of(self, rank: int) -> Callable[[int, int, str], None]:
        def report(done: int, total: int, name: str) -> None:
            with self._lock:
                self._done[rank], self._totals[rank] = done, total
                self._progress.advance(sum(self._done), max(self._totals) * len(self._totals), name)

        return report


def layout_of(checkpoint: Checkpoint, config: Config, engine: StepEngine) -> Layout:
    """Of the KV that `engine` gives out and takes."""
    shape = checkpoint.shape
    return Layout(
        model_fingerprint=checkpoint.fingerprint + _served_shape(checkpoint, config).rope_variant(),
        page_size=config.engine.page_size,
        kv_dtype=config.kv_dtype,
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        kv_scales=engine.kv_scales_digest(),
    )


def worker_info(checkpoint: Checkpoint, config: Config, role: str, peer: Peer, layout: Layout) -> WorkerInfo:
    pool_tokens = (config.engine.num_pages - 1) * config.engine.page_size
    return WorkerInfo(
        role=role,
        peer=peer,
        layout=layout,
        model_name=config.model.name or checkpoint.name,
        max_context_tokens=min(_max_context_tokens(checkpoint, config), pool_tokens + 1),
        max_prompt_tokens=pool_tokens,
        max_running=config.engine.max_running,
    )


def transfer_limits(config: Config) -> TransferLimits:
    rate = config.transfer.emulate_gbytes_per_s
    return TransferLimits(
        max_chunks_in_flight=config.transfer.max_chunks_in_flight,
        bootstrap_timeout_s=config.transfer.bootstrap_timeout_s,
        stall_timeout_s=config.transfer.stall_timeout_s,
        announce_timeout_s=config.server.request_timeout_s,
        emulation=Emulation(None if rate is None else rate * 1e9, config.transfer.emulate_announce_delay_s),
    )


def build_prefill(engine: StepEngine, checkpoint: Checkpoint, config: Config, source: KVSource, wake: Wake) -> PrefillRole:
    metadata = _metadata_slots(config)
    limits = PrefillLimits(
        max_step_tokens=config.scheduler.max_step_tokens,
        max_step_seqs=config.engine.max_prefill_seqs,
        max_chunk_pages=config.engine.transfer_buckets[-1],
        max_queue=config.worker.max_queue,
        max_context_tokens=_max_context_tokens(checkpoint, config),
        max_held_pages=config.scheduler.max_held_pages,
        drop_on_miss=config.scheduler.on_miss == "retry",
    )
    retries = optimistic_retries(config)
    faults = FaultHooks(should_force_retry, should_fail_poll)
    recorder = ClockRecorder(time.time)
    bootstrap = BootstrapQueue(source, metadata, config.engine.page_size, retries, faults, recorder, OPTIMISM_GRACE_S)
    slots = SlotPool(config.engine.max_running, "request")
    scheduler = PrefillScheduler(_memory(config), slots, metadata, bootstrap, limits, recorder)
    override = early_send_override()
    is_early = config.scheduler.early_send_cached_prefix if override is None else override
    early_sends = scheduler.maybe_send_cached_prefix_chunk if is_early else no_early_sends
    page_bytes = config.engine.page_size * checkpoint.shape.kv_bytes_per_token(jnp.dtype(config.kv_dtype).itemsize)
    return PrefillRole(engine, scheduler, source, wake, early_sends, page_bytes)


def build_decode(engine: StepEngine, checkpoint: Checkpoint, config: Config, sink: KVSink, wake: Wake) -> DecodeRole:
    limits = DecodeLimits(
        max_step_tokens=config.scheduler.max_step_tokens,
        max_step_seqs=config.engine.max_prefill_seqs,
        max_queue=config.worker.max_queue,
        max_context_tokens=_max_context_tokens(checkpoint, config),
        reserve_tokens=config.scheduler.decode_reserve_tokens,
    )
    slots = SlotPool(config.engine.max_running, "request")
    scheduler = DecodeScheduler(_memory(config), slots, _metadata_slots(config), sink, limits, ClockRecorder(time.time))
    return DecodeRole(engine, scheduler, sink, wake)


def _memory(config: Config) -> KVMemory:
    pool = PagePool(config.engine.num_pages)
    page_size = config.engine.page_size
    return KVMemory(pool, RadixCache(pool, page_size) if config.scheduler.prefix_cache else NullCache(), page_size)


def _metadata_slots(config: Config) -> MetadataSlots:
    return MetadataSlots(config.scheduler.metadata_slots or 2 * config.engine.max_running)


def _served_shape(checkpoint: Checkpoint, config: Config) -> ModelShape:
    """The model for contexts of the length that is served: page tables are as wide as that takes, and rotary tables made for it."""
    return checkpoint.shape._replace(max_context_tokens=_max_context_tokens(checkpoint, config))


def _max_context_tokens(checkpoint: Checkpoint, config: Config) -> int:
    return min(config.model.max_context_tokens, checkpoint.shape.max_context_tokens)
