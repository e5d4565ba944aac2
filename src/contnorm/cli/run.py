"""The `run` and `resume` commands: runs with progress bars; Ctrl-C saves a checkpoint and stops.

Settings with several values are a sweep: all combinations are run, and the best setting of each norm is shown.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from contnorm import bench
from contnorm.bench.config.schema import RUN_ARGUMENTS, format_value
from contnorm.bench.rng import check_seed, check_seeds
from contnorm.bench.text import spread
from contnorm.cli.common import collection_paused, console, print_lines, print_text, show_rows
from contnorm.cli.options import EXECUTION, FLAGS, load_stream, takes_options
from contnorm.cli.records import show_scores
from contnorm.errors import UserError

if TYPE_CHECKING:
    from contnorm.bench import SweepResult

ScoreName = Annotated[str | None, typer.Option(help="Score to choose by, such as fm; default: acc, or c_f1.")]
PlotFile = Annotated[Path | None, typer.Option(metavar="FILE", help="Figure of the scores: .png, .svg or .pdf.")]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print the result as JSON instead of tables.")]


@takes_options(*EXECUTION, settings=True)
def run(
    typed: dict[str, Any],
    execution: dict[str, Any],
    seeds: Annotated[int | None, typer.Option(help="Number of seeds, from 0 on. Default: 1; 3 for a sweep.")] = None,
    seed: Annotated[int | None, typer.Option(help="Run this single seed.")] = None,
    keep_weights: Annotated[bool, typer.Option("--keep-weights", help="Save the weights, for `diagnose`.")] = False,
    validation: Annotated[
        bool, typer.Option("--validation", help="Use validation tasks, or held-out training samples, not test samples.")
    ] = False,
    score: ScoreName = None,
    by: Annotated[str, typer.Option(help="Choose one setting for each value of these, comma-separated.")] = "norm",
    plot: PlotFile = None,
    json_: JsonFlag = False,
) -> None:
    """Train once over a stream, or once with each combination of settings, as in --norm bn,cn --lr 0.01,0.03.

    Examples:
        # Train with BN over five tasks of digits, with three seeds, and save the weights.
        contnorm run --norm bn --seeds 3 --keep-weights
        # The same with CN. Runs that are recorded already are not repeated.
        contnorm run --norm cn --seeds 3 --keep-weights
        # Try three learning rates for BN and CN, with two seeds each.
        contnorm run --norm bn,cn --lr 0.003,0.01,0.03 --seeds 2 --runs sweep-runs
        # Choose a memory size on held-out training samples.
        contnorm run --norm cn --buffer 50,200 --validation --seeds 2 --runs sweep-runs
    """
    if seed is not None and seeds is not None:
        raise UserError(f"--seed {seed} and --seeds {seeds}: use one of them. --seeds is a number of seeds, from 0 on.")
    check_seeds(1 if seeds is None else seeds)
    check_seed(seed or 0)
    is_sweep = any(isinstance(value, list) for value in typed.values()) or validation or plot is not None or json_
    stream, arguments = load_stream(typed, execution)
    arguments |= {
        "seeds": [seed] if seed is not None else seeds or (3 if is_sweep else 1),
        "keep_weights": keep_weights,
    }
    if is_sweep:
        argument_of = {key: name for name, key in RUN_ARGUMENTS.items()}
        keys = [FLAGS.get(name.strip(), name.strip()) for name in by.split(",")]
        names = [argument_of.get(key, key) for key in keys]
        arguments |= {"validation": validation, "score": score, "by": names}
        show_result(lambda progress: bench.sweep(stream, progress=progress, **arguments), plot, json_)
        return
    result = bench.run(stream, progress=console, **arguments)
    show_scores(result.records, console)
    if result.diverged:
        raise UserError(" ".join(result.diverged.values()))


def show_result(run: Callable[[Console], SweepResult], plot: Path | None, as_json: bool) -> None:
    """Run a sweep or a search, and show its result.

    Args:
        run: Runs it, with a console for progress.
        plot: File of the figure.
        as_json: Whether to print JSON.
    """
    if plot is not None and plot.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise UserError(f"--plot {plot}: use a file name that ends in .png, .svg or .pdf.")
    progress = Console(stderr=True) if as_json else console
    try:
        result, code = run(progress), 0
    except bench.RunInterrupted as stopped:
        result, code = stopped.result, 128 + stopped.signal
    if as_json:
        names = ("stream", "score", "chosen_on", "rule", "warning", "notes")
        settings = json.loads(result.to_frame().to_json(orient="records", double_precision=15))
        print(json.dumps({**{name: getattr(result, name) for name in names}, "settings": settings}, indent=2))
    else:
        _show_sweep(result)
    if plot is not None and code == 0:
        result.plot().savefig(plot, dpi=150)
        print_text(f"figure: {plot}", progress)
    raise typer.Exit(code)


def _show_sweep(result: SweepResult) -> None:
    """Print all settings with their scores, then the best setting of each norm and the number of settings tried."""
    best, groups = result.best, result.groups
    chosen = [id(trial) for trial in best.values()]
    rows = []
    for trial in result.trials:
        seeds = [str(len(trial.scores)) if trial.eligible else f"{len(trial.scores)} of {len(trial.seeds)}"]
        seeds += [f"{len(trial.diverged)} diverged"] if trial.diverged else []
        seeds += [f"{trial.unfinished} unfinished"] if trial.unfinished else []
        score = (spread(list(trial.scores.values())) if trial.scores else "-") + (" *" if id(trial) in chosen else "")
        tried = str(len(groups[next(name for name in best if best[name] is trial)])) if id(trial) in chosen else ""
        rows.append([*map(format_value, trial.setting.values()), score, ", ".join(seeds), tried])
    console.print()
    print_text(
        f"{result.stream}: {result.score} on the {result.chosen_on}; * is the best of the settings tried", style="bold"
    )
    names = list(result.trials[0].setting)
    show_rows([*names, result.score, "seeds", "tried"], rows, named=len(names))
    for line in [f"Rule: {result.rule}", *result.notes]:
        print_text(line)
    if best and result.chosen_on != "test samples":
        print_text("Measure the best settings on the test samples with `contnorm run`, the other options, and:")
        flag_of = {key: f"--{flag} " for flag, key in FLAGS.items()}
        for trial in best.values():
            keys = {RUN_ARGUMENTS.get(name, name): format_value(value) for name, value in trial.setting.items()}
            print_lines(
                ["    " + " ".join(f"{flag_of.get(key, f'--set {key}=')}{value}" for key, value in keys.items())]
            )


@takes_options(
    "device", "lanes", "threads", "data_root", "allow_missing", "log", "log_every", "log_dir", "devices", "launcher",
    "launcher_set",
)  # fmt: skip
def resume(
    execution: dict[str, Any],
    folder: Annotated[Path | None, typer.Argument(help="The same as --runs.", show_default=False)] = None,
    runs: Annotated[Path, typer.Option("--runs", help="Folder of runs, of an experiment, or of a run.")] = Path("runs"),
) -> None:
    """Resume the interrupted runs of a folder, bit-exactly.

    Examples:
        # Finish all stopped runs in the folder runs.
        contnorm resume
        # Finish the stopped runs of another folder, one at a time.
        contnorm resume --runs sweep-runs --lanes 1
    """
    with collection_paused():
        call = bench.resume
    root, missing = execution.pop("data_root"), execution.pop("allow_missing") or None
    records = call(folder or runs, root=root, progress=console, allow_missing=missing, **execution)
    show_scores(records, console)
