"""The JSON of a comparison: what it holds, and when a later call may add to it.

  benchmark, schema_version, note
  boot_id, machine, versions   of the machine and what ran on it; `load_average`: over one minute, before the first measurement
  calls, settings              the commands that measured something, the oldest first, and what they had in common
  ceilings                     the JSON of `python -m pdjax.bench ceilings`, measured before the engines
  engines                      by key: title, commands, measured_at, ready_s (start to ready; null where it never was), rows,
                               error (null where there was none)
  engines.*.rows               by row: median, min, max and `values`, one a repeat; seconds, or tokens a second in `clients_tokens_per_s`

Rows: ttft_N; ttft_N_cached; itl_N (behind the second token); second_N (start to second token); prefill_N (prefill's own time) and
beyond_prefill_N (TTFT less that) of engines with a prefill of their own; clients_tokens_per_s and clients_ttft of the closed loop.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pdjax.benchmarks.peers_engines import ENGINES, Engine, num_cores
from pdjax.benchmarks.peers_measure import Figures
from pdjax.benchmarks.peers_setup import RECIPES
from pdjax.benchmarks.report import SCHEMA_VERSION, quantile
from pdjax.errors import PdjaxError
from pdjax.version import __version__

Run = dict[str, Any]

NOTE = (
    "A later call adds its engines to this file if the machine has not been started again since the ceilings were measured (boot_id) "
    "and the settings are the same; otherwise it begins anew."
)
VECTOR_FLAGS = {"avx2": "AVX2", "avx512f": "AVX-512", "avx512_vnni": "AVX-512 VNNI", "avx512_bf16": "AVX-512 BF16", "amx_tile": "AMX"}
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_CPU_INFO = Path("/proc/cpuinfo")


class UnreadableRecord(PdjaxError):
    """A JSON file that is no comparison."""


def new_run(settings: dict[str, Any], command: str) -> Run:
    """A run in which nothing has been measured yet."""
    return {
        "schema_version": SCHEMA_VERSION,
        "benchmark": "peers",
        "note": NOTE,
        "boot_id": _BOOT_ID.read_text(encoding="ascii").strip(),
        "machine": describe_machine(_CPU_INFO.read_text(encoding="utf-8")),
        "versions": describe_versions(),
        "calls": [command],
        "settings": settings,
        "ceilings": None,
        "engines": {},
    }


def read(path: Path) -> Run:
    """Raises UnreadableRecord."""
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnreadableRecord(f"cannot read {path}: {error}") from error
    if not isinstance(run, dict) or run.get("benchmark") != "peers" or run.get("schema_version") != SCHEMA_VERSION:
        raise UnreadableRecord(f"{path} is not a comparison of schema {SCHEMA_VERSION}")
    return run


def write(run: Run, path: Path) -> None:
    """Replaces the file in one step, so that an interrupted call leaves the previous one."""
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_text(json.dumps(run, indent=2) + "\n", encoding="utf-8")
    os.replace(unfinished, path)


def resume(fresh: Run, earlier: Run) -> Run:
    """`earlier` with the versions of `fresh` and its call behind the others, where both are of one boot and have the same settings;
    `fresh` otherwise."""
    if earlier["ceilings"] is None or any(earlier[key] != fresh[key] for key in ("boot_id", "settings")):
        return fresh
    return earlier | {"calls": earlier["calls"] + fresh["calls"], "versions": fresh["versions"]}


def add_engine(run: Run, key: str, entry: dict[str, Any]) -> None:
    """Put `entry` in the place of an earlier one of the same engine. Engines stand in the order of ENGINES."""
    engines = run["engines"] | {key: entry}
    run["engines"] = {key: engines[key] for key in ENGINES if key in engines}


def new_entry(engine: Engine, commands: Sequence[str], at: str) -> dict[str, Any]:
    """The entry of an engine of which nothing has been measured yet."""
    return {"title": engine.title, "commands": list(commands), "measured_at": at, "ready_s": None, "rows": {}, "error": None}


def rows_of(figures: Figures) -> dict[str, dict[str, Any]]:
    return {row: {"median": quantile(values, 0.5), "min": min(values), "max": max(values), "values": values} for row, values in figures.items()}


def describe_machine(cpu_info: str) -> dict[str, Any]:
    """`cpu_info`: the text of /proc/cpuinfo, of which the first processor is described."""
    flags = set(_field(cpu_info, "flags").split())
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": _field(cpu_info, "model name") or platform.machine(),
        "cores": num_cores(),
        "vector_flags": [name for flag, name in VECTOR_FLAGS.items() if flag in flags],
        "memory_gib": memory_bytes / 2**30,
        "load_average": os.getloadavg()[0],
    }


def _field(cpu_info: str, name: str) -> str:
    match = re.search(rf"^{re.escape(name)}\s*:(.*)$", cpu_info, re.MULTILINE)
    return "" if match is None else match.group(1).strip()


def describe_versions() -> dict[str, str]:
    own = f"{__version__} (JAX {importlib.metadata.version('jax')}, Python {platform.python_version()})"
    return {"pdjax": own} | {part: ", ".join(recipe) for part, recipe in RECIPES.items() if part != "model"}
