"""The package works from a checkout, from an editable installation and from a wheel. Everything is built in a copy, without a network."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PARTS = ("pdjax", "kernels", "configs", "setup.cfg", "pyproject.toml", "LICENSE", "README.md")

BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"

# Run apart from the checkout: prints where things come from and what the default configuration says.
PROBE = """
import site, sys
# The environment of the tests may hold an editable installation itself, whose finder and module names come first.
sys.meta_path[:] = [finder for finder in sys.meta_path if "__editable__" not in finder.__module__]
for name in [name for name in sys.modules if name.startswith("__editable__")]:
    del sys.modules[name]
sys.path.insert(0, sys.argv[1])
site.addsitedir(sys.argv[1])
import pdjax.kernels
from pdjax.config.load import load_config
from pdjax.config.schema import Config
from pdjax.serve import main
assert load_config() == Config()
assert load_config("configs/notebook.yaml").transfer.kind == "device_put"
assert main(["--check"]) == 0
print("kernels", pdjax.kernels.__file__)
"""


def run(*words: str, folder: Path) -> str:
    done = subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkout")
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, folder / part, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / part, folder / part)
    return folder


def build(kind: str, checkout: Path, target: Path) -> zipfile.ZipFile:
    done = subprocess.run([sys.executable, "-c", BUILD, kind, str(target)], cwd=checkout, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stderr, done.stderr
    [wheel] = target.glob("*.whl")
    return zipfile.ZipFile(wheel)


def test_the_symlinks_lead_to_the_folders_beside_the_package() -> None:
    for name in ("kernels", "configs"):
        assert (ROOT / "pdjax" / name).is_symlink()
        assert (ROOT / "pdjax" / name).resolve() == ROOT.resolve() / name


def test_a_wheel_holds_every_module_and_works_without_the_checkout(checkout: Path, tmp_path: Path) -> None:
    with build("build_wheel", checkout, tmp_path) as wheel:
        names = set(wheel.namelist())
        wheel.extractall(tmp_path / "site")
    modules = {str(file.relative_to(checkout)) for file in (checkout / "pdjax").rglob("*.py")}
    modules |= {f"pdjax/kernels/{file.relative_to(checkout / 'kernels')}" for file in (checkout / "kernels").rglob("*.py")}
    assert "pdjax/kernels/__init__.py" in modules
    assert modules <= names
    assert {"pdjax/configs/quickstart.yaml", "pdjax/configs/notebook.yaml"} <= names
    top = {name.partition("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"pdjax"}
    assert [name for name in names if name.endswith("licenses/LICENSE")]
    site = tmp_path / "site"
    assert f"kernels {site / 'pdjax' / 'kernels' / '__init__.py'}" in run("-I", "-c", PROBE, str(site), folder=tmp_path)


def test_an_editable_installation_leads_back_to_the_checkout(checkout: Path, tmp_path: Path) -> None:
    with build("build_editable", checkout, tmp_path) as wheel:
        assert not [name for name in wheel.namelist() if name.startswith("pdjax/")]
        wheel.extractall(tmp_path / "site")
    output = run("-I", "-c", PROBE, str(tmp_path / "site"), folder=tmp_path)
    assert f"kernels {checkout / 'pdjax' / 'kernels' / '__init__.py'}" in output


def test_a_plain_checkout_works_without_installation(checkout: Path, tmp_path: Path) -> None:
    output = run("-I", "-c", PROBE, str(checkout), folder=tmp_path)
    assert f"kernels {checkout / 'pdjax' / 'kernels' / '__init__.py'}" in output
