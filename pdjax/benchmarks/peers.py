"""`scripts/bench_peers`: measures pdjax and what one would run instead, in turn on this machine, and writes the page with the comparison."""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pdjax.benchmarks import peers_record, report
from pdjax.benchmarks.client import RequestFailed
from pdjax.benchmarks.peers_engines import ENGINES, QUICKSTART, ROOT, Engine, ServerFailed, running, shown
from pdjax.benchmarks.peers_measure import Measurement, Plan, Words
from pdjax.benchmarks.peers_record import Run
from pdjax.benchmarks.peers_requests import open_requests
from pdjax.benchmarks.peers_setup import Peers, open_peers, run_to_its_end, set_up
from pdjax.errors import PdjaxError

DESCRIPTION = """\
Measure pdjax and what one would run instead on the same machine, one engine after the other with the same client: TTFT, inter-token
latency and throughput over HTTP, with the quickstart model. Writes a page with figures, ratios and goals, and a picture beside it.

  pdjax      the quickstart: router, prefill worker, decode worker
  vllm       vLLM's CPU build, float32, one server
  vllm-tuned the same on all cores, with the OpenMP that it advises; on its own it leaves one core to its other processes
  vllm-pd    vLLM, one prefill and one decode server, KV over NIXL
  llamacpp   llama.cpp's server with the 4-bit file

The first call installs the others under --cache, each in a virtual environment of its own; that takes some 15 minutes, most of which
llama.cpp compiles. Nothing else should run on the machine while it measures. Results are kept after each engine, and a later call with the
same --json adds to them if the machine has not been started again meanwhile and the settings are the same.

Exit status: 0 when every engine was measured, 1 when one failed, 2 on a bad command line. Goals that are missed do not count."""

EPILOG = """\
examples:
  scripts/bench_peers                                    everything, written to docs/benchmarks.md
  scripts/bench_peers --engines pdjax --json FILE        pdjax once more, beside the others in FILE
  scripts/bench_peers --setup-only                       install, measure nothing
  scripts/bench_peers --render --json FILE --out FILE.md the page once more, from what was measured"""


class MeasurementFailed(PdjaxError):
    """Nothing can be measured; the message says why."""


