"""`run`: train over a stream with one norm and strategy, for several seeds; `decide`: as many as a verdict takes."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

import numpy as np
from rich.console import Console
from rich.text import Text
from torch import nn

from contnorm.bench.api.execution import LOG_EVERY, Loggers, OnTaskDone, RunLogs, print_data_notices, run_runs
from contnorm.bench.api.result import Result
from contnorm.bench.api.stream import Stream, load_stream
from contnorm.bench.comparison import Experiment, check_experiments, compare
from contnorm.bench.components import Component, ComponentKind, components_of, identify, loading_user_code
from contnorm.bench.config.resolve import resolve
from contnorm.bench.config.schema import RUN_ARGUMENTS, flatten_settings, meant_keys, with_setting
from contnorm.bench.engine.checkpoint import weights_path
from contnorm.bench.engine.run import Launcher, Run, RunOptions
from contnorm.bench.label_metrics import LABEL_SCORES
from contnorm.bench.memories import Memory
from contnorm.bench.metrics import SCORES
from contnorm.bench.models.user_norms import built_in_name
from contnorm.bench.records import Record, make_record
from contnorm.bench.rng import list_seeds
from contnorm.bench.sequential import ALPHA, FIRST_SEED, LAST_LOOK, MARGIN, Verdict, check_rule, looks_up_to
from contnorm.bench.strategies.base import Strategy
from contnorm.errors import UserError, escape_terminal, unknown

if TYPE_CHECKING:
    import pandas as pd

_log = logging.getLogger("contnorm")


class _Default(str):
    """The default of an argument, which ``settings`` may override."""


DEFAULT_NORM, DEFAULT_STRATEGY = _Default("cn"), _Default("er")
Model = str | nn.Module | Callable[..., nn.Module]
Norm = str | Callable[..., nn.Module]
ARGUMENTS = (*RUN_ARGUMENTS, "settings", "tag")  # of `run` that describe an experiment
P = ParamSpec("P")
R = TypeVar("R")
_BASES: dict[str, type] = {"strategy": Strategy, "memory": Memory}


class DivergedError(UserError):
    """All seeds of an experiment diverged: their loss, a parameter or a moment is not finite.

    Example:
        >>> stream = load_stream("split-mnist", source="digits", tasks=2, train_per_task=50)
        >>> run(stream, norm="none", lr=1e9)
        Traceback (most recent call last):
        contnorm.bench.api.run.DivergedError: seed 0: the loss is nan at step 5 of 10 (task 0). Most likely the ...
    """


def _unknown_argument(name: str, known: Iterable[str]) -> UserError:
    meant = []
    for key in meant_keys(name):
        here = [argument for argument, setting in RUN_ARGUMENTS.items() if setting == key]
        group, _, field = key.partition(".")
        there = f"load_stream(..., {field}=...)" if group == "stream" else f"settings={{{key!r}: ...}}"
        meant += here or [there]
    return unknown("argument", name, known, meant or None)


def _names_known_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function: an unknown keyword argument raises an error that names one with a similar meaning."""
    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs.keys() - known.keys():
            raise _unknown_argument(name, known)
        return function(*args, **kwargs)

    return checked


