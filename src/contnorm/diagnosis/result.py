"""Result of a diagnosis: numbers, tables, sentences and a figure. It does not import torch.

Distances between moments are L1 norms over channels. A scaled distance makes layers comparable: the distance of means
is divided by the sum over channels of sqrt(oracle variance + eps), and that of variances by the sum of oracle variance
+ eps. A scaled distance of 0.5 means that channel means differ by half a standard deviation, or variances by half of
their value, on average over the layer; channels with small variance have little weight.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from contnorm.bench.escape import escape_terminal
from contnorm.diagnosis.figure import diagnosis_figure, draw_diagnosis

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Bounds", "Diagnosis", "Distance", "LayerDistances", "gain", "mean_diagnosis", "pair_sentence"]

MIN_POINTS = 0.05  # points; smaller values are printed as 0.0
MIN_DRIFT = 0.005  # scaled distance; smaller values are printed as 0.00
WIDTH = 80  # default width of a terminal

Bounds = tuple[float, float]  # ends of an interval


@dataclass(frozen=True)
class Distance:
    """Distances between two sets of moments of a layer: L1 over channels, and scaled by the spread of the layer."""

    mean: float
    var: float
    mean_scaled: float
    var_scaled: float


@dataclass(frozen=True)
class LayerDistances:
    """Pairwise distances between the running, per-task and oracle (all tasks) moments of a layer.

    Attributes:
        layer: Name of the layer in the model.
        running_oracle: Between running and oracle moments.
        task_running: Between each task's moments and the running ones; None if a task does not use the layer.
        task_oracle: Between each task's moments and the oracle's; None if a task does not use the layer.
    """

    layer: str
    running_oracle: Distance
    task_running: tuple[Distance | None, ...]
    task_oracle: tuple[Distance | None, ...]


@dataclass(frozen=True)
class Diagnosis:
    """Result of `contnorm.diagnose`; ``str()`` returns the tables and the sentence for a terminal.

    Attributes:
        model: Class name of the model.
        tasks: Names of the tasks.
        layers: Distances of each layer; empty if the model has no running moments.
        running: Accuracy on each task with the running moments, in percent.
        oracle: Accuracy with the exact moments of all tasks' data.
        own: Accuracy with the exact moments of the task's own data.
        learned: Accuracy right after the task was learned; None if unknown.
        held_out: Whether accuracy was measured on other data than the moments.
        seeds: Seeds over which all numbers are means; empty for a single model.
        recovered_interval: 95 % interval of `recovered` over the seeds; None for fewer than two seeds.
        last_task_interval: 95 % interval of `last_task_change` over the seeds; None for fewer than two seeds.

    Example:
        >>> diagnosis = Diagnosis("Net", ("0", "1"), (), (60.0, 90.0), (60.0, 90.0), (60.0, 90.0), (95.0, 90.0), True)
        >>> diagnosis.forgotten, diagnosis.recovered
        (35.0, 0.0)
    """

    model: str
    tasks: tuple[str, ...]
    layers: tuple[LayerDistances, ...]
    running: tuple[float, ...]
    oracle: tuple[float, ...]
    own: tuple[float, ...]
    learned: tuple[float, ...] | None = None
    held_out: bool = False
    seeds: tuple[int, ...] = ()
    recovered_interval: Bounds | None = None
    last_task_interval: Bounds | None = None

    @property
    def last_task_change(self) -> float:
        """Accuracy points that the last task gains with the oracle's moments; negative if it loses."""
        return self.oracle[-1] - self.running[-1]

    @property
    def forgotten(self) -> float | None:
        """Accuracy points lost since a task was learned, averaged over all tasks but the last; None if unknown."""
        return None if self.learned is None else self._mean_gap(self.learned, self.running)

    @property
    def recovered(self) -> float:
        """Accuracy points gained with the oracle's moments.

        The average is over all tasks but the last if `learned` is known, as for `forgotten`; otherwise over all tasks.
        """
        return self._mean_gap(self.oracle, self.running)

    @property
    def share(self) -> float | None:
        """Recovered share of the forgotten points; None if nothing was forgotten or forgetting is unknown."""
        forgotten = self.forgotten
        return None if forgotten is None or forgotten < MIN_POINTS else self.recovered / forgotten

    def _mean_gap(self, high: Sequence[float], low: Sequence[float]) -> float:
        gaps = [a - b for a, b in zip(high, low, strict=True)]
        # The last task can't be forgotten yet, so it counts only if forgetting is unknown.
        return fmean(gaps[:-1] if self.learned is not None and len(gaps) > 1 else gaps)

    @property
    def sentence(self) -> str:
        """One-sentence summary."""
        if not self.layers:
            return (
                f"{self.model} has no norm layer with running moments that could be re-estimated: none of what it "
                f"forgets comes back that way, and the last task does not change."
            )
        data = "" if self.held_out else " (Accuracy is that on the data the moments were estimated from.)"
        over = f" over {len(self.seeds)} seeds" if self.seeds else ""
        effect = f"Re-estimated moments {self._effect()}{_interval(self.recovered_interval, over)}"
        return f"{'; '.join([effect, self._last_task(), self._most_drifted()])}.{data}"

    def _effect(self) -> str:
        forgotten, recovered = self.forgotten, self.recovered
        if forgotten is None:
            return gain(recovered) + f" (from {fmean(self.running):.1f} to {fmean(self.oracle):.1f} percent)"
        if forgotten < MIN_POINTS:
            return f"{gain(recovered)}, and nothing was forgotten"
        if recovered >= forgotten + MIN_POINTS:
            return f"bring {recovered:.1f} points, more than the {forgotten:.1f} forgotten"
        if recovered >= MIN_POINTS:
            return f"recover {recovered:.1f} of the {forgotten:.1f} points forgotten"
        cost = f", and cost {-recovered:.1f} more" if recovered <= -MIN_POINTS else ""
        return f"recover none of the {forgotten:.1f} points forgotten{cost}"

    def _last_task(self) -> str:
        """Change of the last task, which `recovered` does not include if `learned` is known."""
        change, interval = self.last_task_change, _interval(self.last_task_interval)
        if abs(change) < MIN_POINTS:
            return f"the last task does not change{interval}"
        return f"the last task {'gains' if change > 0 else 'loses'} {abs(change):.1f} points{interval}"

    def _most_drifted(self) -> str:
        drifts = [
            (drift, layer.layer, what)
            for layer in self.layers
            for what, drift in (
                ("mean", layer.running_oracle.mean_scaled),
                ("variance", layer.running_oracle.var_scaled),
            )
        ]
        drift, name, what = max(drifts, key=lambda entry: entry[0])
        if drift < MIN_DRIFT:
            return "no layer's moments have drifted"
        return f"{f'layer {name}' if name else 'the model itself'}'s {what} has drifted most"

    def table(self) -> str:
        """Table of accuracies by task, and of distances by layer (two rows each; per-task distances are averaged)."""
        over = f", mean over {len(self.seeds)} seeds" if len(self.seeds) > 1 else ""
        parts = [f"accuracy in percent, by the moments used{over}\n{self._accuracies()}"]
        if self.layers:
            heading = "L1 distances of moments (scaled by the layer's spread); of tasks, the mean"
            parts.append(f"{heading}\n{self._distances()}")
        return "\n\n".join(parts)

    def _accuracies(self) -> str:
        columns = {"learned": self.learned, "running": self.running}
        if self.layers:
            columns |= {"oracle": self.oracle, "task's own": self.own}
        known = {head: values for head, values in columns.items() if values is not None}
        rows = [[task, *(f"{v[i]:.1f}" for v in known.values())] for i, task in enumerate(self.tasks)]
        rows.append(["mean", *(f"{fmean(v):.1f}" for v in known.values())])
        return _aligned([["task", *known], *rows])

    def _distances(self) -> str:
        pairs = {"running-oracle": _running_oracle, "task-running": _task_running, "task-oracle": _task_oracle}
        rows = []
        for layer in self.layers:
            for name, what in ((layer.layer or "(the model)", "mean"), ("", "var")):
                rows.append([name, what, *(_cell(pick(layer), what) for pick in pairs.values())])
        return _aligned([["layer", "", *pairs], *rows])

    def as_dict(self) -> dict[str, Any]:
        """Convert to plain numbers, strings, lists and dicts for JSON."""
        summary = {
            "forgotten": self.forgotten,
            "recovered": self.recovered,
            "share": self.share,
            "last_task_change": self.last_task_change,
        }
        return {**asdict(self), **summary, "sentence": self.sentence}

    def compare_with(self, other: Diagnosis, name: str = "this model", other_name: str = "the other") -> str:
        """Compare with another model that differs only in its norm, in one sentence.

        Example:
            >>> def make_diagnosis(*running):
            ...     return Diagnosis("Net", ("0", "1"), (), running, (80.0, 90.0), running)
            >>> make_diagnosis(76.0, 90.0).compare_with(make_diagnosis(80.0, 90.0), "bn", "cn")
            'With cn re-estimated moments recover 0.0 points of accuracy, with bn 2.0: 2.0 less.'
        """
        return pair_sentence([(self, other)], name, other_name)

    def draw(self, path: str | Path) -> None:
        """Plot accuracies and distances to a file; its suffix sets the format. Requires matplotlib."""
        draw_diagnosis(self.as_dict(), path)

    def plot(self) -> Figure:
        """Return the figure that `draw` writes, for a notebook. Requires matplotlib."""
        return diagnosis_figure(self.as_dict())

    def __str__(self) -> str:
        return f"{self.table()}\n\n{textwrap.fill(self.sentence, WIDTH, break_on_hyphens=False)}"

    __repr__ = __str__


def mean_diagnosis(by_seed: Mapping[int, Diagnosis], interval: Callable[[Sequence[float]], Bounds | None]) -> Diagnosis:
    """Average the diagnoses of several seeds of one run.

    Args:
        by_seed: Diagnoses of networks that differ only in their seed.
        interval: Function that returns the 95 % interval of a mean, or None for too few values.

    Raises:
        ValueError: If the seeds have different tasks or layers.

    Example:
        >>> by_seed = {
        ...     seed: Diagnosis("Net", ("0", "1"), (), (60.0, 90.0), (oracle, 88.0), (60.0, 90.0), (95.0, 90.0), True)
        ...     for seed, oracle in enumerate((70.0, 80.0))
        ... }
        >>> mean = mean_diagnosis(by_seed, interval=lambda values: (min(values), max(values)))
        >>> mean.recovered, mean.recovered_interval, mean.last_task_change
        (15.0, (10.0, 20.0), -2.0)
    """
    several = list(by_seed.values())
    first = several[0]
    for other in several:
        _check(first, other)
        if [layer.layer for layer in other.layers] != [layer.layer for layer in first.layers]:
            raise ValueError("cannot average diagnoses of networks with different norm layers.")
    learned = None if first.learned is None else _mean_by_task([d.learned for d in several if d.learned is not None])
    return Diagnosis(
        first.model,
        first.tasks,
        tuple(_mean_layer(layers) for layers in zip(*(d.layers for d in several), strict=True)),
        _mean_by_task([d.running for d in several]),
        _mean_by_task([d.oracle for d in several]),
        _mean_by_task([d.own for d in several]),
        learned,
        all(d.held_out for d in several),
        tuple(by_seed),
        interval([d.recovered for d in several]),
        interval([d.last_task_change for d in several]),
    )


def _mean_by_task(accuracies: Sequence[Sequence[float]]) -> tuple[float, ...]:
    return tuple(fmean(values) for values in zip(*accuracies, strict=True))


def _mean_layer(layers: Sequence[LayerDistances]) -> LayerDistances:
    return LayerDistances(
        layers[0].layer,
        _mean_distance([layer.running_oracle for layer in layers]),
        tuple(_mean_of_known(tasks) for tasks in zip(*(layer.task_running for layer in layers), strict=True)),
        tuple(_mean_of_known(tasks) for tasks in zip(*(layer.task_oracle for layer in layers), strict=True)),
    )


def _mean_of_known(distances: Sequence[Distance | None]) -> Distance | None:
    known = [distance for distance in distances if distance is not None]
    return _mean_distance(known) if known else None


def _mean_distance(distances: Sequence[Distance]) -> Distance:
    return Distance(*(fmean(getattr(d, name) for d in distances) for name in Distance.__dataclass_fields__))


def _interval(bounds: Bounds | None, over: str = "") -> str:
    """Text of an interval in brackets; empty if there is none.

    Example:
        >>> _interval((1.0, 4.25), " over 3 seeds"), _interval(None)
        (' (95 % interval +1.0 to +4.2 over 3 seeds)', '')
    """
    return "" if bounds is None else f" (95 % interval {bounds[0]:+.1f} to {bounds[1]:+.1f}{over})"


Pick = Callable[[LayerDistances], Sequence[Distance | None]]


def _running_oracle(layer: LayerDistances) -> Sequence[Distance | None]:
    return (layer.running_oracle,)


def _task_running(layer: LayerDistances) -> Sequence[Distance | None]:
    return layer.task_running


def _task_oracle(layer: LayerDistances) -> Sequence[Distance | None]:
    return layer.task_oracle


def _cell(distances: Sequence[Distance | None], what: str) -> str:
    known = [distance for distance in distances if distance is not None]
    plain, scaled = (fmean(getattr(d, name) for d in known) for name in (what, f"{what}_scaled"))
    return f"{plain:.3g} ({scaled:.2f})"


def _aligned(cells: Sequence[Sequence[str]]) -> str:
    rows = [[escape_terminal(cell) for cell in row] for row in cells]  # names of tasks and layers come from the user
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))).rstrip()
        for row in rows
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def pair_sentence(
    pairs: Sequence[tuple[Diagnosis, Diagnosis]],
    first_name: str,
    second_name: str,
    interval: Callable[[Sequence[float]], object] | None = None,
) -> str:
    """Describe how much less is recovered in the second network than in the first.

    Args:
        pairs: Diagnoses of two networks on the same tasks, one pair per seed.
        first_name: Name of the first network.
        second_name: Name of the second network.
        interval: Function that returns the 95 % interval of the mean of differences, or None for too few of them.

    Example:
        >>> def make_diagnosis(running, oracle):
        ...     exact, learned = (oracle, 90.0), (95.0, 90.0)
        ...     return Diagnosis("Net", ("0", "1"), (), (running, 90.0), exact, exact, learned, held_out=True)
        >>> pair_sentence([(make_diagnosis(75.0, 78.0), make_diagnosis(83.0, 83.5))], "bn", "cn32")
        'With cn32 re-estimated moments recover 0.5 of the 12.0 points forgotten, with bn 3.0 of 20.0: 2.5 less.'
    """
    for first, second in pairs:
        _check(first, second)
    firsts, seconds = ([pair[side] for pair in pairs] for side in (0, 1))
    unforgotten = [_unforgotten(diagnoses) for diagnoses in (firsts, seconds)]
    if any(unforgotten) and not all(unforgotten):
        named = ((first_name, firsts), (second_name, seconds))
        return (
            f"{_one_forgot_nothing(*sorted(named, key=lambda entry: not _unforgotten(entry[1])))}{_over(len(pairs))}."
        )
    less = [first.recovered - second.recovered for first, second in pairs]
    unit = " points of accuracy" if all(unforgotten) or _forgotten(firsts) is None else " points forgotten"
    text = (
        f"Nothing was forgotten, neither with {second_name} nor with {first_name}; with" if all(unforgotten) else "With"
    )
    text += f" {second_name} re-estimated moments recover {_recovered(seconds, unit)}, with {first_name} "
    text += f"{_recovered(firsts, unit, again=True)}: {_difference(fmean(less))}{_over(len(pairs))}"
    bounds = interval(less) if interval is not None else None
    return f"{text}." if bounds is None else f"{text}; the 95 % interval of the difference is {bounds}."


def gain(points: float) -> str:
    """Describe the effect of re-estimated moments on accuracy.

    Example:
        >>> gain(2.0), gain(-1.5), gain(0.01)
        ('recover 2.0 points of accuracy', 'cost 1.5 points of accuracy', 'leave the accuracy as it is')
    """
    if abs(points) < MIN_POINTS:
        return "leave the accuracy as it is"
    return f"recover {points:.1f} points of accuracy" if points > 0 else f"cost {-points:.1f} points of accuracy"


def _one_forgot_nothing(unforgotten: tuple[str, Sequence[Diagnosis]], other: tuple[str, Sequence[Diagnosis]]) -> str:
    """Sentence for one network that forgot nothing, for which no recovered share is defined."""
    effect = gain(fmean(diagnosis.recovered for diagnosis in unforgotten[1]))
    recovered = _recovered(other[1], " points forgotten")
    return (
        f"With {unforgotten[0]} nothing was forgotten, and re-estimated moments {effect}; with {other[0]} "
        f"they recover {recovered}"
    )


def _over(seeds: int) -> str:
    return "" if seeds == 1 else f", over {seeds} seeds"


def _check(first: Diagnosis, second: Diagnosis) -> None:
    if first.tasks != second.tasks:
        raise ValueError(
            f"cannot compare diagnoses of different tasks: {', '.join(first.tasks)} and {', '.join(second.tasks)}. "
            f"Diagnose both models on the same tasks."
        )
    if (first.learned is None) != (second.learned is None):
        raise ValueError(
            "cannot compare diagnoses if forgetting is known for only one of them. Give learned= for both, or none."
        )


def _unforgotten(diagnoses: Sequence[Diagnosis]) -> bool:
    forgotten = _forgotten(diagnoses)
    return forgotten is not None and forgotten < MIN_POINTS


def _forgotten(diagnoses: Sequence[Diagnosis]) -> float | None:
    """Mean of the forgotten points; None if unknown."""
    known = [diagnosis.forgotten for diagnosis in diagnoses if diagnosis.forgotten is not None]
    return fmean(known) if known else None


def _recovered(diagnoses: Sequence[Diagnosis], unit: str, again: bool = False) -> str:
    """Recovered points, or recovered of forgotten points; ``again`` omits the unit, which was stated before."""
    points = fmean(diagnosis.recovered for diagnosis in diagnoses)
    if unit != " points forgotten":
        return f"{points:.1f}{'' if again else unit}"
    return f"{points:.1f} of {'' if again else 'the '}{_forgotten(diagnoses):.1f}{'' if again else unit}"


def _difference(less: float) -> str:
    if abs(less) < MIN_POINTS:
        return "as much"
    return f"{abs(less):.1f} {'less' if less > 0 else 'more'}"
