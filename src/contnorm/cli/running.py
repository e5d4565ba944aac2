"""Runs at a terminal: a bar with the time left, and Ctrl-C that loses nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from contnorm.cli.showing import show_scores
from contnorm.engine.loop import Failed, Finished, Stopped
from contnorm.engine.loop import Progress as Steps
from contnorm.engine.runs import Job, Workplace, execute, resolve, unfinished
from contnorm.errors import UserError
from contnorm.results import Store
from contnorm.streams.sources import data_root

__all__ = ["Hands", "followed", "resume_all", "run_seeds"]


@dataclass(frozen=True)
class Hands:
    """With what runs are made, as typed: a device, how many side by side (None for as many as fit), threads of each."""

    device: str = "cpu"
    lanes: int | None = None
    threads: int = 1


def run_seeds(
    values: dict[str, Any], seeds: list[int], hands: Hands, root: Path | None, runs: Path, console: Console
) -> None:
    """Run what is missing, then show the scores."""
    place = _workplace(runs, hands, root)
    config = resolve(values, place.data_root)
    _run_and_show([Job(config, seed) for seed in seeds], place, console)


def resume_all(path: Path, hands: Hands, root: Path | None, console: Console) -> None:
    """Go on with every stopped run under a folder."""
    jobs = unfinished(path)
    if not jobs:
        raise UserError(f"no stopped run under {path}. `contnorm resume` takes a run's folder, or one of many runs.")
    _run_and_show(jobs, _workplace(_runs_folder(path), hands, root), console)


def _run_and_show(jobs: list[Job], place: Workplace, console: Console) -> None:
    if followed(jobs, place, console):
        store = Store(place.runs)
        done = [job for job in jobs if store.has(job.config, job.seed)]
        show_scores([store.load(store.path(job.config, job.seed)) for job in done], console)


def _workplace(runs: Path, hands: Hands, root: Path | None) -> Workplace:
    if hands.threads < 1:
        raise UserError(f"--threads {hands.threads}: use 1 or more; every run on a CPU has so many.")
    device = _device(hands.device)
    lanes = hands.lanes
    if lanes is None:
        lanes = 8 if device.type == "cuda" else max(1, _cores() // hands.threads)
    if lanes < 1:
        raise UserError(f"--lanes {lanes}: use 1 or more; so many runs go side by side.")
    return Workplace(runs, data_root(root), device, lanes=lanes, threads=hands.threads)


def _cores() -> int:
    """Those this process may use, which in a container are fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _runs_folder(path: Path) -> Path:
    """The folder that holds the hashes, from a path inside it or above it."""
    first = next(iter([*path.glob("**/*.unfinished"), *([path] if path.name.endswith(".unfinished") else [])]))
    return first.parent.parent


def _device(name: str) -> torch.device:
    if name not in ("cpu", "cuda"):
        raise UserError(f"--device {name!r}: use cpu or cuda.")
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no GPU here. Use --device cpu.")
    return torch.device(name)


def followed(jobs: list[Job], place: Workplace, console: Console, tell_recorded: bool = True) -> bool:
    """Run with a bar a run and one for all; False where a person stopped it. A run that failed is told at the end."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    failures: list[str] = []
    stopped = False
    with _stop_asked() as asked, Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bars: dict[Job, Any] = {}
        every = progress.add_task("all runs", total=len(jobs), visible=len(jobs) > 1)
        for event in execute(jobs, place, stop=lambda: bool(asked)):
            what, label = event.what, _label(event.job)
            if isinstance(what, Steps):
                if event.job not in bars:
                    bars[event.job] = progress.add_task(label, total=what.steps)
                progress.update(bars[event.job], completed=what.done)
            elif isinstance(what, str | Finished):
                progress.advance(every)
                if event.job in bars:
                    progress.update(bars[event.job], visible=False)
                if tell_recorded:
                    news = "recorded in" if isinstance(what, Finished) else "not run again, it is in"
                    console.print(f"{label}: {news} {event.path}", soft_wrap=True)
            elif isinstance(what, Failed):
                failures.append(what.why)
            elif isinstance(what, Stopped):
                stopped = True
                said = f"stopped after {what.done} of {what.steps} steps, and saved"
                console.print(f"{label}: {said}. Go on with: contnorm resume {place.runs}", soft_wrap=True)
    if failures:
        raise UserError("; ".join(failures))
    return not stopped


def _label(job: Job) -> str:
    config = job.config
    return f"{config.stream.name} {config.strategy.name} {config.norm.name} seed {job.seed}"


@contextmanager
def _stop_asked() -> Iterator[list[int]]:
    """A list that fills when Ctrl-C or a kind kill comes; the second Ctrl-C acts at once."""
    asked: list[int] = []

    def ask(number: int, frame: object) -> None:
        if asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked.append(number)

    old = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
