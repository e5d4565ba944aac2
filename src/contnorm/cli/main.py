"""The commands, in the order of the work: look around, run, go on, look at what came out, compare.

A person's mistake is one line and exit code 2; anything else is a bug of ours and keeps its traceback. What needs torch
is imported where it is used, so that listing and showing start at once.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperGroup

from contnorm import __version__
from contnorm.bench.config.schema import show_value
from contnorm.bench.escape import escape_terminal
from contnorm.bench.records import Found, Record, Store, distinct
from contnorm.bench.trust import check_files, only_trusted
from contnorm.bench.user_code import code_files
from contnorm.cli.garbage import importing_torch, leave_it_to_the_system
from contnorm.cli.tables import safe_text, say_on_stderr
from contnorm.cli.typed_settings import (
    Setting,
    assignments_of,
    check_seed,
    check_seeds,
    merge_settings,
    number_or_word,
    settings_of,
)
from contnorm.errors import UserError, unknown

__all__ = ["app", "main"]


_UNUSABLE = {
    errno.EACCES, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOENT, errno.ENOSPC, errno.ENOTDIR, errno.EPERM,
    errno.EROFS,
}  # fmt: skip


_FAILED_WRITE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF}


class _Group(TyperGroup):
    """The commands; what no path and no setting can hold is refused before any of them begins."""

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
    """A UserError for what the system refuses and a person can change; other errors as they are."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return UserError(
            "the system's limit of open files is reached. Raise it with `ulimit -n 1024`, or use fewer --lanes."
        )
    if error.errno == errno.ENOMEM:
        return UserError(OUT_OF_MEMORY)
    if error.filename is not None and error.errno in _UNUSABLE:
        return UserError(f"{show_value(str(error.filename))}: can't be used ({error.strerror}).")
    return error


def _has_working_folder() -> bool:
    """Whether the current folder exists; where it was deleted, torch's libraries end the process without a reason."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def _discard_output() -> None:
    """Let what is still in the buffer of stdout go nowhere, or Python would fail at its end to write it."""
    with suppress(OSError, ValueError, AttributeError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


def _open_standard_streams() -> None:
    """Point closed standard descriptors at the null device.

    Else the next files to be opened, such as records, get their numbers, and what is written to stderr goes into them.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one


app = typer.Typer(
    name="contnorm",
    cls=_Group,
    help="Normalization for networks that learn from a stream: run, resume, score and compare.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_at_terminal = sys.stdout is not None and sys.stdout.isatty()  # there is no stdout where it was closed, as by `>&-`
console = Console(width=None if _at_terminal else 160)  # a file or a pipe has no edge to wrap at


def _say_version(asked: bool) -> None:
    if asked:
        console.print(f"contnorm {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="The version, and no more.")
    ] = False,
) -> None:
    context.with_resource(only_trusted(()))  # no command executes user code but what was named on this call


RunsFolder = Annotated[Path, typer.Option("--runs", help="Where records and checkpoints are.")]
Lanes = Annotated[int | None, typer.Option(help="Runs side by side; 8 on a GPU, a core each on a CPU.")]
_WHICH = "Runs, or folders of runs: paths, or beginnings of hashes; all by default."
_THREADS = "Of each run on a CPU; results depend on it in the last digits."
TrustCode = Annotated[
    list[Path] | None,
    typer.Option(
        "--trust-code", metavar="FILE", help="Python code that may be executed where a file names it; repeatable."
    ),
]
AllowMissing = Annotated[
    bool, typer.Option("--allow-missing", help="Use a published data set with missing images, and record it.")
]
DataRoot = Annotated[Path | None, typer.Option("--data-root", help="Where data lies; else CONTNORM_DATA, else ./data.")]


@app.command()
def ls(
    what: Annotated[
        str, typer.Argument(help="norms, streams, strategies, memories, models or tables; all by default.")
    ] = "",
) -> None:
    """What there is, one line each."""
    from contnorm.cli.ls import listings

    found = listings()
    if what and what not in found:
        raise unknown("listing", what, found)
    for name, rows in found.items():
        if what in ("", name):
            table = Table("name", "what it is", title=name, title_justify="left", box=None, pad_edge=False)
            for row in rows:
                table.add_row(*map(safe_text, row))
            console.print(table, "")


