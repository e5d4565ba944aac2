"""The scores of all runs, as rows; needs no torch.

Runs whose pictures have several labels have scores of their own, so they stand in a table of their own, with a row for
each group of labels.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence

from contnorm.cli.showing import GROUPS_SHOWN, SHOWN, SHOWN_OF_LABELS, described, rows_of
from contnorm.comparison.words import FM_OF_LABELS, part_of
from contnorm.report.sheets import Block
from contnorm.results import Record

__all__ = ["run_blocks", "runs_csv"]

Groups = Mapping[str, Sequence[Record]]

SCORES_NOTE = (
    "Percent, mean +- sample standard deviation over seeds. ACC: accuracy on all tasks at the end. FM: forgotten "
    "since each task was known best, up to the last row but one (the paper's definition, fm). LA: accuracy on each "
    "task just after it was learned."
)
LABELS_NOTE = (
    "Percent, mean +- sample standard deviation over seeds, on the test pictures of all tasks at the end. C-F1: the "
    "harmonic mean of precision and recall, each a mean over classes. O-F1: F1 of all labels taken together. mAP: the "
    "mean over classes of average precision."
)


def run_blocks(groups: Groups) -> list[Block]:
    """A row for each setting, way of evaluation and, where there are several, group of labels.

    Example:
        >>> run_blocks({})
        []
    """
    one, several = ([g for g in groups.values() if g[0].several_labels == kind] for kind in (False, True))
    blocks = [_block("One label a picture" if several else "", one, (SCORES_NOTE,))] if one else []
    parts = {words: None for group in several for record in group if (words := part_of(record))}
    notes = (LABELS_NOTE, FM_OF_LABELS, *(f"Some are {words}, which is another stream." for words in parts))
    return [*blocks, _block("Several labels a picture" if one else "", several, notes)] if several else blocks


def _block(title: str, groups: Iterable[Sequence[Record]], notes: Sequence[str]) -> Block:
    rows = [row for group in groups for row in rows_of(group)]
    labels = ["labels"] if rows[0].labels else []
    heads = ["stream", "strategy", "norm", "moments", "seeds", *labels, *rows[0].titles, "run"]
    written = [
        [*row.what, row.moments, str(row.seeds), *([row.labels] if labels else []), *row.scores, row.run]
        for row in rows
    ]
    return Block(title, heads, written, notes)


def runs_csv(groups: Groups) -> str:
    """One line a run and, where there are several, group of labels, unrounded: for other tools."""
    several = any(group[0].several_labels for group in groups.values())
    scores = [*SHOWN, *(SHOWN_OF_LABELS if several else ())]
    written = io.StringIO()
    writer = csv.writer(written, lineterminator="\n")
    writer.writerow(["run", "stream", "strategy", "norm", "moments", "seed", *(["labels"] if several else []), *scores])
    for name, group in groups.items():
        for record in group:
            what = [name, *described(record.config), record.config.evaluate.moments, record.seed]
            for labels in GROUPS_SHOWN if record.several_labels else ("",):
                own = SHOWN_OF_LABELS if record.several_labels else SHOWN
                values = [record.score(score, labels) if score in own else "" for score in scores]
                writer.writerow([*what, *([labels] if several else []), *values])
    return written.getvalue()
