"""The `sweep` command: runs all combinations of some settings, and shows the best setting of each norm."""

from __future__ import annotations

import io
import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from contnorm import bench
from contnorm.bench.config.schema import flatten_settings, show_value
from contnorm.bench.config.sources import (
    RUN_ARGUMENTS,
    Setting,
    check_seeds,
    collect_settings,
    format_value,
    parse_assignment,
)
from contnorm.bench.files import write_output
from contnorm.cli.common import (
    DEVICE_HELP,
    MAX_STEPS_HELP,
    PRECISION_HELP,
    THREADS_HELP,
    AllowMissing,
    DataRoot,
    Lanes,
    Log,
    LogDir,
    LogEvery,
    MemoryMoments,
    RunsFolder,
    console,
    importing_torch,
)
from contnorm.cli.examples import Example, examples
from contnorm.cli.launcher_options import Address, Devices, LauncherName, LauncherSettings, find_launcher
from contnorm.cli.tables import print_text, safe_text, show_rows
from contnorm.errors import UserError, usable

if TYPE_CHECKING:
    from contnorm.bench import SweepResult, Trial

__all__ = [
    "GridFlags",
    "GridOption",
    "JsonFlag",
    "PlotFile",
    "ScoreName",
    "SetOption",
    "run_grid",
    "show_sweep",
    "sweep",
]

GRID_HELP = "Any setting as key=a,b,c, such as train.batch=5,10; repeatable."
GridOption = Annotated[list[str] | None, typer.Option("--grid", metavar="KEY=A,B,C", help=GRID_HELP)]
ScoreName = Annotated[
    str | None, typer.Option(help="Score to choose by, such as acc or fm; default: acc, or c_f1 for multi-label.")
]
PlotFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Figure to write: .png, .svg or .pdf; scores over the settings.")
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print the result as JSON instead of tables.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", help="Any setting as key=value, for all runs, such as strategy.forward=separate; repeatable."
    ),
]
FIGURE_FORMATS = (".png", ".svg", ".pdf")

# Options that take comma-separated values, with their settings.
LIST_FLAGS = {
    "strategy": "strategy.name",
    "norm": "norm.name",
    "groups": "norm.groups",
    "model": "model.name",
    "memory": "memory.kind",
    "buffer": "memory.size",
    "batch": "train.batch",
    "replay": "train.replay",
    "lr": "train.lr",
}


