"""What several commands share: options, the console, and the import of torch."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
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
    "RunsFolder",
    "TrustCode",
    "Where",
    "collection_paused",
    "console",
    "importing_torch",
    "is_explicit",
    "load_torch_libraries",
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
TrustCode = Annotated[
    list[Path] | None,
    typer.Option(
        "--trust-code",
        metavar="FILE",
        help="Allow executing this Python file where settings or records name it; repeatable.",
    ),
]
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
def importing_torch(device: str | None = None) -> Iterator[None]:
    """Context for the first import of torch; exempts the imported objects from garbage collection.

    They are never freed. The collector would scan them several times during the import and again during a run.

    Args:
        device: The device that will be used. The driver of a GPU is initialized during the import.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    if device is not None and device.startswith("cuda"):
        threading.Thread(target=_initialize_driver, name="contnorm-cuda", daemon=True).start()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def load_torch_libraries() -> None:
    """Let a background thread load torch's shared libraries, while Python imports and runs other code.

    Loading them takes a third of the import of torch, and does not hold the interpreter's lock. The process waits for
    the thread at its end: libraries must not be unloaded while they are loaded.
    """
    if "torch" not in sys.modules and sys.platform == "linux":
        threading.Thread(target=_load_libraries, name="contnorm-torch").start()


def _load_libraries() -> None:
    """Load the libraries as torch does, except those that use Python; the import reports what can't be loaded."""
    ctypes, spec = import_module("ctypes"), find_spec("torch")
    with suppress(OSError):
        for folder in (spec and spec.submodule_search_locations) or ():
            ctypes.CDLL(f"{folder}/lib/libtorch_global_deps.so", mode=ctypes.RTLD_GLOBAL)
            ctypes.CDLL(f"{folder}/lib/libtorch.so")  # depends on those of the CPU and the GPU


def _initialize_driver() -> None:
    """Initialize the CUDA driver, as torch does when it is first asked for GPUs; nothing to do if there is none."""
    with suppress(OSError, AttributeError):
        import_module("ctypes").CDLL("libcuda.so.1").cuInit(0)
