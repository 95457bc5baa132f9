"""Every notebook runs from top to bottom in a fresh kernel, draws its pictures, and leaves no process behind."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
from nbclient import NotebookClient
from traitlets.config import Config

from tests.live import COMPILE_CACHE, ROOT

FOLDER = ROOT / "notebooks"
NUM_PICTURES = {"quickstart": 2, "optimistic_and_early_send": 3, "write_a_scheduler_policy": 2}
MAX_BYTES = 400_000
CELL_S = 120.0
QUICKER = {"for number in range(3)]": "for number in range(1)]", "for number in range(2)]": "for number in range(1)]"}
"""Rounds that a notebook repeats for the smallest of several times, which nothing here looks at: one is enough to run every cell."""
PNG = b"\x89PNG"


def read(name: str) -> Any:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def outputs(notebook: Any) -> Iterator[Any]:
    for cell in notebook.cells:
        yield from cell.get("outputs", ())


def pictures(notebook: Any) -> list[bytes]:
    shown = [output["data"]["image/png"] for output in outputs(notebook) if "image/png" in output.get("data", {})]
    return [base64.b64decode(each) for each in shown]


def run(notebook: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place, in a home of its own that shares compiled programs with the other live tests. Raises CellExecutionError."""
    home = folder / "home"
    compiled = home / ".cache" / "pdjax" / "compile"
    compiled.parent.mkdir(parents=True)
    COMPILE_CACHE.mkdir(parents=True, exist_ok=True)
    compiled.symlink_to(COMPILE_CACHE)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("MPLCONFIGDIR", str(COMPILE_CACHE / "matplotlib"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    # Through sockets of the file system, so that nobody else on the machine can reach the kernel.
    private = Config({"KernelManager": {"transport": "ipc", "ip": str(folder / "kernel")}})
    NotebookClient(notebook, timeout=CELL_S, kernel_name="python3", resources={"metadata": {"path": str(folder)}}, config=private).execute()


@pytest.mark.live
@pytest.mark.parametrize("name", NUM_PICTURES)
def test_a_notebook_runs_draws_its_pictures_and_ends_its_kernel(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    children = set(psutil.Process().children(recursive=True))
    notebook = read(name)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
            for repeated, once in QUICKER.items():
                cell.source = cell.source.replace(repeated, once)
    run(notebook, tmp_path, monkeypatch)
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")
    drawn = pictures(notebook)
    assert len(drawn) == NUM_PICTURES[name]
    assert all(each.startswith(PNG) and len(each) > 5_000 for each in drawn)
    said = [output for output in outputs(notebook) if output.get("name") == "stderr"]
    assert not said, "a reader would be shown warnings"
    if name == "quickstart":
        check_quickstart(notebook)
    if name == "optimistic_and_early_send":
        trace = json.loads((tmp_path / "on.trace.json").read_text())
        assert {"early_send", "held_send"} & {event["name"] for event in trace["traceEvents"]}
    assert set(psutil.Process().children(recursive=True)) <= children


def check_quickstart(notebook: Any) -> None:
    told = "".join(output["text"] for output in outputs(notebook) if output.get("name") == "stdout")
    assert "The capital of France is Paris." in told
    assert re.search(r"(\d{3}) of \d{3} prompt tokens were cached", told)
    tables = [output["data"]["text/html"] for output in outputs(notebook) if "text/html" in output.get("data", {})]
    assert len(tables) == 2 and all("<table>" in table for table in tables) and "log probability" in tables[1]


@pytest.mark.parametrize("name", NUM_PICTURES)
def test_a_stored_notebook_is_small_shows_its_pictures_and_tells_nothing_of_the_machine(name: str) -> None:
    notebook = read(name)
    nbformat.validate(notebook)
    text = (FOLDER / f"{name}.ipynb").read_text()
    assert len(text) < MAX_BYTES
    assert len(pictures(notebook)) == NUM_PICTURES[name]
    assert not [output for output in outputs(notebook) if output["output_type"] == "error" or output.get("name") == "stderr"]
    assert not re.search(r"/(home|root|tmp|work|Users|usr)/", text)


def test_no_notebook_is_left_out() -> None:
    assert {file.stem for file in FOLDER.glob("*.ipynb")} == set(NUM_PICTURES)


def test_every_notebook_begins_with_the_badge_and_the_same_install_cell() -> None:
    notebooks = [read(name) for name in NUM_PICTURES]
    assert all("colab-badge.svg" in notebook.cells[0].source for notebook in notebooks)
    installs = {next(cell.source for cell in notebook.cells if cell.cell_type == "code") for notebook in notebooks}
    assert len(installs) == 1 and "%pip install" in installs.pop()
