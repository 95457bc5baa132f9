"""`python -m pdjax.bench`: measure a server (`serve`), one request to it (`timeline`), the two latency techniques (`ablation`), growth
(`growth`), designs against each other (`compare`), the machine (`ceilings`), what narrow numbers change (`numbers`), or compile the kernels
for accelerators (`kernels`)."""

from __future__ import annotations

import argparse
import asyncio
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pdjax.benchmarks import compare_command, growth_command, kernels_command, numbers_command, report, serve, timeline
from pdjax.errors import PdjaxError

if TYPE_CHECKING:
    from pdjax.benchmarks import ablation_plan, ceilings

SERVE_DESCRIPTION = """\
Measure any OpenAI-compatible server over /v1/completions.

For each prompt length, one warm-up request and then N measured ones are sent: random token ids, greedy, end of sequence ignored,
streamed. All times are taken in this process:

  TTFT        from before the connection is opened to the first token
  ITL         between two tokens
  hand-off    from the first token to the second: with prefill and decode apart, the KV moves in between
  end to end  from before the connection is opened to the end of the stream
  tok/s       prompt and output tokens of completed requests over the time all of them took

Exit status: 0 when every request was answered in full, 1 when one was not, 2 on a bad command line."""

SERVE_EPILOG = """\
examples:
  python -m pdjax.bench serve --url http://127.0.0.1:8000
  python -m pdjax.bench serve --url http://127.0.0.1:8000 --lens 128,512,2048 --concurrency 4 --requests 32 --json out.json
  python -m pdjax.bench serve --url http://127.0.0.1:8000 --lens 512 --shared-prefix 448   # prefix-cache hits"""

ABLATION_DESCRIPTION = """\
Measure what a latency technique is worth: systems with it off and on (router, prefill and decode worker, the quickstart model) are started side
by side, and every prompt goes to both, one request at a time, in an order that alternates.

  optimistic    prefill computes before decode has announced itself; the emulated announcement is late by about one forward
  early-send    the cached part of a prompt leaves before the rest is computed; the emulated link moves the KV of the whole prompt
                in the time of one forward
  both          both techniques, a late announcement and a slow link
  retry-storm   retry budgets 0, 1 and 3 with ten times the requests in flight that decode admits

All but the storm also measure a control with nothing emulated, where a technique must not cost anything, and take the time of a forward
from it. The JSON keys are listed at the top of pdjax/benchmarks/ablation_report.py. Nothing else should run on the machine meanwhile.

Exit status: 0 when every request was answered in full, 1 when one was not, 2 on a bad command line. Goals that are missed are
reported and do not count."""

ABLATION_EPILOG = """\
examples:
  python -m pdjax.bench ablation optimistic --json out.json --plot out.png
  python -m pdjax.bench ablation optimistic --load poisson --json out.json   # long prompts, 80 % cached, random arrivals
  python -m pdjax.bench ablation early-send --requests 24 --rounds 2 --json out.json
  python -m pdjax.bench ablation retry-storm --on-miss retry --json out.json"""

TIMELINE_DESCRIPTION = """\
Send one request to a pdjax server and show where its time went: in the router, on both workers and between them.

The first --cached tokens of the prompt are computed beforehand, so that prefill has them in its cache and decode has not. The trace
file is for ui.perfetto.dev or chrome://tracing; it shows all on one clock, and so the transfer that hides under the computation."""

