"""The `run` and `resume` commands: runs jobs with progress bars; Ctrl-C saves a checkpoint and stops."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from contnorm.bench.config.schema import RunConfig
from contnorm.bench.data.registry import data_root, digits_notice
from contnorm.bench.engine.loop import Failed, Finished, Lost, Stopped
from contnorm.bench.engine.loop import Progress as Steps
from contnorm.bench.engine.run_dir import Left, Unfinished
from contnorm.bench.engine.scheduler import Event, Job, Waiting, Workplace, execute, resolve, unfinished
from contnorm.bench.engine.weights import weights_beside
from contnorm.bench.escape import escape_terminal
from contnorm.bench.records import Record, Store
from contnorm.bench.signals import StopSignals
from contnorm.bench.trust import only_trusted
from contnorm.bench.user_code import code_files
from contnorm.cli.data_progress import cores, load_with_progress
from contnorm.cli.show import show_scores
from contnorm.cli.tables import print_error, safe_text
from contnorm.errors import UserError

__all__ = [
    "Hands",
    "cores",
    "device_of",
    "followed",
    "recorded",
    "resume_all",
    "run_seeds",
    "workplace",
]


@dataclass(frozen=True)
class Hands:
    """Options of the command line that control how runs are executed.

    Attributes:
        device: ``"cpu"`` or ``"cuda"``; None for the CPU or, when resuming, the device that a run started on.
        lanes: Number of parallel runs; None for 8 on a GPU and as many as the cores allow on a CPU.
        threads: CPU threads per run; None for 1 or, when resuming, the number that a run started with.
        keep_weights: Whether a finished run saves its weights next to its record.
        allow_missing: Whether published data sets may have other image counts than published.
    """

    device: str | None = None
    lanes: int | None = None
    threads: int | None = None
    keep_weights: bool = False
    allow_missing: bool = False


Work = tuple[Workplace, list[Job]]  # jobs and the environment that they run in


def run_seeds(
    values: dict[str, Any], seeds: list[int], hands: Hands, root: Path | None, runs: Path, console: Console
) -> int:
    """Run the seeds that have no record, show the scores of all, and return the exit code."""
    place = workplace(runs, hands, root)
    config = resolve(values, place.data_root)
    jobs = [Job(config, seed) for seed in seeds]
    code = _run_and_show([(place, jobs)], console)
    if place.keep_weights:
        _warn_of_missing_weights(jobs, Store(place.runs))
    return code


def _warn_of_missing_weights(jobs: list[Job], store: Store) -> None:
    """Warn of runs that were recorded earlier without their weights, since they are not run again."""
    for record in (store.path(job.config, job.seed) for job in jobs):
        if record.is_file() and not weights_beside(record).is_file():
            print_error(f"{record}: was recorded before, without its weights. Move it away to run it for them again.")


def resume_all(path: Path, hands: Hands, root: Path | None, console: Console, trusted: Iterable[Path] = ()) -> int:
    """Resume every stopped run under a folder, by default on the device and with the threads that it started with.

    Args:
        path: Folder to search.
        hands: Options for device, lanes and threads; those that are not None override what a run started with.
        root: Folder of data sets; None for the default one.
        console: Terminal to show progress on.
        trusted: Python files that may be executed; a run that names another one is skipped and reported.

    Returns:
        The exit code: 2 if a run could not be resumed.
    """
    with only_trusted(trusted):
        return _resume_all(path, hands, root, console)


def _resume_all(path: Path, options: Hands, root: Path | None, console: Console) -> int:
    Store(path).check_writable()
    stopped = unfinished(path)
    work, problems = _group_stopped(stopped.runs, options, root)
    problems = [*stopped.problems, *problems]
    if not work:
        raise UserError(
            "; ".join(problems)
            or f"no stopped run under {path}. `contnorm resume` takes a run's folder, or one of many runs."
        )
    for problem in problems:
        print_error(problem)
    return _run_and_show(work, console) or (2 if problems else 0)


def _group_stopped(stopped: list[Left], options: Hands, root: Path | None) -> tuple[list[Work], list[str]]:
    """Group stopped runs by folder and options; also returns the reasons why some can't be resumed."""
    groups: dict[tuple[Path, str, int, bool, bool], list[Job]] = {}
    for run in stopped:
        threads = run.threads if options.threads is None else options.threads
        missing = run.allow_missing or options.allow_missing
        key = (run.runs, options.device or run.device, threads, run.keep_weights, missing)
        groups.setdefault(key, []).append(run.job)
    work: list[Work] = []
    problems: list[str] = []
    for (runs, device, threads, keep, missing), jobs in groups.items():
        if options.device is None and device == "cuda" and not torch.cuda.is_available():
            problems.append(
                f"{runs}: {len(jobs)} of the runs were begun with --device cuda, and torch sees no GPU here."
            )
        else:
            work.append((workplace(runs, Hands(device, options.lanes, threads, keep, missing), root), jobs))
    return work, problems


