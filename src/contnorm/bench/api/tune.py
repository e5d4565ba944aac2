"""`tune`: search for the best value of one setting for each norm, on validation data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from contnorm.bench.api.stream import Stream
from contnorm.bench.api.sweep import SweepGrid, SweepSession, is_lower_better
from contnorm.bench.api.sweep_result import SweepResult, Trial
from contnorm.bench.config.schema import from_dict
from contnorm.bench.config.sources import RUN_ARGUMENTS
from contnorm.bench.grid import LEARNING_RATES, LineSearch, Refine
from contnorm.errors import UserCodeError, UserError

__all__ = ["tune"]


def tune(
    stream: Stream | str,
    *,
    over: str = "lr",
    norm: Any = None,
    strategy: Any = None,
    model: Any = None,
    memory: Any = None,
    lr: Any = None,
    batch_size: Any = None,
    replay: Any = None,
    settings: Mapping[str, Any] | None = None,
    tag: str | None = None,
    seeds: int | Iterable[int] = 3,
    extensions: int = 3,
    refine: Refine | None = "between",
    score: str | None = None,
    runs: str | Path | None = None,
    progress: bool | Console = False,
    **options: Any,
) -> SweepResult:
    """Search for the best value of one setting on validation data, for each norm and each combination of other lists.

    The values of ``over`` are tried first. While the best one is the smallest or the largest tried, the next value
    beyond is tried, at the ratio of the grid. Then a value between the best one and the better of its neighbors is
    tried. The searches of all norms run together. The test samples are never used (see ``validation`` of `sweep`).

    Args:
        stream: A stream, or the name of one.
        over: The setting to search: ``"lr"``, ``"batch_size"``, ``"replay"``, or a numeric setting by dotted key.
        norm, strategy, model, memory, lr, batch_size, replay, settings, tag: As in `sweep`. The list of ``over`` is
            the grid, of at least two values above 0; the default for ``lr`` is 0.003, 0.01, 0.03, 0.1, 0.3. Every
            other list makes separate searches.
        seeds: Number of seeds of each setting, counted from 0, or the seeds.
        extensions: Largest number of values beyond the grid, for each search.
        refine: ``"between"`` the best two neighbors, ``"around"`` the best value (a value on either side), or None.
        score, runs, progress, **options: As in `sweep`.

    Returns:
        The scores of all settings; ``best`` has the best one of each search.

    Raises:
        UserError: If a value is invalid; nothing is run then.
        SweepInterrupted: After Ctrl-C, when the runs are saved. The same call continues.

    Example:
        >>> from contnorm.bench.api.stream import load_stream
        >>> tune(load_stream("split-mnist", source="digits"), norm=["bn", "cn"], lr=[0.1, -1.0])
        Traceback (most recent call last):
        contnorm.errors.UserError: lr=-1,0.1: use numbers above 0, such as 0.01,0.03,0.1.
    """
    arguments = {
        "norm": norm,
        "strategy": strategy,
        "model": model,
        "memory": memory,
        "lr": LEARNING_RATES if lr is None and over in ("lr", "train.lr") and not _sets_lr(settings, options) else lr,
        "batch_size": batch_size,
        "replay": replay,
    }
    grid = SweepGrid.of("tune", arguments, settings, tag, options)
    axis = _searched(over, grid)
    others = grid.combinations(without=axis)
    lower = score is not None and is_lower_better(score)
    searches = [_Search(values, _line_search(axis, grid, extensions, refine, lower)) for values in others]
    session = SweepSession(stream, grid, seeds, True, score, runs, progress, tuned=axis)
    result = session.result
    result.by = ("norm", *(name for name in grid.axes if name not in ("norm", axis)))
    result.rule += _search_rule(axis, extensions, refine)
    while round_ := [(search, value) for search in searches for value in search.line.propose()]:
        trials = grid.trials(session.seeds, [{**search.values, axis: value} for search, value in round_])
        refused = _run_round(session, trials)
        for (search, value), trial in zip(round_, trials, strict=True):
            search.line.record(value, trial.mean if trial.eligible else None)
            if not any(trial is other for other in refused):
                search.trials.append(trial)
    result.trials[:] = [
        trial for search in searches for trial in sorted(search.trials, key=lambda trial: trial.setting[axis])
    ]
    result.notes += [note for search in searches if (note := search.edge_note(axis, extensions))]
    return session.finish()


def _run_round(session: SweepSession, trials: Sequence[Trial]) -> list[Trial]:
    """Run some settings. Those beyond the first grid that can't be run are noted and returned, and end no search.

    For instance, a smaller memory than any of the grid may be too small for the replayed samples of a step.
    """
    is_first = not session.result.trials
    try:
        session.run(trials)
        return []
    except UserCodeError:
        raise
    except UserError:
        if is_first:
            raise
    refused = []
    for trial in trials:
        try:
            session.run([trial])
        except UserError as error:
            refused.append(trial)
            session.result.notes.append(f"{trial.describe()}: can't be run. {error}")
    return refused


class _Search:
    """The search for one combination of the other settings."""

    def __init__(self, values: Mapping[str, Any], line: LineSearch) -> None:
        self.values, self.line = values, line
        self.trials: list[Trial] = []

    def edge_note(self, axis: str, extensions: int) -> str | None:
        """Remark that the best value is still at an edge; None if it is not."""
        best = self.line.best
        if best is None or not self.line.at_edge:
            return None
        label = next(trial for trial in self.trials if trial.setting[axis] == best).describe()
        reason = f" after {extensions} extensions" if extensions and self.line.extended >= extensions else ""
        return f"{label}: is at the edge of the values that were tried{reason}; a value beyond may be better."


def _sets_lr(settings: Mapping[str, Any] | None, options: Mapping[str, Any]) -> bool:
    """Whether the learning rate is given as a setting rather than as an argument."""
    mapping = settings if isinstance(settings, Mapping) else {}
    group = mapping.get("train")
    return "train.lr" in mapping or "train.lr" in options or (isinstance(group, Mapping) and "lr" in group)


def _searched(over: str, grid: SweepGrid) -> str:
    """Return the name of the setting to search, among those of a grid."""
    axis = next((name for name, key in RUN_ARGUMENTS.items() if key == over), over)
    if axis not in grid.axes:
        raise UserError(f"over={over!r}: give at least two values of {axis}, from which the search starts.")
    for value in grid.values[axis]:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UserError(f"over={over!r}: {value!r} is not a number. Only a numeric setting can be searched.")
    return axis


def _line_search(
    axis: str, grid: SweepGrid, extensions: int, refine: Refine | None, lower_is_better: bool
) -> LineSearch:
    key = RUN_ARGUMENTS.get(axis, axis)
    return LineSearch(
        grid.values[axis],
        extensions=extensions,
        refine=refine,
        lower_is_better=lower_is_better,
        shrink=key == "train.lr",
        allowed=lambda value: _is_valid(key, value),
        name=axis,
    )


def _is_valid(key: str, value: float) -> bool:
    """Whether the settings allow a value, such as one beyond the grid."""
    group, _, name = key.partition(".")
    try:
        from_dict({group: {name: value}})
    except UserError:
        return False
    return True


def _search_rule(axis: str, extensions: int, refine: Refine | None) -> str:
    """Return a sentence that says how the grid is continued; empty if it is not."""
    parts = [f"extended while the best value is at an edge, at most {extensions} times"] if extensions else []
    if refine:
        place = "between the best value and its better neighbor" if refine == "between" else "around the best value"
        parts.append(f"refined once {place}")
    return f" The grid of {axis} is {', then '.join(parts)}." if parts else ""
