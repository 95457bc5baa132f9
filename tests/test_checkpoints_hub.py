"""Ids of the Hugging Face hub: fetched by the hub's package where it is installed, one clear error otherwise."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from pdjax.checkpoints import open_checkpoint
from tests.model_kit import golden_tensors, read_golden, write_folder


def test_an_id_without_the_hub_package_is_answered_with_the_command_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match=r"'nobody/nothing' is neither a file nor a folder here.*pip install pdjax\[hub\]"):
        open_checkpoint("nobody/nothing")


def fake_hub(answer: Any) -> types.ModuleType:
    module = types.ModuleType("huggingface_hub")
    module.snapshot_download = answer  # type: ignore[attr-defined]
    module.errors = types.SimpleNamespace(HfHubHTTPError=ConnectionError)  # type: ignore[attr-defined]
    return module


def test_an_id_is_fetched_without_code_and_opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    golden = read_golden("llama")
    folder = write_folder(tmp_path, golden.config, golden_tensors(golden))
    calls = []

    def snapshot_download(model_id: str, allow_patterns: list[str]) -> str:
        calls.append((model_id, allow_patterns))
        return str(folder)

    monkeypatch.setitem(sys.modules, "huggingface_hub", fake_hub(snapshot_download))
    checkpoint = open_checkpoint("nobody/small-model")
    assert checkpoint.name == "small-model" and checkpoint.shape.num_layers == 3
    assert calls == [("nobody/small-model", ["*.json", "*.safetensors", "*.jinja"])]


def test_a_hub_that_does_not_answer_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(model_id: str, allow_patterns: list[str]) -> str:
        raise ConnectionError("no route\nto host")

    monkeypatch.setitem(sys.modules, "huggingface_hub", fake_hub(snapshot_download))
    with pytest.raises(
        ValueError, match="'nobody/nothing' is no file or folder here, and the Hugging Face hub does not give it: no route$"
    ):
        open_checkpoint("nobody/nothing")
