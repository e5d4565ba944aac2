"""The cross-task normalization effect of a model, as measured: numbers, a table, a sentence and a figure; no torch.

Distances between moments are L1, summed over channels, and beside them a scaled one that lets layers be compared: the
sum for the means is divided by the sum of the channels' spreads, sqrt(oracle variance + eps), and that for the
variances by the sum of oracle variance + eps. So 0.5 says that a channel's mean is off by half a standard deviation,
or its variance by half of itself, as it goes in this layer; channels that are hardly alive weigh little.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from contnorm.bench.escape import escape_terminal
from contnorm.diagnosis.figure import draw_effect
from contnorm.diagnosis.pair import gain, pair_sentence

__all__ = ["Diagnosis", "Distance", "LayerDistances"]

SEEN = 0.05  # points: less is printed as 0.0
MOVED = 0.005  # scaled distance: less is printed as 0.00
WIDTH = 80  # of a terminal that nobody has widened


@dataclass(frozen=True)
class Distance:
    """How far two sets of moments of a layer lie apart: L1 over channels, and scaled by the layer's own spread."""

    mean: float
    var: float
    mean_scaled: float
    var_scaled: float


@dataclass(frozen=True)
class LayerDistances:
    """One layer's running moments, those of each task and those of all tasks (oracle), two by two.

    Attributes:
        layer: Its name in the model.
        running_oracle: From the running moments to the oracle's.
        task_running: From each task's own moments to the running ones; None where a task does not reach the layer.
        task_oracle: From each task's own moments to the oracle's.
    """

    layer: str
    running_oracle: Distance
    task_running: tuple[Distance | None, ...]
    task_oracle: tuple[Distance | None, ...]


