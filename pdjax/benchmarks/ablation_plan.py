"""What an ablation starts: which systems, with which configuration, under which emulated delay and link.

A *mode* is a system with a technique off or on. A *condition* is what is emulated around it: nothing (the control), or a slow announcement and
a slow link, scaled to what this machine needs for the forward of the prompt.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from pdjax.benchmarks.system import Roles
from pdjax.checkpoints import open_checkpoint
from pdjax.config.environment import early_send_override
from pdjax.config.load import load_config
from pdjax.config.schema import Config
from pdjax.models.shape import ModelShape

EXPERIMENTS = ("optimistic", "early-send", "both", "retry-storm")
LOADS = ("turns", "poisson")
ON_MISS = ("park", "retry")

OFF, ON = "off", "on"
CONTROL, EMULATED = "control", "emulated"

STORM_RETRIES = (1, 3)
STORM_FACTOR = 10
"""Requests in flight in a retry storm, in multiples of what decode admits."""

WARM_UP_REQUESTS = 2
CALIBRATION_REQUESTS = 6
DECODE_STEP_TOKENS = 64
SMALL_STEP_TOKENS = 16


@dataclass(frozen=True)
class AblationSettings:
    """What to measure. Raises ValueError, naming value and limit, on settings that make no sense together.

    `cached_share`: part of the prompt that prefill has cached and decode has not. `requests`: measured requests of each mode, condition and
    round. `rounds`: how often all systems are started anew. `utilisation`: Poisson load, as a share of what prefill could compute.
    `decode_slots`: sequences that decode admits. `delay_share`: the emulated delay of an announcement over the time of a forward.
    `step_tokens`: token budget of a prefill step, None for one step. `overrides`: `section.field=value` for all processes.
    """

    experiment: str
    prompt_tokens: int = 512
    cached_share: float = 0.0
    out: int = 16
    requests: int = 16
    rounds: int = 1
    load: str = "turns"
    utilisation: float = 0.3
    decode_slots: int = 2
    on_miss: str = "park"
    delay_share: float = 1.0
    step_tokens: int | None = None
    seed: int = 0
    overrides: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, value, choices in (
            ("experiment", self.experiment, EXPERIMENTS), ("load", self.load, LOADS), ("on_miss", self.on_miss, ON_MISS)
        ):  # fmt: skip
            if value not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
        at_least = {"prompt_tokens": (self.prompt_tokens, 32), "out": (self.out, 3), "requests": (self.requests, 1)}
        at_least |= {"rounds": (self.rounds, 1), "decode_slots": (self.decode_slots, 1), "step_tokens": (self.step_tokens or 16, 16)}
        for name, (number, least) in at_least.items():
            if number < least:
                raise ValueError(f"{name} must be at least {least}, got {number}")
        if not 0 <= self.cached_share < 1:
            raise ValueError(f"cached_share must be at least 0 and below 1, got {self.cached_share}")
        if not 0 < self.utilisation < 1:
            raise ValueError(f"utilisation must be above 0 and below 1, got {self.utilisation}")
        if self.delay_share <= 0:
            raise ValueError(f"delay_share must be above 0, got {self.delay_share}")
        if self.load == "poisson" and self.experiment == "retry-storm":
            raise ValueError("load poisson has no meaning with retry-storm, which keeps its number of requests in flight")


POISSON = {"prompt_tokens": 2048, "cached_share": 0.8, "out": 4, "requests": 24, "rounds": 2, "decode_slots": 1, "utilisation": 0.3}
"""Short answers: the time to first token is what is looked at, and prefill and decode may share the same cores."""

DEFAULTS: Mapping[tuple[str, str], Mapping[str, Any]] = {
    ("optimistic", "turns"): {"prompt_tokens": 512},
    # Decode admits one at a time, so that how long a sequence holds its slot counts, as it does on a decode worker that is full.
    ("optimistic", "poisson"): POISSON,
    # A long prompt: the hand-off holds a decode step and two hops besides the transfer, and those do not shrink.
    ("early-send", "turns"): {"prompt_tokens": 2048, "cached_share": 0.8},
    ("early-send", "poisson"): POISSON,
    # Decode answers half-way through the suffix, which is computed in four steps: what can still leave early then does.
    ("both", "turns"): {"prompt_tokens": 2048, "cached_share": 0.8, "delay_share": 0.5, "step_tokens": 112},
    ("both", "poisson"): POISSON,
    ("retry-storm", "turns"): {"prompt_tokens": 128, "requests": 120, "rounds": 2},
}
"""By experiment and load; what is not named here is the default of `AblationSettings`."""


def default_settings(experiment: str, load: str) -> Mapping[str, Any]:
    return DEFAULTS.get((experiment, load), {})


class Mode(NamedTuple):
    """A system by what is switched on in it. `overrides`: for its workers."""

    name: str
    overrides: tuple[str, ...]


class Emulation(NamedTuple):
    """What lies between the workers. None: what this machine has. `forward_s`: the time it was scaled to."""

    forward_s: float | None = None
    announce_delay_s: float | None = None
    gbytes_per_s: float | None = None

    def overrides(self) -> tuple[str, ...]:
        fields = {"emulate_announce_delay_s": self.announce_delay_s, "emulate_gbytes_per_s": self.gbytes_per_s}
        return tuple(f"transfer.{name}={json.dumps(value)}" for name, value in fields.items() if value is not None)


class Plan:
    """The systems of one ablation. Raises ConfigError where the overrides are wrong, ValueError where the environment overrides a mode."""

    def __init__(self, settings: AblationSettings):
        if early_send_override() is not None:
            raise ValueError("PDJAX_EARLY_SEND_CACHED_PREFIX would decide for both modes: unset it")
        self.settings = settings
        self.base = load_config(None, settings.overrides)

    def check(self) -> None:
        """Whether every configuration that will be needed is right; an emulated delay and link stand for the measured ones."""
        for mode in self.modes():
            self.roles(mode, Emulation())
            self.roles(mode, self.calibrated(1.0))

    @property
    def num_cached(self) -> int:
        """Prompt tokens that prefill has cached: full pages."""
        page_size = self.base.engine.page_size
        return int(self.settings.cached_share * self.settings.prompt_tokens) // page_size * page_size

    @property
    def num_in_flight(self) -> int:
        """Requests in flight that the systems are made for. An open loop may have more; they wait on the workers then."""
        if self.settings.experiment == "retry-storm":
            return STORM_FACTOR * self.settings.decode_slots
        return 1 if self.settings.load == "turns" else 2 * self.settings.decode_slots + 4

    def modes(self) -> tuple[Mode, ...]:
        """The first one is what the others are compared with."""
        if self.settings.experiment == "retry-storm":
            return tuple(Mode(storm_mode(retries), self._optimism(retries)) for retries in (0, *STORM_RETRIES))
        if self.settings.experiment == "optimistic":
            return Mode(OFF, self._optimism(0)), Mode(ON, self._optimism(1))
        early = tuple(f"scheduler.early_send_cached_prefix={word}" for word in ("false", "true"))
        retries = (0, 1) if self.settings.experiment == "both" else (0, 0)
        return tuple(
            Mode(name, (*self._optimism(count), switch)) for name, count, switch in zip((OFF, ON), retries, early, strict=True)
        )

    def calibrated(self, forward_s: float) -> Emulation:
        """Scaled to the time in which this machine computes what of a prompt is not cached."""
        settings = self.settings
        delay_s = settings.delay_share * forward_s if settings.experiment in ("optimistic", "both") else None
        num_bytes = settings.prompt_tokens * kv_bytes_per_token(self.base)
        rate = num_bytes / 1e9 / forward_s if settings.experiment in ("early-send", "both") else None
        return Emulation(forward_s, delay_s, rate)

    def roles(self, mode: Mode, emulation: Emulation) -> Roles:
        """The configurations of one system: pools and buckets no larger than needed, a prefix cache on prefill only."""
        common = (*self.settings.overrides, "log.level=warning", *mode.overrides, *emulation.overrides())
        return Roles(
            router=load_config(None, common),
            prefill=load_config(None, (*self._prefill_sizes(), *common)),
            decode=load_config(None, (*self._decode_sizes(), "scheduler.prefix_cache=false", *common)),
        )

    def _optimism(self, retries: int) -> tuple[str, ...]:
        return f"scheduler.optimistic_prefill_retries={retries}", f"scheduler.on_miss={self.settings.on_miss}"

    def _prefill_sizes(self) -> tuple[str, ...]:
        settings = self.settings
        suffix = settings.prompt_tokens - self.num_cached
        step_tokens = min(settings.step_tokens or _round_up(suffix, SMALL_STEP_TOKENS), 1024)
        running = max(2, min(2 * settings.decode_slots + 4, self.num_in_flight))
        shared, own = self._pages(self.num_cached), self._pages(suffix)
        return (
            f"engine.max_running={running}",
            f"engine.decode_buckets=[{running}]",
            f"engine.max_prefill_seqs={min(4, running)}",
            f"engine.prefill_buckets={sorted({SMALL_STEP_TOKENS, step_tokens})}",
            f"engine.num_pages={2 * shared + (running + 3) * own + 1}",
            f"scheduler.max_step_tokens={step_tokens}",
        )

    def _decode_sizes(self) -> tuple[str, ...]:
        slots = self.settings.decode_slots
        buckets = sorted({1, *(2**power for power in range(slots.bit_length()) if 2**power < slots), slots})
        pages = self._pages(self.settings.prompt_tokens + max(self.settings.out, self.base.scheduler.decode_reserve_tokens)) + 1
        return (
            f"engine.max_running={slots}",
            f"engine.decode_buckets={buckets}",
            f"engine.max_prefill_seqs={min(4, slots)}",
            f"engine.prefill_buckets=[{DECODE_STEP_TOKENS}]",
            f"engine.num_pages={(slots + 1) * pages + 1}",
            f"scheduler.max_step_tokens={DECODE_STEP_TOKENS}",
        )

    def _pages(self, num_tokens: int) -> int:
        return math.ceil(num_tokens / self.base.engine.page_size)


def storm_mode(retries: int) -> str:
    return f"n{retries}"


def kv_bytes_per_token(config: Config) -> int:
    """Of the whole model: K and V of every layer."""
    return _shape(config.model.source).kv_bytes_per_token({"float32": 4, "bfloat16": 2, "float8_e4m3fn": 1, "int8": 1}[config.kv_dtype])


@functools.cache
def _shape(source: str) -> ModelShape:
    return open_checkpoint(source).shape


def total_requests(settings: AblationSettings) -> int:
    """How often a run reports a request: warm-ups and calibration included."""
    if settings.experiment == "retry-storm":
        return settings.rounds * (1 + len(STORM_RETRIES)) * (WARM_UP_REQUESTS + settings.requests)
    emulated = 2 * (WARM_UP_REQUESTS + settings.requests)
    control = 2 * WARM_UP_REQUESTS + 2 * (settings.requests if settings.load == "turns" else CALIBRATION_REQUESTS)
    return settings.rounds * (control + emulated)


def _round_up(value: int, multiple: int) -> int:
    return math.ceil(value / multiple) * multiple
