"""`python -m pdjax.convert SRC DST`: writes a model as Orbax checkpoints, whatever format it came in.

SRC is what `model.source` takes: a GGUF file, a Hugging Face folder or id, an embedded model. DST becomes a folder with a description and
Orbax checkpoints, one of each layer; it is a `model.source` itself. A run that was stopped goes on where it was when it is started again.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from pdjax.checkpoints import Checkpoint, open_checkpoint
from pdjax.checkpoints.converted import (
    DESCRIPTION_FILE,
    DTYPES,
    UNFINISHED_FILE,
    WEIGHTS_FOLDER,
    Description,
    describe,
    read_description,
)
from pdjax.checkpoints.orbax_store import WeightStore
from pdjax.checkpoints.parts import aligned_empty
from pdjax.models.pieces import pieces_of
from pdjax.observe.progress import Progress, TerminalProgress, make_board


def convert(checkpoint: Checkpoint, target: Path, dtype: str, progress: Progress) -> int:
    """Write `checkpoint` to `target`, layer by layer, with weights of `dtype`. Returns how many units were there already.

    Raises ValueError, before anything is written, where `target` holds something else.
    """
    description = describe(checkpoint, dtype)
    _begin(target, description)
    store = WeightStore(target / WEIGHTS_FOLDER, checkpoint.shape, DTYPES[dtype], partial(pieces_of, checkpoint.shape))
    progress.stage("convert", len(store.units))
    kept = 0
    for done, layer in enumerate(store.units, start=1):
        if store.is_written(layer):
            kept += 1
        else:
            store.write(layer, _read_unit(checkpoint, store, layer, DTYPES[dtype]))
        progress.advance(done, len(store.units), "ends" if layer is None else f"layer {layer}")
    store.check()
    (target / UNFINISHED_FILE).rename(target / DESCRIPTION_FILE)
    return kept


def _read_unit(checkpoint: Checkpoint, store: WeightStore, layer: int | None, dtype: np.dtype) -> dict[str, np.ndarray]:
    weights = {path: aligned_empty(spec.shape, dtype) for path, spec in store.unit_specs(layer).items()}
    for path, array in weights.items():
        checkpoint.read_into(path, layer, array)
    return weights


def _begin(target: Path, description: Description) -> None:
    """Claim the folder for this conversion, or find that it has been."""
    if (target / DESCRIPTION_FILE).exists():
        raise ValueError(f"{target} holds a converted model already")
    unfinished = target / UNFINISHED_FILE
    if unfinished.exists():
        begun = read_description(unfinished)
        if begun.format != description.format:
            raise ValueError(f"{target} holds an unfinished conversion to format {begun.format}, this is {description.format}; remove it first")
        if begun != description:
            raise ValueError(
                f"{target} holds an unfinished conversion of another model: {begun.name} ({begun.fingerprint}), "
                f"not {description.name} ({description.fingerprint})"
            )
        _remove_halves(target / WEIGHTS_FOLDER)
        return
    if target.exists() and any(target.iterdir()):
        raise ValueError(f"{target} is not empty")
    target.mkdir(parents=True, exist_ok=True)
    half = target / f"{UNFINISHED_FILE}.half"
    half.write_bytes(msgspec.json.encode(description))
    half.rename(unfinished)


def _remove_halves(weights: Path) -> None:
    """What a run that was stopped had not finished writing: Orbax writes under another name first."""
    for folder in weights.glob("*.orbax-checkpoint-tmp*"):
        shutil.rmtree(folder)


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0 done, 2 refused."""
    parser = argparse.ArgumentParser(
        prog="python -m pdjax.convert", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("source", metavar="SRC", help="a .gguf file, a model's folder, an id on the hub, or embedded:NAME")
    parser.add_argument("target", metavar="DST", type=Path, help="a folder that does not exist, is empty, or holds what a stopped run left")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16", help="dtype of the weights; default: bfloat16")
    options = parser.parse_args(arguments)
    with make_board(sys.stderr) as board:
        progress = TerminalProgress("convert", board)
        try:
            kept = convert(open_checkpoint(options.source), options.target, options.dtype, progress)
        except (ValueError, OSError) as error:
            progress.failed(str(error))
            return 2
    resumed = f", of which {kept} parts were there already" if kept else ""
    print(f"{options.target} is written{resumed}. Serve it: python -m pdjax.serve --model {options.target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
