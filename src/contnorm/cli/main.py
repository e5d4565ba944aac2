"""Entry point and commands of the command-line interface.

A user error prints one line and exits with code 2; any other exception is a bug and keeps its traceback. Modules that
need torch are imported inside the commands that use them, so that the other commands start quickly.
"""

from __future__ import annotations

import atexit
import errno
import gc
import io
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperGroup

from contnorm import __version__
from contnorm.bench.config.schema import show_value
from contnorm.bench.config.sources import (
    Setting,
    check_seed,
    check_seeds,
    collect_settings,
    nest_settings,
    parse_assignments,
    parse_int_or_text,
)
from contnorm.bench.escape import escape_terminal
from contnorm.bench.records import Record, RecordSet, Store, drop_duplicates
from contnorm.bench.user_code import check_files, code_files, only_trusted
from contnorm.cli.tables import print_error, safe_text
from contnorm.errors import UserError, unknown

__all__ = ["app", "main"]


_UNUSABLE = {
    errno.EACCES, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOENT, errno.ENOSPC, errno.ENOTDIR, errno.EPERM,
    errno.EROFS,
}  # fmt: skip


_FAILED_WRITE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF}


class _Group(TyperGroup):
    """Command group that rejects arguments with NUL characters and converts OS errors to user errors."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        for argument in args:
            if "\0" in argument:
                raise UserError(f"{show_value(argument)}: has a NUL character, which no path or setting can have.")
        return super().parse_args(ctx, args)

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        try:
            return super().invoke(ctx)
        except OSError as error:
            raise _in_words(error) from error


def _in_words(error: OSError) -> Exception:
    """Convert an OS error that the user can fix to a `UserError`; return other errors unchanged."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return UserError(
            "the system's limit of open files is reached. Raise it with `ulimit -n 1024`, or use fewer --lanes."
        )
    if error.errno == errno.ENOMEM:
        return UserError(OUT_OF_MEMORY)
    if error.filename is not None and error.errno in _UNUSABLE:
        return UserError(f"{show_value(str(error.filename))}: can't be used ({error.strerror}).")
    return error


