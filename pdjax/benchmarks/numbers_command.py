"""The command line of `python -m pdjax.bench numbers`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from pdjax.benchmarks import report

if TYPE_CHECKING:
    from pdjax.benchmarks.numbers import NumbersSettings

DESCRIPTION = """\
Measure how far narrow numbers move what a model says: a text runs through an engine once a variant of the settings, and the log probability
of each of its tokens is held against the base's. Prints a line a variant:

  mean, max                 change of the log probabilities of the text's tokens, in nats
  perplexity                of the text
  same best                 at how many places the most likely next token is the base's
  same answers              tokens that greedily follow the text and its first three quarters, half and quarter, each up to the first that
                            differs
  weights, KV a token       bytes on the device

Needs no quiet machine: nothing is timed.

Exit status: 0 when all was measured, 1 when something failed, 2 on a bad command line."""

EPILOG = """\
examples:
  python -m pdjax.bench numbers --json numbers.json --plot numbers.png
  python -m pdjax.bench numbers --variant engine.weights_dtype=int8 --variant model.dtype=bfloat16,engine.kv_dtype=int8
  python -m pdjax.bench numbers --set model.source=path/of/a/model.gguf --text some.txt --tokens 2000"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "numbers",
        help="how far narrow weights and KV move log probabilities",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--variant",
        action="append",
        metavar="SECTION.FIELD=VALUE[,..]",
        help="what differs from the base; may be repeated (default: each value of engine.kv_dtype and engine.weights_dtype, int8 for both)",
    )
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="SECTION.FIELD=VALUE", help="one field for all")
    parser.add_argument("--text", type=Path, metavar="FILE", help="the text (default: one that comes with pdjax)")
    parser.add_argument("--tokens", type=int, default=600, metavar="N", help="how much of it, in tokens (default: 600)")
    parser.add_argument("--answer", type=int, default=64, metavar="N", help="tokens of each of the four greedy answers (default: 64)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured to FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the changes to FILE.png (needs pdjax[bench])")
    parser.set_defaults(prepare=prepare, run=run)


def prepare(args: argparse.Namespace) -> NumbersSettings:
    """Check everything that can be checked before anything is loaded. Raises ValueError."""
    from pdjax.benchmarks.numbers import TEXT, NumbersSettings, default_variants
    from pdjax.config.load import load_config

    if args.plot is not None:
        report.check_plotting()
    for path in (args.json, args.plot):
        if path is not None:
            report.check_output_path(path)
    if args.text is not None and not args.text.is_file():
        raise ValueError(f"--text: there is no file {args.text}")
    base = tuple(args.overrides)
    variants = default_variants(load_config(None, base)) if args.variant is None else tuple(tuple(one.split(",")) for one in args.variant)
    settings = NumbersSettings(base, variants, args.text or TEXT, args.tokens, args.answer)
    settings.check()
    return settings


def run(args: argparse.Namespace, settings: NumbersSettings) -> int:
    from pdjax.benchmarks import numbers, numbers_report

    console = Console(stderr=True)
    try:
        measured = numbers.run(settings, lambda step: console.print(f"measuring: {step}", highlight=False))
    except (OSError, ValueError) as error:
        console.print(f"pdjax.bench numbers: {error}", highlight=False, markup=False)
        return 1
    numbers_report.print_numbers(Console(width=120), measured)
    if args.json is not None:
        report.write_json(args.json, measured)
    if args.plot is not None:
        numbers_report.plot_numbers(args.plot, measured)
    return 0
