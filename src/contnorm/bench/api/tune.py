"""`tune`: search for the best value of one setting for each norm, on validation data. It is a sweep in rounds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from contnorm.bench.api.stream import Stream
from contnorm.bench.api.sweep import Sweep, SweepGrid
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
    settings: Mapping[str, Any] | None = None,
    tag: str | None = None,
    seeds: int | Iterable[int] = 3,
    extensions: int = 3,
    refine: Refine | None = "between",
    score: str | None = None,
    **options: Any,
) -> SweepResult:
    """Search for the best value of one setting on validation data, for each norm and each combination of other lists.

    The values of ``over`` are tried first. While the best one is the smallest or the largest tried, the next value
    beyond is tried, at the ratio of the grid. Then a value between the best one and the better of its neighbors is
    tried. The searches of all norms run together. The test samples are never used (see ``validation`` of `sweep`).

    Args:
        stream: A stream, or the name of one.
        over: The setting to search: ``"lr"``, ``"batch_size"``, ``"replay"``, or a numeric setting by dotted key.
        settings, tag: As in `sweep`. The list of ``over`` is the grid, of at least two values above 0; the default for
            ``lr`` is 0.003, 0.01, 0.03, 0.1, 0.3. Every other list makes separate searches.
        seeds: Number of seeds of each setting, counted from 0, or the seeds.
        extensions: Largest number of values beyond the grid, for each search.
        refine: ``"between"`` the best two neighbors, ``"around"`` the best value (a value on either side), or None.
        score, **options: As in `sweep`.

    Returns:
        The scores of all settings; ``best`` has the best one of each search.

    Raises:
        UserError: If a value is invalid; nothing is run then.
        RunInterrupted: After Ctrl-C, when the runs are saved. The same call continues.

    Example:
        >>> from contnorm.bench.api.stream import load_stream
        >>> tune(load_stream("split-mnist", source="digits"), norm=["bn", "cn"], lr=[0.1, -1.0])
        Traceback (most recent call last):
        contnorm.errors.UserError: lr=-1,0.1: use numbers above 0, such as 0.01,0.03,0.1.
    """
    axis = next((name for name, key in RUN_ARGUMENTS.items() if key == over), over)
    grid = SweepGrid.of(settings, tag, options)
    if axis == "lr" and "lr" not in grid.values:
        grid = SweepGrid.of(settings, tag, {**options, "lr": LEARNING_RATES})
    if axis not in grid.axes:
        raise UserError(f"over={over!r}: give at least two values of {axis}, from which the search starts.")
    numbers = [value for value in grid.values[axis] if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(numbers) < len(grid.values[axis]):
        raise UserError(f"over={over!r}: only a numeric setting can be searched.")
    key = RUN_ARGUMENTS.get(axis, axis)

    def is_allowed(value: float) -> bool:
        """Whether the settings allow a value, such as one beyond the grid."""
        group, _, name = key.partition(".")
        try:
            from_dict({group: {name: value}})
        except UserError:
            return False
        return True

    searches = [
        (
            combination,
            LineSearch(
                grid.values[axis],
                extensions=extensions,
                refine=refine,
                lower_is_better=score is not None and score.startswith("fm"),
                shrink=key == "train.lr",
                allowed=is_allowed,
                name=axis,
            ),
            list[Trial](),
        )
        for combination in grid.combinations(without=axis)
    ]
    session = Sweep(stream, grid, seeds, True, score, tuned=axis)
    result = session.result
    result.by = ("norm", *(name for name in grid.axes if name not in ("norm", axis)))
    parts = [f"extended while the best value is at an edge, at most {extensions} times"] if extensions else []
    if refine:
        place = "between the best value and its better neighbor" if refine == "between" else "around the best value"
        parts.append(f"refined once {place}")
    result.rule += f" The grid of {axis} is {', then '.join(parts)}." if parts else ""
    while round_ := [(search, value) for search in searches for value in search[1].propose()]:
        trials = grid.trials(session.seeds, [{**combination, axis: value} for (combination, *_), value in round_])
        refused = _run(session, trials)
        for ((_, line, of_search), value), trial in zip(round_, trials, strict=True):
            line.record(value, trial.mean if trial.eligible else None)
            if all(trial is not other for other in refused):
                of_search.append(trial)
    result.trials[:] = [
        trial for _, _, of_search in searches for trial in sorted(of_search, key=lambda trial: trial.setting[axis])
    ]
    for _, line, of_search in searches:
        if line.at_edge:
            label = next(trial for trial in of_search if trial.setting[axis] == line.best).describe()
            reason = f" after {extensions} extensions" if extensions and line.extended >= extensions else ""
            note = f"is at the edge of the values that were tried{reason}; a value beyond may be better."
            result.notes.append(f"{label}: {note}")
    return session.finish()


def _run(session: Sweep, trials: Sequence[Trial]) -> list[Trial]:
    """Run settings. Those beyond the first grid that can't be run are noted and returned, and end no search.

    For instance, a smaller memory than any of the grid may be too small for the replayed samples of a step.
    """
    is_first, refused = not session.result.trials, list[Trial]()
    try:
        session.run(trials)
    except UserError as error:
        if is_first or isinstance(error, UserCodeError):
            raise
        for trial in trials:
            try:
                session.run([trial])
            except UserError as reason:
                refused.append(trial)
                session.result.notes.append(f"{trial.describe()}: can't be run. {reason}")
    return refused
