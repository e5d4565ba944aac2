"""Figures of records as SVG, each with a description for screen readers; selects the figures of a run or a section."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

import numpy as np
import numpy.typing as npt

from contnorm.bench.data.dataset import GROUPS
from contnorm.bench.metrics.accuracy_matrix import AccuracyMatrix
from contnorm.bench.metrics.memory_stats import Census
from contnorm.bench.metrics.multilabel import LABEL_SCORES, LabelMatrix, mean_ap
from contnorm.bench.records import Record, spread_over_seeds
from contnorm.bench.stats import t_interval
from contnorm.paper.format import place_title
from contnorm.paper.measured import MeasuredCell
from contnorm.paper.recipe import Recipe
from contnorm.paper.scores import score_title
from contnorm.report import figures
from contnorm.report.sections import OF_ROWS, Variant
from contnorm.report.svg import svg_of

__all__ = [
    "DISTANCE",
    "MOST_CURVES",
    "ap_by_frequency",
    "ap_by_group",
    "curves_over_tasks",
    "drift_by_depth",
    "drift_over_tasks",
    "forgetting_bars",
    "forgetting_parts",
    "group_bars",
    "has_memory",
    "matrix_heatmap",
    "memory_panels",
    "multilabel_figures",
    "paired_differences",
    "run_figures",
    "score_by_rate",
]

DISTANCE, MOMENTS = "L1 distance to exact moments", ("mean", "var")
MOST_CURVES = 9  # maximum in one figure; more can't be distinguished
SCORES = ("c_f1", "o_f1", "map")
MOST_LAYERS_AS_CURVES = 4  # networks with more norm layers have their drift drawn by depth
Points = dict[int, tuple[float, float]]  # by class: its count in the stream, and its average precision
Place = dict[str, list[MeasuredCell]]  # the cells of the norms of one stream, strategy and memory, by group of classes


def run_figures(records: Sequence[Record]) -> Iterator[str]:
    """Figures of the records of one configuration, drawn when asked for."""
    if records[0].multi_label:
        yield matrix_heatmap(records, "mAP, mean over seeds")
        yield from _label_figures(records)
        yield from _drift(records)
        return
    yield matrix_heatmap(records, "Accuracy, mean over seeds")
    yield from _drift(records)
    is_oracle = records[0].config.evaluate.moments == "oracle"
    both = is_oracle and all(record.matrix_of("matrix_running") is not None for record in records)
    if both and min(record.matrix.tasks for record in records) > 1:
        yield forgetting_bars(records, "Forgotten since each task was learned (fm_first)")


def _drift(records: Sequence[Record]) -> Iterator[str]:
    rows = records[0].drift.get("by_task")
    if not rows or not rows[0] or not all(record.drift.get("by_task") for record in records):
        return
    draw = drift_over_tasks if len(rows[0]) <= MOST_LAYERS_AS_CURVES else drift_by_depth
    yield draw(records, "Drift of running moments from exact ones")


def _label_figures(records: Sequence[Record]) -> Iterator[str]:
    groups = [group for group in ("overall", *GROUPS) if records[0].classes_of(group) != []]
    values = {score_title(name): [[r.score(name, group) for r in records] for group in groups] for name in SCORES}
    yield group_bars(values, groups, "Scores by group of classes, at the end", "percent")
    if all("census" in record.raw for record in records):
        yield ap_by_group(records, "Average precision by class frequency")
    if all(map(has_memory, records)):
        yield memory_panels(records, "Classes in the memory and in the stream")


def multilabel_figures(recipe: Recipe, variant: Variant) -> Iterator[str]:
    """Scores by group of classes, AP by class frequency, and memory content; none if only deviations were published."""
    cells = [one for part in variant.parts for one in part.measured if one.records and one.cell.view.labels]
    numbers = [number for one in cells for number in one.cell.published.values()]
    if numbers and all(number.mean is None for number in numbers):
        return
    suffix = f": {variant.title.lower()}" if variant.title else ""
    for title, place in _places(cells).items():
        for score in (score for score in recipe.scores.values() if score in LABEL_SCORES):
            yield from _norm_bars(place, score, f"{title}, {score_title(score)}{suffix}")
        yield from _class_figures(next(iter(place.values())), title + suffix)


def _places(cells: Sequence[MeasuredCell]) -> dict[str, Place]:
    places: dict[str, Place] = {}
    for one in cells:
        shared = {key: value for key, value in one.cell.place.items() if key not in (*OF_ROWS, "labels")}
        place = places.setdefault(place_title(shared), {})
        place.setdefault(str(one.cell.view.labels), []).append(one)
    return places


def _norm_bars(place: Place, score: str, title: str) -> Iterator[str]:
    groups = [group for group in ("overall", *GROUPS) if group in place]
    norms = list(dict.fromkeys(one.cell.norm for cells in place.values() for one in cells))
    if len(groups) < 2:
        return
    for first in range(0, len(norms), MOST_CURVES):
        values = {
            norm: [[v for one in place[g] if one.cell.norm == norm for v in one.values(score).values()] for g in groups]
            for norm in norms[first : first + MOST_CURVES]
        }
        if any(some for by_group in values.values() for some in by_group):
            yield group_bars(values, groups, title, f"{score_title(score)}, percent")


def _class_figures(cells: Sequence[MeasuredCell], title: str) -> Iterator[str]:
    """Figures of the first two norms, since more can't be distinguished; each run also has its own figures."""
    runs = {one.cell.norm: list(one.records.values()) for one in cells[:2]}
    counted = {norm: records for norm, records in runs.items() if all("census" in record.raw for record in records)}
    if counted:
        yield ap_by_frequency(counted, f"{title}: average precision by class frequency")
    for records in list(counted.values())[:1]:  # the memory content does not depend on the norm
        if all(map(has_memory, records)):
            yield memory_panels(records, f"{title}: classes in the memory and in the stream")