@contextmanager
def importing_torch() -> Iterator[None]:
    """Context for the imports of a command that needs torch; exempts the imported objects from garbage collection.

    They are never freed. The collector would scan them several times during the import and again during a run.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _has_working_folder() -> bool:
    """Whether the current folder exists. If it was deleted, torch's libraries end the process without a message."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def _discard_output() -> None:
    """Redirect stdout to the null device, so that flushing its buffer at exit does not fail."""
    with suppress(OSError, ValueError, AttributeError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


def _open_standard_streams() -> None:
    """Point closed standard descriptors at the null device.

    Otherwise the next opened files, such as records, would get these numbers, and output to stderr would go into them.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one


app = typer.Typer(
    name="contnorm",
    cls=_Group,
    help="Normalization layers for continual learning: run, resume, score and compare experiments.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_at_terminal = sys.stdout is not None and sys.stdout.isatty()  # stdout is None if it was closed, as by `>&-`
console = Console(width=None if _at_terminal else 160)  # wide enough that tables in files and pipes do not wrap


def _print_version(requested: bool) -> None:
    if requested:
        console.print(f"contnorm {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show version and exit.")
    ] = False,
) -> None:
    context.with_resource(only_trusted(()))  # commands execute only user code that is named on the command line


RunsFolder = Annotated[
    Path, typer.Option("--runs", help="Folder of records and checkpoints; to read, also an archive.")
]
Lanes = Annotated[int | None, typer.Option(help="Number of parallel runs. Default: 8 on a GPU, one per core on a CPU.")]
_DEVICE = "Device to compute on: cpu or cuda."
_PRECISION = "Floating-point precision: fp32, tf32 or bf16."
_MAX_STEPS = "Stop after N steps (smoke test; scores are not comparable)."
_THREADS = "CPU threads per run. Changing it changes results slightly."
TrustCode = Annotated[
    list[Path] | None,
    typer.Option(
        "--trust-code",
        metavar="FILE",
        help="Allow executing this Python file where settings or records name it; repeatable.",
    ),
]
AllowMissing = Annotated[
    bool, typer.Option("--allow-missing", help="Accept a published data set with missing images; noted in the record.")
]
DataRoot = Annotated[
    Path | None, typer.Option("--data-root", help="Folder of data sets. Default: $CONTNORM_DATA, or ./data.")
]


@app.command()
def ls(
    what: Annotated[
        str, typer.Argument(help="Kind to list: norms, streams, strategies, memories, models or tables; default: all.")
    ] = "",
) -> None:
    """List available norms, streams, strategies, memories, models and tables."""
    from contnorm.cli.ls import listings

    registries = listings()
    if what and what not in registries:
        raise unknown("listing", what, registries)
    for name, rows in registries.items():
        if what in ("", name):
            table = Table("name", "what it is", title=name, title_justify="left", box=None, pad_edge=False)
            for row in rows:
                table.add_row(*map(safe_text, row))
            console.print(table, "")


@app.command()
def run(
    context: typer.Context,
    stream: Annotated[
        str, typer.Option(help="Stream of tasks to learn; see `contnorm ls streams`.")
    ] = "permuted-mnist",
    strategy: Annotated[str, typer.Option(help="Learning method: er, derpp, single, ... or file.py:Class.")] = "er",
    norm: Annotated[str, typer.Option(help="Normalization layer; see `contnorm ls norms`.")] = "cn",
    groups: Annotated[str | None, typer.Option(help="Number of channel groups, or 'auto'.")] = None,
    weights: Annotated[
        str | None, typer.Option(help="Pretrained weights to start from: a file, or torchvision:IMAGENET1K_V1.")
    ] = None,
    buffer: Annotated[
        int | None, typer.Option(help="Memory size: per task (or class) for ring, in total for the others.")
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Stream samples per step.")] = None,
    replay: Annotated[int | None, typer.Option(help="Replayed memory samples per step.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.")] = None,
    seeds: Annotated[int | None, typer.Option(help="Number of seeds, counted from 0; default: 1.")] = None,
    seed: Annotated[int | None, typer.Option(help="Run this single seed.")] = None,
    device: Annotated[str, typer.Option(help=_DEVICE)] = "cpu",
    lanes: Lanes = None,
    threads: Annotated[int, typer.Option(help=_THREADS)] = 1,
    precision: Annotated[str | None, typer.Option(help=_PRECISION)] = None,
    eval_moments: Annotated[
        str | None,
        typer.Option(
            help="Moments for evaluation: running, or oracle (BN*: exact, from training data of all tasks so far)."
        ),
    ] = None,
    max_steps: Annotated[int | None, typer.Option(help=_MAX_STEPS)] = None,
    keep_weights: Annotated[
        bool,
        typer.Option("--keep-weights", help="Save the final weights of each run next to its record, for `diagnose`."),
    ] = False,
    data_root: DataRoot = None,
    allow_missing: AllowMissing = False,
    runs: RunsFolder = Path("runs"),
    config: Annotated[Path | None, typer.Option(help="TOML file of settings.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any setting as key=value, such as strategy.forward=separate; repeatable."),
    ] = None,
    trust_code: TrustCode = None,
) -> None:
    """Train once over a stream; after each task, measure accuracy on all tasks so far."""
    with importing_torch():
        from contnorm.bench.api.execution import RunOptions
        from contnorm.cli.run import run_seeds

    seed_list = _seeds(seeds, seed)
    flags: dict[str, Any] = {
        "stream.name": stream,
        "strategy.name": strategy,
        "norm.name": norm,
        "norm.groups": parse_int_or_text(groups) if groups is not None else None,
        "model.weights": weights,
        "memory.size": buffer,
        "train.batch": batch,
        "train.replay": replay,
        "train.lr": lr,
        "train.precision": precision,
        "train.max_steps": max_steps,
        "evaluate.moments": eval_moments,
    }
    names = {key: _FLAG_NAMES.get(key, f"--{key.partition('.')[2].replace('_', '-')}") for key in flags}
    typed = [Setting(names[key], key, value) for key, value in flags.items() if _is_typed(context, key, value)]
    defaults = {key: value for key, value in flags.items() if value is not None}
    values = collect_settings(defaults, config, typed, set_ or [])
    named = code_files(nest_settings([*typed, *parse_assignments(set_ or [])]))
    options = RunOptions(device, lanes, threads, keep_weights, allow_missing)
    with only_trusted(
        [*check_files(trust_code or []), *named]
    ):  # excludes code that is named only in the --config file
        raise typer.Exit(run_seeds(values, seed_list, options, data_root, runs, console))


def _seeds(count: int | None, single: int | None) -> list[int]:
    """Seeds to run: ``count`` seeds from 0, or the single one."""
    if single is not None and count is not None:
        raise UserError(f"--seed {single} and --seeds {count}: use one of them; --seeds takes so many, from 0.")
    if count is not None:
        check_seeds(count)
    if single is not None:
        check_seed(single)
    return [single] if single is not None else list(range(count or 1))


# Flags whose names differ from those of their settings.
_FLAG_NAMES = {
    "stream.name": "--stream",
    "strategy.name": "--strategy",
    "norm.name": "--norm",
    "memory.size": "--buffer",
    "evaluate.moments": "--eval-moments",
}


def _is_typed(context: typer.Context, key: str, value: Any) -> bool:
    """Whether a flag of `run` was typed. A settings file overrides the defaults of stream, strategy and norm."""
    group, _, name = key.partition(".")
    if name != "name":
        return value is not None
    return _is_explicit(context, group)


def _is_explicit(context: typer.Context, parameter: str) -> bool:
    """Whether a parameter was passed explicitly, on the command line or in-process."""
    source = context.get_parameter_source(parameter)
    return source is not None and source.name not in ("DEFAULT", "DEFAULT_MAP")


@app.command()
def resume(
    path: Annotated[Path, typer.Argument(help="Folder of a run, or of several runs.")] = Path("runs"),
    device: Annotated[
        str | None, typer.Option(help="Device to compute on: cpu or cuda. Default: the device each run started on.")
    ] = None,
    lanes: Lanes = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads per run. Default: as each run started.")] = None,
    data_root: DataRoot = None,
    trust_code: TrustCode = None,
    allow_missing: AllowMissing = False,
) -> None:
    """Resume all interrupted runs under a folder, bit-exactly."""
    with importing_torch():
        from contnorm.bench.api.execution import RunOptions
        from contnorm.cli.run import resume_all

    options = RunOptions(device, lanes, threads, allow_missing=allow_missing)
    trusted = check_files(trust_code or [])
    raise typer.Exit(resume_all(path, options, data_root, console, trusted))


@app.command()
def show(
    run: Annotated[
        list[str] | None,
        typer.Argument(help="Runs to show: paths of runs or folders, or prefixes of run hashes; default: all."),
    ] = None,
    runs: RunsFolder = Path("runs"),
    by_task: Annotated[bool, typer.Option("--by-task", help="Show the full accuracy matrix of each run.")] = False,
) -> None:
    """Show the scores of finished runs, averaged over seeds."""
    from contnorm.cli.show import show_diverged, show_matrices, show_scores, show_unsealed, unknown_names
    from contnorm.report.summaries import Summaries, find_summaries, summaries_under

    store = Store(runs)
    matches: list[RecordSet] | list[Summaries]
    if by_task:
        matches = [store.search(name) for name in run] if run else [store.load_all()]
    else:
        matches = [find_summaries(store, name) for name in run] if run else [summaries_under(runs)]
    problems = list(dict.fromkeys(problem for match in matches for problem in match.problems))
    records = drop_duplicates([record for match in matches for record in match.records], problems)
    diverged = {run: notes for match in matches for run, notes in match.diverged.items()}
    if not records:
        none = f"no finished runs under {runs}{', all were lost' if diverged else ''}. Make one: contnorm run --norm cn"
        raise UserError("; ".join(problems) or none)
    for problem in [*problems, *unknown_names(records)]:
        print_error(problem)
    if by_task:
        show_matrices([record for record in records if isinstance(record, Record)], console)
    else:
        show_scores(records, console)
    show_diverged(records, diverged, console)
    if run:
        show_unsealed(records, console)


@app.command()
def archive(
    runs: Annotated[Path, typer.Argument(help="Runs folder, or folder of archives.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Archive to write: FILE.jsonl.gz, or FILE.jsonl.")],
    force: Annotated[bool, typer.Option("--force", help="Replace a file that has different content.")] = False,
) -> None:
    """Write all records of a runs folder to one file, which every command reads like a folder."""
    from contnorm.cli.archive import archive_runs

    raise typer.Exit(archive_runs(runs, out, force, console))


@app.command()
def compare(
    a: Annotated[str, typer.Argument(help="First run: a path, or a prefix of the run hash.")],
    b: Annotated[str, typer.Argument(help="Second run, given in the same way.")],
    runs: RunsFolder = Path("runs"),
) -> None:
    """Compare two runs: differing settings, and score differences paired over shared seeds."""
    from contnorm.cli.compare import show_comparison
    from contnorm.cli.show import show_diverged, unknown_names

    store = Store(runs)
    first, second = store.find_one(a), store.find_one(b)
    unknown_here = unknown_names([*first.records, *second.records])
    for problem in dict.fromkeys([*first.problems, *second.problems, *unknown_here]):
        print_error(problem)
    show_comparison(first.records, second.records, console)
    show_diverged([*first.records, *second.records], first.diverged | second.diverged, console)


@app.command()
def diagnose(
    context: typer.Context,
    run: Annotated[str, typer.Argument(help="Run made with --keep-weights: a path, or a prefix of the run hash.")] = "",
    seed: Annotated[int | None, typer.Option(help="Seed to diagnose; default: the first one recorded.")] = None,
    model: Annotated[str | None, typer.Option(help="Network to diagnose instead of a run: file.py:make.")] = None,
    weights: Annotated[Path | None, typer.Option(help="Weights of --model: a safetensors file.")] = None,
    stream: Annotated[str | None, typer.Option(help="Stream of tasks for --model; see `contnorm ls streams`.")] = None,
    norm: Annotated[str, typer.Option(help="Norm passed to the function that --model names.")] = "bn",
    other: Annotated[
        str | None,
        typer.Option(
            "--beside", help="Second run that differs only in its norm: compare how much accuracy is recovered."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Figure to write: .svg, .png or .pdf.")] = None,
    device: Annotated[str, typer.Option(help=_DEVICE)] = "cpu",
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 1,
    data_root: DataRoot = None,
    allow_missing: AllowMissing = False,
    runs: RunsFolder = Path("runs"),
    trust_code: TrustCode = None,
) -> None:
    """Measure the cross-task normalization effect: forgetting caused by the running moments alone."""
    external = (model, weights, stream)
    if bool(run) == any(external) or (any(external) and not all(external)):
        raise UserError("diagnose: say which run, or all of --model, --weights and --stream for a network of your own.")
    if seed is not None:
        check_seed(seed)
    if run and _is_explicit(context, "norm"):
        raise UserError(f"--norm {norm}: is for a network of your own, with --model. A run's norm is in its record.")
    with importing_torch():
        from contnorm.bench.api.execution import RunOptions, run_environment
        from contnorm.cli.diagnose import ExternalModel, show_diagnosis

    place = run_environment(runs, RunOptions(device, 1, threads, allow_missing=allow_missing), data_root)
    target = ExternalModel(model, weights, stream, norm) if model and weights and stream else run
    show_diagnosis(target, seed, place, out, console, other, check_files(trust_code or []))


@app.command()
def paper(
    recipe: Annotated[
        str, typer.Argument(help="Recipe: table1 ... table14, figure1 ... figure3, or a TOML file.")
    ] = "",
    list_: Annotated[bool, typer.Option("--list", help="List the recipes and how many runs of each are done.")] = False,
    seeds: Annotated[int, typer.Option(help="Number of seeds, counted from 0; the paper uses 5.")] = 5,
    only: Annotated[
        list[str] | None, typer.Option(help="Restrict to matching cells, such as norm=cn or buffer=500; repeatable.")
    ] = None,
    device: Annotated[str, typer.Option(help=_DEVICE)] = "cpu",
    lanes: Lanes = None,
    threads: Annotated[int, typer.Option(help=_THREADS)] = 1,
    precision: Annotated[str | None, typer.Option(help=_PRECISION)] = None,
    max_steps: Annotated[int | None, typer.Option(help=_MAX_STEPS)] = None,
    lr: Annotated[
        str, typer.Option(help="Learning rates: one (the recipe's), best (per norm, from `contnorm tune`) or both.")
    ] = "both",
    selected: Annotated[
        Path | None, typer.Option(help="File of learning rates written by `contnorm tune --out`.")
    ] = None,
    data_root: DataRoot = None,
    allow_missing: AllowMissing = False,
    runs: RunsFolder = Path("runs"),
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Override a recipe setting as key=value; disables the verdicts. Repeatable."),
    ] = None,
    trust_code: TrustCode = None,
) -> None:
    """Reproduce a table or figure of the paper: run what is missing, compare with the published numbers."""
    trusted = check_files(trust_code or [])
    check_seeds(seeds)
    if list_ or not recipe:
        with importing_torch():
            from contnorm.cli.paper import show_recipes

        with only_trusted(trusted):
            show_recipes(seeds, data_root, runs, console, recipe)
        return
    with importing_torch():
        from contnorm.bench.api.execution import RunOptions
        from contnorm.cli.paper import PaperOptions, run_recipe

    options = RunOptions(device, lanes, threads, allow_missing=allow_missing)
    request = PaperOptions(
        seeds, only or [], options, max_steps, precision, data_root, runs, lr, selected, set_ or [], trusted
    )
    raise typer.Exit(run_recipe(recipe, request, console))


@app.command()
def tune(
    recipe: Annotated[str, typer.Argument(help="Recipe: table2, table8, table9, table10, table12, or a TOML file.")],
    stream: Annotated[
        str | None, typer.Option(help="Streams to tune, comma-separated, such as split-cifar100; default: all.")
    ] = None,
    strategies: Annotated[
        str | None, typer.Option(help="Strategies to tune, comma-separated, such as er,derpp; default: all.")
    ] = None,
    norms: Annotated[
        str | None, typer.Option(help="Norms to tune, comma-separated, such as bn,cn; default: all.")
    ] = None,
    seeds: Annotated[int, typer.Option(help="Number of seeds, counted from 0.")] = 3,
    rates: Annotated[
        str | None, typer.Option(help="Learning rates to try, comma-separated; default: 0.003,0.01,0.03,0.1,0.3.")
    ] = None,
    device: Annotated[str, typer.Option(help=_DEVICE)] = "cpu",
    lanes: Annotated[
        int | None,
        typer.Option(help="Number of parallel runs. Default: a norm's whole grid on a GPU, one per core on a CPU."),
    ] = None,
    threads: Annotated[int, typer.Option(help=_THREADS)] = 1,
    precision: Annotated[str | None, typer.Option(help=_PRECISION)] = None,
    max_steps: Annotated[
        int | None, typer.Option(help="Stop after N steps (smoke test; no learning rate is chosen).")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="File to write the learning rates to; default: RUNS/selected/RECIPE.toml."),
    ] = None,
    data_root: DataRoot = None,
    allow_missing: AllowMissing = False,
    runs: RunsFolder = Path("runs"),
    trust_code: TrustCode = None,
) -> None:
    """Choose a learning rate for each norm and strategy of a table, using only the validation tasks."""
    with importing_torch():
        from contnorm.bench.api.execution import RunOptions
        from contnorm.cli.tune import RATES, TuneOptions, tune_recipe

    typed = {"stream": stream, "strategy": strategies, "norm": norms}
    only = [f"{key}={value.strip()}" for key, values in typed.items() if values for value in values.split(",")]
    grid = _numbers(rates, "--rates") if rates else RATES
    options = RunOptions(device, lanes, threads, allow_missing=allow_missing)
    trusted = check_files(trust_code or [])
    request = TuneOptions(seeds, only, grid, options, max_steps, precision, data_root, runs, out, trusted)
    raise typer.Exit(tune_recipe(recipe, request, console))


def _numbers(text: str, flag: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"{flag} {text!r}: use numbers with commas between, such as 0.03,0.1.") from None


@app.command()
def data(
    name: Annotated[str, typer.Argument(help="Data set to show, fetch or build; default: list all.")] = "",
    fetch: Annotated[
        bool, typer.Option("--fetch", help="Download the data set from its public source and verify it.")
    ] = False,
    base: Annotated[str | None, typer.Option(help="Base URL to download from instead of the public source.")] = None,
    coco: Annotated[Path | None, typer.Option(help="Build cocoseq from MS-COCO in this folder.")] = None,
    nus: Annotated[Path | None, typer.Option(help="Build nus-wideseq from NUS-WIDE in this folder.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Build a multi-label data set from this CSV table.")] = None,
    images: Annotated[
        Path | None, typer.Option(help="Folder of images to build from; without --csv, its labels.csv is the table.")
    ] = None,
    groups: Annotated[
        Path | None, typer.Option(help="Table that assigns classes to groups; default: by number of images.")
    ] = None,
    ids: Annotated[
        Path | None, typer.Option(help="Folder of the task lists; default: DIR/ids, otherwise downloaded.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder to build the data set in; default: under the data root.")
    ] = None,
    size: Annotated[int | None, typer.Option(help="Image side in pixels: 256 or 224; any size with --csv.")] = None,
    allow_missing: Annotated[
        bool, typer.Option("--allow-missing", help="Build without missing images; noted in the manifest.")
    ] = False,
    jobs: Annotated[int | None, typer.Option(help="Number of decoding processes; default: one per core.")] = None,
    data_root: DataRoot = None,
) -> None:
    """List data sets, download one, or build a multi-label one."""
    from contnorm.cli.data import download, show_data_set, show_data_sets

    build_options = {
        "ids": ids,
        "groups": groups,
        "out": out,
        "size": size,
        "allow-missing": allow_missing,
        "jobs": jobs,
    }
    if any(path is not None for path in (coco, nus, csv, images)):
        from contnorm.cli.data import BuildOptions, build_dataset

        request = BuildOptions(coco, nus, csv, images, groups, ids, out, size, allow_missing, jobs, base)
        raise typer.Exit(build_dataset(name, request, data_root, console))
    for option, value in build_options.items():
        if value:
            raise UserError(f"--{option}: is for building. Say what from: --coco DIR, --nus DIR, or --csv FILE.")
    if fetch:
        download(name, base, data_root, console)
    if name:
        show_data_set(name, data_root, console)
    else:
        show_data_sets(data_root, console)


@app.command()
def report(
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Output file, or folder for one file per table; default: report.html."),
    ] = None,
    form: Annotated[str, typer.Option("--format", help="Output format: html, md, latex or csv.")] = "html",
    part: Annotated[str, typer.Option(help="Part to write: all, tables, claims or runs; html always has all.")] = "all",
    table: Annotated[
        list[str] | None,
        typer.Option(help="Table to include: table2, ... or a TOML file; repeatable; default: all of the paper's."),
    ] = None,
    runs: Annotated[
        list[Path] | None,
        typer.Option("--runs", help="Folder or archive of records; repeatable, for one report over several."),
    ] = None,
) -> None:
    """Write a report of the paper's tables and all runs: an HTML page, Markdown, LaTeX or CSV."""
    from contnorm.cli.report import report_of, write_report
    from contnorm.cli.show import unknown_names
    from contnorm.report.record_index import RecordFolders

    roots = runs or [Path("runs")]
    folders = RecordFolders(roots)
    made = report_of(folders, table or [])
    if not made.runs:
        none = f"no finished runs under {', '.join(map(str, roots))}{', all were lost' if made.diverged else ''}"
        reason = "; ".join(folders.problems) or none
        raise UserError(f"{reason}. Make one: contnorm run --norm cn")
    for problem in [*folders.problems, *unknown_names(folders.records)]:
        print_error(problem)
    write_report(made, form, part, out, console)


@app.command()
def speed(
    what: Annotated[str, typer.Argument(help="Benchmark: layers, step or run.")] = "layers",
    device: Annotated[str, typer.Option(help=_DEVICE)] = "cpu",
    out: Annotated[Path, typer.Option(help="Folder of the CSV files to write.")] = Path("speed"),
    max_steps: Annotated[int | None, typer.Option(help="Stop each timed run after N steps (smoke test).")] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Time only runs with this strategy, norm or stream; repeatable; for `run` only."),
    ] = None,
    data_root: DataRoot = None,
) -> None:
    """Measure the speed of layers, training steps or whole runs, compared with torch's own layers."""
    from contnorm.cli.speed import speed as measure

    measure(what, device, data_root, out, max_steps, console, only or ())


