"""Measure what the running moments of a model cost on its tasks, or how far they are from new data without labels.

With tasks, it is the cross-task normalization effect: how much forgetting is caused by the running moments alone.
Three sets of moments are compared in every layer with running moments: the running ones, the exact ones of each task's
data, and the exact ones of all tasks' data (the oracle's, BN*). Exact moments are estimated layer by layer, with those
of the previous layers already set. Accuracy is measured with all three; weights do not change.

Distances between moments are L1 norms over channels. A scaled distance makes layers comparable: the distance of means
is divided by the sum over channels of sqrt(oracle variance + eps), and that of variances by the sum of oracle variance
+ eps. A scaled distance of 0.5 means that channel means differ by half a standard deviation, or variances by half of
their value, on average over the layer; channels with small variance have little weight.

Without tasks, nothing but the distances of the running moments to those of the given data is measured. The oracle's
moments are then those of this data.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from contnorm.checks import widest
from contnorm.moments.freeze import evaluation_mode
from contnorm.moments.pooling import Moments, moment_layers
from contnorm.moments.reestimate import (
    Call,
    ChainedBatches,
    LayerMoments,
    call_on_first_element,
    check_batches,
    generators_restored,
    reestimate,
    to_model_device,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ByTask = Sequence[Iterable[Any]] | Mapping[Any, Iterable[Any]]
Predict = Callable[[nn.Module, Any, Any], Tensor]
Bounds = tuple[float, float]  # ends of an interval
Interval = Callable[[Sequence[float]], Bounds | None]  # the 95 % interval of a mean; None for too few values
BLUE, ORANGE, GREEN, INK = "#4477aa", "#ee7733", "#228833", "#55555a"


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
        tasks: Names of the tasks; empty for data without tasks, of which `layers` alone are known.
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
        """Accuracy points that the last task gains with the oracle's moments (negative: loses); NaN without tasks."""
        return self.oracle[-1] - self.running[-1] if self.tasks else math.nan

    @property
    def forgotten(self) -> float | None:
        """Accuracy points lost since a task was learned, averaged over all tasks but the last; None if unknown."""
        return None if self.learned is None else self._mean_gap(self.learned, self.running)

    @property
    def recovered(self) -> float:
        """Accuracy points gained with the oracle's moments.

        The average is over all tasks but the last if `learned` is known, as for `forgotten`; otherwise over all tasks.
        NaN without tasks.
        """
        return self._mean_gap(self.oracle, self.running)

    @property
    def share(self) -> float | None:
        """Recovered share of the forgotten points; None if nothing was forgotten or forgetting is unknown."""
        return self.recovered / self.forgotten if self.forgotten is not None and self.forgotten > 0 else None

    def _mean_gap(self, high: Sequence[float], low: Sequence[float]) -> float:
        gaps = [a - b for a, b in zip(high, low, strict=True)]
        if not gaps:
            return math.nan
        # The last task can't be forgotten yet, so it counts only if forgetting is unknown.
        return fmean(gaps[:-1] if self.learned is not None and len(gaps) > 1 else gaps)

    @property
    def sentence(self) -> str:
        """One-sentence summary."""
        if not self.layers:
            effect = ": none of what it forgets comes back that way, and the last task does not change"
            reason = f"{self.model} has no norm layer with running moments that could be re-estimated"
            return f"{reason}{effect if self.tasks else ''}."
        drifts = [(getattr(x.running_oracle, f"{k}_scaled"), x.layer, k) for x in self.layers for k in ("mean", "var")]
        drift, name, kind = max(drifts, key=lambda entry: entry[0])
        layer, kind = f"layer {name}" if name else "the model itself", "mean" if kind == "mean" else "variance"
        drifted = "no layer's moments have drifted" if drift < 0.005 else f"{layer}'s {kind} has drifted most"
        if not self.tasks:
            mean, var = (fmean(getattr(x.running_oracle, f"{k}_scaled") for x in self.layers) for k in ("mean", "var"))
            return (
                f"Scaled distances of the running moments to those of the data are {mean:.2f} for means and {var:.2f} "
                f"for variances, on average over the layers; {drifted}."
            )
        recovered = round(self.recovered, 1) + 0.0  # not -0.0
        forgotten, change = self.forgotten, self.last_task_change
        before, after = fmean(self.running), fmean(self.oracle)
        if forgotten is None:
            effect = f"{recovered:.1f} points of accuracy (from {before:.1f} to {after:.1f} percent)"
        else:
            past = f"of the {forgotten:.1f} points forgotten" if forgotten > 0 else "points, and nothing was forgotten"
            effect = f"{recovered:.1f} {past}"
        interval = _interval(self.recovered_interval, f" over {len(self.seeds)} seeds")
        last = f"{'gains' if change > 0 else 'loses'} {abs(change):.1f} points"
        last = f"the last task {'does not change' if abs(change) < 0.05 else last}"
        data = "" if self.held_out else " (Accuracy is that on the data the moments were estimated from.)"
        last += _interval(self.last_task_interval)
        return f"Re-estimated moments recover {effect}{interval}; {last}; {drifted}.{data}"

    def table(self) -> str:
        """Table of accuracies by task, and of distances by layer (two rows each; per-task distances are averaged)."""
        if not self.tasks:
            rows = [["layer", "mean", "variance"]]
            rows += [
                [x.layer or "(the model)", *(_cell((x.running_oracle,), kind) for kind in ("mean", "var"))]
                for x in self.layers
            ]
            return (
                f"L1 distances of running moments to those of the data (scaled by the layer's spread)\n{_aligned(rows)}"
            )
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
        names = ["sentence", *(("forgotten", "recovered", "share", "last_task_change") if self.tasks else ())]
        return {**asdict(self), **{name: getattr(self, name) for name in names}}

    def draw(self, path: str | Path) -> None:
        """Plot accuracies and distances to a file; its suffix sets the format. Requires matplotlib."""
        import matplotlib

        with matplotlib.rc_context({"svg.hashsalt": "contnorm", "svg.fonttype": "none"}):  # the same file each time
            metadata = {"Date": None} if str(path).endswith(".svg") else None
            self.plot().savefig(path, metadata=metadata, dpi=150)

    def plot(self) -> Figure:
        """Return the figure that `draw` writes, for a notebook. Requires matplotlib."""
        import matplotlib
        from matplotlib.figure import Figure

        from contnorm.bench.figures import with_png  # needs numpy, which matplotlib has and torch alone has not

        panels = [_draw_accuracies, _draw_drift, _draw_distances] if self.layers else [_draw_accuracies]
        panels = panels if self.tasks else [_draw_drift]
        size = (len(panels) * max(4.6, 0.34 * len(self.tasks)), max(4.6, 1.6 + 0.22 * len(self.layers)))  # inches
        with matplotlib.rc_context({"text.parse_math": False}):  # a dollar sign in a name is not a formula
            figure = Figure(figsize=size, layout="constrained")  # not pyplot's, so a notebook keeps its backend
            for panel, axes in zip(panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True):
                panel(axes, self)
            figure.suptitle("\n".join(textwrap.wrap(self.sentence, 45 * len(panels))), fontsize=11)
        return with_png(figure)

    def __str__(self) -> str:
        return f"{self.table()}\n\n{textwrap.fill(self.sentence, 80, break_on_hyphens=False)}"

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
    mean: Diagnosis = _mean(several)
    return replace(
        mean,
        held_out=all(d.held_out for d in several),
        seeds=tuple(by_seed),
        recovered_interval=interval([d.recovered for d in several]),
        last_task_interval=interval([d.last_task_change for d in several]),
    )


