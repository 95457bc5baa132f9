"""The figures that a worker reports with each heartbeat, by the names under which the router's metrics page shows them.

`NAME{LABEL=VALUE}` becomes a series with that label, `..._total` a counter. May be called from any thread; numbers may be a turn old.
"""

from __future__ import annotations

from collections.abc import Mapping

from pdjax.scheduler.decode import DecodeScheduler
from pdjax.scheduler.memory import KVMemory
from pdjax.scheduler.metadata import MetadataSlots
from pdjax.scheduler.prefill import PrefillScheduler
from pdjax.scheduler.slots import SlotPool
from pdjax.scheduler.timeline import Totals
from pdjax.transfer.rooms import Counts, FailureKind

Gauges = dict[str, float]

SENDS = (("early", "early_send"), ("chunk", "send"), ("last", "last_send"), ("held", "held_send"))
"""When pages were handed to the transport, and the timeline's name for it."""


def prefill_gauges(scheduler: PrefillScheduler, transfer: Counts, page_bytes: int) -> Gauges:
    """`page_bytes`: KV of one page over all layers."""
    counts, totals = scheduler.counts, scheduler.recorder.totals
    sent_pages = {when: totals.counts[name] for when, name in SENDS}
    return {
        **_labelled("queue_length", "queue", scheduler.queue_lengths()),
        **_held(scheduler.slots, scheduler.metadata, scheduler.memory),
        **_stages(totals),
        **_labelled("kv_pages_handed_over_total", "when", sent_pages),
        **_rooms(transfer),
        **_labelled("cached_tokens_total", "tier", {"device": counts.cached_tokens}),
        "prompt_tokens_total": counts.prompt_tokens,
        "optimistic_retries_total": counts.retries,
        "early_sent_pages_total": counts.early_sent_pages,
        "early_sent_bytes_total": counts.early_sent_pages * page_bytes,
        "kv_bytes_sent_total": transfer.bytes_sent,
        "kv_chunks_sent_total": transfer.chunks_sent,
        "kv_speed_bytes_per_second": totals.speed_pages_per_s * page_bytes,
    }


def decode_gauges(scheduler: DecodeScheduler, transfer: Counts) -> Gauges:
    return {
        **_labelled("queue_length", "queue", scheduler.queue_lengths()),
        **_held(scheduler.slots, scheduler.metadata, scheduler.memory),
        **_stages(scheduler.recorder.totals),
        **_rooms(transfer),
        "retractions_total": scheduler.num_retractions,
        "kv_bytes_received_total": transfer.bytes_received,
        "kv_chunks_received_total": transfer.chunks_received,
    }


def _held(slots: SlotPool, metadata: MetadataSlots, memory: KVMemory) -> Gauges:
    return {
        "slots_held": slots.num_held,
        "slots_free": slots.num_free,
        "metadata_slots_held": metadata.num_held,
        "metadata_slots_free": metadata.num_free,
        "pages_private": memory.num_private,
        "pages_cached": memory.cache.num_pages,
        "pages_free": memory.pool.num_free,
    }


def _stages(totals: Totals) -> Gauges:
    return {
        **_labelled("stage_seconds_total", "stage", dict(totals.seconds)),
        **_labelled("stage_ends_total", "stage", dict(totals.ends)),
    }


def _rooms(transfer: Counts) -> Gauges:
    """Failures of every kind, so that a counter starts at 0 and its first failure is a rise."""
    return {
        **_labelled("kv_rooms_failed_total", "kind", {kind.value: transfer.failures.get(kind.value, 0) for kind in FailureKind}),
        "kv_rooms_succeeded_total": transfer.rooms_succeeded,
        "kv_transfer_seconds_total": transfer.transfer_s_total,
        "kv_busy_seconds_total": transfer.busy_s_total,
    }


def _labelled(name: str, label: str, values: Mapping[str, float]) -> Gauges:
    return {f"{name}{{{label}={key}}}": value for key, value in values.items()}