def build_parser() -> argparse.ArgumentParser:
    defaults = Plan()
    parser = argparse.ArgumentParser(
        prog="scripts/bench_peers", description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = ",".join(ENGINES)
    parser.add_argument("--engines", type=_engines, default=tuple(ENGINES), metavar="A,B,..", help=f"which ones to measure (default: {every})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="everything measured (default: benchmarks.json under --cache)")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks.md", metavar="FILE.md", help="the page (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=defaults.repeats, metavar="N", help="measurements of each figure (default: %(default)s)")
    parser.add_argument(
        "--lens", type=_lengths, default=defaults.lens, metavar="N,N,..", help="prompt lengths in tokens (default: 128,512,2048)"
    )
    parser.add_argument("--cached", type=int, default=defaults.cached, metavar="N", help="cached part of the longest (default: %(default)s)")
    parser.add_argument("--cache", type=Path, required=True, metavar="FOLDER", help="where the other servers are installed")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="compilers at a time while installing (default: %(default)s)")
    parser.add_argument("--setup-only", action="store_true", help="install what --engines need and stop")
    parser.add_argument("--render", action="store_true", help="measure nothing; write the page from --json")
    return parser


def _engines(text: str) -> tuple[str, ...]:
    chosen = tuple(text.split(","))
    for key in chosen:
        if key not in ENGINES:
            raise argparse.ArgumentTypeError(f"engine {key!r} is unknown; known: {', '.join(ENGINES)}")
    return tuple(key for key in ENGINES if key in chosen)


def _lengths(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"prompt lengths look like 128,512, got {text!r}") from None


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, install, measure, report. Returns the exit status."""
    parser = build_parser()
    args = parser.parse_args(argv)
    record = args.json or args.cache.expanduser() / "benchmarks.json"
    try:
        plan = Plan(repeats=args.repeats, lens=args.lens, cached=args.cached)
        _check(args, record)
    except ValueError as error:
        parser.error(str(error))
    try:
        if args.render:
            return _write_page(peers_record.read(record), args.out)
        peers = open_peers(args.cache)
        set_up(peers, args.engines, args.jobs, say)
        if args.setup_only:
            return 0
        run = _measure_all(peers, args.engines, plan, record, _as_called(args, plan))
        return _write_page(run, args.out)
    except PdjaxError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _check(args: argparse.Namespace, record: Path) -> None:
    """Everything that can be checked before anything long is begun. Raises ValueError."""
    if args.jobs < 1:
        raise ValueError(f"--jobs must be at least 1, got {args.jobs}")
    report.check_plotting()
    report.check_output_path(args.out)
    if args.json is not None:
        report.check_output_path(record)


def _as_called(args: argparse.Namespace, plan: Plan) -> str:
    """The command as a user types it, without paths."""
    given = {"--engines": args.engines, "--repeats": plan.repeats, "--lens": plan.lens, "--cached": plan.cached}
    usual = {"--engines": tuple(ENGINES), "--repeats": Plan.repeats, "--lens": Plan.lens, "--cached": Plan.cached}
    words = ["scripts/bench_peers"]
    for option, value in given.items():
        if value != usual[option]:
            words += [option, ",".join(map(str, value)) if isinstance(value, tuple) else str(value)]
    return " ".join(words)


def _measure_all(peers: Peers, engines: Sequence[str], plan: Plan, record: Path, command: str) -> Run:
    """Ceilings, then the engines; `record` is written after each. Raises PdjaxError where the ceilings cannot be measured."""
    run = peers_record.new_run(json.loads(json.dumps(asdict(plan))), command)
    if record.exists():
        run = peers_record.resume(run, peers_record.read(record))
        say(f"{record}: {'adding to' if run['ceilings'] else 'of another boot or other settings, replacing'} what was measured before")
    if run["ceilings"] is None:
        run["ceilings"] = _measure_ceilings(peers)
        peers_record.write(run, record)
    asyncio.run(_take_turns(peers, engines, plan, run, record))
    return run


def _measure_ceilings(peers: Peers) -> dict[str, Any]:
    """In a process of its own, which takes its memory and threads away again."""
    say("measuring the machine's ceilings")
    log = peers.logs / "ceilings.log"
    with tempfile.TemporaryDirectory() as folder, log.open("wb") as output:
        path = Path(folder) / "ceilings.json"
        if run_to_its_end((sys.executable, "-m", "pdjax.bench", "ceilings", "--json", str(path)), output) != 0:
            raise MeasurementFailed(f"the ceilings cannot be measured; see {log}")
        return json.loads(path.read_text(encoding="utf-8"))


def _open_words() -> Words:
    from pdjax.api.tokenizer import Tokenizer
    from pdjax.checkpoints import open_checkpoint
    from pdjax.config.load import load_config

    source = load_config(QUICKSTART, []).model.source
    return Words(Tokenizer(open_checkpoint(source).tokenizer_data()), secrets.randbits(32))


async def _take_turns(peers: Peers, engines: Sequence[str], plan: Plan, run: Run, record: Path) -> None:
    """One engine after the other. SIGTERM ends the whole in order, as Ctrl-C does."""
    task, words = asyncio.current_task(), _open_words()
    assert task is not None, "runs as a task"
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    for key in engines:
        peers_record.add_engine(run, key, await _turn(peers, ENGINES[key], plan, words))
        peers_record.write(run, record)


async def _turn(peers: Peers, engine: Engine, plan: Plan, words: Words) -> dict[str, Any]:
    """Start, warm, measure and stop one engine; its entry in the record."""
    say(f"{engine.title}: starting")
    servers = engine.make_servers(peers)
    entry = peers_record.new_entry(engine, [shown(server.command, peers) for server in servers], time.strftime("%Y-%m-%d %H:%M:%S"))
    try:
        async with running(servers, peers.logs, say) as ready_s:
            entry["ready_s"] = ready_s
            requests = await open_requests(engine.key, [server.endpoint for server in servers])
            measurement = Measurement(requests, _plan_of(engine, plan), words, say)
            try:
                await measurement.run()
            finally:
                entry["rows"] = peers_record.rows_of(measurement.figures)
    except (RequestFailed, ServerFailed) as error:
        say(f"{engine.title}: failed: {error}")
        entry["error"] = str(error)
    return entry


def _plan_of(engine: Engine, plan: Plan) -> Plan:
    """With the lengths that are measured of this engine only, as far as they lie between the others, and the clients that it gets."""
    extra = [length for length in engine.extra_lens if min(plan.lens) < length < max(plan.lens)]
    return replace(plan, lens=tuple(sorted({*plan.lens, *extra})), clients=plan.clients if engine.has_clients else 0)


def _write_page(run: Run, out: Path) -> int:
    """The page, and the picture beside it. Exit status 1 where an engine failed."""
    from pdjax.benchmarks import peers_report  # brings in JAX, which measuring does without

    picture = out.with_suffix(".svg")
    peers_report.draw(run, picture)
    out.write_text(peers_report.page(run, picture.name), encoding="utf-8")
    say(f"written: {out}, {picture}")
    return 1 if any(entry["error"] for entry in run["engines"].values()) else 0


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):  # also where a shell started this in the background, which ignores Ctrl-C
        signal.signal(number, signal.default_int_handler)
    sys.exit(main())