def _mean(values: Sequence[Any]) -> Any:
    """Return the mean of equal structures of floats, without those that are None; all else is that of the first."""
    known = [value for value in values if value is not None]
    first = known[0] if known else None
    if isinstance(first, tuple):
        return tuple(map(_mean, zip(*known, strict=True)))
    if isinstance(first, Distance | LayerDistances | Diagnosis):
        return replace(first, **{f.name: _mean([getattr(v, f.name) for v in known]) for f in fields(first)})
    return fmean(known) if isinstance(first, float) else first


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
    text += difference if len(pairs) == 1 else f"{difference}, over {len(pairs)} seeds"
    bounds = interval(less) if interval is not None else None
    return f"{text}." if bounds is None else f"{text}; the 95 % interval of the difference is {bounds}."


def _interval(bounds: Bounds | None, over: str = "") -> str:
    return "" if bounds is None else f" (95 % interval {bounds[0]:+.1f} to {bounds[1]:+.1f}{over})"


def _cell(distances: Sequence[Distance | None], what: str) -> str:
    mean = _mean(distances)
    return "-" if mean is None else f"{getattr(mean, what):.3g} ({getattr(mean, f'{what}_scaled'):.2f})"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))).rstrip()
        for row in rows
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


# --- figure ---------------------------------------------------------------------------------------------------------