@examples(
    Example(
        "Try three learning rates for BN and CN, with two seeds each.",
        "contnorm sweep --norm bn,cn --lr 0.003,0.01,0.03 --seeds 2 --runs sweep-runs",
    ),
    Example(
        "Choose a memory size on held-out training samples.",
        "contnorm sweep --norm cn --buffer 50,200 --validation --seeds 2 --runs sweep-runs",
    ),
)
def sweep(
    stream: Annotated[
        str, typer.Option(help="Stream of tasks to learn; see `contnorm ls streams`.")
    ] = "permuted-mnist",
    strategy: Annotated[str | None, typer.Option(help="Learning methods, comma-separated; default: er.")] = None,
    norm: Annotated[
        str | None, typer.Option(help="Normalization layers, comma-separated, such as bn,cn; default: cn.")
    ] = None,
    groups: Annotated[str | None, typer.Option(help="Numbers of channel groups, comma-separated.")] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Networks, comma-separated, each a name or file.py:make; default: that of the stream."),
    ] = None,
    memory: Annotated[str | None, typer.Option(help="Memories, comma-separated; see `contnorm ls memories`.")] = None,
    buffer: Annotated[str | None, typer.Option(help="Memory sizes, comma-separated.")] = None,
    batch: Annotated[str | None, typer.Option(help="Stream samples per step, comma-separated.")] = None,
    replay: Annotated[str | None, typer.Option(help="Replayed memory samples per step, comma-separated.")] = None,
    lr: Annotated[str | None, typer.Option(help="Learning rates, comma-separated, such as 0.003,0.01,0.03.")] = None,
    grid: GridOption = None,
    seeds: Annotated[int, typer.Option(help="Number of seeds of each setting, counted from 0.")] = 3,
    validation: Annotated[
        bool,
        typer.Option(
            "--validation", help="Use validation tasks, or held-out training samples, instead of the test samples."
        ),
    ] = False,
    score: ScoreName = None,
    by: Annotated[
        str, typer.Option(help="Choose one setting for each value of these settings, comma-separated.")
    ] = "norm",
    plot: PlotFile = None,
    json_: JsonFlag = False,
    device: Annotated[str, typer.Option(help=DEVICE_HELP)] = "cpu",
    lanes: Lanes = None,
    threads: Annotated[int, typer.Option(help=THREADS_HELP)] = 1,
    precision: Annotated[str | None, typer.Option(help=PRECISION_HELP)] = None,
    max_steps: Annotated[int | None, typer.Option(help=MAX_STEPS_HELP)] = None,
    memory_moments: MemoryMoments = False,
    data_root: DataRoot = None,
    allow_missing: AllowMissing = False,
    runs: RunsFolder = Path("runs"),
    log: Log = None,
    log_every: LogEvery = 50,
    log_dir: LogDir = None,
    config: Annotated[Path | None, typer.Option(help="TOML file of settings of all runs.")] = None,
    set_: SetOption = None,
    devices: Devices = None,
    launcher: LauncherName = None,
    address: Address = None,
    launcher_set: LauncherSettings = None,
) -> None:
    """Run all combinations of some settings, and show the best setting of each norm."""
    flags = GridFlags(
        {
            "strategy": strategy,
            "norm": norm,
            "groups": groups,
            "model": model,
            "memory": memory,
            "buffer": buffer,
            "batch": batch,
            "replay": replay,
            "lr": lr,
        },
        grid or [],
        {"train.precision": precision, "train.max_steps": max_steps},
        set_ or [],
        config,
    )
    check_seeds(seeds)
    with importing_torch(device, in_workers=bool(devices or launcher)):
        where = find_launcher(launcher, address, launcher_set)
        options = bench.RunOptions(
            device, lanes, threads, False, allow_missing, where, devices, memory_moments=memory_moments
        )
    names = [_AXIS_OF_FLAG.get(name.strip(), name.strip()) for name in by.split(",")]

    def run(stream_: bench.Stream, settings: dict[str, Any], progress: Console) -> SweepResult:
        return bench.sweep(
            stream_,
            settings=settings,
            seeds=seeds,
            validation=validation,
            score=score,
            by=names,
            runs=runs,
            progress=progress,
            device=device,
            lanes=lanes,
            threads=threads,
            memory_moments=memory_moments,
            log=log,
            log_every=log_every,
            log_dir=log_dir,
            launcher=where,
            devices=devices,
        )

    raise typer.Exit(run_grid(run, stream, flags, options, data_root, plot, json_, console, runs))


_AXIS_OF_FLAG = {"groups": "norm.groups", "buffer": "memory.size", "batch": "batch_size"}


@dataclass(frozen=True)
class GridFlags:
    """The settings of a grid, as they are typed.

    Attributes:
        lists: Comma-separated values of each option of `LIST_FLAGS`; None if it is not typed.
        grid: Settings as ``key=a,b,c``.
        single: Values of other options by dotted key; None if they are not typed.
        assignments: Settings of ``--set``.
        config: TOML file of settings.
    """

    lists: dict[str, str | None]
    grid: Sequence[str]
    single: dict[str, Any]
    assignments: Sequence[str]
    config: Path | None = None

    def typed(self) -> list[Setting]:
        """Settings of options and of ``--grid``; several values are a list."""
        settings = [
            Setting(f"--{name}", LIST_FLAGS[name], _parse_list(f"--{name}", LIST_FLAGS[name], text))
            for name, text in self.lists.items()
            if text is not None
        ]
        for text in self.grid:
            key, equals, values = text.partition("=")
            if not equals or not key.strip():
                raise UserError(f"--grid {show_value(text)}: expected key=a,b,c, such as train.batch=5,10.")
            name = f"--grid {key.strip()}"
            settings.append(Setting(name, key.strip(), _parse_list(name, key.strip(), values)))
        flags = {key: value for key, value in self.single.items() if value is not None}
        return [*settings, *(Setting(f"--{key.partition('.')[2]}", key, value) for key, value in flags.items())]

    def nested(self, stream: str) -> dict[str, Any]:
        """All settings by group, with the stream."""
        return collect_settings({"stream.name": stream}, self.config, self.typed(), self.assignments)