@dataclass(frozen=True)
class Diagnosis:
    """What `contnorm.diagnose` found; `str()` of it is the tables and the sentence, for a terminal.

    Attributes:
        model: The name of the model's class.
        tasks: Names of the tasks.
        layers: Distances, a layer each; none where the model keeps no moments.
        running: Accuracy on each task with the running moments, in percent.
        oracle: With the exact moments of all tasks' data.
        own: With the exact moments of the task's own data.
        learned: When the task had just been learned, where that was given.
        held_out: Whether accuracy was measured on other data than the moments.

    Example:
        >>> found = Diagnosis("Net", ("0", "1"), (), (60.0, 90.0), (60.0, 90.0), (60.0, 90.0), (95.0, 90.0), True)
        >>> found.forgotten, found.recovered
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

    @property
    def forgotten(self) -> float | None:
        """Points lost since a task was learned, on average over the tasks but the last; None where that isn't known."""
        return None if self.learned is None else self._lost(self.learned, self.running)

    @property
    def recovered(self) -> float:
        """Points the oracle's moments bring: over the tasks but the last beside `forgotten`, else over all tasks."""
        return self._lost(self.oracle, self.running)

    @property
    def share(self) -> float | None:
        """Recovered of forgotten; None where nothing was forgotten or that isn't known."""
        forgotten = self.forgotten
        return None if forgotten is None or forgotten < SEEN else self.recovered / forgotten

    def _lost(self, high: Sequence[float], low: Sequence[float]) -> float:
        gaps = [a - b for a, b in zip(high, low, strict=True)]
        # The task learned last had no time to be forgotten; it counts only where nothing is said of learning.
        return fmean(gaps[:-1] if self.learned is not None and len(gaps) > 1 else gaps)

    @property
    def sentence(self) -> str:
        """What it comes to, in words."""
        if not self.layers:
            return (
                f"{self.model} has no norm layer with running moments that could be re-estimated: none of what it "
                f"forgets comes back that way."
            )
        data = "" if self.held_out else " (Accuracy is that on the data the moments were estimated from.)"
        said = [f"Re-estimated statistics {self._effect()}", *self._price(), self._most_drifted()]
        return f"{'; '.join(said)}.{data}"

    def _effect(self) -> str:
        forgotten, recovered = self.forgotten, self.recovered
        if forgotten is None:
            return gain(recovered) + f" (from {fmean(self.running):.1f} to {fmean(self.oracle):.1f} percent)"
        if forgotten < SEEN:
            return f"{gain(recovered)}, and nothing was forgotten"
        if recovered >= forgotten + SEEN:
            return f"bring {recovered:.1f} points, more than the {forgotten:.1f} forgotten"
        if recovered >= SEEN:
            return f"recover {recovered:.1f} of the {forgotten:.1f} points forgotten"
        cost = f", and cost {-recovered:.1f} more" if recovered <= -SEEN else ""
        return f"recover none of the {forgotten:.1f} points forgotten{cost}"

    def _price(self) -> list[str]:
        """What the last task loses, which `recovered` leaves out beside `forgotten`."""
        loss = self.running[-1] - self.oracle[-1]
        if self.learned is None or len(self.tasks) == 1 or loss < SEEN:
            return []
        return [f"the last task loses {loss:.1f} by them"]

    def _most_drifted(self) -> str:
        moved = [
            (drift, layer.layer, what)
            for layer in self.layers
            for what, drift in (
                ("mean", layer.running_oracle.mean_scaled),
                ("variance", layer.running_oracle.var_scaled),
            )
        ]
        drift, name, what = max(moved, key=lambda found: found[0])
        if drift < MOVED:
            return "no layer's moments have drifted"
        return f"{f'layer {name}' if name else 'the model itself'}'s {what} has drifted most"

    def table(self) -> str:
        """Accuracies by task, and distances by layer, two rows each: those of tasks as the mean over tasks."""
        parts = [f"accuracy in percent, by the moments used\n{self._accuracies()}"]
        if self.layers:
            said = "L1 distances of moments (scaled by the layer's spread); of tasks, the mean"
            parts.append(f"{said}\n{self._distances()}")
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
        """All of it in numbers, texts, lists and dicts, for JSON."""
        said = {"forgotten": self.forgotten, "recovered": self.recovered, "share": self.share}
        return {**asdict(self), **said, "sentence": self.sentence}

    def beside(self, other: Diagnosis, here: str = "this model", there: str = "the other") -> str:
        """How much less re-estimation recovers in another model, trained alike but for its norm, in a sentence.

        Example:
            >>> def found(*running):
            ...     return Diagnosis("Net", ("0", "1"), (), running, (80.0, 90.0), running)
            >>> found(76.0, 90.0).beside(found(80.0, 90.0), "bn", "cn")
            'With cn re-estimated statistics recover 0.0 points of accuracy, with bn 2.0: 2.0 less.'
        """
        return pair_sentence([(self, other)], here, there)

    def draw(self, path: str | Path) -> None:
        """Draw accuracies and distances to a file, in the format its ending says; needs matplotlib."""
        draw_effect(self.as_dict(), path)

    def __str__(self) -> str:
        return f"{self.table()}\n\n{textwrap.fill(self.sentence, WIDTH, break_on_hyphens=False)}"

    __repr__ = __str__


Pick = Callable[[LayerDistances], Sequence[Distance | None]]


def _running_oracle(layer: LayerDistances) -> Sequence[Distance | None]:
    return (layer.running_oracle,)


def _task_running(layer: LayerDistances) -> Sequence[Distance | None]:
    return layer.task_running


def _task_oracle(layer: LayerDistances) -> Sequence[Distance | None]:
    return layer.task_oracle


def _cell(distances: Sequence[Distance | None], what: str) -> str:
    found = [distance for distance in distances if distance is not None]
    plain, scaled = (fmean(getattr(d, name) for d in found) for name in (what, f"{what}_scaled"))
    return f"{plain:.3g} ({scaled:.2f})"


def _aligned(cells: Sequence[Sequence[str]]) -> str:
    rows = [[escape_terminal(cell) for cell in row] for row in cells]  # names of tasks and layers are users' own
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))).rstrip()
        for row in rows
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])
