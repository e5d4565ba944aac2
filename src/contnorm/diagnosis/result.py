"""Result of a diagnosis: numbers, tables and sentences. It does not import torch.

Distances between moments are L1 norms over channels. A scaled distance makes layers comparable: the distance of means
is divided by the sum over channels of sqrt(oracle variance + eps), and that of variances by the sum of oracle variance
+ eps. A scaled distance of 0.5 means that channel means differ by half a standard deviation, or variances by half of
their value, on average over the layer; channels with small variance have little weight.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from contnorm.diagnosis.figure import diagnosis_figure, draw_diagnosis

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Bounds", "Diagnosis", "Distance", "LayerDistances", "mean_diagnosis", "pair_sentence"]

MIN_POINTS = 0.05  # points; smaller values are printed as 0.0
MIN_DRIFT = 0.005  # scaled distance; smaller values are printed as 0.00
WIDTH = 80  # default width of a terminal

Bounds = tuple[float, float]  # ends of an interval
Interval = Callable[[Sequence[float]], Bounds | None]  # the 95 % interval of a mean; None for too few values


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
        change = self.last_task_change
        last = f"{'gains' if change > 0 else 'loses'} {abs(change):.1f} points"
        last = f"the last task {'does not change' if abs(change) < MIN_POINTS else last}"
        return f"{effect}; {last}{_interval(self.last_task_interval)}; {self._most_drifted()}.{data}"

    def _effect(self) -> str:
        forgotten, recovered = self.forgotten, self.recovered
        if forgotten is None:
            return f"{_gain(recovered)} (from {fmean(self.running):.1f} to {fmean(self.oracle):.1f} percent)"
        if forgotten < MIN_POINTS:
            return f"{_gain(recovered)}, and nothing was forgotten"
        if recovered >= forgotten + MIN_POINTS:
            return f"bring {recovered:.1f} points, more than the {forgotten:.1f} forgotten"
        if recovered >= MIN_POINTS:
            return f"recover {recovered:.1f} of the {forgotten:.1f} points forgotten"
        cost = f", and cost {-recovered:.1f} more" if recovered <= -MIN_POINTS else ""
        return f"recover none of the {forgotten:.1f} points forgotten{cost}"

    def _most_drifted(self) -> str:
        means = [(layer.running_oracle.mean_scaled, layer.layer, "mean") for layer in self.layers]
        variances = [(layer.running_oracle.var_scaled, layer.layer, "variance") for layer in self.layers]
        drift, name, what = max(means + variances, key=lambda entry: entry[0])
        if drift < MIN_DRIFT:
            return "no layer's moments have drifted"
        return f"{f'layer {name}' if name else 'the model itself'}'s {what} has drifted most"

    def table(self) -> str:
        """Table of accuracies by task, and of distances by layer (two rows each; per-task distances are averaged)."""
        columns = {"learned": self.learned, "running": self.running}
        if self.layers:
            columns |= {"oracle": self.oracle, "task's own": self.own}
        known = {head: values for head, values in columns.items() if values is not None}
        rows = [["task", *known]]
        rows += [[task, *(f"{values[i]:.1f}" for values in known.values())] for i, task in enumerate(self.tasks)]
        rows.append(["mean", *(f"{fmean(values):.1f}" for values in known.values())])
        over = f", mean over {len(self.seeds)} seeds" if len(self.seeds) > 1 else ""
        text = f"accuracy in percent, by the moments used{over}\n{_aligned(rows)}"
        if not self.layers:
            return text
        rows = [["layer", "", "running-oracle", "task-running", "task-oracle"]]
        for layer in self.layers:
            pairs = ((layer.running_oracle,), layer.task_running, layer.task_oracle)
            rows.append([layer.layer or "(the model)", "mean", *(_cell(pair, "mean") for pair in pairs)])
            rows.append(["", "var", *(_cell(pair, "var") for pair in pairs)])
        heading = "L1 distances of moments (scaled by the layer's spread); of tasks, the mean"
        return f"{text}\n\n{heading}\n{_aligned(rows)}"

    def as_dict(self) -> dict[str, Any]:
        """Convert to plain numbers, strings, lists and dicts for JSON."""
        names = ("forgotten", "recovered", "share", "last_task_change", "sentence")
        return {**asdict(self), **{name: getattr(self, name) for name in names}}

    def compare_with(self, other: Diagnosis, name: str = "this model", other_name: str = "the other") -> str:
        """Compare with another model that differs only in its norm, in one sentence.

        Example:
            >>> def make_diagnosis(*running):
            ...     return Diagnosis("Net", ("0", "1"), (), running, (80.0, 90.0), running)
            >>> make_diagnosis(76.0, 90.0).compare_with(make_diagnosis(80.0, 90.0), "bn", "cn")
            'Re-estimated moments recover 0.0 points of accuracy with cn and 2.0 with bn: 2.0 less.'
        """
        return pair_sentence([(self, other)], name, other_name)

    def draw(self, path: str | Path) -> None:
        """Plot accuracies and distances to a file; its suffix sets the format. Requires matplotlib."""
        draw_diagnosis(self, path)

    def plot(self) -> Figure:
        """Return the figure that `draw` writes, for a notebook. Requires matplotlib."""
        return diagnosis_figure(self)

    def __str__(self) -> str:
        return f"{self.table()}\n\n{textwrap.fill(self.sentence, WIDTH, break_on_hyphens=False)}"

    __repr__ = __str__


def mean_diagnosis(by_seed: Mapping[int, Diagnosis], interval: Interval) -> Diagnosis:
    """Average the diagnoses of several seeds of one run.

    Args:
        by_seed: Diagnoses of networks that differ only in their seed.
        interval: Function that returns the 95 % interval of a mean, or None for too few values.

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
    layers = []
    for same in zip(*(diagnosis.layers for diagnosis in several), strict=True):
        by_task = [
            tuple(map(_mean_distance, zip(*(getattr(layer, name) for layer in same), strict=True)))
            for name in ("task_running", "task_oracle")
        ]
        overall = _mean_distance([layer.running_oracle for layer in same])
        assert overall is not None
        layers.append(LayerDistances(same[0].layer, overall, *by_task))
    learned = None if first.learned is None else _mean_by_task([d.learned for d in several if d.learned is not None])
    return Diagnosis(
        first.model,
        first.tasks,
        tuple(layers),
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


def _mean_distance(distances: Sequence[Distance | None]) -> Distance | None:
    known = [astuple(distance) for distance in distances if distance is not None]
    return Distance(*map(fmean, zip(*known, strict=True))) if known else None


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
        'Re-estimated moments recover 0.5 of 12.0 points forgotten with cn32 and 3.0 of 20.0 with bn: 2.5 less.'
    """
    for first, second in pairs:
        if first.tasks != second.tasks or (first.learned is None) != (second.learned is None):
            raise ValueError("diagnoses of different tasks, or with forgetting known for only one, can't be compared.")
    less = [first.recovered - second.recovered for first, second in pairs]
    parts = []
    for side in (0, 1):
        points = f"{fmean(pair[side].recovered for pair in pairs):.1f}"
        forgotten = [pair[side].forgotten for pair in pairs]
        known = [value for value in forgotten if value is not None]
        parts.append(f"{points} of {fmean(known):.1f}" if known else points)
    unit = "points of accuracy" if pairs[0][0].learned is None else "points forgotten"
    difference = f"{abs(fmean(less)):.1f} {'less' if fmean(less) > 0 else 'more'}"
    text = f"Re-estimated moments recover {parts[1]} {unit} with {second_name} and {parts[0]} with {first_name}: "
    text += "as much" if abs(fmean(less)) < MIN_POINTS else difference
    text += "" if len(pairs) == 1 else f", over {len(pairs)} seeds"
    bounds = interval(less) if interval is not None else None
    return f"{text}." if bounds is None else f"{text}; the 95 % interval of the difference is {bounds}."


def _gain(points: float) -> str:
    if abs(points) < MIN_POINTS:
        return "leave the accuracy as it is"
    return f"recover {points:.1f} points of accuracy" if points > 0 else f"cost {-points:.1f} points of accuracy"


def _interval(bounds: Bounds | None, over: str = "") -> str:
    return "" if bounds is None else f" (95 % interval {bounds[0]:+.1f} to {bounds[1]:+.1f}{over})"


def _cell(distances: Sequence[Distance | None], what: str) -> str:
    mean = _mean_distance(distances)
    return "-" if mean is None else f"{getattr(mean, what):.3g} ({getattr(mean, f'{what}_scaled'):.2f})"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))).rstrip()
        for row in rows
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])
