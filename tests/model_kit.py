"""Small random models of every family, as transformers computed them, and Hugging Face folders made of them."""

from __future__ import annotations

import contextlib
import json
import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

GOLDENS = Path(__file__).parent / "goldens" / "models"
_KINDS = {np.dtype(np.float32): "F32", np.dtype(np.float16): "F16", np.dtype(ml_dtypes.bfloat16): "BF16", np.dtype(np.int8): "I8"}


class Golden(NamedTuple):
    """A file of `scripts/make_model_goldens.py`. `tops`: for each token of the answer the 20 best, as (id, log probability)."""

    name: str
    seed: int
    config: dict[str, Any]
    tensors: dict[str, list[int]]
    prompt: list[int]
    answer: list[int]
    tops: list[list[tuple[int, float]]]
    prompt_logprobs: list[float]


def read_golden(name: str) -> Golden:
    content = json.loads((GOLDENS / f"{name}.json").read_text())
    return Golden(name, **{field: content[field] for field in Golden._fields[1:]})


def draw(name: str, shape: tuple[int, ...], seed: int, is_gemma: bool) -> np.ndarray:
    """The tensor `name` of a golden's model, float32; as in `scripts/make_model_goldens.py`."""
    values = np.random.default_rng(zlib.crc32(f"{seed}:{name}".encode())).standard_normal(shape)
    if name.endswith("norm.weight"):
        values = 0.1 * values + (1 if not is_gemma else 2 if "post_" in name else 0)
    elif len(shape) == 1:
        values = 0.3 * values
    elif name.endswith("embed_tokens.weight"):
        values = 2 * values / np.sqrt(shape[1]) if is_gemma else values
    else:
        values = 1.5 * values / np.sqrt(shape[1])
    return values.astype(np.float32)


def golden_tensors(golden: Golden) -> dict[str, np.ndarray]:
    return {name: draw(name, tuple(shape), golden.seed, "gemma" in golden.name) for name, shape in golden.tensors.items()}


@contextlib.contextmanager
def quick_compilation(cache: Path) -> Iterator[None]:
    """For models so small that compiling is all that takes time: little of it, and programs that several of them share once."""
    changed = {
        "jax_disable_most_optimizations": True,
        "jax_compilation_cache_dir": str(cache),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: jax.config.values[name] for name in changed}
    _configure(changed)
    try:
        yield
    finally:
        _configure(before)


def _configure(settings: Mapping[str, Any]) -> None:
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # JAX decides once whether there is a cache


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray], alignment: int = 8) -> Path:
    """As the format is specified: the header's length, the header, the tensors' bytes end to end. Spaces fill the header up to a multiple
    of `alignment`."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": _KINDS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [end, end := end + tensor.nbytes]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % alignment)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(np.ascontiguousarray(each).tobytes() for each in tensors.values()))
    return path


def write_folder(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], shards: int = 1) -> Path:
    """A folder as transformers saves models, without a tokenizer; several `shards` have an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config)))
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors)
        return folder
    weight_map = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        write_safetensors(folder / file, {name: tensors[name] for name in tensors if weight_map[name] == file})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder
