"""The result of a sweep: the scores of each setting, and the best setting of each norm."""

from __future__ import annotations

import base64
import html
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from contnorm.bench.api.result import Result
from contnorm.bench.config.schema import RunConfig
from contnorm.bench.config.sources import format_value
from contnorm.bench.figures import Point, sweep_figure
from contnorm.bench.grid import best_candidate
from contnorm.bench.records import spread_over_seeds

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

__all__ = ["SweepResult", "Trial"]


@dataclass
class Trial:
    """One setting of a sweep, with the scores of its seeds so far.

    Attributes:
        setting: Value of each setting that the sweep varies, and of the norm, as it is shown; by name.
        arguments: Arguments of `bench.run` that repeat it.
        seeds: The seeds that it is run with.
        config: The resolved settings; None until the sweep starts.
        scores: Score of each finished seed.
        diverged: Reason of each diverged seed.
        result: Result of the finished seeds; None if there is none.

    Example:
        >>> trial = Trial({"norm": "cn", "lr": 0.03}, {"norm": "cn", "lr": 0.03}, (0, 1, 2), scores={0: 61.0, 1: 63.0})
        >>> trial.mean, trial.unfinished
        (62.0, 1)
    """

    setting: Mapping[str, Any]
    arguments: Mapping[str, Any]
    seeds: tuple[int, ...]
    config: RunConfig | None = None
    scores: dict[int, float] = field(default_factory=dict)
    diverged: dict[int, str] = field(default_factory=dict)
    result: Result | None = field(default=None, repr=False)

    @property
    def mean(self) -> float:
        """Mean score over the finished seeds; NaN if there is none."""
        return spread_over_seeds(list(self.scores.values()))[0] if self.scores else math.nan

    @property
    def std(self) -> float:
        """Standard deviation over the finished seeds; NaN for fewer than two."""
        return spread_over_seeds(list(self.scores.values()))[1] if self.scores else math.nan

    @property
    def unfinished(self) -> int:
        """Number of seeds that neither finished nor diverged."""
        return len(self.seeds) - len(self.scores) - len(self.diverged)

    @property
    def eligible(self) -> bool:
        """Whether it can be chosen: all seeds finished, and none diverged."""
        return len(self.scores) == len(self.seeds)

    def describe(self) -> str:
        """Return the settings in one line.

        Example:
            >>> Trial({"norm": "bn", "lr": 0.03, "train.batch": 5}, {}, (0,)).describe()
            'bn lr=0.03 train.batch=5'
        """
        rest = [f"{name}={format_value(value)}" for name, value in self.setting.items() if name != "norm"]
        return " ".join([str(self.setting["norm"]), *rest])

    def spread(self) -> str:
        """Return mean and standard deviation as text; ``"-"`` if no seed finished."""
        if not self.scores:
            return "-"
        return f"{self.mean:.2f}" + ("" if math.isnan(self.std) else f" ± {self.std:.2f}")


@dataclass(repr=False)
class SweepResult:
    """Result of `bench.sweep` and `bench.tune`.

    Attributes:
        trials: The settings in the order of the grid, each a `Trial`.
        axes: Names of the settings that vary.
        stream: Name of the stream.
        score: Name of the score that settings are chosen by.
        seeds: The seeds of each setting.
        chosen_on: The samples that settings are chosen on: ``"test samples"``, validation tasks, or held-out samples.
        rule: The rule by which settings are chosen, in words.
        by: Names of the settings for each combination of which one setting is chosen.
        warning: Why scores of the chosen settings are biased; None if they were chosen on validation samples.
        notes: Remarks, such as that a best value is at an edge of the grid.
        tuned: Name of the setting that `bench.tune` searched; None for a sweep.
        lower_is_better: Whether the lowest score is the best.

    Example:
        >>> low = Trial({"norm": "bn", "lr": 0.01}, {}, (0,), scores={0: 61.0})
        >>> high = Trial({"norm": "bn", "lr": 0.1}, {}, (0,), scores={0: 70.0})
        >>> result = SweepResult([low, high], ("norm", "lr"), "split-mnist", "acc", (0,), "test samples", "highest acc")
        >>> result.best["bn"].setting["lr"], result.best["bn"].mean
        (0.1, 70.0)
    """

    trials: list[Trial]
    axes: tuple[str, ...]
    stream: str
    score: str
    seeds: tuple[int, ...]
    chosen_on: str
    rule: str
    by: tuple[str, ...] = ("norm",)
    warning: str | None = None
    notes: list[str] = field(default_factory=list)
    tuned: str | None = None
    lower_is_better: bool = False

    @property
    def results(self) -> list[Result | None]:
        """The `Result` of each setting, in the order of `trials`; None if no seed finished."""
        return [trial.result for trial in self.trials]

    @property
    def complete(self) -> bool:
        """Whether every seed of every setting finished or diverged."""
        return all(trial.unfinished == 0 for trial in self.trials)

    @property
    def groups(self) -> dict[Any, list[Trial]]:
        """The settings among which one is chosen: by norm, or by the tuple of the values of `by`."""
        groups: dict[Any, list[Trial]] = {}
        for trial in self.trials:
            values = tuple(trial.setting[name] for name in self.by)
            groups.setdefault(values[0] if len(values) == 1 else values, []).append(trial)
        return groups

    @property
    def best(self) -> dict[Any, Trial]:
        """The chosen setting of each norm (see `by`).

        A norm is missing while it has unfinished settings, and if every setting has a diverged seed.
        """
        chosen = {}
        for name, trials in self.groups.items():
            if any(trial.unfinished for trial in trials):
                continue
            best = best_candidate(trials, self._tie_order, self.lower_is_better)
            if best is not None:
                chosen[name] = best
        return chosen

    def _tie_order(self, trial: Trial) -> float:
        """On ties, the smallest value of the tuned setting or the learning rate is chosen; then the first setting."""
        value = trial.setting.get(self.tuned or "lr")
        return float(value) if isinstance(value, int | float) else 0.0

    def choice_notes(self) -> list[str]:
        """Return remarks on the choice: ties, and norms for which nothing is chosen."""
        notes = []
        best = self.best
        for name, trials in self.groups.items():
            label = " ".join(map(str, name)) if isinstance(name, tuple) else str(name)
            missing = sum(trial.unfinished for trial in trials)
            if missing:
                runs = "1 run is" if missing == 1 else f"{missing} runs are"
                notes.append(f"{label}: {runs} missing, so nothing is chosen yet.")
            elif name not in best:
                notes.append(f"{label}: every setting has a diverged seed, so none is chosen.")
            else:
                ties = [t for t in trials if t.eligible and t is not best[name] and t.mean == best[name].mean]
                if ties:
                    others = ", ".join(trial.describe() for trial in ties)
                    notes.append(f"{others} did as well as the chosen {best[name].describe()}.")
                elif self._is_at_edge(best[name], trials):
                    notes.append(f"{label}: lr={best[name].setting['lr']:g} is at the edge of the grid; extend it.")
        return notes

    def _is_at_edge(self, best: Trial, trials: list[Trial]) -> bool:
        """Whether the chosen learning rate of a sweep is the smallest or the largest; `tune` notes it itself."""
        rates = {trial.setting["lr"] for trial in trials} if "lr" in self.axes and self.tuned is None else set()
        return len(rates) > 1 and best.setting["lr"] in (min(rates), max(rates))

    def to_frame(self) -> pd.DataFrame:
        """Return a pandas data frame with one row per setting.

        Columns: the settings that vary, ``mean`` and ``std`` of the score, ``seeds`` (finished), ``diverged``,
        ``unfinished``, ``best`` (whether it is chosen) and ``hash`` (of the resolved settings).
        """
        import pandas  # only where a table is made

        return pandas.DataFrame(self._rows())

    def _rows(self) -> list[dict[str, Any]]:
        chosen = self._chosen()
        return [self._row(trial, id(trial) in chosen) for trial in self.trials]

    def _chosen(self) -> set[int]:
        """Identities of the chosen trials."""
        return {id(trial) for trial in self.best.values()}

    def _row(self, trial: Trial, is_best: bool) -> dict[str, Any]:
        return {
            **trial.setting,
            "mean": trial.mean,
            "std": trial.std,
            "seeds": len(trial.scores),
            "diverged": len(trial.diverged),
            "unfinished": trial.unfinished,
            "best": is_best,
            "hash": None if trial.config is None else trial.config.hash,
        }

    def to_dict(self) -> dict[str, Any]:
        """Return everything as values that JSON can represent; numbers that are not finite become None."""
        rows = []
        for trial, row in zip(self.trials, self._rows(), strict=True):
            scores = {str(seed): value for seed, value in sorted(trial.scores.items())}
            rows.append({**_without_nan(row), "scores": _without_nan(scores)})
        best, groups = [], self.groups
        for name, trial in self.best.items():
            group = groups[name]
            tried = {"settings_tried": len(group), "runs": sum(len(t.scores) + len(t.diverged) for t in group)}
            best.append({**trial.setting, **_without_nan({"mean": trial.mean, "std": trial.std}), **tried})
        return {
            "stream": self.stream,
            "score": self.score,
            "seeds": list(self.seeds),
            "chosen_on": self.chosen_on,
            "rule": self.rule,
            "warning": self.warning,
            "notes": [*self.notes, *self.choice_notes()],
            "settings": rows,
            "best": best,
        }

    def plot(self) -> Figure:
        """Return a matplotlib figure: the mean score over a numeric setting, one curve per norm; the best is circled.

        The axis is the learning rate if it varies, otherwise the setting that was tuned or another numeric one.
        Settings with a diverged or missing seed are crosses.
        """
        axis, chosen = self._figure_axis(), self._chosen()
        points = []
        for trial in self.trials:
            others = {name: value for name, value in trial.setting.items() if name != axis}
            curve = (
                Trial(others, {}, ()).describe() if "norm" in others else ", ".join(map(format_value, others.values()))
            )
            value = trial.setting[axis]
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            x = float(value) if is_number else format_value(value)
            points.append(Point(curve or self.score, x, trial.mean, trial.std, trial.eligible, id(trial) in chosen))
        seeds = f"{len(self.seeds)} seed{'s' if len(self.seeds) > 1 else ''}"
        title = f"{self.stream}, {self.chosen_on}\nmean ± standard deviation over {seeds}"
        return sweep_figure(points, axis, f"{self.score} (percent)", title)

    def _figure_axis(self) -> str:
        """Name of the setting on the axis of the figure."""
        candidates = [self.tuned, "lr", *self.axes]
        for name in candidates:
            values = {trial.setting[name] for trial in self.trials} if name in self.axes else set()
            if len(values) > 1 and all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
                return str(name)
        return next((name for name in self.axes if name != "norm"), "norm")

    def __repr__(self) -> str:
        parts = [f"{trial.describe()}: {trial.spread()}" for trial in self.best.values()]
        best = f"; best {self.score}, chosen on {self.chosen_on}: {', '.join(parts)}" if parts else ""
        missing = sum(trial.unfinished for trial in self.trials)
        unfinished = f", {missing} runs missing" if missing else ""
        return f"SweepResult({self.stream}, {len(self.trials)} settings, {len(self.seeds)} seeds{unfinished}{best})"

    def _repr_html_(self) -> str:
        """Show the settings as a table with the best ones in bold, the warning, and the figure."""
        head = "".join(f"<th>{html.escape(name)}</th>" for name in (*self.trials[0].setting, self.score, "seeds"))
        rows, chosen = [], self._chosen()
        for trial in self.trials:
            done = f"{len(trial.scores)} of {len(trial.seeds)}"
            done += f", {len(trial.diverged)} diverged" if trial.diverged else ""
            cells = [*map(format_value, trial.setting.values()), trial.spread(), done]
            tag = "th" if id(trial) in chosen else "td"
            rows.append("<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>")
        lines = [f"Rule: {self.rule}", *([self.warning] if self.warning else []), *self.notes, *self.choice_notes()]
        text = "".join(f"<p>{html.escape(line)}</p>" for line in lines)
        image = io.BytesIO()
        self.plot().savefig(image, format="png", dpi=90, bbox_inches="tight")
        encoded = base64.b64encode(image.getvalue()).decode()
        table = f"<table><tr>{head}</tr>{''.join(rows)}</table>"
        return f'{table}{text}<img alt="score by setting" src="data:image/png;base64,{encoded}">'


def _without_nan(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace numbers that are not finite, which JSON can't represent, by None."""
    return {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in values.items()}
