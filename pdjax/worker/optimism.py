"""Where optimistic prefill makes no sense: the matrix of `docs/optimistic_prefill.md`."""

from __future__ import annotations

import logging

from pdjax.config.schema import Config

logger = logging.getLogger(__name__)


def why_no_optimism(config: Config) -> str | None:
    """Why a system with this configuration must not compute prompts ahead of their bootstrap; None where it may."""
    slots = config.scheduler.metadata_slots or 2 * config.engine.max_running
    if config.transfer.kind == "loopback":
        return "transfer.kind loopback has no decode side to be ahead of"
    if not config.scheduler.prefix_cache and config.scheduler.on_miss == "retry":
        return "scheduler.on_miss retry without scheduler.prefix_cache would compute every prompt anew at each try"
    if slots < 2:
        return f"with {slots} metadata slot a prompt that is ahead would keep every other one waiting"
    return None


def optimistic_retries(config: Config) -> int:
    """`scheduler.optimistic_prefill_retries`, or 0 and a warning that names the reason where the configuration does not support it."""
    retries = config.scheduler.optimistic_prefill_retries
    reason = why_no_optimism(config)
    if retries and reason is not None:
        logger.warning("optimistic prefill is switched off: %s", reason)
        return 0
    return retries
