"""`python -m pdjax.bench growth`: how time and memory grow with what there is to do. One part after the other, each on its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from pdjax.benchmarks import growth_engine, growth_radix, growth_router, growth_scheduler, growth_start
from pdjax.benchmarks.growth_report import PartReport, build_growth
from pdjax.config.load import load_config
from pdjax.errors import PdjaxError

Tell = Callable[[str], None]

PARTS = ("scheduler", "radix", "router", "memory", "engine", "start")


@dataclass(frozen=True)
class GrowthSettings:
    """Which parts to run. `overrides`: `section.field=value` for the systems of `engine` and `start`. Raises ValueError."""

    parts: tuple[str, ...] = PARTS
    overrides: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for part in self.parts:
            if part not in PARTS:
                raise ValueError(f"a part must be one of {', '.join(PARTS)}, got {part!r}")
        if len(set(self.parts)) < len(self.parts) or not self.parts:
            raise ValueError(f"name each part once and at least one, got {', '.join(self.parts) or 'none'}")
        load_config(None, self.overrides)


def run(settings: GrowthSettings, tell: Tell, on_part: Callable[[PartReport], None]) -> dict[str, Any]:
    """Run the parts in the order of PARTS, each handed to `on_part` when it is done. A part that fails is reported as such, and the next
    one runs."""
    runs: dict[str, Callable[[], PartReport]] = {
        "scheduler": lambda: growth_scheduler.run(tell),
        "radix": lambda: growth_radix.run(tell),
        "router": lambda: growth_router.run_router(tell),
        "memory": lambda: growth_router.run_memory(tell),
        "engine": lambda: growth_engine.run(tell, settings.overrides),
        "start": lambda: growth_start.run(tell, settings.overrides),
    }
    reports = []
    for part in PARTS:
        if part in settings.parts:
            try:
                reports.append(runs[part]())
            except PdjaxError as error:
                reports.append(PartReport(part, (), error=str(error)))
            on_part(reports[-1])
    return build_growth(reports, asdict(settings))
