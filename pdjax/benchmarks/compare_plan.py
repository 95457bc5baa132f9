"""What `python -m pdjax.bench compare` starts and sends: designs, their processes, and the trace as it is replayed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pdjax.benchmarks.fleet import Part, available_cores, serve_part, share_cores
from pdjax.benchmarks.trace import BLOCK_TOKENS, SAMPLE, Replayed, Scale, TraceRequest, read_trace, replay_of, span_s, spread_arrivals
from pdjax.config.load import load_config
from pdjax.config.schema import Config

VOCAB = 48000

_UNIFIED = re.compile(r"unified:([1-9]\d*)")
_APART = re.compile(r"([1-9]\d*)p([1-9]\d*)d")


class Design(NamedTuple):
    """How workers share the phases. `num_prefill` 0: every worker computes prompts and answers. `overrides`: of this design alone."""

    label: str
    num_prefill: int
    num_decode: int
    overrides: tuple[str, ...] = ()

    @property
    def num_workers(self) -> int:
        return self.num_prefill + self.num_decode

    @property
    def is_disaggregated(self) -> bool:
        return self.num_prefill > 0


def parse_design(text: str) -> Design:
    """`unified:N` or `MpNd`, with `+SECTION.FIELD=VALUE` behind it any number of times. Raises ValueError."""
    form, *overrides = text.split("+")
    if found := _UNIFIED.fullmatch(form):
        return Design(text, 0, int(found[1]), tuple(overrides))
    if found := _APART.fullmatch(form):
        return Design(text, int(found[1]), int(found[2]), tuple(overrides))
    raise ValueError(f"a design looks like unified:2, 1p1d or unified:2+scheduler.max_step_tokens=128, got {text!r}")


@dataclass(frozen=True)
class CompareSettings:
    """Raises ValueError, naming value and limit, on settings that make no sense together.

    `scale_outputs` None: as `scale_lengths`. `loads`: factors on the rate that the trace has after `scale_time`.
    """

    designs: tuple[str, ...] = ("unified:2", "1p1d")
    trace: Path = SAMPLE
    scale_lengths: float = 0.02
    scale_outputs: float | None = 0.05
    scale_time: float = 4.0
    max_requests: int = 20
    loads: tuple[float, ...] = (0.5, 1.0, 2.0)
    ttft_target_s: float = 4.0
    itl_target_s: float = 0.15
    seed: int = 0
    timeout_s: float = 600.0
    overrides: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("scale_lengths", "scale_time", "ttft_target_s", "itl_target_s", "timeout_s"):
            _check_positive(name, getattr(self, name))
        if self.scale_outputs is not None:
            _check_positive("scale_outputs", self.scale_outputs)
        if not self.loads:
            raise ValueError("at least one load is needed, got none")
        for load in self.loads:
            _check_positive("a load", load)
        if self.max_requests < 2:
            raise ValueError(f"max_requests must be at least 2, got {self.max_requests}")
        for name, values in (("designs", self.designs), ("loads", self.loads)):
            if len(set(values)) < len(values):
                raise ValueError(f"{name} must differ from each other, got {', '.join(map(str, values))}")

    @property
    def scale(self) -> Scale:
        return Scale(self.scale_lengths, self.scale_lengths if self.scale_outputs is None else self.scale_outputs, self.scale_time)


def _check_positive(name: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"{name} must be above 0, got {value}")


class System(NamedTuple):
    """The processes of one design."""

    router: Part
    workers: list[Part]


class ComparePlan:
    """Raises ValueError where designs, trace or settings do not fit each other; nothing has been started then."""

    def __init__(self, settings: CompareSettings, cores: Sequence[int] | None = None):
        self.settings = settings
        self._cores = available_cores() if cores is None else list(cores)
        self.designs = [parse_design(text) for text in settings.designs]
        self._configs = {design.label: self._config(design) for design in self.designs}
        self.trace = spread_arrivals(read_trace(settings.trace))[: settings.max_requests]
        self._check_arrivals()
        self._check_lengths()

    def system(self, design: Design) -> System:
        """The workers of `design` have the machine's cores in equal shares."""
        config = self._configs[design.label]
        roles = ["prefill"] * design.num_prefill + ["decode"] * design.num_decode
        shares = share_cores(design.num_workers, self._cores)
        workers = [serve_part(f"{role}-{place}", role, config, share) for place, (role, share) in enumerate(zip(roles, shares, strict=True))]
        return System(serve_part("router", "router", config), workers)

    def cores_a_worker(self, design: Design) -> int:
        """0: there are fewer cores than workers, so none is bound."""
        return len(self._cores) // design.num_workers

    def replay(self, load: float) -> list[Replayed]:
        """The requests at `load`. Prompts of different loads have no token in common but by chance: no load finds another's in a cache."""
        scale = self.settings.scale
        return replay_of(self.trace, scale._replace(time=scale.time / load), f"{self.settings.seed} {load}", VOCAB)

    def offered_per_s(self, load: float) -> float:
        """Requests per second."""
        return len(self.trace) * load / (span_s([request.arrival_s for request in self.trace]) * self.settings.scale_time)

    def warm_up_prompts(self, design: Design) -> list[list[int]]:
        """Prompts of the median length, two for each worker."""
        lengths = sorted(len(request.prompt) for request in self.replay(1.0))
        length = lengths[len(lengths) // 2]
        requests = [TraceRequest(0.0, length, 1, (place,) * -(-length // BLOCK_TOKENS)) for place in range(2 * design.num_workers)]
        return [request.prompt for request in replay_of(requests, Scale(1.0, 1.0, 1.0), f"{self.settings.seed} warm-up", VOCAB)]

    def _config(self, design: Design) -> Config:
        return load_config(None, ("log.level=warning", *self.settings.overrides, *design.overrides))

    def _check_arrivals(self) -> None:
        if len(self.trace) < 2 or span_s([request.arrival_s for request in self.trace]) <= 0:
            raise ValueError(f"{self.settings.trace}: {len(self.trace)} requests at one time have no rate")

    def _check_lengths(self) -> None:
        longest = max(len(request.prompt) + request.output_tokens for request in self.replay(1.0))
        for design in self.designs:
            config = self._configs[design.label]
            limit = min(config.model.max_context_tokens, (config.engine.num_pages - 1) * config.engine.page_size)
            if longest > limit:
                most = f"{design.label} takes at most {limit}"
                raise ValueError(f"the longest scaled request has {longest} tokens, {most}: lower --scale-lengths")
