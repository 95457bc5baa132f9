"""How XLA calls a function that numba has compiled, and how that function shares its work among XLA's own threads.

XLA hands a handler one address, of a call frame (`XLA_FFI_CallFrame` in xla/ffi/api/c_api.h, which jaxlib carries in its include folder).
The constants below index the words of those structures, which only ever grow at their end.

A handler cuts its work into numbered parts. The calling thread and tasks on XLA's pool take parts by number until none is left, so that a
thread that the system has stopped holds up one part, not its whole share. A task may start when the call is long over: it then finds no
part and touches nothing of the call. So a call waits for parts, never for tasks, and calls on all threads of a pool cannot starve each other.

Each kernel spells out its own task and handler around these functions: numba keeps no compiled function whose closure holds another one.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import llvmlite.binding as llvm
import numba
import xxhash
from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

_EXTENSION, _API, _CONTEXT, _ARGUMENTS, _RESULTS = 1, 2, 3, 9, 14  # words of a call frame
_DTYPE, _DATA, _DIMS = 2, 3, 5  # words of a buffer
FLOAT32, INT8, UINT16 = 11, 2, 7
"""Codes of a buffer's dtype."""
_SCHEDULE, _NUM_THREADS = 17, 18  # words of the table of XLA's functions
_METADATA, _VERSION = 3, 3  # word of the extension that asks for metadata, word of the metadata that takes the version
_MAJOR, _MINOR = 0, 3

_FRAME, _SCRATCH, _PARTS, _NEXT, _DONE, _HOLDERS, _REQUEST, _JOB_WORDS = 0, 1, 2, 3, 4, 5, 6, 11  # words of a job
"""A request holds the arguments of a function of XLA: its size in bytes, an extension, the context, and two words more."""
_SPINS = 4096  # looks at a counter, about 10 us, before the thread lets others run
_MOST_THREADS = 64
_LINE = 64

_WORD = ir.IntType(64)
_C_FUNCTION = ir.FunctionType(_WORD, [_WORD])
_aligned_alloc = types.ExternalFunction("aligned_alloc", types.intp(types.intp, types.intp))
free = types.ExternalFunction("free", types.void(types.intp))
_yield_thread = types.ExternalFunction("sched_yield", types.int32())

_KEPT: list[Any] = []
"""Compiled functions live as long as the process: XLA has their addresses."""


def c_function(function: Callable[[int], int]) -> Any:
    """Compile a function of one word that gives one, with what it calls, for C to call. That takes seconds; the folder that `NUMBA_CACHE_DIR`
    names, or else JAX's compilation cache, keeps the result. Without either nothing does."""
    told = numba.config.CACHE_DIR
    directory = told or jax.config.jax_compilation_cache_dir
    if directory:
        numba.config.CACHE_DIR = str(Path(directory) / f"numba-{_sources()}")
    try:
        compiled = cfunc(types.intp(types.intp), cache=bool(directory))(function)
    finally:
        numba.config.CACHE_DIR = told
    _KEPT.append(compiled)
    return compiled


@functools.cache
def _sources() -> str:
    """Stands for the code of this package. numba looks at the file of a function only, not at what it calls in others."""
    return xxhash.xxh64(b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))).hexdigest()


def name_task(name: str, task: Any) -> None:
    """Let handlers that are compiled from now on find a task by name: an address would be another one in the next process."""
    llvm.add_symbol(name, task.address)


def register_handler(name: str, handler: Any) -> None:
    """Make a handler known to XLA, for good."""
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(ctypes.cast(handler.address, ctypes.c_void_p)), platform="cpu")


@intrinsic
def pointer(typing_context: Any, address: Any) -> Any:
    """A pointer from an address, for `carray`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.voidptr(types.intp), generate


@intrinsic
def _add_atomic(typing_context: Any, address: Any, addend: Any) -> Any:
    """Add to a word that other threads use, too; gives what it held before."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", builder.inttoptr(args[0], _WORD.as_pointer()), args[1], "acq_rel")

    return types.intp(types.intp, types.intp), generate


@intrinsic
def _load_atomic(typing_context: Any, address: Any) -> Any:
    """A word that other threads write."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(args[0], _WORD.as_pointer()), "acquire", 8)

    return types.intp(types.intp), generate


@intrinsic
def _call(typing_context: Any, function: Any, argument: Any) -> Any:
    """Call a C function by its address, with one word."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.call(builder.inttoptr(args[0], _C_FUNCTION.as_pointer()), [args[1]])

    return types.intp(types.intp, types.intp), generate