CEILINGS_DESCRIPTION = """\
Measure what this machine can do at best: a float32 matrix product of 2048 x 2048 and the bandwidth of reading 540 MB, once as a sum
and once as a matrix-vector product, with JAX on its default device. Prints the least time that the quickstart model needs for 512
prompt tokens and for one decode step. Nothing else should run on the machine meanwhile."""


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, run, report. Returns the exit status."""
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        settings = args.prepare(args)
    except ValueError as error:
        parser.error(str(error))
    try:
        return args.run(args, settings)
    except PdjaxError as error:
        where = f"{args.url}: " if "url" in args else ""
        print(f"{parser.prog}: {where}{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pdjax.bench", description="Measure a server or the machine that it runs on.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", title="commands")
    _add_serve(commands)
    _add_ablation(commands)
    _add_timeline(commands)
    growth_command.add(commands)
    compare_command.add(commands)
    kernels_command.add(commands)
    numbers_command.add(commands)
    _add_ceilings(commands)
    return parser


def _add_serve(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "serve",
        help="latency and throughput of an OpenAI-compatible server",
        description=SERVE_DESCRIPTION,
        epilog=SERVE_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--url", required=True, help="the server, for example http://127.0.0.1:8000")
    parser.add_argument("--lens", type=_lengths, default=(128, 512), metavar="N,N,..", help="prompt lengths in tokens (default: 128,512)")
    parser.add_argument("--out", type=int, default=32, metavar="N", help="output tokens of each request (default: 32)")
    parser.add_argument("--concurrency", type=int, default=1, metavar="N", help="requests in flight at a time (default: 1)")
    parser.add_argument("--requests", type=int, metavar="N", help="measured requests a length (default: 8, or 4 x concurrency if more)")
    parser.add_argument(
        "--shared-prefix", type=int, default=0, metavar="K", help="the first K tokens of all prompts are the same (default: 0)"
    )
    parser.add_argument(
        "--seed",
        type=int,
        metavar="N",
        help="seed of the prompts; the same seed against the same running server finds its prompts cached (default: a fresh one)",
    )
    parser.add_argument("--vocab", type=int, default=48000, metavar="N", help="prompt tokens are drawn from 100..N-1 (default: 48000)")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="seconds after which a request has failed (default: 600)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured, every request included, to FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw latency over prompt length to FILE.png (needs pdjax[bench])")
    parser.set_defaults(prepare=_prepare_serve, run=_run_serve)


def _add_ablation(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Options that are not given are left out of `args`, so that each experiment has defaults of its own."""
    parser = commands.add_parser(
        "ablation",
        help="what optimistic prefill and early send are worth on this machine",
        description=ABLATION_DESCRIPTION,
        epilog=ABLATION_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("experiment", metavar="EXPERIMENT", help="optimistic, early-send, both or retry-storm")
    parser.add_argument("--prompt-tokens", type=int, metavar="N", help="prompt length (default: 512; 2048 with a cached prefix; storm 128)")
    parser.add_argument("--cached-share", type=float, metavar="X", help="part of it that is cached on prefill (default: 0, or 0.8)")
    parser.add_argument("--out", type=int, metavar="N", help="output tokens of each request (default: 16; poisson: 4)")
    parser.add_argument("--requests", type=int, metavar="N", help="measured requests a mode, condition and round (default: 16 to 120)")
    parser.add_argument("--rounds", type=int, metavar="N", help="how often all systems are started anew (default: 1 or 2)")
    parser.add_argument("--load", metavar="LOAD", help="turns (default) or poisson: random arrivals")
    parser.add_argument("--utilisation", type=float, metavar="X", help="poisson: load over what prefill can compute (default: 0.3)")
    parser.add_argument("--decode-slots", type=int, metavar="N", help="sequences that decode admits (default: 2; poisson: 1)")
    parser.add_argument("--on-miss", metavar="WHAT", help="scheduler.on_miss: park (default) or retry")
    parser.add_argument("--delay-share", type=float, metavar="X", help="emulated delay over the time of a forward (default: 1; both: 0.5)")
    parser.add_argument("--step-tokens", type=int, metavar="N", help="token budget of a prefill step (default: all in one; both: a quarter)")
    parser.add_argument("--seed", type=int, metavar="N", help="seed of prompts and arrivals (default: 0; caches start empty in every run)")
    parser.add_argument("--set", action="append", dest="overrides", metavar="SECTION.FIELD=VALUE", help="one field for all processes")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write everything measured, every request included, to FILE")
    parser.add_argument("--plot", type=Path, default=None, metavar="FILE.png", help="draw the medians to FILE.png (needs pdjax[bench])")
    parser.set_defaults(prepare=_prepare_ablation, run=_run_ablation)


def _add_timeline(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "timeline",
        help="where the time of one request goes, as a table and as a trace for Perfetto",
        description=TIMELINE_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--url", required=True, help="the server, for example http://127.0.0.1:8000")
    parser.add_argument("--prompt-tokens", type=int, default=2048, metavar="N", help="prompt length in tokens (default: 2048)")
    parser.add_argument("--cached", type=int, default=1600, metavar="K", help="of these, cached on prefill beforehand (default: 1600)")
    parser.add_argument("--out-tokens", type=int, default=16, metavar="N", help="output tokens (default: 16)")
    parser.add_argument("--seed", type=int, metavar="N", help="seed of the prompt (default: a fresh one, which no cache knows)")
    parser.add_argument("--vocab", type=int, default=48000, metavar="N", help="prompt tokens are drawn from 100..N-1 (default: 48000)")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="seconds after which a request has failed (default: 600)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="write the trace to FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the trace to FILE.png (needs pdjax[bench])")
    parser.set_defaults(prepare=_prepare_timeline, run=_run_timeline)


def _add_ceilings(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "ceilings",
        help="matrix product and memory bandwidth of this machine",
        description=CEILINGS_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--repeats", type=int, default=10, metavar="N", help="timed runs of each measurement (default: 10)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured to FILE")
    parser.set_defaults(prepare=_prepare_ceilings, run=_run_ceilings)


def _lengths(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"prompt lengths look like 128,512, got {text!r}") from None


def _prepare_serve(args: argparse.Namespace) -> serve.ServeSettings:
    """Check everything that can be checked before anything is sent. Raises ValueError."""
    if args.plot is not None:
        report.check_plotting()
    _check_outputs(args.json, args.plot)
    return serve.ServeSettings(
        url=args.url,
        lens=args.lens,
        out=args.out,
        concurrency=args.concurrency,
        requests=max(8, 4 * args.concurrency) if args.requests is None else args.requests,
        shared_prefix=args.shared_prefix,
        seed=secrets.randbits(32) if args.seed is None else args.seed,
        vocab=args.vocab,
        timeout_s=args.timeout,
    )


def _run_serve(args: argparse.Namespace, settings: serve.ServeSettings) -> int:
    measured = _measure_serve(settings)
    report.print_serve(Console(), measured)
    if args.json is not None:
        report.write_json(args.json, measured)
    if args.plot is not None:
        report.plot_serve(args.plot, measured)
    return 1 if any(result["errors"] for result in measured["results"]) else 0


def _measure_serve(settings: serve.ServeSettings) -> dict[str, Any]:
    """Run behind a progress bar that is redrawn when a request ends."""
    with _progress() as progress:
        task = progress.add_task("connecting", total=len(settings.lens) * (settings.requests + 1))

        def on_request(prompt_tokens: int) -> None:
            progress.update(task, advance=1, description=f"{prompt_tokens} prompt tokens", refresh=True)

        return asyncio.run(serve.run(settings, on_request))


def _prepare_ablation(args: argparse.Namespace) -> ablation_plan.AblationSettings:
    """Check everything that can be checked before anything is started. Raises ValueError."""
    from pdjax.benchmarks.ablation_plan import AblationSettings, Plan, default_settings

    if args.plot is not None:
        report.check_plotting()
    _check_outputs(args.json, args.plot)
    given = {key: value for key, value in vars(args).items() if key in AblationSettings.__dataclass_fields__}
    given["overrides"] = tuple(given.get("overrides", ()))
    settings = AblationSettings(**{**default_settings(args.experiment, given.get("load", "turns")), **given})
    Plan(settings).check()
    return settings


def _run_ablation(args: argparse.Namespace, settings: ablation_plan.AblationSettings) -> int:
    from pdjax.benchmarks import ablation_report

    measured = _measure_ablation(settings)
    ablation_report.print_ablation(Console(), measured)
    if args.json is not None:
        report.write_json(args.json, measured)
    if args.plot is not None:
        ablation_report.plot_ablation(args.plot, measured)
    return 1 if ablation_report.num_errors(measured) else 0


def _measure_ablation(settings: ablation_plan.AblationSettings) -> dict[str, Any]:
    """Run behind a progress bar, which is redrawn only between requests."""
    from pdjax.benchmarks import ablation
    from pdjax.benchmarks.ablation_plan import total_requests

    with _progress() as progress:
        task = progress.add_task(settings.experiment, total=total_requests(settings))
        watch = ablation.Watch(
            on_step=lambda step: progress.update(task, description=step, refresh=True),
            on_request=lambda: progress.update(task, advance=1, refresh=True),
        )
        return asyncio.run(ablation.run(settings, watch))


def _progress() -> Progress:
    """Redrawn on request only: a thread that redraws would disturb the times of the others."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), auto_refresh=False)


def _prepare_timeline(args: argparse.Namespace) -> timeline.TimelineSettings:
    if args.plot is not None:
        report.check_plotting()
    _check_outputs(args.out, args.plot)
    return timeline.TimelineSettings(
        url=args.url,
        prompt_tokens=args.prompt_tokens,
        cached=args.cached,
        out_tokens=args.out_tokens,
        seed=secrets.randbits(32) if args.seed is None else args.seed,
        vocab=args.vocab,
        timeout_s=args.timeout,
    )


def _run_timeline(args: argparse.Namespace, settings: timeline.TimelineSettings) -> int:
    observed = timeline.observe(settings)
    timeline.print_timeline(Console(), observed)
    timeline.write_trace(args.out, observed)
    if args.plot is not None:
        timeline.plot_timeline(args.plot, observed)
    return 0


def _prepare_ceilings(args: argparse.Namespace) -> ceilings.CeilingSettings:
    from pdjax.benchmarks import ceilings  # brings in JAX, which `serve` does without

    if args.repeats < 1:
        raise ValueError(f"--repeats must be at least 1, got {args.repeats}")
    _check_outputs(args.json)
    return ceilings.CeilingSettings(repeats=args.repeats)


def _run_ceilings(args: argparse.Namespace, settings: ceilings.CeilingSettings) -> int:
    from pdjax.benchmarks import ceilings

    console = Console(stderr=True)
    measured = ceilings.run(settings, lambda step: console.print(f"measuring: {step}"))
    report.print_ceilings(Console(), measured)
    if args.json is not None:
        report.write_json(args.json, measured)
    return 0


def _check_outputs(*paths: Path | None) -> None:
    for path in paths:
        if path is not None:
            report.check_output_path(path)


if __name__ == "__main__":
    sys.exit(main())