def _draw_accuracies(axes: Axes, result: Diagnosis) -> None:
    bars = [("running moments", result.running, BLUE)]
    if result.layers:
        bars += [("oracle moments", result.oracle, ORANGE), ("the task's own", result.own, GREEN)]
    width = 0.8 / len(bars)
    for number, (label, values, colour) in enumerate(bars):
        positions = [task + (number - (len(bars) - 1) / 2) * width for task in range(len(result.tasks))]
        axes.bar(positions, values, width, label=label, color=colour)
    if result.learned is not None:
        starts = [task - 0.45 for task in range(len(result.tasks))]  # across the bars of its task
        axes.hlines(result.learned, starts, [start + 0.9 for start in starts], color=INK, label="when just learned")
    axes.set(title="accuracy", xlabel="task", ylabel="percent", ylim=(0, 100))
    axes.set_xticks(range(len(result.tasks)), result.tasks, fontsize=8)
    axes.legend(fontsize=8)


def _draw_drift(axes: Axes, result: Diagnosis) -> None:
    rows = range(len(result.layers))
    for key, label, colour, offset in (("mean_scaled", "mean", BLUE, -0.2), ("var_scaled", "variance", ORANGE, 0.2)):
        lengths = [getattr(layer.running_oracle, key) for layer in result.layers]
        axes.barh([row + offset for row in rows], lengths, 0.4, label=label, color=colour)
    title = "running to oracle moments" if result.tasks else "running moments to those of the data"
    axes.set(title=title, xlabel="distance, scaled by the layer's spread", ylabel="layer")
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(rows, [layer.layer or "(the model)" for layer in result.layers], fontsize=8)
    axes.legend(fontsize=8)


def _draw_distances(axes: Axes, result: Diagnosis) -> None:
    cells = [
        [float("nan") if d is None else (d.mean_scaled + d.var_scaled) / 2 for d in layer.task_running]
        for layer in result.layers
    ]
    largest = max((cell for row in cells for cell in row if cell == cell), default=0.0)
    image = axes.imshow(cells, aspect="auto", cmap="Blues", vmin=0, vmax=largest or 1.0)
    axes.set(title="each task's to running moments", xlabel="task")
    axes.set_yticks(range(len(cells)), [])  # rows are the same as in the panel to the left, which labels them
    axes.set_xticks(range(len(result.tasks)), result.tasks, fontsize=8)
    axes.figure.colorbar(image, ax=axes).set_label("scaled, of mean and variance the average", fontsize=8)


# --- measurement ----------------------------------------------------------------------------------------------------