app.command("bench", hidden=True)(speed)  # the former name of the command, kept for existing scripts


def main() -> None:
    """Run the command line; a user error prints one line and exits with code 2."""
    _prepare_process()
    try:
        code = app(prog_name="contnorm", standalone_mode=False)
        if sys.stdout:
            sys.stdout.flush()  # an error here can still be handled; at exit it could not
    except UserError as error:
        print_error(str(error))
        raise SystemExit(2) from None
    except OSError as error:
        raise SystemExit(_output_failed(error)) from None
    except typer.Abort:
        raise SystemExit(130) from None  # Ctrl-C while there was nothing to save
    except (MemoryError, RuntimeError, ImportError) as error:
        if not _out_of_memory(error):
            raise
        print_error(OUT_OF_MEMORY)
        raise SystemExit(2) from None
    except _WRONG_USE as error:
        message = _in_one_line(error)
        if message:  # empty if the help was shown because there were no arguments
            print_error(message)
        raise SystemExit(2) from None
    raise SystemExit(code if isinstance(code, int) else 0)


def _prepare_process() -> None:
    """Set up what every command needs: standard streams, an existing current folder, logging."""
    _open_standard_streams()
    if not _has_working_folder():
        print_error("the current folder was deleted. Change to one that exists.")
        raise SystemExit(2)
    # Torch's modules hold half a million objects. The operating system frees them faster than a last collection.
    atexit.register(gc.freeze)
    _log_to_stderr()
    if isinstance(sys.stdout, io.TextIOWrapper):  # characters that the encoding lacks are shown as escapes
        sys.stdout.reconfigure(errors="backslashreplace")


