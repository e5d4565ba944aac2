"""Execution of runs with progress, signals and messages; shared by the Python API and the command line."""

from __future__ import annotations

import logging
import re
import shlex
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from contnorm.bench.api.progress import RunMonitor, RunProgress
from contnorm.bench.api.run_logs import Loggers, LogOptions, RunLogs
from contnorm.bench.api.task_callback import OnTaskDone, TaskCallback
from contnorm.bench.components import own_code
from contnorm.bench.config.schema import RunConfig
from contnorm.bench.data.progress import cores, load_with_progress
from contnorm.bench.data.registry import data_root, digits_notice
from contnorm.bench.data.store import find_stored
from contnorm.bench.engine.events import Finished
from contnorm.bench.engine.job import Job, RunEnvironment
from contnorm.bench.engine.run_dir import RunDir, StoppedRun, stopped_runs
from contnorm.bench.engine.scheduler import execute
from contnorm.bench.hardware_queues import request_hardware_queues
from contnorm.bench.launchers.base import Launcher
from contnorm.bench.launchers.local import LocalLauncher, list_devices
from contnorm.bench.launchers.registry import create_launcher
from contnorm.bench.records import Record, Store
from contnorm.bench.signals import StopSignals
from contnorm.errors import UserError, check_count

__all__ = [
    "RunInterrupted",
    "RunOptions",
    "environment_with_data",
    "find_device",
    "find_launcher",
    "resume",
    "run_environment",
    "run_jobs",
    "run_missing",
]

log = logging.getLogger("contnorm")


class RunInterrupted(KeyboardInterrupt):
    """Runs were stopped by a signal, after saving what can be saved.

    After SIGTERM it is a `SystemExit` too: a program that does not catch it ends with status 143, as the commands do.

    Attributes:
        signal: Number of the signal.

    Example:
        >>> stopped = RunInterrupted("stopped after saving.", signal.SIGTERM)
        >>> isinstance(stopped, SystemExit), stopped.code
        (True, 143)
    """

    def __new__(cls, message: str, number: int, *rest: object) -> RunInterrupted:
        """Create the exception, as an object of a subclass after SIGTERM."""
        return super().__new__(_terminated(cls) if number == signal.SIGTERM else cls, message)

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.signal = number


def _terminated(cls: type[RunInterrupted]) -> type[RunInterrupted]:
    """The subclass of an exception that is a `SystemExit` too."""
    return type(cls.__name__, (cls, SystemExit), {"code": 128 + signal.SIGTERM, "__module__": cls.__module__})


@dataclass(frozen=True)
class RunOptions:
    """Options that control how runs are executed. They are not part of a run's identity.

    Attributes:
        device: ``"cpu"``, ``"cuda"`` or a GPU by its index, such as ``"cuda:1"``; None for the CPU or, when resuming,
            the type of device that a run started on.
        lanes: Number of parallel runs; None for 8 on a GPU and as many as the cores allow on a CPU.
        threads: CPU threads per run; None for 1 or, when resuming, the number that a run started with.
        keep_weights: Whether a finished run saves its weights next to its record.
        allow_missing: Whether published data sets may have other image counts than published.
        launcher: Where runs are executed: the name of a launcher, or a launcher; None for this machine.
        devices: Indices of GPUs of this machine that are used in parallel, as a list or as text (``"0,1"`` or
            ``"all"``). Each has a worker process that executes up to ``lanes`` runs at a time.
        memory_moments: Whether runs are evaluated with the moments of their replay memory too.

    Example:
        >>> RunOptions(device="cuda", lanes=4).lanes
        4
    """

    device: str | None = None
    lanes: int | None = None
    threads: int | None = None
    keep_weights: bool = False
    allow_missing: bool = False
    launcher: str | Launcher | None = None
    devices: Sequence[int] | str | int | None = None
    memory_moments: bool = False


def run_environment(runs: Path | None, options: RunOptions, root: Path | None) -> RunEnvironment:
    """Return the environment that runs are executed in; the folder of data sets is the default one if it is None."""
    return environment_with_data(runs, options, data_root(root))


