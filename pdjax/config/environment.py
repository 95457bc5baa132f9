"""Every environment variable that pdjax reads, one function each. Nothing else in the project looks at the environment."""

from __future__ import annotations

import os
import random

import xxhash


def attention_override() -> str | None:
    """`PDJAX_ATTENTION`: the attention implementation to use in place of the platform's best; None where unset or empty."""
    return os.environ.get("PDJAX_ATTENTION") or None


def should_force_retry(request_id: str) -> bool:
    """`PDJAX_TEST_FORCE_RETRY_PROB`: the share of requests whose first optimistic forward is thrown away. The same requests each time."""
    probability = _probability("PDJAX_TEST_FORCE_RETRY_PROB")
    return probability > 0 and xxhash.xxh3_64_intdigest(request_id.encode()) < probability * 2**64


def should_fail_poll() -> bool:
    """`PDJAX_TEST_FAILURE_PROB`: the share of looks at a sender that find it failed."""
    probability = _probability("PDJAX_TEST_FAILURE_PROB")
    return probability > 0 and random.random() < probability


def early_send_override() -> bool | None:
    """`PDJAX_EARLY_SEND_CACHED_PREFIX`: 0 or 1 in place of `scheduler.early_send_cached_prefix`; None where unset or empty."""
    value = os.environ.get("PDJAX_EARLY_SEND_CACHED_PREFIX")
    if value not in (None, "", "0", "1"):
        raise ValueError(f"PDJAX_EARLY_SEND_CACHED_PREFIX must be 0 or 1, got {value!r}")
    return None if not value else value == "1"


def _probability(name: str) -> float:
    """Read at run time, so that a test can change it while a worker runs. Raises ValueError outside 0..1."""
    text = os.environ.get(name) or "0"
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must be a number from 0 to 1, got {text!r}")
    return value
