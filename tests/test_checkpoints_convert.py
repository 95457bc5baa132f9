"""Conversion to Orbax: nothing is lost, a stopped run goes on, devices restore their own parts, and what does not fit is named."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import msgspec
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pdjax.checkpoints import open_checkpoint, orbax_store
from pdjax.checkpoints.converted import DESCRIPTION_FILE, UNFINISHED_FILE, WEIGHTS_FOLDER, ConvertedCheckpoint, describe
from pdjax.checkpoints.orbax_store import WeightStore
from pdjax.convert import convert, main
from pdjax.engine.mesh import Chips, chips_for
from pdjax.engine.weights import PlacedWeights, RestoredWeights, place_weights
from pdjax.models.pieces import pieces_of, whole
from pdjax.models.shape import ModelShape
from pdjax.observe.progress import NullProgress
from tests.gguf_kit import TINY
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
    with pytest.raises(ValueError, match=r"layer-00000: weight layers/gate_up\.gate should have shape \(52, 32\) but has \(48, 32\)"):
        weights_of(target)
    (target / DESCRIPTION_FILE).write_text(json.dumps(whole | {"surprise": 1}))
    with pytest.raises(ValueError, match="does not describe a converted model: .*surprise"):
        open_checkpoint(str(target))
    (target / DESCRIPTION_FILE).write_text(json.dumps(whole | {"format": 3}))
    with pytest.raises(ValueError, match="format 3 with dtype 'float32' is not known"):
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
    with pytest.raises(ValueError, match=r"layer-00001: weight layers/[\w.]+ cannot be read"):
        weights_of(target)


# ---- devices that restore their own parts


class Restored(NamedTuple):
    """A converted model, what was asked of it in one call each, and the bytes that were read of its files meanwhile."""

    checkpoint: ConvertedCheckpoint
    calls: list[dict[str, jax.sharding.Sharding]]
    weights: PlacedWeights
    bytes_read: int

    def largest_call(self) -> int:
        """Bytes of all pieces that one call brings, each once."""
        store, dtype = self.checkpoint.store, np.dtype(np.float32)
        sizes = {}
        for layer in (None, 0):
            for path, spec in store.unit_specs(layer).items():
                sizes |= {piece.path(path): math.prod(piece.of(spec).shape) for piece in pieces_of(self.checkpoint.shape, spec)}
        return max(sum(sizes[name] for name in call) for call in self.calls) * dtype.itemsize


def bytes_read_of_files() -> int:
    metrics = tensorstore.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
    return sum(value["value"] for metric in metrics for value in metric["values"])


def restored(target: Path, chips: Chips, by_layer: bool) -> Restored:
    checkpoint = open_checkpoint(str(target))
    assert isinstance(checkpoint, ConvertedCheckpoint)
    restore = checkpoint.restorer(np.dtype(np.float32))
    assert restore is not None
    calls: list[dict[str, jax.sharding.Sharding]] = []
    seen: list[tuple[int, int]] = []

    def recorded(layer: int | None, where: Mapping[str, jax.sharding.Sharding]) -> dict[str, jax.Array]:
        calls.append(dict(where))
        return restore(layer, where)

    source = RestoredWeights(checkpoint.shape, recorded, lambda done, total: seen.append((done, total)))
    before = bytes_read_of_files()
    weights = place_weights(checkpoint.shape, source, jnp.dtype(jnp.float32), chips, by_layer)
    assert seen == [(i, 4) for i in range(1, 5)]
    return Restored(checkpoint, calls, weights, bytes_read_of_files() - before)


@pytest.fixture(scope="module")
def converted_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Goldens by name, each converted: a plain one with 2 KV heads, one with a bias, one with experts and a shared one."""
    folder = tmp_path_factory.mktemp("converted")
    for name in ("llama", "qwen2-moe"):
        convert(open_checkpoint(str(source(folder, name))), folder / f"{name}-out", "float32", NullProgress())
    return {name: folder / f"{name}-out" for name in ("llama", "qwen2-moe")}


@pytest.mark.parametrize(
    ("name", "width", "by_layer"),
    [("llama", 1, True), ("llama", 2, True), ("llama", 4, False), ("qwen2-moe", 4, False), ("qwen2-moe", 2, True)],
)
def test_each_chip_restores_the_part_that_it_holds_as_if_the_host_had_placed_it(
    converted_folders: dict[str, Path], name: str, width: int, by_layer: bool
) -> None:
    """Of four chips, those of a model with two KV heads hold copies."""
    chips = chips_for(open_checkpoint(str(converted_folders[name])).shape, jax.devices()[2 : 2 + width])
    found = restored(converted_folders[name], chips, by_layer)
    expected = place_weights(found.checkpoint.shape, weights_of(converted_folders[name]), jnp.dtype(jnp.float32), chips, by_layer)
    assert jax.tree.structure(found.weights) == jax.tree.structure(expected)
    for mine, theirs in zip(jax.tree.leaves(found.weights), jax.tree.leaves(expected), strict=True):
        assert mine.sharding.is_equivalent_to(theirs.sharding, mine.ndim)
        for own, other in zip(mine.addressable_shards, theirs.addressable_shards, strict=True):
            assert own.device == other.device
            np.testing.assert_array_equal(own.data, other.data)