def _run_and_show(work: list[Work], console: Console) -> int:
    done: list[Record] = []
    failures: list[str] = []
    for place, jobs in work:
        code = 0
        try:
            code = followed(jobs, place, console)
        except UserError as error:  # a failed run does not keep the others from running
            failures.append(str(error))
        if code:
            return code
        store = Store(place.runs)
        done += [store.load_run(job.config, job.seed) for job in jobs if store.has(job.config, job.seed)]
    show_scores(done, console)
    if failures:
        raise UserError(_join_sentences(failures))
    return 0


def _join_sentences(failures: Sequence[str]) -> str:
    """Join messages, each with a full stop.

    Example:
        >>> _join_sentences(["seed 0: the loss is nan.", "net.py:3: KeyError: 'a'"])
        "seed 0: the loss is nan. net.py:3: KeyError: 'a'."
    """
    return " ".join(f"{why.removesuffix('.')}." for why in failures)


def workplace(runs: Path, hands: Hands, root: Path | None) -> Workplace:
    """Environment that runs are executed in, from the options of the command line."""
    threads = 1 if hands.threads is None else hands.threads
    if threads < 1:
        raise UserError(f"--threads {threads}: use 1 or more; every run on a CPU has so many.")
    device = device_of(hands.device or "cpu")
    lanes = hands.lanes
    if lanes is None:
        lanes = 8 if device.type == "cuda" else max(1, cores() // threads)
    if lanes < 1:
        raise UserError(f"--lanes {lanes}: use 1 or more; so many runs go side by side.")
    return Workplace(
        runs,
        data_root(root),
        device,
        lanes=lanes,
        threads=threads,
        keep_weights=hands.keep_weights,
        allow_missing=hands.allow_missing,
    )


def device_of(name: str) -> torch.device:
    """Device of a name; raises a `UserError` if the name is unknown or torch sees no such device."""
    if name not in ("cpu", "cuda"):
        raise UserError(f"--device {name!r}: use cpu or cuda.")
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no GPU here. Use --device cpu.")
    return torch.device(name)


def followed(
    jobs: list[Job],
    place: Workplace,
    console: Console,
    tell_recorded: bool = True,
    go_on: str | None = None,
    if_lost: Callable[[Job, str], None] | None = None,
) -> int:
    """Execute jobs, with a progress bar for each run and one for all runs.

    Args:
        jobs: Runs to execute.
        place: Environment that they run in.
        console: Terminal to print to.
        tell_recorded: Whether to print the path of each record.
        go_on: Sentence that says how to continue after a stop; by default the `contnorm resume` command.
        if_lost: Called with each run whose loss is no longer finite, and the reason; such runs then are no failures.

    Returns:
        0 if all runs are finished, otherwise the exit code for the signal that stopped them.

    Raises:
        UserError: At the end, with the reasons of all failed runs.
    """
    for notice in _data_notices([job.config for job in jobs], place.data_root):
        print_error(notice)
    again = go_on or "Run the command again to go on."
    go_on = go_on or f"Go on with: contnorm resume {shlex.quote(str(place.runs))}{_trust_options(jobs)}"
    with StopSignals() as signals, _Follower(jobs, console, tell_recorded, go_on, if_lost) as follower:
        try:
            prepare = partial(
                load_with_progress,
                root=place.data_root,
                console=console,
                allow_missing=place.allow_missing,
                bars=follower.progress,
            )
            for event in execute(jobs, place, stop=lambda: bool(signals), prepare=prepare):
                follower.show_event(event)
        except KeyboardInterrupt:
            follower.print(f"stopped at once; what was saved at the last checkpoints stays. {go_on}")
            return 128 + (signals.received or [signal.SIGINT])[-1]
        if signals and follower.waiting:
            follower.show_waiting(Store(place.runs), again)
    if follower.failures:
        raise UserError(_join_sentences(sorted(follower.failures)))
    return 128 + signals.received[0] if signals and follower.waiting else 0


def _trust_options(jobs: Sequence[Job]) -> str:
    """Options that `contnorm resume` needs to execute the user code of these runs."""
    files = dict.fromkeys(
        file for config in {job.config: None for job in jobs} for file in code_files(config.as_dict())
    )
    return "".join(f" --trust-code {shlex.quote(str(file))}" for file in files)


def _data_notices(configs: Iterable[RunConfig], root: Path) -> list[str]:
    """Notices on the data sets, to print before the runs start."""
    streams = dict.fromkeys((config.stream.source, config.stream.name) for config in configs)
    return [notice for source, name in streams if (notice := digits_notice(source, name, root))]


def recorded(jobs: list[Job], place: Workplace, console: Console) -> int:
    """Execute the jobs that are neither recorded nor known to diverge; for tables that are made of all of them.

    A run whose loss is no longer finite is recorded as diverged. It would diverge again, so it is not a failure of the
    command and is not run a second time. Runs that an archive does not have are not executed.
    """
    store = Store(place.runs)
    remaining = [job for job in jobs if not store.is_diverged(job.config, job.seed)]
    if store.read_only:
        available = [job for job in remaining if store.has(job.config, job.seed)]
        if len(available) < len(remaining):
            missing = len(remaining) - len(available)
            print_error(f"{place.runs}: is an archive, so its {missing} missing runs are not executed.")
        remaining = available
    return followed(
        remaining,
        place,
        console,
        tell_recorded=False,
        go_on="Run it again to go on.",
        if_lost=lambda job, reason: None,
    )


class _Follower:
    """Shows progress bars, and prints a line for each event of a run."""

    def __init__(
        self,
        jobs: list[Job],
        console: Console,
        tell_recorded: bool,
        go_on: str,
        if_lost: Callable[[Job, str], None] | None,
    ) -> None:
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        self.console, self.tell_recorded, self.go_on, self.if_lost = console, tell_recorded, go_on, if_lost
        self.progress = Progress(*columns, console=console, disable=not console.is_terminal)
        self.every = self.progress.add_task("all runs", total=len(jobs), visible=len(jobs) > 1)
        self.total = f"{len(jobs)} runs"
        self.bars: dict[Job, Any] = {}
        self.waiting = dict.fromkeys(jobs)  # jobs that are neither recorded nor failed
        self.stopped: set[Job] = set()
        self.failures: list[str] = []

    def __enter__(self) -> _Follower:
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def print(self, text: str) -> None:
        self.console.print(safe_text(text), soft_wrap=True)

    def show_event(self, event: Event) -> None:
        job, what = event.job, event.what
        if isinstance(what, Steps):
            if job not in self.bars:
                self.bars[job] = self.progress.add_task(_label(job), total=what.steps)
            self.progress.update(self.bars[job], completed=what.done)
        elif isinstance(what, Waiting):
            self.print(f"{_label(job)}: waiting for {what.holder}, which is running it.")
        elif isinstance(what, Stopped):
            self.stopped.add(job)
            saved = "and saved" if what.saved in (None, what.done) else f"and {what.saved} of them are saved"
            self.print(f"{_label(job)}: stopped after {what.done} of {what.steps} steps, {saved}. {self.go_on}")
        else:
            self.waiting.pop(job, None)
            self._show_end(event)

    def _show_end(self, event: Event) -> None:
        self.progress.advance(self.every)
        if event.job in self.bars:
            self.progress.update(self.bars[event.job], visible=False)
        if isinstance(event.what, Lost) and self.if_lost is not None:
            self.if_lost(event.job, event.what.why)
        elif isinstance(event.what, Failed):
            self.failures.append(event.what.why)
        elif self.tell_recorded:
            outcome = "recorded in" if isinstance(event.what, Finished) else "not run again, it is in"
            self.print(f"{_label(event.job)}: {outcome} {event.path}")

    def show_waiting(self, store: Store, again: str) -> None:
        """Print how many runs were not started, and what to do: ``again`` if `resume` would not find them."""
        rest = [job for job in self.waiting if job not in self.stopped]
        noted = all(Unfinished.of(job, store).note.is_file() for job in rest)
        if rest:
            self.print(f"not begun yet: {len(rest)} of {self.total}. {self.go_on if noted else again}")


def _label(job: Job) -> str:
    config = job.config
    return escape_terminal(f"{config.stream.name} {config.strategy.name} {config.norm.name} seed {job.seed}")
