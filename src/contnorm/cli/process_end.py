"""The end of a process that has used a GPU, without the teardown of Python and CUDA, which takes 0.3 seconds.

Before this, Python has waited for threads and called all other exit functions, as always. What is left out only frees
memory and the GPU, which the operating system does as well. A process that has executed code of the user ends as usual:
that code may have files that Python writes at its end.
"""

from __future__ import annotations

import atexit
import os
import sys
from typing import Any

__all__ = ["note_status", "skip_teardown"]

# Tools that measure a process write their results when its libraries are unloaded.
TOOLS = ("LD_PRELOAD", "CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH", "COVERAGE_PROCESS_START", "PYTHONINSPECT")

_status: int | None = None  # the exit status; None if the process does not end by an exit status


def skip_teardown() -> None:
    """Let the process skip the teardown. To be called first: exit functions are called in reverse order.

    Nothing is skipped if there are exit functions already, which would not be called.
    """
    registered: Any = getattr(atexit, "_ncallbacks", None)
    if registered is not None and registered() == 0:
        atexit.register(_end)


def note_status(code: object) -> None:
    """Note the code of the `SystemExit` that ends the process."""
    global _status
    _status = 0 if code is None else code if isinstance(code, int) and 0 <= code < 256 else None


def _end() -> None:
    if _status is None or not _has_used_gpu() or _has_run_user_code() or any(map(os.environ.get, TOOLS)):
        return
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    except (OSError, ValueError):  # Python reports it
        return
    os._exit(_status)


def _has_used_gpu() -> bool:
    torch: Any = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()


def _has_run_user_code() -> bool:
    user_code: Any = sys.modules.get("contnorm.bench.user_code")
    return user_code is not None and user_code.has_run()
