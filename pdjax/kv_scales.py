"""`python -m pdjax.kv_scales FILE`: writes the scales of an int8 KV pool to a file for `engine.kv_scales`.

Workers find the same scales by themselves, so nobody has to run this. Where they do not, they refuse each other and name both digests: then
one file for all of them settles it. FILE is JSON, one list for each layer: scale of the keys, scale of the values, head by head.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pdjax.checkpoints import open_checkpoint
from pdjax.config.load import load_config
from pdjax.config.schema import Config
from pdjax.engine.kv_scales import KVScales, write_scales
from pdjax.observe.progress import Progress, TerminalProgress, make_board
from pdjax.worker.build import find_kv_scales
from pdjax.worker.devices import devices_in


def write_file(config: Config, target: Path, progress: Progress) -> KVScales:
    """Find the scales of the model that `config` names, on as many devices as a prefill worker has, and write them to `target`.

    Raises ValueError or OSError where there is a `target` already, or where the model cannot be had.
    """
    if target.exists():
        raise ValueError(f"{target} is there already")
    checkpoint = open_checkpoint(config.model.source)
    (devices,) = devices_in([range(config.prefill.tensor_parallel)])
    scales = find_kv_scales(checkpoint, config, devices, progress)
    write_scales(target, scales)
    return scales


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0 done, 2 refused."""
    parser = argparse.ArgumentParser(
        prog="python -m pdjax.kv_scales", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("target", metavar="FILE", type=Path, help="the file to write; must not exist")
    parser.add_argument("--config", metavar="FILE", help="YAML file of the system; default: configs/quickstart.yaml")
    parser.add_argument("--set", metavar="FIELD=VALUE", action="append", default=[], help="a field of it, as for pdjax.serve")
    options = parser.parse_args(arguments)
    with make_board(sys.stderr) as board:
        progress = TerminalProgress("kv-scales", board)
        try:
            scales = write_file(load_config(options.config, options.set), options.target, progress)
        except (ValueError, OSError) as error:
            progress.failed(str(error))
            return 2
    print(f"{options.target} is written, digest {scales.digest}")
    print(f"Serve with it: python -m pdjax.serve --set engine.kv_dtype=int8 --set engine.kv_scales={options.target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