def diagnose(
    model: nn.Module,
    batches_by_task: ByTask | Iterable[Any],
    *,
    test_by_task: ByTask | None = None,
    learned: Sequence[float] | Mapping[Any, float] | None = None,
    predict: Predict | None = None,
    call: Call | None = None,
) -> Diagnosis:
    """Measure how much of a model's forgetting is caused by its running moments, or how far they are from new data.

    With the labelled data of tasks, accuracy is measured with running and exact moments, by task, and distances of
    moments by layer. With new data alone, without tasks and labels, the distances of the running moments to those of
    this data are measured by layer.

    The model runs in evaluation mode without gradients. Afterwards its parameters, moments, modes and hooks are
    bit-identical to those before, and so are the random generators of Python and torch. Frozen moments are measured
    like others, and stay frozen.

    Args:
        model: Any model with norm layers that have running moments, of torch or of this package.
        batches_by_task: For each task, in training order, an iterable of batches ``(x, y)`` that can be iterated
            repeatedly; or a mapping from names of tasks to such iterables. The moments are estimated from these.
            Or new data without tasks: a list of batches, a DataLoader or a generator, whose labels are ignored. A list
            whose first element is a tensor or a mapping, or begins with a tensor as ``(x, y)`` does, is one of batches.
        test_by_task: Data for measuring accuracy, in the same form. By default accuracy is measured on
            ``batches_by_task``, and the sentence says so.
        learned: Accuracy on each task right after it was learned, in percent. It is needed to compute forgetting and
            the share of it that re-estimation recovers.
        predict: Function ``predict(model, x, task)`` that returns the classes of ``x``, by default
            ``model(x).argmax(1)``; needed for one head per task, for example. ``task`` is the index of the task, or its
            key in the mapping.
        call: Function ``call(model, batch)`` that runs the model on a batch, by default ``model(x)``.

    Returns:
        The diagnosis: ``.sentence``, ``.table()``, ``.draw(path)``, ``.as_dict()``, and the numbers. The moments of a
        generator are approximate, as with ``exact=False`` of `reestimate`.

    Raises:
        TypeError: If the batches of a task are a generator, which can be iterated only once.
        ValueError: If a task has no data, if moments are not finite (NaN in the data, or a diverged model), or if
            `reestimate` can't determine a layer's moments.

    Example:
        >>> model = nn.Sequential(nn.BatchNorm1d(2, affine=False))  # the larger feature is the class
        >>> model[0].running_mean.copy_(torch.tensor([5.0, 0.0]))  # simulated drift from 0
        tensor([5., 0.])
        >>> x = torch.tensor([[1.0, -1.0], [-1.0, 1.0]] * 5)
        >>> tasks = [[(x, x.argmax(1))], [(2 * x, x.argmax(1))]]
        >>> print(diagnose(model, tasks, test_by_task=tasks, learned=[100.0, 50.0]).sentence)
        Re-estimated moments recover 50.0 of the 50.0 points forgotten; the last task gains 50.0 points; layer ...

        New data without labels:

        >>> print(diagnose(model, [x, x]).sentence)
        Scaled distances of the running moments to those of the data are 2.44 for means and 0.05 for variances, ...
    """
    eps = {name: float(getattr(layer, "eps", 0.0)) for name, layer in moment_layers(model, "lift").items()}
    layers: tuple[LayerDistances, ...] = ()
    if not isinstance(batches_by_task, Mapping) and (
        not isinstance(batches_by_task, Sequence) or any(map(_is_batch, batches_by_task[:1]))
    ):
        if test_by_task is not None or learned is not None or predict is not None:
            raise ValueError("diagnose: test_by_task, learned and predict need labelled batches of each task.")
        if eps:
            exact = not isinstance(batches_by_task, Iterator)
            with (
                generators_restored(),
                reestimate(model, batches_by_task, call=call, exact=exact, frozen="lift") as done,
            ):
                layers = tuple(_distances(name, m, [], eps[name]) for name, m in done.moments.items())
        return Diagnosis(type(model).__name__, (), layers, (), (), ())
    train = _named(batches_by_task)
    test = train if test_by_task is None else _named(test_by_task)
    before = None if learned is None else _named(learned)
    for task, batches in (*train.items(), *test.items()):
        check_batches(batches, f"diagnose: task {task!r}")
    for name, other in (("test_by_task", test), ("learned", before)):
        if other is not None and set(other) != set(train):
            raise ValueError(f"diagnose: {name} has the tasks {list(other)} and batches_by_task {list(train)}.")

    def accuracy(task: Any) -> float:
        return _accuracy(model, test[task], task, predict, call or call_on_first_element)

    with torch.no_grad(), generators_restored(), evaluation_mode(model):
        running = tuple(map(accuracy, train))
        oracle, own = running, running
        if eps:  # else no layer has moments, so all three accuracies are equal
            by_task: list[tuple[float, dict[str, LayerMoments]]] = []
            for task, batches in train.items():
                with reestimate(model, batches, call=call, frozen="lift") as done:
                    by_task.append((accuracy(task), done.moments))
            with reestimate(model, ChainedBatches(list(train.values())), call=call, frozen="lift") as done:
                oracle = tuple(map(accuracy, train))
            own = tuple(value for value, _ in by_task)
            moments = [measured for _, measured in by_task]
            layers = tuple(_distances(name, m, moments, eps[name]) for name, m in done.moments.items())
    past = None if before is None else tuple(float(before[task]) for task in train)
    held_out = test_by_task is not None
    return Diagnosis(type(model).__name__, tuple(map(str, train)), layers, running, oracle, own, past, held_out)


