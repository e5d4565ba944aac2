"""What several commands share: options, the console, and the import of torch."""

from __future__ import annotations

import gc
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

__all__ = [
    "DEVICE_HELP",
    "MAX_STEPS_HELP",
    "PRECISION_HELP",
    "THREADS_HELP",
    "AllowMissing",
    "DataRoot",
    "Lanes",
    "Log",
    "LogDir",
    "LogEvery",
    "MemoryMoments",
    "RunsFolder",
    "Where",
    "collection_paused",
    "console",
    "importing_torch",
    "is_explicit",
]

_at_terminal = sys.stdout is not None and sys.stdout.isatty()  # stdout is None if it was closed, as by `>&-`
console = Console(width=None if _at_terminal else 200)  # wide enough that tables in files and pipes do not wrap

DEVICE_HELP = "Device to compute on: cpu, cuda, or a GPU by its index, such as cuda:1."
PRECISION_HELP = "Floating-point precision: fp32, tf32 or bf16."
MAX_STEPS_HELP = "Stop after N steps (smoke test; scores are not comparable)."
THREADS_HELP = "CPU threads per run. Changing it changes results slightly."

RunsFolder = Annotated[
    Path, typer.Option("--runs", help="Folder of records and checkpoints; to read, also an archive.")
]
Lanes = Annotated[int | None, typer.Option(help="Number of parallel runs. Default: 8 on a GPU, one per core on a CPU.")]
Where = Annotated[
    list[str] | None,
    typer.Option(
        "--where",
        metavar="CONDITION",
        help="Select runs by settings: norm=cn, lr<=0.03, strategy=er,derpp, seed!=3; repeatable, all must hold.",
    ),
]
Log = Annotated[
    list[str] | None,
    typer.Option("--log", help="Log metrics while the runs train: csv, tensorboard, wandb or mlflow; repeatable."),
]
LogEvery = Annotated[int, typer.Option("--log-every", help="Steps between the losses that are logged.")]
LogDir = Annotated[
    Path | None, typer.Option("--log-dir", help="Folder of logs. Default: next to the runs folder, as runs-logs.")
]
AllowMissing = Annotated[
    bool, typer.Option("--allow-missing", help="Accept a published data set with missing images; noted in the record.")
]
MemoryMoments = Annotated[
    bool,
    typer.Option(
        "--memory-moments",
        help="Evaluate with the moments of the replay memory too, beside --eval-moments; the run has the same hash.",
    ),
]
DataRoot = Annotated[
    Path | None, typer.Option("--data-root", help="Folder of data sets. Default: $CONTNORM_DATA, or ./data.")
]


def is_explicit(context: typer.Context, parameter: str) -> bool:
    """Whether a parameter was passed explicitly, on the command line or in-process."""
    source = context.get_parameter_source(parameter)
    return source is not None and source.name not in ("DEFAULT", "DEFAULT_MAP")


@contextmanager
def collection_paused() -> Iterator[None]:
    """Context for imports, which create many objects and no garbage: garbage collection would only scan them."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def importing_torch(device: str | None = None, in_workers: bool = False) -> Iterator[None]:
    """Context for the first import of torch; exempts the imported objects from garbage collection.

    They are never freed. The collector would scan them several times during the import and again during a run.

    Args:
        device: The device that will be used. A GPU is initialized during the import.
        in_workers: Whether worker processes will use GPUs, and this process none.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    if device is not None and device.startswith("cuda"):
        index = None if in_workers else _index_of(device)
        threading.Thread(target=_initialize_gpu, args=(index,), name="contnorm-cuda", daemon=True).start()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _index_of(device: str) -> int | None:
    """Return the index of a GPU by its name; None for a name that is refused later."""
    index = device.partition(":")[2] or "0"
    return int(index) if re.fullmatch("[0-9]{1,3}", index) else None


def _initialize_gpu(index: int | None) -> None:
    """Initialize the CUDA driver and, unless it is None, a GPU by its index, as torch does before it first uses one.

    What torch then finds initialized takes it no time. Errors are left to torch, which reports them.
    """
    with suppress(OSError, AttributeError):
        ctypes = import_module("ctypes")
        driver = ctypes.CDLL("libcuda.so.1")
        if driver.cuInit(0) == 0 and index is not None:
            gpu, context = ctypes.c_int(), ctypes.c_void_p()
            if driver.cuDeviceGet(ctypes.byref(gpu), index) == 0:
                driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), gpu)