def environment_with_data(runs: Path | None, options: RunOptions, root: Path) -> RunEnvironment:
    """Return the environment that runs are executed in, with a folder of data sets that was checked before."""
    threads = 1 if options.threads is None else check_count(options.threads, "threads")
    lanes = None if options.lanes is None else check_count(options.lanes, "lanes")
    device, launcher = _find_place(options)
    if lanes is None:
        lanes = 8 if device.type == "cuda" else max(1, cores() // threads)
    return RunEnvironment(
        runs,
        root,
        device,
        lanes=lanes,
        threads=threads,
        keep_weights=options.keep_weights,
        memory_moments=options.memory_moments,
        allow_missing=options.allow_missing,
        launcher=launcher,
    )


def _find_place(options: RunOptions) -> tuple[torch.device, Launcher | None]:
    """Return the device and the launcher of runs."""
    launcher = find_launcher(options.launcher)
    devices = launcher.devices if isinstance(launcher, LocalLauncher) else ()
    if options.devices is not None:
        if launcher is not None:
            raise UserError(f"devices={options.devices!r}: are GPUs of this machine. Use them without a launcher.")
        devices = list_devices(options.devices)
    if not devices:
        return find_device(
            "cpu" if options.device is None else options.device, launcher is not None and launcher.remote
        ), launcher
    if options.device not in (None, "cpu", "cuda"):  # the CPU is the default of commands
        raise UserError(f"devices={options.devices!r} and device={options.device!r}: use one of them.")
    if len(devices) == 1:
        return find_device(f"cuda:{devices[0]}"), None
    return torch.device("cuda"), LocalLauncher(devices)


def find_launcher(launcher: str | Launcher | None) -> Launcher | None:
    """Return the launcher of a name; None for this machine.

    Example:
        >>> find_launcher(None) is None, type(find_launcher("local")).__name__
        (True, 'LocalLauncher')
    """
    found = create_launcher(launcher) if isinstance(launcher, str) else launcher
    if not isinstance(found, Launcher | None):
        kind = f"the class {found.__name__}" if isinstance(found, type) else f"of class {type(found).__name__}"
        raise UserError(
            f"launcher is {kind}: use a name of `contnorm ls launchers`, or an object of a subclass of bench.Launcher."
        )
    return found


def find_device(name: str, remote: bool = False) -> torch.device:
    """Return the device of a name; raises a `UserError` if the name is unknown or torch sees no such device.

    Args:
        name: ``"cpu"``, ``"cuda"``, or ``"cuda:1"`` and so on.
        remote: Whether the device is one of another machine.

    Example:
        >>> find_device("gpu")
        Traceback (most recent call last):
        contnorm.errors.UserError: device='gpu': use cpu, cuda, or a GPU by its index, such as cuda:1.
    """
    if not isinstance(name, str) or not re.fullmatch(r"cpu|cuda(:\d{1,3})?", name):
        raise UserError(f"device={name!r}: use cpu, cuda, or a GPU by its index, such as cuda:1.")
    device = torch.device(name)
    if remote and device.index is not None:
        raise UserError(f"device={name!r}: a launcher chooses the GPUs of its workers. Use cuda.")
    if device.type == "cuda":
        request_hardware_queues()  # before torch is asked for GPUs, which initializes the driver
    if device.type == "cuda" and not remote and not torch.cuda.is_available():
        raise UserError(f"device={name!r}: torch sees no GPU here. Use cpu.")
    if device.index is not None and device.index >= (count := torch.cuda.device_count()):
        raise UserError(f"device={name!r}: torch sees {count} GPUs here, cuda:0 to cuda:{count - 1}.")
    return device


def run_jobs(
    jobs: Sequence[Job],
    environment: RunEnvironment,
    console: Console | None = None,
    *,
    print_records: bool = True,
    resume_hint: str | None = None,
    on_diverged: Callable[[Job, str], None] | None = None,
    notices: bool = True,
    on_finished: Callable[[Job, Finished], None] | None = None,
    monitor: RunMonitor | None = None,
    logs: RunLogs | None = None,
    on_task_done: OnTaskDone | None = None,
) -> None:
    """Execute jobs, with a progress bar for each run and one for all runs.

    Args:
        jobs: Runs to execute.
        environment: Environment that they run in.
        console: Terminal or notebook to print to; None for no output.
        print_records: Whether to print the path of each record.
        resume_hint: Sentence that says how to continue after a stop; by default the `contnorm resume` command.
        on_diverged: Called with each run that diverged, and the reason; such runs then are no failures.
        notices: Whether to log notices on the data sets, such as that embedded digits are used in place of MNIST.
        on_finished: Called with each run that was executed and finished, and its results.
        monitor: Gets every event, and is shown above the progress bars.
        logs: Loggers that get the events of the runs.
        on_task_done: Called with a `TaskDone` after each task of a run; its exception stops the runs.

    Raises:
        RunInterrupted: If SIGINT or SIGTERM stopped the runs, after they were saved.
        UserError: At the end, with the reasons of all failed runs.
    """
    jobs = list(jobs)
    for notice in _data_notices([job.config for job in jobs], environment.data_root) if notices else ():
        log.warning(notice)
    messages = _StopMessages.of(jobs, environment, resume_hint, "" if logs is None else logs.command_line)
    recorded = environment.runs is not None
    if logs is not None and logs.loggers:
        environment = replace(environment, log_every=logs.every)
    progress = RunProgress(jobs, console, print_records, messages.hint, on_diverged, recorded, monitor)
    prepare = partial(_prepare, environment=environment, progress=progress) if progress.shown else None
    callback = TaskCallback(on_task_done, jobs, environment)
    with StopSignals() as signals, progress:
        try:
            for event in execute(jobs, environment, stop=lambda: bool(signals) or bool(callback), prepare=prepare):
                progress.show_event(event)
                if logs is not None:
                    logs.log_event(event)
                callback.handle(event)
                if on_finished is not None and isinstance(event.what, Finished):
                    on_finished(event.job, event.what)
        except KeyboardInterrupt as error:
            message = f"{messages.at_once} {messages.hint}"
            progress.print(message)
            raise RunInterrupted(message, (signals.received or [signal.SIGINT])[-1]) from error
        if signals and progress.waiting:
            progress.show_waiting(None if environment.runs is None else environment.store, messages.again)
    callback.raise_error()
    if progress.failures:
        raise UserError(join_sentences(sorted(progress.failures)))
    if signals and progress.waiting:
        message = f"{messages.saved} {messages.hint}" if _are_noted(progress.waiting, environment) else messages.unsaved
        raise _interrupted(message, signals.received[0], console)


def _are_noted(jobs: Iterable[Job], environment: RunEnvironment) -> bool:
    """Whether `resume` would find some of the runs."""
    if environment.runs is None:
        return False
    return any(RunDir.of(job, environment.store).note.is_file() for job in jobs)


def _interrupted(message: str, number: int, console: Console | None) -> RunInterrupted:
    """Return the exception of runs that were saved; its message is logged where Python and the console print none."""
    if number == signal.SIGTERM and console is None:
        log.warning(message)
    return RunInterrupted(message, number)


@dataclass(frozen=True)
class _StopMessages:
    """Messages after a stop: what was saved, and how to continue.

    Attributes:
        saved: After the first signal, when the runs are saved.
        at_once: After the second signal.
        hint: How to continue runs that were started.
        again: How to continue if no run was started.
    """

    saved: str
    at_once: str
    hint: str
    again: str

    @property
    def unsaved(self) -> str:
        """After the first signal, when no run had been started."""
        return f"stopped. {self.again}"

    @classmethod
    def of(cls, jobs: Sequence[Job], environment: RunEnvironment, hint: str | None, log_options: str) -> _StopMessages:
        if environment.runs is None:
            nothing = "Nothing is saved, since runs=None."
            return cls("stopped.", "stopped.", nothing, nothing)
        again = hint or "Run it again to continue."
        if any(own_code(job.config) for job in jobs):
            hint = again
        resume = f"Continue with: contnorm resume {shlex.quote(str(environment.runs))}{log_options}"
        return cls("stopped after saving.", "stopped at once; the last checkpoints are kept.", hint or resume, again)


def _prepare(name: str, environment: RunEnvironment, progress: RunProgress) -> None:
    """Decode a data set with a progress bar, if it was not decoded before."""
    is_in_memory = "@" in name and find_stored(name, environment.data_root) is None  # or made by a plugin
    if name not in environment.sources and not is_in_memory:
        load_with_progress(
            name,
            environment.data_root,
            progress.console,
            allow_missing=environment.allow_missing,
            bars=progress.bars,
        )


def run_missing(jobs: Sequence[Job], environment: RunEnvironment, console: Console | None = None) -> None:
    """Execute the jobs that are neither recorded nor known to diverge; for tables that are made of all of them.

    A run whose loss is no longer finite is recorded as diverged. It would diverge again, so it is not a failure and is
    not run a second time. Runs that an archive does not have are not executed.
    """
    store = environment.store
    remaining = [job for job in jobs if not store.is_diverged(job.config, job.seed)]
    if store.read_only:
        available = [job for job in remaining if store.has(job.config, job.seed)]
        if len(available) < len(remaining):
            missing = len(remaining) - len(available)
            log.warning(f"{environment.runs}: is an archive, so its {missing} missing runs are not executed.")
        remaining = available
    run_jobs(
        remaining,
        environment,
        console,
        print_records=False,
        resume_hint="Run it again to continue.",
        on_diverged=lambda job, reason: None,
    )


def resume(
    path: str | Path = "runs",
    *,
    options: RunOptions | None = None,
    root: str | Path | None = None,
    console: Console | None = None,
    log: Loggers | None = None,
    log_every: int = LogOptions.every,
    log_dir: str | Path | None = None,
) -> list[Record]:
    """Resume every stopped run under a folder, by default on the device and with the threads that it started with.

    Args:
        path: Folder to search.
        options: Device, lanes, threads and launcher; those that are not None override what a run started with.
        root: Folder of data sets; None for the default one.
        console: Terminal or notebook to show progress on; None for no output.
        log: Loggers, as in `bench.run`; they continue the logs of the runs.
        log_every: Steps between the losses that are logged.
        log_dir: Folder of logs; None for the folder next to that of the runs.

    Returns:
        The records of the resumed runs.

    Raises:
        UserError: If nothing can be resumed; and, after the other runs are finished, if a run failed.

    Example:
        >>> resume("no such folder")
        Traceback (most recent call last):
        contnorm.errors.UserError: no stopped run under no such folder. Name the folder of a run, or of many runs.
    """
    options, folder = options or RunOptions(), Path(path)
    log_options = LogOptions.of(log, log_every, log_dir)
    Store(folder).check_writable()
    stopped = stopped_runs(folder)
    groups, problems = _group_stopped(stopped.runs, options, None if root is None else Path(root))
    problems = [*stopped.problems, *problems]
    if not groups:
        raise UserError(
            "; ".join(problems) or f"no stopped run under {folder}. Name the folder of a run, or of many runs."
        )
    for problem in problems:
        logging.getLogger("contnorm").warning(problem)
    records: list[Record] = []
    failures: list[str] = []
    for environment, jobs in groups:
        with _collect_failures(failures), log_options.open(environment.runs) as logs:
            run_jobs(jobs, environment, console, logs=logs)
        store = environment.store
        records += [store.load_run(job.config, job.seed) for job in jobs if store.has(job.config, job.seed)]
    if failures or problems:
        raise ResumeError(join_sentences(failures), records)
    return records


class ResumeError(UserError):
    """Some runs could not be resumed.

    Attributes:
        records: The records of the runs that were resumed and finished.
    """

    def __init__(self, message: str, records: list[Record]) -> None:
        super().__init__(message)
        self.records = records


@contextmanager
def _collect_failures(failures: list[str]) -> Iterator[None]:
    """Collect the message of failed runs, so that they do not keep other runs from running."""
    try:
        yield
    except UserError as error:
        failures.append(str(error))


def _group_stopped(
    stopped: list[StoppedRun], options: RunOptions, root: Path | None
) -> tuple[list[tuple[RunEnvironment, list[Job]]], list[str]]:
    """Group stopped runs by folder and options; also returns the reasons why some can't be resumed."""
    groups: dict[tuple[Path, str, int, bool, bool, bool], list[Job]] = {}
    device_option = options.device if options.devices is None else "cuda"
    for run in stopped:
        threads = run.threads if options.threads is None else options.threads
        missing = run.allow_missing or options.allow_missing
        device = run.device if device_option is None else device_option
        key = (run.runs, device, threads, run.keep_weights, missing, run.memory_moments)
        groups.setdefault(key, []).append(run.job)
    launcher = find_launcher(options.launcher)
    remote = launcher is not None and launcher.remote
    work: list[tuple[RunEnvironment, list[Job]]] = []
    problems: list[str] = []
    for (runs, device, threads, keep, missing, memory), jobs in groups.items():
        if device_option is None and device == "cuda" and not remote and not torch.cuda.is_available():
            problems.append(
                f"{runs}: {len(jobs)} stopped runs started on a GPU (--device cuda), and torch sees none here."
            )
        else:
            chosen = RunOptions(device, options.lanes, threads, keep, missing, launcher, options.devices, memory)
            work.append((run_environment(runs, chosen, root), jobs))
    return work, problems


def join_sentences(failures: Sequence[str]) -> str:
    """Join messages, each with a full stop.

    Example:
        >>> join_sentences(["seed 0: the loss is nan.", "net.py:3: KeyError: 'a'"])
        "seed 0: the loss is nan. net.py:3: KeyError: 'a'."
    """
    return " ".join(f"{why.removesuffix('.')}." for why in failures)


def _data_notices(configs: Iterable[RunConfig], root: Path) -> list[str]:
    """Notices on the data sets, to print before the runs start."""
    streams = dict.fromkeys((config.stream.source, config.stream.name) for config in configs)
    return [notice for source, name in streams if (notice := digits_notice(source, name, root))]
