"""Garbage collection is suspended while torch is imported and skipped when the process exits.

Torch's modules hold half a million objects that are never freed. Without this, Python's collector would scan them
several times during the import, again at every full collection of a run, and once more at exit, when the operating
system frees all memory anyway.
"""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["importing_torch", "leave_it_to_the_system"]


@contextmanager
def importing_torch() -> Iterator[None]:
    """Context for the imports of a command that needs torch; exempts the imported objects from garbage collection."""
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def leave_it_to_the_system() -> None:
    """Skip garbage collection when the interpreter exits."""
    atexit.register(gc.freeze)
