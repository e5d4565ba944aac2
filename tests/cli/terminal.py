"""Helpers: printed text and exit code of a command."""

from __future__ import annotations

import io
from collections.abc import Sequence

from contnorm.bench.engine.job import Job, RunEnvironment
from rich.console import Console

from contnorm.bench.api.execution import RunInterrupted, run_jobs

__all__ = ["exit_code", "printed"]


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def exit_code(jobs: Sequence[Job], environment: RunEnvironment, console: Console) -> int:
    """Execute jobs; returns 0, or the exit code for the signal that stopped them."""
    try:
        run_jobs(jobs, environment, console)
    except RunInterrupted as stopped:
        return 128 + stopped.signal
    return 0
