"""Imports run downwards, and the environment is read in one place. The rules themselves stand in setup.cfg."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LINT = "import sys; sys.path.insert(0, '.'); from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    # In a process of its own: import-linter imports the package that it looks at.
    return subprocess.run([sys.executable, "-c", LINT], cwd=folder, capture_output=True, text=True, timeout=240)


def test_the_import_rules_hold() -> None:
    done = lint(ROOT)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("module", "statement", "rule"),
    [
        ("scheduler/pages.py", "import jax", "pdjax.scheduler is not allowed to import jax"),
        ("scheduler/pages.py", "import asyncio", "pdjax.scheduler is not allowed to import asyncio"),
        ("engine/batch.py", "import pdjax.transfer.base", "pdjax.engine is not allowed to import pdjax.transfer"),
        ("models/shape.py", "import pdjax.worker.loop", "pdjax.models is not allowed to import pdjax.worker"),
        ("kernels/base.py", "import pdjax.models.shape", "pdjax.kernels is not allowed to import pdjax.models"),
        ("router/policy.py", "import jax", "pdjax.router is not allowed to import jax"),
        ("observe/progress.py", "import pdjax.router.policy", "pdjax.observe is not allowed to import pdjax.router"),
    ],
)
def test_a_planted_wrong_import_is_found(module: str, statement: str, rule: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "pdjax", tmp_path / "pdjax", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "setup.cfg", tmp_path)
    with (tmp_path / "pdjax" / module).open("a") as file:
        file.write(f"\n{statement}\n")
    done = lint(tmp_path)
    assert done.returncode == 1, done.stdout
    assert rule in done.stdout


def test_only_one_module_reads_the_environment() -> None:
    readers = set()
    for file in (ROOT / "pdjax").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = {node.attr} if isinstance(node, ast.Attribute) else set()
            names |= {alias.name for alias in node.names} if isinstance(node, ast.ImportFrom) else set()
            if names & {"environ", "environb", "getenv"}:
                readers.add(str(file.relative_to(ROOT)))
    assert readers == {"pdjax/config/environment.py"}
