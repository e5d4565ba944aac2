"""`decide`: run two experiments with as many seeds as a verdict takes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from contnorm.bench.api.arguments import as_stream, check_score, console_of, resolve_run
from contnorm.bench.api.result import Result
from contnorm.bench.api.run import run_experiments
from contnorm.bench.api.stream import Stream
from contnorm.bench.comparison import Experiment, check_experiments, compare
from contnorm.bench.engine.run import Run
from contnorm.bench.records import Record
from contnorm.bench.sequential import ALPHA, FIRST_SEED, LAST_LOOK, MARGIN, Verdict, check_rule, looks_up_to
from contnorm.errors import UserError, escape_terminal

if TYPE_CHECKING:
    import pandas as pd


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
    progress: bool | Console = False,
    **options: Any,
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
        progress: Whether to show progress and a line for each look; or the rich console to show them on.
        **options: How runs are executed, as in `run`: ``device``, ``devices``, ``lanes``, ``launcher``, ``log`` and so
            on.

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
    described = [side for side in sides if isinstance(side, Mapping) and all(isinstance(key, str) for key in side)]
    if len(results) + len(described) < 2:
        return compare(*sides, score, by=by, seed=seed, first_seed=first_seed, **rule)
    if (stream is None) != bool(results):
        raise UserError(f"stream={stream!r}: pass the stream of experiments to be run; a result has its own.")
    shared: Any = stream if stream is not None else results[0].stream
    chosen = as_stream(shared)
    rule |= {"score": check_score(score, chosen), "first_seed": FIRST_SEED if first_seed is None else first_seed}
    console = console_of(progress)
    options |= {"runs": runs, "progress": console or False}
    known: list[tuple[Run, dict[int, Record], dict[int, str]]] = []  # each side: records and reasons by seed
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
            console.print(Text(escape_terminal(f"{verdict.sentence} {verdict.seeds_needed}")), soft_wrap=True)
        if verdict.is_decided:
            break
    return verdict