@_names_known_arguments
def run(
    stream: Stream | str,
    *,
    norm: Norm = DEFAULT_NORM,
    strategy: str | Strategy | type[Strategy] = DEFAULT_STRATEGY,
    model: Model | None = None,
    memory: str | Memory | type[Memory] | None = None,
    lr: float | None = None,
    batch_size: int | None = None,
    replay: int | None = None,
    seeds: int | Iterable[int] = 1,
    settings: Mapping[str, Any] | None = None,
    runs: str | Path | None = None,
    tag: str | None = None,
    device: str = "cpu",
    devices: Sequence[int] | str | int | None = None,
    lanes: int | None = None,
    threads: int = 1,
    keep_weights: bool = False,
    memory_moments: bool = False,
    progress: bool | Console = False,
    log: Loggers | None = None,
    log_every: int = LOG_EVERY,
    log_dir: str | Path | None = None,
    launcher: str | Launcher | None = None,
    on_task_done: OnTaskDone | None = None,
) -> Result:
    """Train once over a stream for each seed; after each task, measure accuracy on all tasks so far.

    A run is identified by its settings and seed. With a folder ``runs``, a finished run is recorded there and not
    repeated, and a stopped one is resumed bit-exactly. Several seeds run in parallel: on a CPU in processes if that
    saves time, on a GPU in one CUDA graph. The results of a seed do not depend on the others.

    Args:
        stream: A stream, or the name of one.
        norm: Name of the normalization layer: ``"bn"``, ``"gn"``, ``"cn"`` and so on. A number of groups may follow, as
            in ``"cn8"``; otherwise it is the default of the stream. ``"none"`` removes the norm layers of a network.
            Or a norm of your own: ``path/to/file.py:Class``, a registered name, or a class or function that creates a
            layer for a number of channels.
        strategy: Learning method: a name, ``path/to/file.py:Class``, or an object such as ``bench.ER(replay=10)``.
        model: Network: a name, ``path/to/file.py:make``, a function ``make(input_shape, num_outputs)``, or a
            `torch.nn.Module`. The norm layers of the function's network, and of a copy of the module, are converted to
            ``norm``; a function ``make(input_shape, num_outputs, norm)`` makes them itself with ``norm(channels)``. All
            seeds start from the weights of a given module. Default: that of the stream.
        memory: Replay memory: a name, ``path/to/file.py:Class``, a subclass of `Memory`, or an object such as
            ``bench.Ring(50)``. Default: that of the stream.
        lr: Learning rate.
        batch_size: Samples of the stream per step.
        replay: Replayed samples per step.
        seeds: Number of seeds, counted from 0, or the seeds.
        settings: Further settings by dotted key, such as ``{"strategy.forward": "separate"}``; see the list of
            settings in the documentation.
        runs: Folder of records and checkpoints; None to keep the results in memory only.
        tag: Name of a network, strategy, memory or norm that can't be identified by its code, such as one that uses an
            open file. Runs with the same tag and settings count as the same run.
        device: ``"cpu"``, ``"cuda"``, or a GPU by its index, such as ``"cuda:1"``.
        devices: Indices of several GPUs of this machine to use in parallel, such as ``[0, 1]``, or ``"all"``. Each has
            a worker process that executes up to ``lanes`` runs at a time.
        lanes: Number of parallel runs; None for 8 on a GPU, and as many as the cores allow on a CPU.
        threads: CPU threads per run. Changing it changes results slightly.
        keep_weights: Whether to keep the final weights, for `Result.models`.
        memory_moments: Whether to evaluate with the exact moments of the replay memory too, beside the moments of the
            settings. It changes neither the training nor the other accuracies, and not the identity of the run. Runs
            without running moments or memory, and runs that are recorded already, stay without it.
        progress: Whether to show progress; or the rich console to show it on.
        log: Loggers of settings, losses, accuracies and scores: ``"csv"``, ``"tensorboard"``, ``"wandb"``,
            ``"mlflow"``, an object of a subclass of `bench.Logger`, or a list of these. They do not change results.
        log_every: Steps between the losses that are logged.
        log_dir: Folder of logs; None for the folder next to ``runs`` whose name ends in ``-logs``, or ``runs-logs``.
        launcher: Where runs are executed: a name, such as ``"ray"``, or a launcher, such as
            ``bench.RayLauncher(address="auto")``; None for this machine. Results do not depend on it.
        on_task_done: Called in this process with a `bench.Event` after each task of a run: its settings, seed and
            accuracies so far. Runs that are recorded already are included. An exception that it raises, such as
            `bench.StopRun`, stops and saves all runs of the call, which then raises it.

    Returns:
        The results of all seeds.

    Raises:
        UserError: If a setting is invalid, or if runs failed.
        DivergedError: If all seeds diverged.
        KeyboardInterrupt: After Ctrl-C, when the runs are saved.

    Example:
        >>> stream = load_stream("split-mnist", source="digits", tasks=2, train_per_task=100)
        >>> result = run(stream, norm="bn", strategy="er", seeds=2, lanes=1)
        >>> result.accuracy.shape
        (2, 2, 2)
    """
    options = dict(locals())
    arguments = {name: options.pop(name) for name in ARGUMENTS}
    stream = find_stream(options.pop("stream"))
    (result,) = run_experiments(stream, [resolve_run(stream, arguments, runs is not None)], **options)
    if isinstance(result, DivergedError):
        raise result
    return result


def run_all(stream: Stream | str, experiments: Sequence[Mapping[str, Any]], **options: Any) -> list[Result]:
    """Run several experiments on the same stream, in parallel where lanes are free.

    Args:
        stream: A stream, or the name of one.
        experiments: For each experiment its arguments of `run`: ``norm``, ``strategy``, ``model``, ``memory``, ``lr``,
            ``batch_size``, ``replay``, ``settings`` and ``tag``.
        **options: The other arguments of `run`: ``seeds``, ``runs``, ``device``, ``lanes`` and so on.

    Returns:
        The results of the experiments, in order.

    Example:
        >>> stream = load_stream("split-mnist", source="digits", tasks=2, train_per_task=50)
        >>> bn, gn = run_all(stream, [{"norm": "bn"}, {"norm": "gn", "lr": 0.1}])
        >>> bn.config.norm.name, gn.config.train.lr
        ('bn', 0.1)
    """
    stream = find_stream(stream)
    runs = [resolve_run(stream, one, options.get("runs") is not None) for one in experiments]
    results = run_experiments(stream, runs, **options)
    for result in results:
        if isinstance(result, UserError):
            raise result
    return [result for result in results if isinstance(result, Result)]


