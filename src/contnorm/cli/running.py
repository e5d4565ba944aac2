"""Runs at a terminal: a bar with the time left, and Ctrl-C that loses nothing."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from contnorm.cli.showing import show_scores
from contnorm.config import RunConfig
from contnorm.engine.loop import Failed, Finished, Stopped
from contnorm.engine.loop import Progress as Steps
from contnorm.engine.runs import Workplace, execute, resolve, unfinished
from contnorm.errors import UserError
from contnorm.results import Store
from contnorm.streams.sources import data_root

__all__ = ["resume_all", "run_seeds"]


def run_seeds(
    values: dict[str, Any], seeds: list[int], device: str, lanes: int, root: Path | None, runs: Path, console: Console
) -> None:
    """Run what is missing, then show the scores."""
    place = _workplace(runs, device, lanes, root)
    config = resolve(values, place.data_root)
    if _followed(config, seeds, place, console):
        store = Store(runs)
        show_scores([store.load(store.path(config, seed)) for seed in seeds if store.has(config, seed)], console)


def resume_all(path: Path, device: str, lanes: int, root: Path | None, console: Console) -> None:
    """Go on with every stopped run under a folder."""
    found: dict[RunConfig, list[int]] = {}
    for config, seed in unfinished(path):
        found.setdefault(config, []).append(seed)
    if not found:
        raise UserError(f"no stopped run under {path}. `contnorm resume` takes a run's folder, or one of many runs.")
    runs = _runs_folder(path)
    place = _workplace(runs, device, lanes, root)
    for config, seeds in found.items():
        if not _followed(config, seeds, place, console):
            return
    store = Store(runs)
    done = [(config, seed) for config, seeds in found.items() for seed in seeds if store.has(config, seed)]
    show_scores([store.load(store.path(config, seed)) for config, seed in done], console)


def _workplace(runs: Path, device: str, lanes: int, root: Path | None) -> Workplace:
    if lanes < 1:
        raise UserError(f"--lanes {lanes}: use 1 or more; on a GPU so many seeds move side by side.")
    chosen = _device(device)
    return Workplace(runs, data_root(root), chosen, lanes=lanes if chosen.type == "cuda" else 1)


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


def _followed(config: RunConfig, seeds: list[int], place: Workplace, console: Console) -> bool:
    """Run with a bar a seed; False where a person stopped it. A run that failed is told at the end."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    label = f"{config.stream.name} {config.strategy.name} {config.norm.name}"
    failures: list[str] = []
    stopped = False
    with _stop_asked() as asked, Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bars: dict[int, Any] = {}
        for event in execute(config, seeds, place, stop=lambda: bool(asked)):
            what = event.what
            if isinstance(what, Steps):
                if event.seed not in bars:
                    bars[event.seed] = progress.add_task(f"{label} seed {event.seed}", total=what.steps)
                progress.update(bars[event.seed], completed=what.done)
            elif isinstance(what, str):
                console.print(f"{label} seed {event.seed}: not run again, it is in {event.path}", soft_wrap=True)
            elif isinstance(what, Finished):
                console.print(f"{label} seed {event.seed}: recorded in {event.path}", soft_wrap=True)
            elif isinstance(what, Failed):
                failures.append(what.why)
            elif isinstance(what, Stopped):
                stopped = True
                said = f"stopped after {what.done} of {what.steps} steps, and saved"
                again = f"contnorm resume {place.runs}"
                console.print(f"{label} seed {event.seed}: {said}. Go on with: {again}", soft_wrap=True)
    if failures:
        raise UserError("; ".join(failures))
    return not stopped


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