def _output_failed(error: OSError) -> int:
    """Report that output could not be written; re-raise other errors.

    Returns:
        The exit code: 2, or 1 without a message if the reader of a pipe has ended.
    """
    if not isinstance(error, BrokenPipeError):
        if error.filename is not None or error.errno not in _FAILED_WRITE:
            raise error
        print_error(f"output can't be written ({error.strerror}). What was recorded and saved stays.")
    _discard_output()
    return 1 if isinstance(error, BrokenPipeError) else 2


OUT_OF_MEMORY = (
    "the settings need more memory than there is. Use a smaller model.width, train.batch, train.replay or memory.size, "
    "or fewer --lanes."
)


def _out_of_memory(error: Exception) -> bool:
    """Whether an error is a failed allocation; on a CPU torch has no exception class for it, only the message."""
    return isinstance(error, MemoryError) or any(
        words in str(error)
        for words in ("allocate memory", "CUDA out of memory", "can't start new thread", "failed to map segment")
    )


class _LineFormatter(logging.Formatter):
    """Formats log messages like the other lines on stderr."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802, logging's name
        return escape_terminal(super().formatMessage(record))


def _log_to_stderr() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(_LineFormatter("contnorm: %(message)s"))
    logging.basicConfig(handlers=[handler])


# Base class of all usage errors; typer does not export it.
_WRONG_USE = cast("type[Exception]", typer.BadParameter.__mro__[1])


def _in_one_line(error: Any) -> str:
    """Message of a usage error in one line, with a pointer to the help; empty if the error has no message."""
    message = " ".join(str(error.format_message()).split())
    if not message:
        return ""
    message += "" if message.endswith((".", "?")) else "."
    where = error.ctx.command_path if error.ctx is not None else "contnorm"
    return f"{message} See `{where} --help`."


if __name__ == "__main__":
    main()
