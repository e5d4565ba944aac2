"""The library of C++ kernels: compiled at its first use in any process, loaded at its first use in a process."""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_int, c_int64, c_void_p
from functools import cache
from importlib import import_module
from pathlib import Path

__all__ = ["CompiledLibrary", "library", "unavailable_reason"]

SOURCE = Path(__file__).with_name("continual.cpp")
# Contraction and reordering of operations would let the result depend on the compiler. The last two flags only drop the
# error number of `sqrt` and floating-point exceptions, which nobody reads; NaN and infinity propagate.
FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-fopenmp",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
)

_SIZES = [c_int64] * 4
_SIGNATURES = {
    "contnorm_cn_train": [c_void_p] * 9 + _SIZES + [c_int, c_int, c_double, c_double, c_int, c_int],
    "contnorm_cn_evaluate": [c_void_p] * 7 + _SIZES + [c_int, c_int, c_double, c_int, c_int],
    "contnorm_cn_backward": [c_void_p] * 10 + _SIZES + [c_int, c_int, c_int, c_int],
}


class CompiledLibrary:
    """The functions of the library; each raises MemoryError if it can't allocate its tables."""

    def __init__(self, path: Path) -> None:
        loaded = ctypes.CDLL(str(path))
        for name, types in _SIGNATURES.items():
            function = getattr(loaded, name)
            function.argtypes, function.restype = types, c_int
        self._loaded = loaded

    def call(self, name: str, *args: int | float | None) -> None:
        if getattr(self._loaded, name)(*args) != 0:
            raise MemoryError(f"{name}: there is not enough memory for the tables of the kernel.")


@cache
def _load() -> CompiledLibrary | str:
    """Return the library, or why there is none; decided once per process, so that a run does not change kernels."""
    build = import_module("contnorm.kernels.cpp.build")  # imports what a program without this kernel does not need
    try:
        return CompiledLibrary(build.compile_library(SOURCE, FLAGS))
    except build.BuildError as error:
        return str(error)
    except (OSError, AttributeError) as error:  # the folder does not allow execution, or libgomp is missing
        return f"the compiled library can't be loaded ({error})"


def unavailable_reason() -> str | None:
    """Return why the C++ kernels can't be used on this machine; None if they can. Compiles them at the first call."""
    loaded = _load()
    return loaded if isinstance(loaded, str) else None


def library() -> CompiledLibrary:
    """Return the library; `unavailable_reason` must be None."""
    loaded = _load()
    assert isinstance(loaded, CompiledLibrary), loaded
    return loaded
