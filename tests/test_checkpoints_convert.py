"""Conversion to Orbax: nothing is lost, a stopped run goes on, and what does not fit is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from pdjax.checkpoints import open_checkpoint
from pdjax.checkpoints.converted import DESCRIPTION_FILE, ConvertedCheckpoint
from pdjax.convert import convert, main
from pdjax.observe.progress import NullProgress
from tests.model_kit import golden_tensors, read_golden, write_folder

TOKENIZER = {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]}, "added_tokens": []}


class Stopped(Exception):
    pass


class StopsAfter(NullProgress):
    """As if the process were stopped after some units; keeps what it was told."""

    def __init__(self, units: int = 1000):
        self.seen: list[tuple[int, int, str]] = []
        self._units = units

    def advance(self, done: int, total: int, detail: str = "") -> None:
        self.seen.append((done, total, detail))
        if done == self._units:
            raise Stopped


def source(folder: Path, name: str = "qwen2-moe") -> Path:
    golden = read_golden(name)
    written = write_folder(folder / name, golden.config, golden_tensors(golden), shards=2)
    (written / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    return written


def weights_of(path: Path, dtype: type = np.float32) -> dict[str, np.ndarray]:
    return open_checkpoint(str(path)).load_weights(np.dtype(dtype), lambda done, total: None)


@pytest.mark.parametrize("name", ["qwen2-moe", "gemma3"])
def test_a_converted_model_is_the_model(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder, target = source(tmp_path, name), tmp_path / "out" / "converted"
    assert main([str(folder), str(target), "--dtype", "float32"]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{target} is written. Serve it: python -m pdjax.serve --model {target}\n"
    assert "layer 2" in printed.err
    original, converted = open_checkpoint(str(folder)), open_checkpoint(str(target))
    assert isinstance(converted, ConvertedCheckpoint)
    assert converted.shape == original.shape and converted.tokenizer_data() == original.tokenizer_data()
    assert (converted.name, converted.eos_token_ids) == (name, original.eos_token_ids)
    expected, found = weights_of(folder), weights_of(target)
    assert expected.keys() == found.keys()
    for path, weight in expected.items():
        np.testing.assert_array_equal(found[path], weight)


def test_weights_are_rounded_once_and_the_fingerprint_tells(tmp_path: Path) -> None:
    folder = source(tmp_path, "llama")
    for dtype in ("float32", "bfloat16"):
        convert(open_checkpoint(str(folder)), tmp_path / dtype, dtype, NullProgress())
    half = weights_of(tmp_path / "bfloat16", ml_dtypes.bfloat16)
    for path, weight in weights_of(tmp_path / "float32").items():
        np.testing.assert_array_equal(half[path], weight.astype(ml_dtypes.bfloat16))
    fingerprints = {open_checkpoint(str(tmp_path / dtype)).fingerprint for dtype in ("float32", "bfloat16")}
    assert fingerprints == {f"{open_checkpoint(str(folder)).fingerprint}:{dtype}" for dtype in ("float32", "bfloat16")}


def test_a_stopped_conversion_goes_on_where_it_was(tmp_path: Path) -> None:
    folder, target = source(tmp_path, "llama"), tmp_path / "out"
    checkpoint = open_checkpoint(str(folder))
    with pytest.raises(Stopped):
        convert(checkpoint, target, "float32", StopsAfter(2))
    with pytest.raises(ValueError, match="holds an unfinished conversion; the same pdjax.convert command again finishes it"):
        open_checkpoint(str(target))
    half = target / "weights" / "layer-00001.orbax-checkpoint-tmp"
    half.mkdir()
    progress = StopsAfter()
    assert convert(checkpoint, target, "float32", progress) == 2
    assert progress.seen == [(1, 4, "ends"), (2, 4, "layer 0"), (3, 4, "layer 1"), (4, 4, "layer 2")]
    assert not half.exists()
    for path, weight in weights_of(folder).items():
        np.testing.assert_array_equal(weights_of(target)[path], weight)


def test_folders_that_hold_something_else_are_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, other, target = source(tmp_path, "llama"), source(tmp_path, "qwen3"), tmp_path / "out"
    with pytest.raises(Stopped):
        convert(open_checkpoint(str(folder)), target, "float32", StopsAfter(1))
    with pytest.raises(ValueError, match=r"holds an unfinished conversion of another model: llama \(xxh3:.*\), not qwen3"):
        convert(open_checkpoint(str(other)), target, "float32", NullProgress())
    convert(open_checkpoint(str(folder)), target, "float32", NullProgress())
    assert main([str(folder), str(target)]) == 2
    assert f"{target} holds a converted model already" in capsys.readouterr().err
    assert main([str(folder), str(other)]) == 2
    assert f"{other} is not empty" in capsys.readouterr().err
    assert main([str(tmp_path / "nothing.gguf"), str(tmp_path / "new")]) == 2
    assert "there is no such file" in capsys.readouterr().err and not (tmp_path / "new").exists()


def test_a_converted_model_that_does_not_fit_its_description_is_named(tmp_path: Path) -> None:
    target = tmp_path / "out"
    convert(open_checkpoint(str(source(tmp_path, "llama"))), target, "float32", NullProgress())
    whole = json.loads((target / DESCRIPTION_FILE).read_text())
    position = open_checkpoint(str(target)).shape._fields.index("ffn_dim")
    damaged = whole | {"shape": [*whole["shape"][:position], 52, *whole["shape"][position + 1 :]]}
    (target / DESCRIPTION_FILE).write_text(json.dumps(damaged))
    with pytest.raises(ValueError, match=r"layer-00000: weight layers/gate_up should have shape \(104, 32\) but has \(96, 32\)"):
        weights_of(target)
    (target / DESCRIPTION_FILE).write_text(json.dumps(whole | {"surprise": 1}))
    with pytest.raises(ValueError, match="does not describe a converted model: .*surprise"):
        open_checkpoint(str(target))
    (target / DESCRIPTION_FILE).write_text(json.dumps(whole | {"format": 2}))
    with pytest.raises(ValueError, match="format 2 with dtype 'float32' is not known"):
        open_checkpoint(str(target))
    (target / DESCRIPTION_FILE).write_text(json.dumps(whole))
    (target / "weights" / "layer-00001").rename(target / "weights" / "gone")
    with pytest.raises(ValueError, match="layer-00001 is missing"):
        weights_of(target)


def test_damage_anywhere_in_the_weights_is_noticed_and_named(tmp_path: Path) -> None:
    target = tmp_path / "out"
    convert(open_checkpoint(str(source(tmp_path, "llama"))), target, "float32", NullProgress())
    sums = target / "weights" / "layer-00001.sums.json"
    changed = json.loads(sums.read_text()) | {"layers/down": "0" * 16}
    sums.write_text(json.dumps(changed))
    with pytest.raises(ValueError, match=r"layer-00001: weight layers/down is damaged: its checksum is [0-9a-f]{16}, not 0{16}"):
        weights_of(target)
    sums.write_text("{")
    with pytest.raises(ValueError, match=r"layer-00001\.sums\.json is not readable"):
        weights_of(target)


@pytest.mark.parametrize("part", [slice(0, 9000), slice(0, 0)])
def test_a_truncated_data_file_is_named(tmp_path: Path, part: slice) -> None:
    target = tmp_path / "out"
    convert(open_checkpoint(str(source(tmp_path, "llama"))), target, "float32", NullProgress())
    largest = max((target / "weights" / "layer-00001").rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    assert largest.stat().st_size > 20_000
    largest.write_bytes(largest.read_bytes()[part])
    with pytest.raises(ValueError, match=r"layer-00001: weight layers/\w+ cannot be read"):
        weights_of(target)


SHARDED = """
import sys
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from pdjax.checkpoints import open_checkpoint

checkpoint = open_checkpoint(sys.argv[1])
mesh = Mesh(np.array(jax.devices()), ("tensor",))
rows, whole = NamedSharding(mesh, PartitionSpec("tensor")), NamedSharding(mesh, PartitionSpec())
restored = checkpoint.store.read_sharded(1, {"layers/gate_up": rows, "layers/mlp_norm": whole}, np.dtype(np.float32))
expected = np.empty((96, 32), np.float32)
checkpoint.read_into("layers/gate_up", 1, expected)
for shard in restored["layers/gate_up"].addressable_shards:
    assert shard.data.shape == (24, 32)
    np.testing.assert_array_equal(shard.data, expected[shard.index])
assert restored["layers/mlp_norm"].sharding.is_fully_replicated and len(restored) == 2
print(len(restored["layers/gate_up"].addressable_shards))
"""


def test_each_device_restores_the_part_that_it_holds(tmp_path: Path) -> None:
    convert(open_checkpoint(str(source(tmp_path, "llama"))), tmp_path / "out", "float32", NullProgress())
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    command, root = [sys.executable, "-c", SHARDED, str(tmp_path / "out")], Path(__file__).parent.parent
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "4\n", done.stderr
