"""What must hold of the stages that a worker tells with the last event of a request."""

from __future__ import annotations

from pdjax.protocol import Failed, Finished, Stage


def check_stages(request_id: str, event: Finished | Failed) -> None:
    """The stages of a request follow each other without gaps, none is negative, and what lies beside them lies inside the whole."""
    proper = [stage for stage in event.stages if not stage.track]
    for before, after in zip(proper, proper[1:], strict=False):
        assert before.end_s == after.start_s, f"{request_id}: {before} is followed by {after}"
    for stage in event.stages:
        assert _is_inside(stage, proper[0].start_s, proper[-1].end_s), f"{request_id}: {stage} is not inside {proper}"


def _is_inside(stage: Stage, start_s: float, end_s: float) -> bool:
    return start_s <= stage.start_s <= stage.end_s <= end_s