@intrinsic(prefer_literal=True)
def address_of(typing_context: Any, name: Any) -> Any:
    """The address of a task, by its name."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ptrtoint(cgutils.get_or_insert_function(builder.module, _C_FUNCTION, name.literal_value), _WORD)

    return types.intp(name), generate


@njit
def _words(address: int) -> Any:
    """int64[_JOB_WORDS or more] at an address."""
    return carray(pointer(address), 32, types.intp)


@njit
def allocate(num_bytes: int) -> int:
    """Address of so much memory, at the start of a cache line: vectors that cross lines cost two loads. `free` takes it back."""
    return _aligned_alloc(_LINE, (num_bytes + _LINE - 1) // _LINE * _LINE)


@njit
def floats(address: int, length: int) -> Any:
    """float32[length] at an address."""
    return carray(pointer(address), length, types.float32)


@njit
def integers(frame: int, index: int) -> Any:
    """Argument `index` of int32, by its flat index."""
    return carray(pointer(argument(frame, index)), 1 << 30, types.int32)


@njit
def argument_dtype(frame: int, index: int) -> int:
    """Code of the dtype of argument `index`."""
    return _words(_words(_words(frame)[_ARGUMENTS])[index])[_DTYPE] & 0xFFFFFFFF


@njit
def argument(frame: int, index: int) -> int:
    """Address of what argument `index` holds."""
    return _words(_words(_words(frame)[_ARGUMENTS])[index])[_DATA]


@njit
def argument_dim(frame: int, index: int, axis: int) -> int:
    """Length of an axis of argument `index`."""
    return _words(_words(_words(_words(frame)[_ARGUMENTS])[index])[_DIMS])[axis]


@njit
def result(frame: int, index: int) -> int:
    """Address of where result `index` goes."""
    return _words(_words(_words(frame)[_RESULTS])[index])[_DATA]


@njit
def result_dim(frame: int, index: int, axis: int) -> int:
    """Length of an axis of result `index`."""
    return _words(_words(_words(_words(frame)[_RESULTS])[index])[_DIMS])[axis]


@njit
def answered_metadata(frame: int) -> bool:
    """Whether XLA only asks which version of the interface the handler speaks; it then has its answer."""
    extension = _words(frame)[_EXTENSION]
    if extension != 0:
        _words(_words(extension)[_METADATA])[_VERSION] = _MINOR << 32 | _MAJOR
    return extension != 0


@njit
def run_parts(frame: int, task: int, num_parts: int, scratch_bytes: int) -> int:
    """Have `task` run on as many threads as there are parts for, this one among them; returns when all parts are done.

    Gives the job, which `end` takes back.
    """
    job = allocate(8 * _JOB_WORDS)
    words = _words(job)
    words[_FRAME], words[_PARTS], words[_NEXT], words[_DONE], words[_HOLDERS] = frame, num_parts, 0, 0, 2
    words[_SCRATCH] = allocate(scratch_bytes)
    if num_parts > 1:
        _call_helpers(frame, job, task, num_parts)
    _call(task, job)
    wait_for_parts(job, num_parts)
    return job


@njit
def end(job: int) -> None:
    free(scratch_of(job))
    release(job)


@njit
def frame_of(job: int) -> int:
    """For a task with a part only: behind the last part the frame may be gone."""
    return _words(job)[_FRAME]


@njit
def scratch_of(job: int) -> int:
    """Address of the memory that all parts share. For a task with a part only, and before `end`."""
    return _words(job)[_SCRATCH]


@njit
def take_part(job: int) -> int:
    """A part that nobody has taken, or -1."""
    part = _add_atomic(job + 8 * _NEXT, 1)
    return part if part < _words(job)[_PARTS] else -1


@njit
def part_done(job: int) -> None:
    _add_atomic(job + 8 * _DONE, 1)


@njit
def wait_for_parts(job: int, num_parts: int) -> None:
    """Return when so many parts, or more, are done. A task may wait so for parts with numbers below its own: they are taken before it is."""
    spins = 0
    while _load_atomic(job + 8 * _DONE) < num_parts:
        spins += 1
        if spins > _SPINS:
            _yield_thread()


@njit
def release(job: int) -> None:
    """Give up a hold of a job, as every task does at its end; the last to do so frees it."""
    if _add_atomic(job + 8 * _HOLDERS, -1) == 1:
        free(job)


@njit
def _call_helpers(frame: int, job: int, task: int, num_parts: int) -> None:
    """Ask XLA's pool for threads, this one left out."""
    num_helpers = min(_num_threads(frame, job), num_parts, _MOST_THREADS) - 1
    request = job + 8 * _REQUEST
    _fill_request(request, frame, 5, task, job)
    for _ in range(num_helpers):
        _add_atomic(job + 8 * _HOLDERS, 1)
        if _call(_words(_words(frame)[_API])[_SCHEDULE], request) != 0:
            release(job)
            return


@njit
def _fill_request(request: int, frame: int, num_words: int, first: int, second: int) -> None:
    words = _words(request)
    words[0], words[1], words[2], words[3], words[4] = 8 * num_words, 0, _words(frame)[_CONTEXT], first, second


@njit
def _num_threads(frame: int, job: int) -> int:
    """Threads of XLA's pool; 1 where it has none."""
    request = job + 8 * _REQUEST
    _fill_request(request, frame, 4, request + 32, 1)
    _call(_words(_words(frame)[_API])[_NUM_THREADS], request)
    return _words(request)[4]