@app.command()
def run(
    context: typer.Context,
    stream: Annotated[str, typer.Option(help="What is learned; see `contnorm ls streams`.")] = "permuted-mnist",
    strategy: Annotated[str, typer.Option(help="How; see `contnorm ls strategies`.")] = "er",
    norm: Annotated[str, typer.Option(help="Which normalization; see `contnorm ls norms`.")] = "cn",
    groups: Annotated[str | None, typer.Option(help="Groups of channels, or 'auto'.")] = None,
    weights: Annotated[
        str | None, typer.Option(help="What the network begins with: a file, or torchvision:IMAGENET1K_V1.")
    ] = None,
    buffer: Annotated[int | None, typer.Option(help="Slots of the memory: of a ring, or in all.")] = None,
    batch: Annotated[int | None, typer.Option(help="Samples of the stream a step.")] = None,
    replay: Annotated[int | None, typer.Option(help="Samples of the memory a step.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.")] = None,
    seeds: Annotated[int | None, typer.Option(help="How many seeds, from 0; one by default.")] = None,
    seed: Annotated[int | None, typer.Option(help="Just this seed.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    lanes: Lanes = None,
    threads: Annotated[int, typer.Option(help=_THREADS)] = 1,
    precision: Annotated[str | None, typer.Option(help="fp32, tf32 or bf16.")] = None,
    eval_moments: Annotated[str | None, typer.Option(help="running, or oracle for BN*.")] = None,
    max_steps: Annotated[int | None, typer.Option(help="Stop early, for a try.")] = None,
    keep_weights: Annotated[
        bool, typer.Option("--keep-weights", help="Leave each run's weights beside its record, for `diagnose`.")
    ] = False,
    data_root: DataRoot = None,
    allow_missing: AllowMissing = False,
    runs: RunsFolder = Path("runs"),
    config: Annotated[Path | None, typer.Option(help="A TOML file of settings.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="key=value: strategy.forward=separate")] = None,
    trust_code: TrustCode = None,
) -> None:
    """Learn a stream, once through, and record how well each task is known after each other one."""
    with importing_torch():
        from contnorm.cli.run import Hands, run_seeds

    wanted = _seeds(seeds, seed)
    flags: dict[str, Any] = {
        "stream.name": stream,
        "strategy.name": strategy,
        "norm.name": norm,
        "norm.groups": number_or_word(groups) if groups is not None else None,
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
    values = merge_settings(defaults, config, typed, set_ or [])
    named = code_files(settings_of([*typed, *assignments_of(set_ or [])]))
    hands = Hands(device, lanes, threads, keep_weights, allow_missing)
    with only_trusted([*check_files(trust_code or []), *named]):  # code that only --config names is not among them
        raise typer.Exit(run_seeds(values, wanted, hands, data_root, runs, console))


def _seeds(many: int | None, one: int | None) -> list[int]:
    """The seeds asked for: so many from 0, or just one."""
    if one is not None and many is not None:
        raise UserError(f"--seed {one} and --seeds {many}: use one of them; --seeds takes so many, from 0.")
    if many is not None:
        check_seeds(many)
    if one is not None:
        check_seed(one)
    return [one] if one is not None else list(range(many or 1))


# Flags that are not called as their setting is.
_FLAG_NAMES = {
    "stream.name": "--stream",
    "strategy.name": "--strategy",
    "norm.name": "--norm",
    "memory.size": "--buffer",
    "evaluate.moments": "--eval-moments",
}


def _is_typed(context: typer.Context, key: str, value: Any) -> bool:
    """Whether a flag of `run` was given: the defaults of stream, strategy and norm yield to a file of settings."""
    group, _, name = key.partition(".")
    if name != "name":
        return value is not None
    return _given(context, group)


def _given(context: typer.Context, parameter: str) -> bool:
    """Whether a parameter was given by the caller, at the command line or in-process."""
    source = context.get_parameter_source(parameter)
    return source is not None and source.name not in ("DEFAULT", "DEFAULT_MAP")


@app.command()
def resume(
    path: Annotated[Path, typer.Argument(help="A run, or a folder of runs.")] = Path("runs"),
    device: Annotated[str | None, typer.Option(help="cpu or cuda; what each run was begun on by default.")] = None,
    lanes: Lanes = None,
    threads: Annotated[
        int | None, typer.Option(help="Of each run on a CPU; what it was begun with by default.")
    ] = None,
    data_root: DataRoot = None,
    trust_code: TrustCode = None,
    allow_missing: AllowMissing = False,
) -> None:
    """Go on, bit for bit, with every run under a folder that was stopped."""
    with importing_torch():
        from contnorm.cli.run import Hands, resume_all

    hands = Hands(device, lanes, threads, allow_missing=allow_missing)
    trusted = check_files(trust_code or [])
    raise typer.Exit(resume_all(path, hands, data_root, console, trusted))


@app.command()
def show(
    run: Annotated[
        list[str] | None,
        typer.Argument(help="Paths of runs or of folders of runs, or beginnings of hashes; all by default."),
    ] = None,
    runs: RunsFolder = Path("runs"),
    by_task: Annotated[bool, typer.Option("--by-task", help="The whole accuracy matrix of each run.")] = False,
) -> None:
    """Scores of finished runs, averaged over seeds."""
    from contnorm.cli.show import show_lost, show_matrices, show_scores, show_unsealed, unknown_names
    from contnorm.report.summaries import Summaries, find_summaries, summaries_under

    store = Store(runs)
    found: list[Found] | list[Summaries]
    if by_task:
        found = [store.search(given) for given in run] if run else [store.readable()]
    else:
        found = [find_summaries(store, given) for given in run] if run else [summaries_under(runs)]
    problems = list(dict.fromkeys(problem for some in found for problem in some.problems))
    records = distinct([record for some in found for record in some.records], problems)
    lost = {run: notes for some in found for run, notes in some.lost.items()}
    if not records:
        none = f"no finished runs under {runs}{', all were lost' if lost else ''}. Make one: contnorm run --norm cn"
        raise UserError("; ".join(problems) or none)
    for problem in [*problems, *unknown_names(records)]:
        say_on_stderr(problem)
    if by_task:
        show_matrices([record for record in records if isinstance(record, Record)], console)
    else:
        show_scores(records, console)
    show_lost(records, lost, console)
    if run:
        show_unsealed(records, console)


@app.command()
def compare(
    a: Annotated[str, typer.Argument(help="A run: a path, or the beginning of a hash.")],
    b: Annotated[str, typer.Argument(help="Another.")],
    runs: RunsFolder = Path("runs"),
) -> None:
    """Two runs: in which settings they differ, and how far their scores, paired over the seeds both have."""
    from contnorm.cli.compare import show_comparison
    from contnorm.cli.show import show_lost, unknown_names

    store = Store(runs)
    first, second = store.find_one(a), store.find_one(b)
    unknown_here = unknown_names([*first.records, *second.records])
    for problem in dict.fromkeys([*first.problems, *second.problems, *unknown_here]):
        say_on_stderr(problem)
    show_comparison(first.records, second.records, console)
    show_lost([*first.records, *second.records], first.lost | second.lost, console)


@app.command()
def diagnose(
    context: typer.Context,
    run: Annotated[
        str, typer.Argument(help="A run made with --keep-weights: a path, or the beginning of a hash.")
    ] = "",
    seed: Annotated[int | None, typer.Option(help="Which seed; the first there is by default.")] = None,
    model: Annotated[str | None, typer.Option(help="Instead of a run: file.py:make, a network of your own.")] = None,
    weights: Annotated[Path | None, typer.Option(help="Its weights, a safetensors file.")] = None,
    stream: Annotated[str | None, typer.Option(help="Its tasks; see `contnorm ls streams`.")] = None,
    norm: Annotated[str, typer.Option(help="The norm that `make` is given.")] = "bn",
    beside: Annotated[
        str | None, typer.Option(help="A run that differs in its norm alone: how much less is recovered there.")
    ] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="A figure too: .svg, .png or .pdf.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    threads: Annotated[int, typer.Option(help="On a CPU.")] = 1,
    data_root: DataRoot = None,
    allow_missing: AllowMissing = False,
    runs: RunsFolder = Path("runs"),
    trust_code: TrustCode = None,
) -> None:
    """How much of what a network forgot lies in its running moments alone: the cross-task normalization effect."""
    brought = (model, weights, stream)
    if bool(run) == any(brought) or (any(brought) and not all(brought)):
        raise UserError("diagnose: say which run, or all of --model, --weights and --stream for a network of your own.")
    if seed is not None:
        check_seed(seed)
    if run and _given(context, "norm"):
        raise UserError(f"--norm {norm}: is for a network of your own, with --model. A run's norm is in its record.")
    with importing_torch():
        from contnorm.cli.diagnose import Brought, show_diagnosis
        from contnorm.cli.run import Hands, workplace

    place = workplace(runs, Hands(device, 1, threads, allow_missing=allow_missing), data_root)
    given = Brought(model, weights, stream, norm) if model and weights and stream else run
    show_diagnosis(given, seed, place, out, console, beside, check_files(trust_code or []))


@app.command()
def paper(
    recipe: Annotated[str, typer.Argument(help="table1 ... table14, figure1 ... figure3, or a file of your own.")] = "",
    list_: Annotated[bool, typer.Option("--list", help="Which there are, and how much of each is run.")] = False,
    seeds: Annotated[int, typer.Option(help="How many, from 0; the paper has five.")] = 5,
    only: Annotated[list[str] | None, typer.Option(help="Some cells: norm=cn stream=split-cifar100 buffer=500")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    lanes: Lanes = None,
    threads: Annotated[int, typer.Option(help=_THREADS)] = 1,
    precision: Annotated[str | None, typer.Option(help="fp32, tf32 or bf16.")] = None,
    max_steps: Annotated[int | None, typer.Option(help="Stop early, for a try.")] = None,
    lr: Annotated[
        str, typer.Option(help="one for all, best: each norm its own as `contnorm tune` chose it, or both.")
    ] = "both",
    selected: Annotated[Path | None, typer.Option(help="The file that `contnorm tune` wrote with --out.")] = None,
    data_root: DataRoot = None,
    allow_missing: AllowMissing = False,
    runs: RunsFolder = Path("runs"),
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="key=value over the recipe's settings; no verdicts then.")
    ] = None,
    trust_code: TrustCode = None,
) -> None:
    """A table or figure of the paper: run what is missing, then ours beside the published, with a verdict."""
    trusted = check_files(trust_code or [])
    check_seeds(seeds)
    if list_ or not recipe:
        from contnorm.cli.paper_list import show_recipes

        with only_trusted(trusted):
            show_recipes(seeds, data_root, runs, console, recipe)
        return
    with importing_torch():
        from contnorm.cli.paper import Asked, run_recipe
        from contnorm.cli.run import Hands

    hands = Hands(device, lanes, threads, allow_missing=allow_missing)
    asked = Asked(seeds, only or [], hands, max_steps, precision, data_root, runs, lr, selected, set_ or [], trusted)
    raise typer.Exit(run_recipe(recipe, asked, console))


@app.command()
def tune(
    recipe: Annotated[str, typer.Argument(help="table2, table8, table9, table10, table12, or a file of your own.")],
    stream: Annotated[str | None, typer.Option(help="Just these, with commas between: split-cifar100")] = None,
    strategies: Annotated[str | None, typer.Option(help="Just these: er,derpp")] = None,
    norms: Annotated[str | None, typer.Option(help="Just these: bn,cn")] = None,
    seeds: Annotated[int, typer.Option(help="How many, from 0.")] = 3,
    rates: Annotated[str | None, typer.Option(help="The grid; 0.003,0.01,0.03,0.1,0.3 by default.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    lanes: Annotated[
        int | None, typer.Option(help="Runs side by side; a norm's whole grid on a GPU, a core each on a CPU.")
    ] = None,
    threads: Annotated[int, typer.Option(help=_THREADS)] = 1,
    precision: Annotated[str | None, typer.Option(help="fp32, tf32 or bf16.")] = None,
    max_steps: Annotated[int | None, typer.Option(help="Stop early, for a try: nothing is chosen.")] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="The file; RUNS/selected/RECIPE.toml by default.")
    ] = None,
    data_root: DataRoot = None,
    allow_missing: AllowMissing = False,
    runs: RunsFolder = Path("runs"),
    trust_code: TrustCode = None,
) -> None:
    """Choose a learning rate for each norm and strategy of a table, on the validation tasks alone."""
    with importing_torch():
        from contnorm.cli.run import Hands
        from contnorm.cli.tune import RATES, Wanted, tune_recipe

    typed = {"stream": stream, "strategy": strategies, "norm": norms}
    only = [f"{key}={value.strip()}" for key, values in typed.items() if values for value in values.split(",")]
    grid = _numbers(rates, "--rates") if rates else RATES
    hands = Hands(device, lanes, threads, allow_missing=allow_missing)
    trusted = check_files(trust_code or [])
    wanted = Wanted(seeds, only, grid, hands, max_steps, precision, data_root, runs, out, trusted)
    raise typer.Exit(tune_recipe(recipe, wanted, console))


def _numbers(text: str, flag: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"{flag} {text!r}: use numbers with commas between, such as 0.03,0.1.") from None


@app.command()
def data(
    name: Annotated[str, typer.Argument(help="One data set.")] = "",
    fetch: Annotated[bool, typer.Option("--fetch", help="Bring it from its public source, and verify it.")] = False,
    base: Annotated[str | None, typer.Option(help="Another address to fetch from.")] = None,
    coco: Annotated[Path | None, typer.Option(help="Build cocoseq from MS-COCO in this folder.")] = None,
    nus: Annotated[Path | None, typer.Option(help="Build nus-wideseq from NUS-WIDE in this folder.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Build one of your own from this table.")] = None,
    images: Annotated[Path | None, typer.Option(help="Its pictures; their labels.csv is the table.")] = None,
    groups: Annotated[Path | None, typer.Option(help="A table of its classes' groups; else by count.")] = None,
    ids: Annotated[Path | None, typer.Option(help="The lists of the tasks; else DIR/ids, else fetched.")] = None,
    out: Annotated[Path | None, typer.Option(help="Build it here; else under the data root.")] = None,
    size: Annotated[int | None, typer.Option(help="Side of the squares, 256 or 224; of your own any.")] = None,
    allow_missing: Annotated[
        bool, typer.Option("--allow-missing", help="Build without the pictures that are not there, and record it.")
    ] = False,
    jobs: Annotated[int | None, typer.Option(help="Processes that decode; a core each by default.")] = None,
    data_root: DataRoot = None,
) -> None:
    """Where each data set is, and what is missing; or fetch one, or build one whose pictures have several labels."""
    from contnorm.cli.data import fetch_with_bar, show_data_set, show_data_sets

    told = {"ids": ids, "groups": groups, "out": out, "size": size, "allow-missing": allow_missing, "jobs": jobs}
    if any(given is not None for given in (coco, nus, csv, images)):
        from contnorm.cli.data_build import Asked, build_with_bar

        asked = Asked(coco, nus, csv, images, groups, ids, out, size, allow_missing, jobs, base)
        raise typer.Exit(build_with_bar(name, asked, data_root, console))
    for option, value in told.items():
        if value:
            raise UserError(f"--{option}: is for building. Say what from: --coco DIR, --nus DIR, or --csv FILE.")
    if fetch:
        fetch_with_bar(name, base, data_root, console)
    if name:
        show_data_set(name, data_root, console)
    else:
        show_data_sets(data_root, console)


@app.command()
def report(
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="A file, or a folder for a file a table; report.html by default.")
    ] = None,
    form: Annotated[str, typer.Option("--format", help="html, md, latex or csv.")] = "html",
    part: Annotated[str, typer.Option(help="all, tables, claims or runs; a page has all.")] = "all",
    table: Annotated[
        list[str] | None,
        typer.Option(help="Some tables: table2, or a file of your own; all of the paper's by default."),
    ] = None,
    runs: Annotated[
        list[Path] | None, typer.Option("--runs", help="Where records are; several folders make one report.")
    ] = None,
) -> None:
    """One self-contained page of the paper's tables and all runs under a folder; or the tables as text."""
    from contnorm.cli.report import report_of
    from contnorm.cli.report_files import write_report
    from contnorm.cli.show import unknown_names
    from contnorm.report.record_shelf import Shelves

    roots = runs or [Path("runs")]
    shelves = Shelves(roots)
    made = report_of(shelves, table or [])
    if not made.runs:
        none = f"no finished runs under {', '.join(map(str, roots))}{', all were lost' if made.lost else ''}"
        said = "; ".join(shelves.problems) or none
        raise UserError(f"{said}. Make one: contnorm run --norm cn")
    for problem in [*shelves.problems, *unknown_names(shelves.records)]:
        say_on_stderr(problem)
    write_report(made, form, part, out, console)


@app.command()
def bench(
    what: Annotated[str, typer.Argument(help="layers, step or run.")] = "layers",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    out: Annotated[Path, typer.Option(help="The folder of the files of rows.")] = Path("bench"),
    max_steps: Annotated[int | None, typer.Option(help="Of each run, for a try.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Of whole runs, those with this: a strategy, a norm.")] = None,
    data_root: DataRoot = None,
) -> None:
    """How fast it is, beside torch's own layers: single layers, training steps, or whole runs."""
    from contnorm.cli.speed import bench as measure

    measure(what, device, data_root, out, max_steps, console, only or ())


def main() -> None:
    """The way in: a person's mistake becomes one line and exit code 2."""
    _prepare_process()
    try:
        code = app(prog_name="contnorm", standalone_mode=False)
        if sys.stdout:
            sys.stdout.flush()  # what fails here would fail after the last handler
    except UserError as error:
        say_on_stderr(str(error))
        raise SystemExit(2) from None
    except OSError as error:
        raise SystemExit(_output_failed(error)) from None
    except typer.Abort:
        raise SystemExit(130) from None  # Ctrl-C where nothing had to be saved
    except (MemoryError, RuntimeError, ImportError) as error:
        if not _out_of_memory(error):
            raise
        say_on_stderr(OUT_OF_MEMORY)
        raise SystemExit(2) from None
    except _WRONG_USE as error:
        said = _in_one_line(error)
        if said:  # nothing where the help was asked for by typing nothing
            say_on_stderr(said)
        raise SystemExit(2) from None
    raise SystemExit(code if isinstance(code, int) else 0)


def _prepare_process() -> None:
    """Check what every command needs of the process it runs in: standard streams, a current folder, logging."""
    _open_standard_streams()
    if not _has_working_folder():
        say_on_stderr("the current folder was deleted. Change to one that exists.")
        raise SystemExit(2)
    leave_it_to_the_system()
    _log_to_stderr()
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal that has no letter for a character shows its code
        sys.stdout.reconfigure(errors="backslashreplace")


def _output_failed(error: OSError) -> int:
    """Report that output could not be written; other errors are raised again.

    Returns:
        The exit code: 1, without a message, where the reader of a pipe has ended.
    """
    if not isinstance(error, BrokenPipeError):
        if error.filename is not None or error.errno not in _FAILED_WRITE:
            raise error
        say_on_stderr(f"output can't be written ({error.strerror}). What was recorded and saved stays.")
    _discard_output()
    return 1 if isinstance(error, BrokenPipeError) else 2


OUT_OF_MEMORY = (
    "the settings need more memory than there is. Use a smaller model.width, train.batch, train.replay or memory.size, "
    "or fewer --lanes."
)


def _out_of_memory(error: Exception) -> bool:
    """Whether an error is of a failed allocation; that of torch on a CPU is no class of its own."""
    return isinstance(error, MemoryError) or any(
        words in str(error)
        for words in ("allocate memory", "CUDA out of memory", "can't start new thread", "failed to map segment")
    )


class _LineFormatter(logging.Formatter):
    """Log messages as other lines on stderr are."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802, logging's name
        return escape_terminal(super().formatMessage(record))


def _log_to_stderr() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(_LineFormatter("contnorm: %(message)s"))
    logging.basicConfig(handlers=[handler])


# All that typer says of what was typed; it gives no name for it.
_WRONG_USE = cast("type[Exception]", typer.BadParameter.__mro__[1])


def _in_one_line(error: Any) -> str:
    """What was typed wrong, and where it says what is right."""
    said = " ".join(str(error.format_message()).split())
    if not said:
        return ""
    said += "" if said.endswith((".", "?")) else "."
    where = error.ctx.command_path if error.ctx is not None else "contnorm"
    return f"{said} See `{where} --help`."


if __name__ == "__main__":
    main()
