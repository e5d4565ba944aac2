"""Limits the size of a page with many runs: summarizes streams, folds tables and leaves out figures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from contnorm.report.page import Cell, Rows, RunView, Table
from contnorm.report.summaries import LABEL_SCORES_SHOWN, SCORES_SHOWN, Summary
from contnorm.report.text_tables import Block

__all__ = ["MOST_CURVES", "MOST_OPEN", "Views", "limited_views", "score_tables", "strongest"]

MOST_OPEN = 100  # rows of scores, or configurations, that are shown unfolded
MOST_ROWS = 2000  # rows of scores on a page
MOST_VIEWS = 1000  # configurations that are described with their command, versions and device
MOST_CURVES = 9  # maximum in one figure; more can't be distinguished
FIGURE_BYTES = 1_000_000  # total size of the figures of single configurations


@dataclass(frozen=True)
class Views:
    """The configurations that a page describes, and a note on what it leaves out."""

    views: Sequence[RunView]
    note: str = ""


def score_tables(block: Block, title: str) -> list[Table]:
    """Tables of the scores of all configurations; with many rows, a summary by stream and folded tables below."""
    if len(block.rows) <= MOST_OPEN:
        return [Table(title, block.heads, [_rows(block.rows)], block.below)]
    shown = block.rows[:MOST_ROWS]
    omitted = len(block.rows) - len(shown)
    notes = [f"The rows of each stream are folded below: {len(shown)} in all."]
    notes += [f"{omitted} more rows are left out of this page: `contnorm report --format csv` has all."] * bool(omitted)
    by_stream: dict[str, list[Sequence[str]]] = {}
    for row in block.rows:
        by_stream.setdefault(row[0], []).append(row)
    first_score = next(name for name in ("ACC", "mAP") if name in block.heads)
    heads = ["stream", "rows", f"highest {first_score}", *block.heads[1:3], "run"]
    best = {
        stream: max(rows, key=lambda row: _leading(row, block.heads.index(first_score)))
        for stream, rows in by_stream.items()
    }
    summary = [
        [stream, str(len(rows)), best[stream][block.heads.index(first_score)], *best[stream][1:3], best[stream][-1]]
        for stream, rows in by_stream.items()
    ]
    return [Table(title, heads, [_rows(summary)], [*block.below, *notes]), *_folded(block.heads, shown)]


def _folded(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[Table]:
    by_stream: dict[str, list[Sequence[str]]] = {}
    for row in rows:
        by_stream.setdefault(row[0], []).append(row)
    for stream, some in by_stream.items():
        yield Table(f"{stream}: {len(some)} rows", heads, [_rows(some)], (), folded=True)


def _rows(rows: Iterable[Sequence[str]]) -> Rows:
    return Rows("", [list(map(Cell, row)) for row in rows])


def _leading(row: Sequence[str], place: int) -> float:
    """Mean of a cell such as ``64.75 +- 3.44``; minus infinity for a cell without a number."""
    try:
        return float(row[place].split()[0])
    except ValueError:
        return float("-inf")


def strongest(groups: Mapping[str, Sequence[Summary]], most: int = MOST_CURVES) -> list[str]:
    """Names of the ``most`` configurations with the highest final score, in their original order.

    Example:
        >>> strongest({})
        []
    """
    if len(groups) <= most:
        return list(groups)
    means = {name: fmean(map(_final_score, group)) for name, group in groups.items()}
    best = sorted(groups, key=lambda name: -means[name])[:most]
    return [name for name in groups if name in best]


def _final_score(one: Summary) -> float:
    """ACC, or mAP over all labels, with the moments that the run was evaluated with."""
    scores = one.scores[one.config.evaluate.moments]
    if one.multi_label:
        return scores["overall"][LABEL_SCORES_SHOWN.index("map")]
    return scores[""][SCORES_SHOWN.index("acc")]


def limited_views(views: Iterable[tuple[RunView, Iterator[str]]], total: int) -> Views:
    """Collect the views of configurations; figures are included until their total size reaches the limit.

    Args:
        views: View of each configuration, and an iterator of its figures, which is consumed only if there is room.
        total: Number of configurations.
    """
    made: list[RunView] = []
    drawn, room = 0, FIGURE_BYTES
    for view, figures in views:
        if len(made) == MOST_VIEWS:
            break
        if room > 0:
            svgs = list(figures)
            room -= sum(map(len, svgs))
            drawn += 1
            made.append(RunView(view.name, view.title, view.settings, view.command, view.facts, svgs))
        else:
            made.append(view)
    notes = []
    if drawn < len(made):
        matrix = "`contnorm show HASH --by-task` prints the matrices of the others"
        notes.append(f"Figures are drawn of the first {drawn} of {total} settings, to keep the page small; {matrix}.")
    if len(made) < total:
        notes.append(f"{total - len(made)} settings are left out here: `contnorm show` and --format csv have all.")
    return Views(made, " ".join(notes))