def matrix_heatmap(records: Sequence[Record], title: str) -> str:
    """Accuracy on each task after each task, averaged over seeds; mAP for multi-label streams."""
    matrices = [_percent(record.counted) for record in records]
    tasks = min(map(len, matrices))  # with ``max_steps``, seeds may reach different tasks
    mean = np.mean([matrix[:tasks, :tasks] for matrix in matrices], axis=0)
    what = "mAP" if records[0].multi_label else "accuracy"
    learned, last = np.nan_to_num(np.diag(mean)).mean(), np.nan_to_num(mean[-1]).mean()
    description = f"{tasks} tasks; {learned:.1f} percent when just learned, {last:.1f} at the end, on average."
    return svg_of(figures.accuracy_matrix_heatmap(mean, title, what), f"{title}. {description}")


def _percent(counted: AccuracyMatrix | LabelMatrix) -> npt.NDArray[np.float64]:
    """Percentages of shape (tasks, tasks); NaN for cells without a measurement."""
    if isinstance(counted, LabelMatrix):
        rows = [[math.nan if stats is None else mean_ap(stats) for stats in row] for row in counted.own]
    else:
        tasks = range(counted.tasks)
        rows = [[math.nan if counted.correct[i][j] is None else counted.at(i, j) for j in tasks] for i in tasks]
    return np.array(rows, dtype=np.float64)


def curves_over_tasks(curves: Mapping[str, Sequence[Sequence[float]]], title: str, ylabel: str) -> str:
    """Mean curves over seeds, by name, with bands of one standard deviation; ``curves`` has one curve per seed."""
    ends = {name: [fmean(values) for values in zip(*some, strict=False)][-1] for name, some in curves.items()}
    description = f"At the end: {', '.join(f'{name} {end:.2f}' for name, end in ends.items())}."
    return svg_of(figures.curves_over_tasks(curves, title, ylabel), f"{title}. {description}")


def score_by_rate(points: Mapping[str, Sequence[tuple[float, float, float]]], title: str, score: str) -> str:
    """Score by learning rate: ``points`` has, by name, learning rate, mean and standard deviation over seeds."""
    best = {name: max(some, key=lambda point: point[1]) for name, some in points.items()}
    words = ", ".join(f"{name} {mean:.2f} at {rate:g}" for name, (rate, mean, _) in best.items())
    title = f"{title}: {score} by learning rate"
    return svg_of(figures.score_by_rate(points, title, f"{score} (percent)"), f"{title}. Highest: {words}.")


