"""Random weights of named shapes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from pdjax.api.chat_template import ChatTemplate
from pdjax.api.tokenizer import Tokenizer
from pdjax.checkpoints import open_checkpoint
from pdjax.checkpoints.named_shapes import NAMES, named_shape
from pdjax.models.shape import weight_specs
from pdjax.serve import make_parser
from tests.model_kit import read_golden

PARAMETERS = {
    "smollm2-135m": 134.5e6,
    "smollm2-1.7b": 1.711e9,
    "smollm3-3b": 3.075e9,
    "llama-3.2-1b": 1.236e9,
    "llama-3.2-3b": 3.213e9,
    "llama-3-8b": 8.030e9,
    "llama-3.1-8b": 8.030e9,
    "llama-3.1-70b": 70.55e9,
    "mistral-7b": 7.242e9,
    "qwen2.5-0.5b": 494.0e6,
    "qwen2.5-7b": 7.616e9,
    "qwen3-0.6b": 596.0e6,
    "qwen3-8b": 8.191e9,
    "gemma-2-2b": 2.614e9,
    "gemma-3-1b": 999.9e6,
    "phi-3-mini": 3.821e9,
    "mixtral-8x7b": 46.70e9,
    "qwen3-30b-a3b": 30.53e9,
    "qwen1.5-moe-a2.7b": 14.32e9,
}
"""As their makers count them."""


def test_named_shapes_have_as_many_parameters_as_their_makers_count() -> None:
    assert set(PARAMETERS) == set(NAMES)
    for name, expected in PARAMETERS.items():
        found = sum(math.prod(spec.shape) for spec in weight_specs(named_shape(name)).values())
        assert found == pytest.approx(expected, rel=1e-3), name


def random_source(tmp_path: Path, name: str) -> str:
    path = tmp_path / name / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(read_golden(name).config | {"vocab_size": 300}))
    return f"random:{path}"


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen2-moe"])
def test_a_model_of_random_weights_is_the_same_wherever_it_is_made(tmp_path: Path, name: str) -> None:
    source = random_source(tmp_path, name)
    first, second = open_checkpoint(source), open_checkpoint(source)
    assert (first.name, first.eos_token_ids) == (name, ()) and first.fingerprint == second.fingerprint
    weights = [each.load_weights(np.dtype(np.float32), lambda done, total: None) for each in (first, second)]
    for path, spec in weight_specs(first.shape).items():
        np.testing.assert_array_equal(weights[0][path], weights[1][path])
        if path.endswith("norm"):
            assert np.all(weights[0][path] == (0 if name == "gemma3" else 1))
        elif not path.endswith("bias"):
            assert np.std(weights[0][path]) == pytest.approx(spec.shape[-1] ** -0.5, rel=0.15)
            assert spec.axes[0] != "layers" or not np.array_equal(weights[0][path][0], weights[0][path][1])


def test_large_weights_repeat_what_was_drawn_without_rows_alike(tmp_path: Path) -> None:
    target = np.empty((1001, 2048), np.float32)
    open_checkpoint(random_source(tmp_path, "llama")).read_into("embed", None, target)
    assert len(np.unique(target[:, 0])) > 900 and np.all(np.isfinite(target))


def test_the_text_of_random_models_is_bytes_and_their_answers_can_be_seen(tmp_path: Path) -> None:
    data = open_checkpoint(random_source(tmp_path, "llama")).tokenizer_data()
    tokenizer = Tokenizer(data)
    assert tokenizer.encode("hé \n") == list("hé \n".encode())
    assert tokenizer.decode([104, 299, 256]) == "h 299 256"
    template = ChatTemplate.from_data(data)
    assert template is not None
    assert template.render([{"role": "user", "content": "hi"}], True) == "user: hi\nassistant:"


def test_shapes_that_cannot_be_had_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="model shape 'gpt-9' is unknown; known: smollm2-135m, .*, or the path of a config.json"):
        open_checkpoint("random:gpt-9")
    with pytest.raises(FileNotFoundError, match="none.json: there is no such file"):
        open_checkpoint(f"random:{tmp_path}/none.json")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(read_golden("llama").config))
    with pytest.raises(ValueError, match="random weights need a vocabulary of at least 256 tokens, it has 128"):
        open_checkpoint(f"random:{path}")


def test_the_command_line_names_a_shape_as_the_configuration_does() -> None:
    assert make_parser().parse_args(["--random-weights", "qwen3-8b"]).overrides == ['model.source="random:qwen3-8b"']
