"""The result of a sweep or a search on a terminal: tables, JSON, a figure, and the commands that measure the best."""

from __future__ import annotations

import io
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from contnorm import bench
from contnorm.atomic_files import write_atomically
from contnorm.bench.config.sources import RUN_ARGUMENTS, format_value
from contnorm.cli.options import FLAGS, Request
from contnorm.cli.tables import print_text, safe_text, show_rows
from contnorm.errors import UserError, usable

if TYPE_CHECKING:
    from contnorm.bench import SweepResult, Trial

__all__ = ["JsonFlag", "PlotFile", "ScoreName", "show_result", "show_sweep"]

ScoreName = Annotated[
    str | None, typer.Option(help="Score to choose by, such as acc or fm; default: acc, or c_f1 for multi-label.")
]
PlotFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Figure to write: .png, .svg or .pdf; scores over the settings.")
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print the result as JSON instead of tables.")]
FIGURE_FORMATS = (".png", ".svg", ".pdf")


def show_result(
    run: Callable[[Console], SweepResult], request: Request, plot: Path | None, as_json: bool, console: Console
) -> int:
    """Run a sweep or a search, show its result, and return the exit code.

    Args:
        run: Runs it, with a console for progress.
        request: What was typed.
        plot: File of the figure.
        as_json: Whether to print JSON.
        console: Terminal to print to.
    """
    if plot is not None and plot.suffix.lower() not in FIGURE_FORMATS:
        raise UserError(f"--plot {plot}: use a file name that ends in {', '.join(FIGURE_FORMATS)}.")
    progress = Console(stderr=True) if as_json else console
    try:
        result, code = run(progress), 0
    except bench.RunInterrupted as stopped:
        result, code = stopped.result, 128 + stopped.signal
    if as_json:
        print(json.dumps(result.to_dict(), indent=2))
    else:
        show_sweep(result, console)
        if result.best and result.chosen_on != "test samples":
            print_text("Measure the best settings on the test samples:", console)
            for trial in result.best.values():
                console.print(safe_text(_test_command(trial, result, request)), soft_wrap=True)
    if plot is not None and code == 0:
        image = io.BytesIO()
        result.plot().savefig(image, format=plot.suffix[1:].lower(), dpi=150)
        with usable(plot, "it can't be written", "Use another file."):
            write_atomically(plot, image.getvalue())
        print_text(f"figure: {plot}", progress)
    return code


def _test_command(trial: Trial, result: SweepResult, request: Request) -> str:
    """Return the command that measures a setting on the test samples: what was typed, with the chosen values."""
    settings = {**trial.arguments, **trial.arguments.get("settings", {})}
    flag_of, argument_of = (
        {key: flag for flag, key in FLAGS.items()},
        {key: name for name, key in RUN_ARGUMENTS.items()},
    )
    typed = {setting.key: setting.value for setting in request.typed}
    if result.tuned is not None:  # its default grid is not typed
        typed.setdefault(RUN_ARGUMENTS.get(result.tuned, result.tuned), None)
    parts = ["contnorm", "run"]
    for key, value in typed.items():
        if key not in ("stream.part", "stream.holdout"):
            shown = format_value(settings.get(argument_of.get(key, key), value))
            parts += [f"--{flag_of[key]}", shown] if key in flag_of else ["--set", f"{key}={shown}"]
    execution = request.execution
    usual = {"config": None, "data_root": None, "runs": Path("runs"), "device": "cpu", "devices": None, "threads": 1}
    for name, default in usual.items():
        if execution[name] not in (None, default):
            parts += [f"--{name.replace('_', '-')}", str(execution[name])]
    parts += [f"--{name.replace('_', '-')}" for name in ("allow_missing", "memory_moments") if execution[name]]
    return shlex.join([*parts, "--seeds", str(len(result.seeds))])


def show_sweep(result: SweepResult, console: Console) -> None:
    """Print all settings with their scores, then the best setting of each norm and the number of settings tried."""
    best, groups = result.best, result.groups
    chosen = {id(trial) for trial in best.values()}
    names = list(result.trials[0].setting)
    rows = []
    for trial in result.trials:
        seeds = [str(len(trial.scores)) if trial.eligible else f"{len(trial.scores)} of {len(trial.seeds)}"]
        seeds += [f"{len(trial.diverged)} diverged"] if trial.diverged else []
        seeds += [f"{trial.unfinished} unfinished"] if trial.unfinished else []
        score = trial.spread().replace("±", "+-") + (" *" if id(trial) in chosen else "")
        rows.append([*map(format_value, trial.setting.values()), score, ", ".join(seeds)])
    console.print()
    console.print(safe_text(f"{result.stream}: {result.score} on the {result.chosen_on}"), style="bold")
    show_rows([*names, result.score, "seeds"], rows, console, named=len(names))
    if best:
        console.print()
        console.print(safe_text(f"best setting of each {' and '.join(result.by)} (*)"), style="bold")
        rows = []
        for name, trial in best.items():
            runs = sum(len(one.scores) + len(one.diverged) for one in groups[name])
            score = trial.spread().replace("±", "+-")
            rows.append([*map(format_value, trial.setting.values()), score, str(len(groups[name])), str(runs)])
        show_rows([*names, result.score, "settings tried", "runs"], rows, console, named=len(names))
    if any(trial.diverged for trial in result.trials):
        print_text(
            "diverged: the loss is not finite. Such a setting is not chosen, and its runs are not repeated.", console
        )
    for line in [*result.notes, *result.choice_notes()]:
        print_text(line, console)
