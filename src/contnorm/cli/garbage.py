"""No garbage is looked for where there is none: while torch is imported, and when the command ends.

Torch's modules are half a million objects, and they all stay. Python's collector goes through them several times while
they come, again at every full collection of a run, and once more at the end, when the system takes all memory anyway.
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
    """Around the imports of a command that needs torch: what they bring is never looked through."""
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
    """When Python ends, look for no garbage."""
    atexit.register(gc.freeze)
