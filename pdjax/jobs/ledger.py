"""The result files of a job: what makes it possible to go on after Ctrl-C, SIGKILL or a power cut.

A row is done when its line, with the newline at its end, is in one of the two journals; nothing else says so. Lines are appended and
written through to the disk before the job counts them. A line without its newline was being written when the process died: it is cut off,
and its row is done again. Beside the journals stands the job's identity, written before the first result: which input they belong to.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple, Self

import msgspec

from pdjax.config.load import ConfigError
from pdjax.jobs.config import Paths
from pdjax.jobs.outcomes import Counts, ResultLine, counts_of

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(ResultLine).decode


class Identity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What must not change between two runs of a job. `request`: the defaults of plain prompts."""

    fingerprint: str
    request: dict[str, object]


class Past(NamedTuple):
    """What earlier runs have left. `done`: lines of the input."""

    done: frozenset[int]
    counts: Counts


class _Journal(NamedTuple):
    """`num_bytes`: up to the end of the last whole line."""

    results: list[ResultLine]
    num_bytes: int


def look_back(paths: Paths, identity: Identity) -> Past:
    """Reads and changes nothing. Raises ConfigError where the files beside the output are of another job."""
    journals = [_read_journal(path) for path in (paths.output_journal, paths.errors_journal)]
    results = [result for journal in journals for result in journal.results]
    _check_identity(paths, identity, is_begun=bool(results))
    counts = Counts()
    for result in results:
        counts = counts.plus(counts_of(result))
    return Past(frozenset(result.line for result in results), counts)


class Ledger:
    """Appends results. A context manager; between entering and leaving no other process can be at work on the same output.

    `commit` may be called by any thread, one at a time.
    """

    def __init__(self, paths: Paths, output: BinaryIO, errors: BinaryIO, past: Past):
        """Use `open`."""
        self.past = past
        self._paths = paths
        self._output = output
        self._errors = errors
        self._failure: OSError | None = None

    @classmethod
    def open(cls, paths: Paths, identity: Identity) -> Ledger:
        """Take hold of the job's files, cutting off what was not written to its end. Raises ConfigError as `look_back`, and where another
        process is at work; OSError where a file cannot be written."""
        with contextlib.ExitStack() as opened:
            output = opened.enter_context(paths.output_journal.open("ab", buffering=0))
            errors = opened.enter_context(paths.errors_journal.open("ab", buffering=0))
            for file, path in ((output, paths.output_journal), (errors, paths.errors_journal)):
                _lock(file, path)
            past = look_back(paths, identity)
            for file, path in ((output, paths.output_journal), (errors, paths.errors_journal)):
                file.truncate(_read_journal(path).num_bytes)
            _write_identity(paths.identity, identity)
            opened.pop_all()
        return cls(paths, output, errors, past)

    def commit(self, results: Iterable[ResultLine]) -> None:
        """On the disk when this returns. Raises OSError, and from then on always: the last line may be a part of one."""
        if self._failure is not None:
            raise self._failure
        ok, failed = [], []
        for result in results:
            (ok if result.is_ok else failed).append(result)
        try:
            _append(self._output, ok)
            _append(self._errors, failed)
        except OSError as error:
            self._failure = error
            raise

    def results(self) -> tuple[list[ResultLine], list[ResultLine]]:
        """Everything that is done, good and failed, in the order of the input."""
        journals = [_read_journal(path).results for path in (self._paths.output_journal, self._paths.errors_journal)]
        ok, failed = (sorted(results, key=lambda result: result.line) for results in journals)
        return ok, failed

    def close(self) -> None:
        self._output.close()
        self._errors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _append(file: BinaryIO, results: Sequence[ResultLine]) -> None:
    if not results:
        return
    data = memoryview(b"".join(_encode(result) + b"\n" for result in results))
    while data:
        data = data[file.write(data) :]
    os.fsync(file.fileno())


def _lock(file: BinaryIO, path: Path) -> None:
    """Held until `file` is closed, however the process ends."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError([f"another process is writing {path}; a job has one process at a time"]) from None


def _read_journal(path: Path) -> _Journal:
    """Raises ConfigError naming the first whole line that is no result."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return _Journal([], 0)
    results = []
    whole = data[: data.rfind(b"\n") + 1]
    for number, line in enumerate(whole.split(b"\n")[:-1], 1):
        try:
            result = _decode(line)
            if result.line < 1:
                raise ValueError(f"id {result.id!r}")
        except (msgspec.DecodeError, ValueError) as error:
            raise ConfigError([f"{path}: line {number} is no result of a batch job: {error}; name another file, or remove it"]) from None
        results.append(result)
    return _Journal(results, len(whole))


def _check_identity(paths: Paths, identity: Identity, is_begun: bool) -> None:
    try:
        known = msgspec.json.decode(paths.identity.read_bytes(), type=Identity)
    except FileNotFoundError:
        if is_begun:
            raise ConfigError([f"{paths.output_journal} holds results, but {paths.identity}, which says of what, is gone"]) from None
        return
    except msgspec.DecodeError as error:
        raise ConfigError([f"{paths.identity}: does not say of which job the results are: {error}"]) from None
    if not is_begun or known == identity:
        return
    files = ", ".join(str(path) for path in (paths.output_journal, paths.errors_journal, paths.identity))
    what = f"the input {paths.input} has" if known.fingerprint != identity.fingerprint else "the defaults in `request` have"
    raise ConfigError([f"{what} changed since this job was begun; name another output, or remove {files} to begin again"])


def _write_identity(path: Path, identity: Identity) -> None:
    """Whole or not at all, and before any result."""
    unfinished = path.with_name(path.name + ".new")
    with unfinished.open("wb") as file:
        file.write(_encode(identity))
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new names too, the journals' among them
    finally:
        os.close(folder)
