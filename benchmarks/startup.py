"""Wall time from the start of a command to its end, or to the first training step of a run.

Each time is the median of several new processes, after one that is not counted: it compiles Python's bytecode (as an
installation does) and Triton's kernels.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.runs import command_environment, write_noise
from contnorm.bench.config.schema import from_dict
from contnorm.bench.data.registry import SOURCES, find_layout
from contnorm.bench.records import Store

COMMANDS = ("--help", "show", "ls", "run --help", "compare --help")
SEEDS = 5
POLL = 0.002  # seconds between two looks at the log of a run


@dataclass(frozen=True)
class StartRow:
    """Wall time of a command: the median and the least of several processes."""

    command: str
    until: str  # end, or first step
    repeats: int
    seconds: float
    least: float


def measure_startup(device: str, root: Path, repeats: int = 7, runs: int = 3) -> Iterator[StartRow]:
    """Time the start of commands, and of ER on Split CIFAR-100 with CN and five seeds until its first step.

    Args:
        device: cpu or cuda, for the run.
        root: Folder of data sets; noise is used if it has no CIFAR-100.
        repeats: Timed processes of each command.
        runs: Timed processes of the run.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write_records(folder / "runs")
        for command in COMMANDS:
            yield _row(f"contnorm {command}", "end", partial(_time_command, command.split(), folder), repeats)
        data = root if find_layout(SOURCES["cifar100"], root) is not None else write_noise("cifar100", folder / "data")
        arguments = ["run", "--stream", "split-cifar100", "--norm", "cn", "--seeds", str(SEEDS), "--device", device]
        arguments += ["--data-root", str(data)] + (["--precision", "tf32"] if device != "cpu" else ["--lanes", "1"])
        command = f"contnorm run, ER, CN, {SEEDS} seeds"
        yield _row(command, "first step", partial(_time_first_step, arguments, folder), runs)


def _row(command: str, until: str, timed: Callable[[], float], repeats: int) -> StartRow:
    timed()
    seconds = [timed() for _ in range(repeats)]
    return StartRow(command, until, repeats, statistics.median(seconds), min(seconds))


def _write_records(runs: Path) -> None:
    """Write records for `show`, of two norms with five seeds each."""
    store, matrix = Store(runs), {"correct": [[3, None], [2, 4]], "total": [4, 4]}
    for norm in ("bn", "cn"):
        config = from_dict({"stream": {"source": "mnist"}, "norm": {"name": norm}})
        for seed in range(SEEDS):
            store.save(config, seed, {"matrix": matrix})


def _start(arguments: Sequence[str], folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "contnorm", *arguments],
        cwd=folder,
        env=command_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def _time_command(arguments: Sequence[str], folder: Path) -> float:
    started = time.perf_counter()
    with _start(arguments, folder) as process:
        error = process.communicate()[1]
    seconds = time.perf_counter() - started
    if process.returncode:
        raise RuntimeError(f"contnorm {' '.join(arguments)} failed: {error.strip()[-500:]}")
    return seconds


def _time_first_step(arguments: Sequence[str], folder: Path) -> float:
    """Time until a run has logged the loss of its first step; it is stopped then."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        logs = Path(name) / "logs"
        options = ["--runs", str(Path(name) / "runs"), "--log", "csv", "--log-every", "1", "--log-dir", str(logs)]
        started = time.perf_counter()
        with _start([*arguments, *options], folder) as process:
            while not _has_first_loss(logs):
                if process.poll() is not None:
                    assert process.stderr is not None
                    error = process.stderr.read()
                    raise RuntimeError(f"contnorm {' '.join(arguments)} failed: {error.strip()[-500:]}")
                time.sleep(POLL)
            seconds = time.perf_counter() - started
            process.terminate()
            process.communicate()
    return seconds


def _has_first_loss(logs: Path) -> bool:
    return any(path.read_text().count("\n") > 1 for path in logs.glob("csv/*/*.csv"))