def find_stream(stream: Stream | str) -> Stream:
    """Return a stream, or the one of a name, for a run."""
    if loading_user_code():
        raise UserError(
            "bench.run was called by a file that is loaded as user code. Call it if __name__ == '__main__'."
        )
    found = load_stream(stream) if isinstance(stream, str) else stream
    if not isinstance(found, Stream):
        raise UserError(
            f"stream: use a name or a bench.Stream, such as Stream.from_arrays makes, not {type(stream).__name__}."
        )
    return found


def resolve_run(stream: Stream, arguments: Mapping[str, Any], recorded: bool) -> Run:
    """Check and complete the settings of an experiment; returns its run with seed 0.

    Args:
        stream: The stream.
        arguments: Arguments of `run`: those of `ARGUMENTS`.
        recorded: Whether runs are recorded, so that Python objects need an identity.
    """
    for name in arguments:
        if name not in ARGUMENTS:
            raise _unknown_argument(str(name), ARGUMENTS)
    given: dict[str, tuple[str, Any]] = {}  # by setting key: the argument and its value
    objects: list[Component] = []

    def give(argument: str, key: str, value: Any) -> None:
        value = value.item() if isinstance(value, np.generic) else value
        if key in given and given[key][1] != value:
            other, earlier = given[key]
            raise UserError(f"{other} and {argument} set {key} to {earlier!r} and to {value!r}. Give it once.")
        given[key] = argument, value

    for argument, key in RUN_ARGUMENTS.items():
        value = arguments.get(argument)
        if value is None or isinstance(value, _Default):
            continue
        if isinstance(value, str | bool | int | float | np.generic):
            give(argument, key, value)
            continue
        settings = _settings_of(argument, key, value)
        for own_key, own_value in settings.items():
            give(f"{argument}={type(value).__name__}(...)", own_key, own_value)
        if key not in settings:
            found = identify(value, cast(ComponentKind, argument), arguments.get("tag"), recorded, _definition(value))
            give(argument, key, found.name)
            if found.code is not None:
                give(argument, f"{key.partition('.')[0]}.code", found.code)
            objects.append(found)
    for key, value in flatten_settings(arguments.get("settings") or {}).items():
        give(f"settings[{key!r}]", key, value)
    defaults = {"norm": {"name": str(DEFAULT_NORM)}, "strategy": {"name": str(DEFAULT_STRATEGY)}, **stream.defaults}
    values: dict[str, Any] = {**defaults, "stream": stream.settings}
    for key, (_, value) in given.items():
        values = with_setting(values, key, value)
    return Run(resolve(values, stream.root or Path("data")), 0, objects)


def _settings_of(argument: str, key: str, value: Any) -> dict[str, Any]:
    """Return the settings of an object, with its name (``key``) if it is a strategy or memory of this package.

    An object of a user's subclass has the settings of its base class, but not its name: its code differs. An object
    that can't be used as a norm, a strategy, a memory or a network is refused.
    """
    if isinstance(value, list | tuple):
        raise UserError(f"{argument}={value!r}: takes one value. Run several with bench.sweep.")
    base = _BASES.get(argument)
    if base is not None:
        kind = value if isinstance(value, type) else type(value)
        if not issubclass(kind, base):
            raise UserError(f"{argument}={value!r}: use a name, or a subclass of bench.{base.__name__} or its object.")
        built_in = kind.__module__.startswith("contnorm.bench.")
        settings = {key: getattr(value, "name", "")} if isinstance(value, type) else getattr(value, "overrides", {})
        return {name: own for name, own in settings.items() if name != key or (built_in and own)}
    if not callable(value) or (argument == "norm" and isinstance(value, nn.Module | Mapping)):
        raise UserError(f"{argument}={value!r}: use a name, or a function or class that makes it.")
    if argument == "norm" and (name := built_in_name(value)) is not None:
        raise UserError(f"norm={value.__name__}: is a norm of contnorm. Use its name, norm={name!r}.")
    return {}


