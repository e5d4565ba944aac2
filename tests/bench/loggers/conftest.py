"""A small stream, and a logger that keeps what it gets."""

import os
import signal
from collections.abc import Mapping

import pytest

from contnorm import bench
from contnorm.bench.loggers import LoggedRun
from tests.bench.api.conftest import arrays, stream

__all__ = ["Memo", "StopAt", "arrays", "stream"]


class Memo(bench.Logger):
    """Keeps all events."""

    def __init__(self) -> None:
        self.runs: list[LoggedRun] = []
        self.rows: list[tuple[int, int, str, float]] = []
        self.ends: list[tuple[int, str, str]] = []
        self.closed = 0

    def start(self, run: LoggedRun) -> None:
        self.runs.append(run)

    def metrics(self, run: LoggedRun, step: int, values: Mapping[str, float]) -> None:
        self.rows += [(run.seed, step, name, value) for name, value in values.items()]

    def end(self, run: LoggedRun, status: str, reason: str = "") -> None:
        self.ends.append((run.seed, status, reason))

    def close(self) -> None:
        self.closed += 1

    def series(self, name: str, seed: int = 0) -> dict[int, float]:
        found = [(step, value) for of, step, metric, value in self.rows if (of, metric) == (seed, name)]
        assert len(dict(found)) == len(found), "a step was logged twice"
        return dict(found)


class StopAt(bench.Logger):
    """Interrupts the runs, as Ctrl-C does, when the loss of a step is logged."""

    def __init__(self, step: int) -> None:
        self.step = step

    def metrics(self, run: LoggedRun, step: int, values: Mapping[str, float]) -> None:
        if step == self.step and "loss" in values:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def run() -> LoggedRun:
    """A run that no network trains, for calls of a logger."""
    settings = {"stream.name": "s", "strategy.name": "er", "norm.name": "cn", "train.lr": 0.1, "norm.groups": None}
    return LoggedRun("0123456789ab", 0, settings, {"versions": {"torch": "2"}, "commit": None})
