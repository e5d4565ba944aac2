"""Helpers: printed text and exit code of a command."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.console import Console

from contnorm.bench.api.execution import RunInterrupted, run_runs
from contnorm.bench.engine.run import Run, RunOptions

__all__ = ["exit_code", "printed"]


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def exit_code(jobs: Sequence[Run], environment: RunOptions, console: Console) -> int:
    """Execute jobs; returns 0, or the exit code for the signal that stopped them."""
    try:
        run_runs(jobs, environment, console)
    except RunInterrupted as stopped:
        return 128 + stopped.signal
    return 0