def _definition(value: object) -> object:
    """Return what identifies an object: of a strategy or memory its class, with attributes that are no settings."""
    if not isinstance(value, Strategy | Memory):
        return value
    base = next(cls for cls in type(value).__mro__ if cls.__module__.startswith("contnorm."))
    fresh: object = base(1) if issubclass(base, Memory) else base()
    own = {name: part for name, part in vars(value).items() if name not in vars(fresh)}
    if isinstance(value, Strategy):
        own |= dict(value.named_children()) | dict(value.named_parameters(recurse=False))
        own |= dict(value.named_buffers(recurse=False))
    return (type(value), own) if own else type(value)


def run_experiments(
    stream: Stream,
    experiments: Sequence[Run],
    *,
    seeds: int | Iterable[int] = 1,
    runs: str | Path | None = None,
    progress: bool | Console = False,
    log: Loggers | None = None,
    log_every: int = LOG_EVERY,
    log_dir: str | Path | None = None,
    on_task_done: OnTaskDone | None = None,
    **options: Any,
) -> list[Result | DivergedError]:
    """Run several experiments as `run_all` does; one whose seeds all diverged has an error in place of its result.

    Args:
        stream: The stream.
        experiments: A run of each experiment, with any seed.
        seeds, runs, progress, log, log_every, log_dir, on_task_done: As in `run`.
        **options: Options of `RunOptions`.
    """
    for name in options.keys() - RunOptions.__dataclass_fields__.keys():
        raise _unknown_argument(name, inspect.signature(run).parameters)
    resolved = RunOptions(
        **{name: value for name, value in options.items() if value is not None},
        allow_missing=stream.allow_missing,
        runs=None if runs is None else Path(runs).expanduser(),
        data_root=stream.root or Path("data"),
        sources={stream.source.name: stream.source} if stream.root is None else {},
    )
    console = progress if isinstance(progress, Console) else Console(stderr=True) if progress else None
    seed_list = list_seeds(seeds)
    todo = list(dict.fromkeys(replace(one, seed=seed) for one in experiments for seed in seed_list))
    if "source" not in stream.settings:
        print_data_notices(todo, resolved.data_root)
    logs = None if log is None else RunLogs(log, resolved.runs, log_every, log_dir)
    ended = run_runs(todo, resolved, console, logs=logs, on_task_done=on_task_done)
    results: list[Result | DivergedError] = []
    for one in experiments:
        events = {seed: ended[replace(one, seed=seed)] for seed in seed_list}
        diverged = {seed: event.why for seed, event in events.items() if event.kind == "diverged"}
        records = [
            resolved.store.load_run(event.config, seed)
            if event.kind == "recorded"
            else make_record(event.config, seed, event.results, event.path)
            for seed, event in events.items()
            if seed not in diverged
        ]
        if not records:
            results.append(DivergedError(" ".join(diverged.values())))
            continue
        for reason in diverged.values():
            _log.warning(reason)
        weights: dict[int, bytes | Path] = {}
        for record in records:
            kept = events[record.seed].weights
            if kept is not None:
                weights[record.seed] = kept
            elif record.path is not None and weights_path(record.path).is_file():
                weights[record.seed] = weights_path(record.path)
            elif resolved.keep_weights and record.path is not None:
                why = f"{record.path}: was recorded without its weights. Move it away to run it again with them."
                _log.warning(why)
        objects = components_of(one.config)
        results.append(Result(records, diverged=diverged, stream=stream, weights=weights, objects=objects))
    return results


