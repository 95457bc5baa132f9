"""`python -m pdjax.bench numbers`: what it counts is worked out by hand, what it measures of a small model is what was asked for."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from pdjax import bench
from pdjax.benchmarks import numbers, numbers_report
from pdjax.benchmarks.numbers import NumbersSettings, Said, compared, default_variants
from pdjax.config.load import load_config
from tests.model_kit import read_golden

pytestmark = pytest.mark.usefixtures("compiled_quickly")


def said(logprobs: list[float], best: list[int], answers: list[list[int]]) -> Said:
    return Said(np.array(logprobs, np.float32), np.array(best), answers, 1000, 10)


def test_changes_and_shared_tokens_are_counted_as_the_hand_does() -> None:
    base = said([-1.0, -2.0, -3.0], [7, 8, 9], [[1, 2, 3], [4, 5, 6]])
    row = compared(said([-1.5, -2.0, -2.0], [7, 8, 1], [[1, 2, 0], [0, 5, 6]]), base)
    assert row["changes"] == [0.5, 0, 1] and row["mean_change"] == 0.5 and row["max_change"] == 1
    assert row["perplexity"] == pytest.approx(np.exp(5.5 / 3))
    assert (row["same_best"], row["places"], row["same_answer"], row["answer_tokens"]) == (2, 3, 2, 6)


def test_every_value_that_the_schema_allows_is_a_variant() -> None:
    variants = default_variants(load_config(None, ["model.dtype=bfloat16"]))
    assert set(variants) >= {("engine.kv_dtype=float32",), ("engine.kv_dtype=float8_e4m3fn",), ("engine.weights_dtype=int8",)}
    assert not {("engine.kv_dtype=bfloat16",), ("engine.weights_dtype=bfloat16",), ("engine.kv_dtype=auto",)} & set(variants)
    assert variants[-1] == ("engine.kv_dtype=int8", "engine.weights_dtype=int8")


def test_int8_weights_of_a_small_model_move_its_words_a_little_and_take_a_third(tmp_path: Path) -> None:
    sizes = {"vocab_size": 300, "max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(json.dumps(read_golden("llama").config | sizes))
    base = (f"model.source=random:{tmp_path}/config.json", "engine.compile_cache=null", "engine.page_size=4")
    settings = NumbersSettings(base, (("engine.weights_dtype=int8",),), tokens=140, answer_tokens=3)
    settings.check()
    measured = numbers.run(settings, lambda step: None)
    exact, narrow = measured["results"]
    assert [len(row["changes"]) for row in measured["results"]] == [139] * 2
    assert exact["variant"] == "base" and exact["max_change"] == 0
    assert (exact["same_best"], exact["same_answer"], exact["answer_tokens"]) == (139, 12, 12)
    assert 5 < narrow["perplexity"] < 1000 and 0 < narrow["same_best"] <= 139
    assert 0 < narrow["mean_change"] < 0.2 and narrow["weight_bytes"] < exact["weight_bytes"] / 3
    console = Console(width=120, record=True)
    numbers_report.print_numbers(console, measured)
    shown = console.export_text()
    assert "weights_dtype int8" in shown and "139/139" in shown
    picture = tmp_path / "numbers.png"
    numbers_report.plot_numbers(picture, measured)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--variant", "engine.weights_dtype=int4"], "engine.weights_dtype"),
        (["--tokens", "7"], "--tokens must be at least 8"),
        (["--text", "no/such/file.txt"], "there is no file"),
        (["--json", "no/such/folder/out.json"], "cannot write"),
    ],
)
def test_a_bad_command_line_is_refused_before_anything_is_loaded(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.main(["numbers", *arguments])
    assert ended.value.code == 2 and text in capsys.readouterr().err
