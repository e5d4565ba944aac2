"""What a page shows of many runs: a summary of each stream, the rest folded, and limits on the size of all of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from contnorm.report.page import Cell, Rows, RunView, Table
from contnorm.report.summaries import LABEL_SCORES_SHOWN, SCORES_SHOWN, Summary
from contnorm.report.text_tables import Block

__all__ = ["MOST_CURVES", "MOST_OPEN", "Views", "limited_views", "score_tables", "strongest"]

MOST_OPEN = 100  # rows of scores, or settings, that stand on a page unfolded
MOST_ROWS = 2000  # rows of scores on a page
MOST_VIEWS = 1000  # settings that are described with their command, versions and device
MOST_CURVES = 9  # in one figure; more can't be told apart
FIGURE_BYTES = 1_000_000  # of the figures of single settings


@dataclass(frozen=True)
class Views:
    """The settings that a page describes, and what it leaves out, in words."""

    views: Sequence[RunView]
    note: str = ""


def score_tables(block: Block, title: str) -> list[Table]:
    """The scores of all settings; of many, a summary of each stream, and below it the rows of the stream, folded."""
    if len(block.rows) <= MOST_OPEN:
        return [Table(title, block.heads, [_rows(block.rows)], block.below)]
    shown = block.rows[:MOST_ROWS]
    left_out = len(block.rows) - len(shown)
    notes = [f"The rows of each stream are folded below: {len(shown)} in all."]
    notes += [f"{left_out} more rows are left out of this page: `contnorm report --format csv` has all."] * bool(
        left_out
    )
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
    """The mean of a cell such as ``64.75 +- 3.44``; a cell without a number comes last."""
    try:
        return float(row[place].split()[0])
    except ValueError:
        return float("-inf")


def strongest(groups: Mapping[str, Sequence[Summary]], most: int = MOST_CURVES) -> list[str]:
    """Of some settings those whose score at the end is highest, as many as one figure can show, in their order.

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
    """ACC, or mAP of all labels, with the moments that the run is evaluated with."""
    scores = one.scores[one.config.evaluate.moments]
    if one.several_labels:
        return scores["overall"][LABEL_SCORES_SHOWN.index("map")]
    return scores[""][SCORES_SHOWN.index("acc")]


def limited_views(views: Iterable[tuple[RunView, Iterator[str]]], total: int) -> Views:
    """The views of some settings, with their figures as long as these stay small together.

    Args:
        views: Of each setting its view, and its figures, which are drawn only where there is room.
        total: How many settings there are.
    """
    made: list[RunView] = []
    drawn, room = 0, FIGURE_BYTES
    for view, figures in views:
        if len(made) == MOST_VIEWS:
            break
        if room > 0:
            found = list(figures)
            room -= sum(map(len, found))
            drawn += 1
            made.append(RunView(view.name, view.title, view.settings, view.command, view.facts, found))
        else:
            made.append(view)
    notes = []
    if drawn < len(made):
        matrix = "`contnorm show HASH --by-task` prints the matrices of the others"
        notes.append(f"Figures are drawn of the first {drawn} of {total} settings, to keep the page small; {matrix}.")
    if len(made) < total:
        notes.append(f"{total - len(made)} settings are left out here: `contnorm show` and --format csv have all.")
    return Views(made, " ".join(notes))