def decide(
    a: Mapping[str, Any] | Experiment | pd.DataFrame,
    b: Mapping[str, Any] | Experiment | None = None,
    score: str | None = None,
    *,
    by: str | None = None,
    seed: str = "seed",
    margin: float = MARGIN,
    cases: int = 1,
    alpha: float = ALPHA,
    max_seeds: int = LAST_LOOK,
    first_seed: int | None = None,
    stream: Stream | str | None = None,
    runs: str | Path | None = None,
    device: str = "cpu",
    lanes: int | None = None,
    threads: int = 1,
    progress: bool | Console = False,
) -> Verdict:
    """Decide whether the score of ``a`` is higher than, lower than or equivalent to that of ``b``, over paired seeds.

    Results of `bench.run`, and experiments that are described by their arguments, are run with further seeds until
    the comparison is decided or the limit is reached, with looks at 16, 24, 32, ... and 128 seeds. Recorded runs and
    plain numbers are decided by the seeds that they have, as by `bench.compare`. All these looks are allowed for: the
    probability of a wrong verdict is at most ``alpha``, if the differences are normally distributed (see
    `contnorm.bench.sequential`).

    Args:
        a, b: The experiments: results of `bench.run`, or dictionaries of the arguments of `run`, as in `run_all`, such
            as ``{"norm": "cn"}``; or, to run nothing, recorded runs, numbers or a DataFrame as `bench.compare` takes
            them.
        score: Name of the score, such as ``"acc"`` or ``"aia"``; by default the first one.
        by, seed: Columns of a DataFrame, as in `bench.compare`.
        margin, cases, alpha, max_seeds, first_seed: As in `bench.compare`.
        stream: The stream, or the name of one; by default that of the results.
        runs: Folder of records and checkpoints. Recorded runs are not repeated, and after a stop the same call
            continues. None to keep the results in memory only.
        device, lanes, threads: As in `run`.
        progress: Whether to show progress and a line for each look; or the rich console to show them on.

    Returns:
        The verdict, with the records of a and b.

    Raises:
        UserError: If an argument is invalid, the experiments can't be compared, or all first runs diverged.
        KeyboardInterrupt: After Ctrl-C, when the runs are saved.

    Example:
        >>> import logging; logging.getLogger("contnorm").setLevel("ERROR")
        >>> from contnorm import bench
        >>> stream = bench.load_stream("split-mnist", source="digits", tasks=2, train_per_task=40)
        >>> verdict = decide({"norm": "bn"}, {"norm": "bn", "lr": 1e-5}, stream=stream, max_seeds=16, lanes=1)
        >>> verdict.outcome, verdict.seeds
        ('higher', 16)
    """
    rule: dict[str, Any] = {"margin": margin, "cases": cases, "alpha": alpha, "max_seeds": max_seeds}
    check_rule(**rule)
    sides: tuple[Any, Any] = a, b
    results = [side for side in sides if isinstance(side, Result) and side.stream is not None]
    described = [side for side in sides if isinstance(side, Mapping) and any(isinstance(key, str) for key in side)]
    if len(results) + len(described) < 2:
        return compare(*sides, score, by=by, seed=seed, first_seed=first_seed, **rule)
    if (stream is None) != bool(results):
        raise UserError(f"stream={stream!r}: pass the stream of experiments to be run; a result has its own.")
    shared: Any = stream if stream is not None else results[0].stream
    chosen = find_stream(shared)
    rule |= {"score": check_score(score, chosen), "first_seed": FIRST_SEED if first_seed is None else first_seed}
    console = progress if isinstance(progress, Console) else Console(stderr=True) if progress else None
    options: dict[str, Any] = {"runs": runs, "device": device, "lanes": lanes, "threads": threads}
    options["progress"] = console or False
    known: list[tuple[Run, dict[int, Record], dict[int, str]]] = []  # of each side: records and reasons by seed
    for side in sides:
        if not isinstance(side, Result):
            known.append((resolve_run(chosen, side, recorded=runs is not None), {}, {}))
            continue
        if runs is not None and side.objects and any(record.path is None for record in side.records):
            raise UserError(
                f"a result was run in memory with Python objects, so it can't be continued in the folder {runs}. "
                f"Describe it by its arguments of bench.run."
            )
        by_seed = {record.seed: record for record in side.records}
        known.append((Run(side.config, 0, side.objects), by_seed, dict(side.diverged)))
    experiments = [one for one, *_ in known]
    first, second = experiments
    check_experiments(first.config, second.config, first.objects, second.objects)
    for size in looks_up_to(max_seeds):
        seeds = range(rule["first_seed"], rule["first_seed"] + size)
        missing = [seed for seed in seeds if not all(seed in found or seed in lost for _, found, lost in known)]
        outcomes = run_experiments(chosen, experiments, seeds=missing, **options) if missing else []
        for (_, found, lost), outcome in zip(known, outcomes, strict=bool(missing)):
            if isinstance(outcome, Result):
                found |= {record.seed: record for record in outcome.records}
                lost |= outcome.diverged
            elif found:
                lost |= dict.fromkeys(missing, str(outcome))
            else:
                raise outcome
        first_side, second_side = (
            Result(found.values(), diverged=lost, stream=chosen, objects=one.objects) for one, found, lost in known
        )
        verdict = compare(first_side, second_side, **rule)
        if console is not None:
            console.print(Text(escape_terminal(f"{verdict.sentence} {verdict.plan}")), soft_wrap=True)
        if verdict.is_decided:
            break
    return verdict


def check_score(score: str | None, stream: Stream) -> str:
    """Return the name of a score of a stream; by default the first one."""
    scores = list(LABEL_SCORES if stream._spec.kind == "multi-label" else SCORES)
    if score is not None and score not in scores:
        raise unknown("score", score, scores)
    return score or scores[0]
