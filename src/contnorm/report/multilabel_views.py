"""Selects the figures of a section or a run of a multi-label stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from contnorm.bench.data.dataset import GROUPS
from contnorm.bench.metrics.multilabel import LABEL_SCORES
from contnorm.bench.records import Record
from contnorm.paper.format import place_title
from contnorm.paper.measured import MeasuredCell
from contnorm.paper.recipe import Recipe
from contnorm.paper.scores import score_title
from contnorm.report.heat_map import matrix_heat_map
from contnorm.report.memory_panels import has_memory, memory_panels
from contnorm.report.multilabel_figures import ap_by_frequency, ap_of_groups, group_bars
from contnorm.report.sections import OF_ROWS, Way

__all__ = ["label_figures", "run_figures"]

SCORES = ("c_f1", "o_f1", "map")
MOST_NAMES = 9  # maximum in one figure; more can't be distinguished
Place = dict[str, list[MeasuredCell]]  # the cells of the norms of one stream, strategy and memory, by group of classes


def label_figures(recipe: Recipe, way: Way) -> Iterator[str]:
    """Scores by group of classes, AP by class frequency, and memory content; none if only deviations were published."""
    cells = [one for part in way.parts for one in part.measured if one.records and one.cell.view.labels]
    numbers = [number for one in cells for number in one.cell.published.values()]
    if numbers and all(number.mean is None for number in numbers):
        return
    suffix = f": {way.title.lower()}" if way.title else ""
    for title, place in _places(cells).items():
        for score in (score for score in recipe.scores.values() if score in LABEL_SCORES):
            yield from _bars(place, score, f"{title}, {score_title(score)}{suffix}")
        yield from _of_classes(next(iter(place.values())), title + suffix)


def _places(cells: Sequence[MeasuredCell]) -> dict[str, Place]:
    places: dict[str, Place] = {}
    for one in cells:
        shared = {key: value for key, value in one.cell.place.items() if key not in (*OF_ROWS, "labels")}
        place = places.setdefault(place_title(shared), {})
        place.setdefault(str(one.cell.view.labels), []).append(one)
    return places


def _bars(place: Place, score: str, title: str) -> Iterator[str]:
    groups = [group for group in ("overall", *GROUPS) if group in place]
    norms = list(dict.fromkeys(one.cell.norm for cells in place.values() for one in cells))
    if len(groups) < 2:
        return
    for first in range(0, len(norms), MOST_NAMES):
        values = {
            norm: [[v for one in place[g] if one.cell.norm == norm for v in one.values(score).values()] for g in groups]
            for norm in norms[first : first + MOST_NAMES]
        }
        if any(some for by_group in values.values() for some in by_group):
            yield group_bars(values, groups, title, f"{score_title(score)}, percent")


def _of_classes(cells: Sequence[MeasuredCell], title: str) -> Iterator[str]:
    """Figures of the first two norms, since more can't be distinguished; each run also has its own figures."""
    runs = {one.cell.norm: list(one.records.values()) for one in cells[:2]}
    known = {norm: records for norm, records in runs.items() if all("census" in record.raw for record in records)}
    if known:
        yield ap_by_frequency(known, f"{title}: each class by how often it came")
    for records in list(known.values())[:1]:  # the memory content does not depend on the norm
        if all(map(has_memory, records)):
            yield memory_panels(records, f"{title}: the memory beside the stream")


def run_figures(records: Sequence[Record]) -> list[str]:
    """Figures of the records of one run."""
    groups = [group for group in ("overall", *GROUPS) if records[0].classes_of(group) != []]
    values = {score_title(name): [[r.score(name, group) for r in records] for group in groups] for name in SCORES}
    drawn = [
        matrix_heat_map(records, "mAP, mean over seeds"),
        group_bars(values, groups, "Scores by group of classes, at the end", "percent"),
    ]
    if all("census" in record.raw for record in records):
        drawn.append(ap_of_groups(records, "Each class by how often it came"))
    if all(map(has_memory, records)):
        drawn.append(memory_panels(records, "The memory beside the stream"))
    return drawn