def test_restoring_asks_for_a_layer_at_a_time_and_for_no_array_on_the_host(
    converted_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more than a layer's parts are on their way at a time, and each only to the chips that hold it."""
    asked: list[ocp.RestoreArgs] = []
    monkeypatch.setattr(WeightStore, "_restore", recording(WeightStore._restore, asked))
    found = restored(converted_folders["llama"], chips_for(read_shape_of(converted_folders), jax.devices()[:4]), by_layer=False)
    assert asked and all(isinstance(each, ocp.ArrayRestoreArgs) for each in asked), "an np.ndarray would be whole on the host"
    split = {name for call in found.calls for name, sharding in call.items() if not sharding.is_fully_replicated}
    assert split >= {"embed", "layers/qkv.q", "layers/qkv.k", "layers/qkv.v", "layers/gate_up.gate", "layers/gate_up.up", "layers/down"}
    total = sum(array.nbytes for array in weights_of(converted_folders["llama"]).values())
    assert found.largest_call() < total / 2
    # Files have a head, and chips that hold the same part may read it at the same time: once for each of the four would be more.
    assert found.bytes_read < 2.5 * total


def recording(restore: Callable[..., Any], asked: list[ocp.RestoreArgs]) -> Callable[..., Any]:
    def recorded(store: WeightStore, layer: int | None, wanted: Mapping[str, ocp.RestoreArgs]) -> Any:
        asked.extend(wanted.values())
        return restore(store, layer, wanted)

    return recorded


def read_shape_of(folders: dict[str, Path]) -> ModelShape:
    return open_checkpoint(str(folders["llama"])).shape


def test_a_device_reads_the_chunks_of_its_own_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on one of several hosts, which has no use for the others' rows."""
    monkeypatch.setattr(orbax_store, "CHUNK_BYTES", 1 << 20)
    shape = TINY._replace(num_layers=1, embed_dim=1024, num_heads=16, num_kv_heads=4, head_dim=64, ffn_dim=2048)
    cut = functools.partial(pieces_of, shape)
    store = WeightStore(tmp_path, shape, np.dtype(np.float32), cut)
    rng = np.random.default_rng(0)
    weights = {path: rng.standard_normal(spec.shape, np.float32) for path, spec in store.unit_specs(0).items()}
    store.write(0, weights)
    mesh = Mesh(np.array(jax.devices()[:4]), ("model",))
    rows = NamedSharding(mesh, PartitionSpec("model"))
    read = {}
    for name in ("layers/qkv.q", "layers/gate_up.up"):
        before = bytes_read_of_files()
        (array,) = store.restore(0, {name: rows}, np.dtype(np.float32)).values()
        read[name] = bytes_read_of_files() - before
        assert [shard.data.shape for shard in array.addressable_shards] == [(len(array) // 4, 1024)] * 4
    np.testing.assert_array_equal(array, weights["layers/gate_up"][2048:])
    all_bytes = sum(weight.nbytes for weight in weights.values())
    assert read["layers/qkv.q"] < 1.2 * weights["layers/qkv"].nbytes < all_bytes / 4
    assert read["layers/gate_up.up"] < 1.2 * weights["layers/gate_up"].nbytes / 2


def test_a_damaged_or_missing_file_is_named_before_devices_read_it(tmp_path: Path) -> None:
    target = tmp_path / "out"
    convert(open_checkpoint(str(source(tmp_path, "llama"))), target, "float32", NullProgress())
    chips = chips_for(open_checkpoint(str(target)).shape, jax.devices()[:2])
    largest = max((target / "weights" / "layer-00001").rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    with pytest.raises(
        ValueError, match=rf"layer-00001: file \S*{largest.name} is damaged: its checksum is [0-9a-f]{{16}}, not [0-9a-f]{{16}}"
    ):
        restored(target, chips, by_layer=True)
    largest.unlink()
    with pytest.raises(ValueError, match=rf"layer-00001: file \S*{largest.name} is missing"):
        restored(target, chips, by_layer=True)


def test_a_unit_without_its_checksums_is_written_again(tmp_path: Path) -> None:
    """As a run leaves it that was stopped between a checkpoint and the sums of its files."""
    folder, target = source(tmp_path, "llama"), tmp_path / "out"
    with pytest.raises(Stopped):
        convert(open_checkpoint(str(folder)), target, "float32", StopsAfter(3))
    (target / "weights" / "layer-00001.files.json").unlink()
    assert convert(open_checkpoint(str(folder)), target, "float32", NullProgress()) == 2
    np.testing.assert_array_equal(weights_of(target)["layers/down"], weights_of(folder)["layers/down"])


def test_folders_that_were_converted_before_weights_were_stored_in_pieces_are_still_read(tmp_path: Path) -> None:
    """Through the host: devices cannot read their rows of what is stored in one."""
    folder, target = source(tmp_path, "llama"), tmp_path / "out"
    checkpoint = open_checkpoint(str(folder))
    store = WeightStore(target / WEIGHTS_FOLDER, checkpoint.shape, np.dtype(np.float32), lambda spec: (whole(spec),))
    for layer in store.units:
        unit = {path: np.empty(spec.shape, np.float32) for path, spec in store.unit_specs(layer).items()}
        for path, array in unit.items():
            checkpoint.read_into(path, layer, array)
        store.write(layer, unit)
    for sums in (target / WEIGHTS_FOLDER).glob("*.files.json"):
        sums.unlink()
    description = msgspec.structs.replace(describe(checkpoint, "float32"), format=1)
    (target / DESCRIPTION_FILE).write_bytes(msgspec.json.encode(description))
    old = open_checkpoint(str(target))
    assert old.restorer(np.dtype(np.float32)) is None
    expected = weights_of(folder)
    for path, weight in weights_of(target).items():
        np.testing.assert_array_equal(weight, expected[path])
    (target / DESCRIPTION_FILE).rename(target / UNFINISHED_FILE)
    with pytest.raises(ValueError, match="holds an unfinished conversion to format 1, this is 2; remove it first"):
        convert(checkpoint, target, "float32", NullProgress())
