"""A scheduler with one small fault, which the simulation has to find. The faulty text exists only in the process that installs it."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import NamedTuple

PACKAGE = Path(__file__).parent.parent.parent / "pdjax"


class Mutant(NamedTuple):
    """`old` stands exactly once in `file`; `new` takes its place. `why`: what is wrong about that. `seeds` were found to notice."""

    name: str
    file: str
    old: str
    new: str
    why: str
    seeds: tuple[int, ...]

    @property
    def module(self) -> str:
        return "pdjax." + self.file.removesuffix(".py").replace("/", ".")

    def source(self) -> str:
        """The file with the fault in it."""
        text = (PACKAGE / self.file).read_text()
        assert text.count(self.old) == 1, f"mutant {self.name!r}: its text stands {text.count(self.old)} times in {self.file}"
        return text.replace(self.old, self.new)


class _Loader(SourceFileLoader):
    """Compiles the faulty text; neither reads nor writes compiled files."""

    def __init__(self, mutant: Mutant):
        super().__init__(mutant.module, str(PACKAGE / mutant.file))
        self._mutant = mutant

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._mutant.source(), self.path, "exec")


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, mutant: Mutant):
        self._mutant = mutant

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        if fullname != self._mutant.module:
            return None
        return importlib.util.spec_from_file_location(fullname, PACKAGE / self._mutant.file, loader=_Loader(self._mutant))


def install(mutant: Mutant) -> None:
    """From now on an import of the mutant's module finds the faulty text. The module must not have been imported before."""
    assert mutant.module not in sys.modules, f"{mutant.module} has been imported without the fault"
    sys.meta_path.insert(0, _Finder(mutant))