def drift_over_tasks(records: Sequence[Record], title: str) -> str:
    """Distance of running moments from exact ones after each task: one curve per layer and moment."""
    layers = list(records[0].drift["by_task"][0])
    curves = {
        f"{layer} {moment}": [[after[layer][moment] for after in record.drift["by_task"]] for record in records]
        for layer in layers
        for moment in MOMENTS
    }
    return curves_over_tasks(curves, title, DISTANCE)


def drift_by_depth(records: Sequence[Record], title: str) -> str:
    """Distance of running moments from exact ones by layer, after the first, the middle and the last task."""
    layers, tasks = list(records[0].drift["by_task"][0]), min(len(record.drift["by_task"]) for record in records)
    shown = sorted({1, (tasks + 1) // 2, tasks})
    distances = {
        moment: {
            task: [fmean(r.drift["by_task"][task - 1][layer][moment] for r in records) for layer in layers]
            for task in shown
        }
        for moment in MOMENTS
    }
    last = {moment: by_task[tasks] for moment, by_task in distances.items()}
    words = (f"{moment} {some[0]:.2f} in the first layer, {some[-1]:.2f} in the last" for moment, some in last.items())
    figure = figures.drift_by_depth(distances, title, DISTANCE)
    return svg_of(figure, f"{title}. At the end: {'; '.join(words)}.")


def forgetting_parts(records: Sequence[Record]) -> tuple[list[float], list[float]]:
    """Forgetting of each task but the last, split into the part that exact moments recover and the rest.

    Needs records of runs with ``--eval-moments oracle``; returns means over them.
    """
    running = [matrix for record in records if (matrix := record.matrix_of("matrix_running")) is not None]
    last = min(matrix.tasks for matrix in running) - 1
    forgotten = [fmean(m.at(t, t) - m.at(last, t) for m in running) for t in range(last)]
    both = list(zip(records, running, strict=True))
    recovered = [fmean(record.matrix.at(last, t) - m.at(last, t) for record, m in both) for t in range(last)]
    return recovered, [whole - part for whole, part in zip(forgotten, recovered, strict=True)]


def forgetting_bars(records: Sequence[Record], title: str) -> str:
    """Bars of the forgetting of each task: the part that exact moments recover (statistics), and the rest (weights)."""
    recovered, remaining = forgetting_parts(records)
    forgotten = fmean(recovered) + fmean(remaining)
    description = f"Of {forgotten:.1f} points forgotten on average, exact moments recover {fmean(recovered):.1f}."
    return svg_of(figures.forgetting_bars(recovered, remaining, title), f"{title}. {description}")


def paired_differences(pairs: Mapping[str, Sequence[float]], title: str, unit: str = "points of ACC") -> str:
    """Paired differences: each seed as a dot, the mean as a line, its 95 % interval as a bar."""
    intervals = {name: t_interval(differences) for name, differences in pairs.items()}
    xlabel = f"difference, {unit}, seed by seed; bar: 95 % interval of the mean"
    means = "; ".join(f"{name} {fmean(some):+.2f}" for name, some in pairs.items())
    return svg_of(figures.paired_differences(pairs, intervals, title, xlabel), f"{title}. Means: {means}.")


def group_bars(values: Mapping[str, Sequence[Sequence[float]]], groups: Sequence[str], title: str, ylabel: str) -> str:
    """Grouped bars: for each group of classes, the mean over seeds of each series with its standard deviation.

    Args:
        values: Scores of each seed, by series name and then by group.
        groups: Names of the groups.
        title: Title of the figure.
        ylabel: Label of the value axis.
    """
    spreads = {name: [_mean_and_std(some) for some in by_group] for name, by_group in values.items()}
    words = (
        f"{group}: {', '.join(f'{name} {_number(some[i][0])}' for name, some in spreads.items())}"
        for i, group in enumerate(groups)
    )
    return svg_of(figures.group_bars(spreads, groups, title, ylabel), f"{title}. {'; '.join(words)}.")


def _number(value: float) -> str:
    return "none" if math.isnan(value) else f"{value:.1f}"


def _mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    """Mean and deviation; the deviation of a single seed is 0, and a group without test images has NaN for both."""
    if not values:
        return math.nan, math.nan
    mean, std = spread_over_seeds(list(values))
    return mean, 0.0 if math.isnan(std) else std


def ap_by_group(records: Sequence[Record], title: str) -> str:
    """Final average precision of each class of one run against its count in the stream, coloured by group."""
    points, groups = _points(records), records[0].raw["classes"]["groups"]
    by_group = {group: {c: point for c, point in points.items() if groups[c] == group} for group in GROUPS}
    return _scatter(by_group, records[0], title)


def ap_by_frequency(runs: Mapping[str, Sequence[Record]], title: str) -> str:
    """Final average precision of each class of several runs against its count in the stream, coloured by run."""
    return _scatter({name: _points(records) for name, records in runs.items()}, next(iter(runs.values()))[0], title)


def _points(records: Sequence[Record]) -> Points:
    """Means over seeds; classes without training or test images are left out."""
    shown = [Census.from_json(record.raw["census"]).shown[-1] for record in records]
    tallies = [_labels(record).tally[-1] for record in records]
    points: Points = {}
    for c in range(tallies[0].classes):
        count = fmean(counts[c] for counts in shown)
        aps = [ap for tally in tallies if (ap := tally.ap[c]) is not None]
        if count and aps:
            points[c] = (count, 100 * fmean(aps))
    return points


def _labels(record: Record) -> LabelMatrix:
    assert isinstance(record.counted, LabelMatrix)
    return record.counted


def _scatter(series: Mapping[str, Points], record: Record, title: str) -> str:
    """Scatter plot with a colour and marker per series, and tooltips; series without any class are left out."""
    shown = {name: points for name, points in series.items() if points}
    names = record.raw["classes"]["names"]
    tooltips = {
        f"series-{number}": [f"{names[c]}, {name}: {n:g} images, AP {ap:.1f}" for c, (n, ap) in points.items()]
        for number, (name, points) in enumerate(shown.items())
    }
    means = (f"{name} {fmean(ap for _, ap in points.values()):.1f}, {len(points)}" for name, points in shown.items())
    figure = figures.class_scatter({name: list(points.values()) for name, points in shown.items()}, title)
    return svg_of(figure, f"{title}. Mean of the classes, and their number: {'; '.join(means) or 'none'}.", tooltips)


def has_memory(record: Record) -> bool:
    """Whether a record has the content of its run's memory."""
    census = record.raw.get("census")
    return census is not None and census["capacity"] > 0


def memory_panels(records: Sequence[Record], title: str) -> str:
    """Percentage of each class among the labels in the memory and in the stream so far, averaged over seeds."""
    censuses = [Census.from_json(record.raw["census"]) for record in records]
    tasks = min(len(census.held) for census in censuses)
    held = np.mean([_shares(census.held[:tasks]) for census in censuses], axis=0)
    shown = np.mean([_shares(census.shown[:tasks]) for census in censuses], axis=0)
    order = sorted(np.flatnonzero(shown[-1]), key=lambda c: (-shown[-1][c], c))
    groups = np.array(records[0].raw["classes"]["groups"])
    words = (
        f"{group} classes {held[-1][groups == group].sum():.1f} percent of the memory's labels and "
        f"{shown[-1][groups == group].sum():.1f} of the stream's"
        for group in GROUPS
    )
    figure = figures.memory_panels(held[:, order], shown[:, order], title)
    return svg_of(figure, f"{title}. At the end: {'; '.join(words)}.")


def _shares(counts: Sequence[Sequence[int]]) -> npt.NDArray[np.float64]:
    """Percentage of each class after each task; zeros if there are no labels yet."""
    rows = np.array(counts, dtype=np.float64)
    return np.asarray(100 * rows / np.maximum(rows.sum(1, keepdims=True), 1))
