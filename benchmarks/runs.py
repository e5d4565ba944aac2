"""Wall time of whole runs, from the start of the command to the last record.

This includes set-up, CUDA graph capture, evaluation and checkpoints. The time does not depend on the content of images,
so noise in the shape of a data set is used if the data set is absent; each row says which one was used.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from contnorm.bench.data.registry import SOURCES, find_layout


@dataclass(frozen=True)
class RunCase:
    """A command to time."""

    stream: str
    source: str
    strategy: str
    norm: str
    seeds: int = 5
    precision: str = "tf32"
    recipe: str = ""  # a table of the paper, all of whose runs on this stream are one command


@dataclass(frozen=True)
class RunRow:
    """Wall time of a command, and the kind of data."""

    case: RunCase
    data: str  # real or noise
    kernels: str  # compiled: by this run, the first of its kind; cached: by an earlier run
    seconds: float


RUN_CASES = (
    *(
        RunCase(stream, source, strategy, norm)
        for stream, source, strategy in (("split-cifar100", "cifar100", "er"), ("split-cifar10", "cifar10", "derpp"))
        for norm in ("bn", "cn")
    ),
    RunCase("split-cifar100", "cifar100", "er, derpp", "all", recipe="table2"),
)
WARM_UP = ("--seeds", "1", "--max-steps", "300")  # of a recipe: all kernels of its runs, also after the first task


def measure_runs(device: str, root: Path, max_steps: int | None = None, only: Sequence[str] = ()) -> Iterator[RunRow]:
    """Time every case in a separate process, as a user would run it.

    Each is timed twice, since the first run compiles kernels. A recipe is timed once, after a short run that compiles.

    Args:
        device: cpu or cuda.
        root: Folder of data sets.
        max_steps: Stop each run after this many steps (smoke test).
        only: Words that a case must have, such as a strategy and a norm.
    """
    with tempfile.TemporaryDirectory() as folder:
        for case in (case for case in RUN_CASES if set(only) <= set(map(str, vars(case).values()))):
            real = find_layout(SOURCES[case.source], root) is not None
            data = root if real else write_noise(case.source, Path(folder) / "data")
            for number, kernels in enumerate(("compiled", "cached")):
                runs = Path(folder) / f"{case.stream}-{case.norm}-{number}"
                command = _command(case, device, data, runs, max_steps)
                if case.recipe and kernels == "compiled":
                    _timed([*command, *WARM_UP])
                else:
                    yield RunRow(case, "real" if real else "noise", kernels, _timed(command))


def _command(case: RunCase, device: str, data: Path, runs: Path, max_steps: int | None) -> list[str]:
    command = [sys.executable, "-m", "contnorm"]
    if case.recipe:
        command += ["paper", case.recipe, "--only", f"stream={case.stream}", "--lr", "one"]
    else:
        command += ["run", "--stream", case.stream, "--strategy", case.strategy, "--norm", case.norm]
    command += ["--seeds", str(case.seeds), "--device", device, "--precision", case.precision]
    command += ["--data-root", str(data), "--runs", str(runs)]
    return command if max_steps is None else [*command, "--max-steps", str(max_steps)]


def _timed(command: Sequence[str]) -> float:
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env=command_environment())
    seconds = time.perf_counter() - started
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()[-500:]}")
    return seconds


def command_environment() -> dict[str, str]:
    """Return the environment of a timed command, in which Python caches bytecode, as it does for installed packages."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def write_noise(source: str, root: Path) -> Path:
    """Write noise in the binary format of CIFAR-10 or CIFAR-100."""
    generator = np.random.default_rng(0)
    if source == "cifar100":
        parts = {"cifar-100-binary/train.bin": 50_000, "cifar-100-binary/test.bin": 10_000}
    else:
        names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
        parts = {f"cifar-10-batches-bin/{name}.bin": 10_000 for name in names}
    for name, count in parts.items():
        labels = np.arange(count) % SOURCES[source].classes
        columns = [labels // 5, labels] if source == "cifar100" else [labels]
        images = generator.integers(0, 256, size=(count, 3072))
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(np.concatenate([np.stack(columns, 1), images], axis=1).astype(np.uint8).tobytes())
    return root