def _parse_list(flag: str, key: str, text: str) -> Any:
    """Parse comma-separated values; a single one is not a list.

    Example:
        >>> _parse_list("--lr", "train.lr", "0.01,0.03"), _parse_list("--norm", "norm.name", "cn")
        ([0.01, 0.03], 'cn')
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise UserError(f"{flag} {show_value(text)}: has an empty value. Use values with commas between.")
    is_name = key in ("norm.name", "strategy.name", "memory.kind", "model.name")  # "none" is the name of a norm
    values = parts if is_name else [parse_assignment(f"{key}={part}")[1] for part in parts]
    return values if len(values) > 1 else values[0]


def run_grid(
    run: Callable[[bench.Stream, dict[str, Any], Console], SweepResult],
    stream: str,
    flags: GridFlags,
    options: bench.RunOptions,
    data_root: Path | None,
    plot: Path | None,
    as_json: bool,
    console: Console,
    runs: Path = Path("runs"),
) -> int:
    """Run a sweep or a search, show its result, and return the exit code.

    Args:
        run: Runs it, with the stream, the settings by dotted key and a console for progress.
        stream: Name of the stream.
        flags: Typed settings.
        options: How runs are executed.
        data_root: Folder of data sets.
        plot: File of the figure.
        as_json: Whether to print JSON.
        console: Terminal to print to.
        runs: Folder of records and checkpoints, for the commands that are printed.
    """
    if plot is not None and plot.suffix.lower() not in FIGURE_FORMATS:
        raise UserError(f"--plot {plot}: use a file name that ends in {', '.join(FIGURE_FORMATS)}.")
    values = flags.nested(stream)
    progress = Console(stderr=True) if as_json else console
    of_stream = values.pop("stream")
    lists = {f"stream.{key}": value for key, value in of_stream.items() if isinstance(value, list)}
    single = {key: value for key, value in of_stream.items() if not isinstance(value, list)}
    loaded = bench.load_stream(root=data_root, allow_missing=options.allow_missing, **single)
    try:
        result, code = run(loaded, {**flatten_settings(values), **lists}, progress), 0  # lists are rejected there
    except bench.SweepInterrupted as stopped:
        result, code = stopped.result, 128 + stopped.signal
    if as_json:
        print(json.dumps(result.to_dict(), indent=2))
    else:
        show_sweep(result, console)
        shared = _shared_options(options, data_root, runs)
        _show_commands(result, flags, stream, shared, console)
    if plot is not None and code == 0:
        _write_figure(result, plot)
        print_text(f"figure: {plot}", progress)
    return code


def _show_commands(result: SweepResult, flags: GridFlags, stream: str, shared: Sequence[str], console: Console) -> None:
    """Print the commands that measure the chosen settings on the test samples, if they were chosen on others."""
    if not result.best or result.chosen_on == "test samples":
        return
    print_text("Measure the best settings on the test samples:", console)
    for trial in result.best.values():
        console.print(safe_text(_test_command(trial, result, flags, stream, shared)), soft_wrap=True)


def _shared_options(options: bench.RunOptions, data_root: Path | None, runs: Path) -> list[str]:
    """Typed options of `contnorm sweep` that also apply to `contnorm run`: with others, results could differ."""
    parts = ["--data-root", str(data_root)] if data_root else []
    parts += ["--runs", str(runs)] if runs != Path("runs") else []
    parts += ["--device", options.device] if options.device not in (None, "cpu") else []
    parts += ["--devices", str(options.devices)] if options.devices is not None else []
    parts += ["--threads", str(options.threads)] if options.threads != 1 else []
    parts += ["--allow-missing"] if options.allow_missing else []
    parts += ["--memory-moments"] if options.memory_moments else []
    return parts


def _test_command(trial: Trial, result: SweepResult, flags: GridFlags, stream: str, shared: Sequence[str]) -> str:
    """Command that runs a setting on the test samples: the typed options, with the chosen value of each list."""
    settings = {**trial.arguments, **trial.arguments.get("settings", {})}
    typed = {setting.key: setting.value for setting in flags.typed()}
    if result.tuned is not None:  # its default grid is not typed
        typed.setdefault(RUN_ARGUMENTS.get(result.tuned, result.tuned), None)
    parts = ["contnorm run", "--stream", stream]
    for key in typed:
        axis = next((name for name, known in RUN_ARGUMENTS.items() if known == key), key)
        value, flag = format_value(settings[axis]), _RUN_FLAGS.get(key)
        parts += [flag, value] if flag else ["--set", f"{key}={value}"]
    for text in flags.assignments:
        if not text.startswith(("stream.part=", "stream.holdout=")):
            parts += ["--set", text]
    if flags.config:
        parts += ["--config", str(flags.config)]
        of_file = collect_settings({}, flags.config, [], []).get("stream", {})
        parts += ["--set", "stream.holdout=none"] if of_file.get("holdout") is not None else []
        parts += ["--set", "stream.part=all"] if of_file.get("part") == "validate" else []
    parts += shared
    return " ".join([parts[0], *map(shlex.quote, [*parts[1:], "--seeds", str(len(result.seeds))])])


_RUN_FLAGS = {key: f"--{name}" for name, key in LIST_FLAGS.items()}


def _write_figure(result: SweepResult, path: Path) -> None:
    figure = result.plot()
    image = io.BytesIO()
    figure.savefig(image, format=path.suffix[1:].lower(), dpi=150)
    with usable(path, "it can't be written", "Use another file."):
        write_output(path, image.getvalue())


def show_sweep(result: SweepResult, console: Console) -> None:
    """Print all settings with their scores, then the best setting of each norm and the number of settings tried."""
    best, groups = result.best, result.groups
    chosen = {id(trial) for trial in best.values()}
    names = list(result.trials[0].setting)
    rows = [
        [*_setting_cells(trial), _score_text(trial, id(trial) in chosen), _seeds_text(trial)] for trial in result.trials
    ]
    console.print()
    console.print(safe_text(f"{result.stream}: {result.score} on the {result.chosen_on}"), style="bold")
    show_rows([*names, result.score, "seeds"], rows, console, named=len(names))
    if best:
        console.print()
        console.print(safe_text(f"best setting of each {' and '.join(result.by)} (*)"), style="bold")
        best_rows = []
        for name, trial in best.items():
            group = groups[name]
            runs = sum(len(one.scores) + len(one.diverged) for one in group)
            best_rows.append([*_setting_cells(trial), _score_text(trial, False), str(len(group)), str(runs)])
        show_rows([*names, result.score, "settings tried", "runs"], best_rows, console, named=len(names))
    if any(trial.diverged for trial in result.trials):
        print_text(
            "diverged: the loss is not finite. Such a setting is not chosen, and its runs are not repeated.", console
        )
    for line in [*result.notes, *result.choice_notes()]:
        print_text(line, console)


def _setting_cells(trial: Trial) -> list[str]:
    return [format_value(value) for value in trial.setting.values()]


def _score_text(trial: Trial, best: bool) -> str:
    return trial.spread().replace("±", "+-") + (" *" if best else "")


def _seeds_text(trial: Trial) -> str:
    parts = [str(len(trial.scores)) if trial.eligible else f"{len(trial.scores)} of {len(trial.seeds)}"]
    parts += [f"{len(trial.diverged)} diverged"] if trial.diverged else []
    parts += [f"{trial.unfinished} unfinished"] if trial.unfinished else []
    return ", ".join(parts)
