"""The `run` and `resume` commands: runs with progress bars; Ctrl-C saves a checkpoint and stops."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console

from contnorm.bench.api.execution import ResumeError, RunInterrupted, RunOptions, resume
from contnorm.bench.api.run import run
from contnorm.bench.api.stream import load_stream
from contnorm.bench.config.schema import flatten_settings
from contnorm.cli.show import show_scores
from contnorm.errors import UserError

__all__ = ["resume_all", "run_seeds"]


def run_seeds(
    values: dict[str, Any], seeds: list[int], options: RunOptions, root: Path | None, runs: Path, console: Console
) -> int:
    """Run the seeds that have no record, show the scores of all, and return the exit code."""
    stream = load_stream(root=root, allow_missing=options.allow_missing, **values["stream"])
    settings = flatten_settings({group: content for group, content in values.items() if group != "stream"})
    try:
        result = run(
            stream,
            settings=settings,
            seeds=seeds,
            runs=runs,
            device=options.device or "cpu",
            lanes=options.lanes,
            threads=1 if options.threads is None else options.threads,
            keep_weights=options.keep_weights,
            progress=console,
        )
    except RunInterrupted as stopped:
        return 128 + stopped.signal
    show_scores(result.records, console)
    if result.diverged:
        raise UserError(" ".join(result.diverged.values()))
    return 0


def resume_all(
    path: Path, options: RunOptions, root: Path | None, console: Console, trusted: Iterable[Path] = ()
) -> int:
    """Resume every stopped run under a folder, show the scores, and return the exit code."""
    try:
        records = resume(path, options=options, root=root, trusted=trusted, console=console)
    except RunInterrupted as stopped:
        return 128 + stopped.signal
    except ResumeError as error:
        show_scores(error.records, console)
        if str(error):
            raise
        return 2
    show_scores(records, console)
    return 0