def _is_batch(element: Any) -> bool:
    first = element[0] if isinstance(element, tuple | list) and element else element
    return isinstance(first, Tensor | Mapping)


def _named(values: Sequence[Any] | Mapping[Any, Any]) -> dict[Any, Any]:
    return dict(values) if isinstance(values, Mapping) else dict(enumerate(values))


def _accuracy(model: nn.Module, batches: Iterable[Any], task: Any, predict: Predict | None, call: Call) -> float:
    """Return the accuracy on one task in percent, with the current moments of the model."""
    correct = total = 0
    for batch in batches:
        if predict is not None:
            predictions = predict(model, to_model_device(model, batch[0]), task)
        else:
            predictions = call(model, batch).argmax(1)  # type: ignore[attr-defined]
        y = batch[1]
        if predictions.shape != y.shape:
            raise ValueError(
                f"diagnose: task {task!r}: labels have shape {tuple(y.shape)} and predictions "
                f"{tuple(predictions.shape)}. Give predict=, which returns the class of every label."
            )
        correct += int((predictions == y.to(predictions.device)).sum())
        total += y.numel()
    if not total:
        raise ValueError(f"diagnose: task {task!r} has no samples. Give a list of batches (x, y) for each task.")
    return 100 * correct / total


def _distances(
    name: str, layer: LayerMoments, by_task: Sequence[Mapping[str, LayerMoments]], eps: float
) -> LayerDistances:
    running, oracle = (layer.old_mean, layer.old_var), (layer.new_mean, layer.new_var)
    spread = widest(oracle[1]) + eps
    scales = float(spread.sqrt().sum()), float(spread.sum())

    def distance(a: Moments | None, b: Moments) -> Distance | None:
        if a is None:
            return None
        mean, var = (float((widest(x) - widest(y)).abs().sum()) for x, y in zip(a, b, strict=True))
        # A layer with constant input and eps=0 has no scale.
        return Distance(mean, var, *(d / scale if scale else 0.0 for d, scale in zip((mean, var), scales, strict=True)))

    tasks = [(m[name].new_mean, m[name].new_var) if name in m else None for m in by_task]
    overall = distance(running, oracle)
    assert overall is not None
    to_running, to_oracle = (tuple(distance(moments, to) for moments in tasks) for to in (running, oracle))
    return LayerDistances(name, overall, to_running, to_oracle)
