"""Tables of the scores of all runs, for reports. Needs no torch.

Multi-label runs have other scores than single-label runs. They are in a separate table, with one row per group of
labels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from contnorm.bench.config.defaults import changed
from contnorm.bench.config.sources import format_settings
from contnorm.bench.metrics.accuracy_matrix import score
from contnorm.bench.records import Record
from contnorm.cli.show import (
    GROUPS_SHOWN,
    SHOWN,
    SHOWN_OF_LABELS,
    Lost,
    described,
    lost_lines,
    own_settings,
    rows_of,
)
from contnorm.paper.format import FM_OF_LABELS, data_remarks, part_of
from contnorm.report.summaries import Summary
from contnorm.report.text_tables import Block, csv_text

__all__ = ["run_blocks", "runs_csv"]

Groups = Mapping[str, Sequence[Record]]
Summarized = Mapping[str, Sequence[Summary]]

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


def run_blocks(groups: Summarized, lost: Lost) -> list[Block]:
    """One row per configuration, kind of moments and group of labels; notes on diverged seeds below.

    Example:
        >>> run_blocks({}, {})
        []
    """
    one, several = ([g for g in groups.values() if g[0].multi_label == kind] for kind in (False, True))
    blocks = [_block("One label a picture" if several else "", one, (SCORES_NOTE, *_data_notes(one)))] if one else []
    notes = (LABELS_NOTE, FM_OF_LABELS, *_data_notes(several))
    blocks += [_block("Several labels a picture" if one else "", several, notes)] if several else []
    diverged = lost_lines([record for group in groups.values() for record in group], lost)
    return [*blocks[:-1], replace(blocks[-1], below=(*blocks[-1].below, *diverged))] if diverged and blocks else blocks


def _data_notes(groups: Iterable[Sequence[Summary]]) -> list[str]:
    """Notes on incomplete published data sets, and on runs of one data set that used different data."""
    records = [record for group in groups for record in group]
    parts = {words: None for record in records if (words := part_of(record))}
    return [*(f"Some are {words}, which is another stream." for words in parts), *data_remarks(records)]


def _block(title: str, groups: Iterable[Sequence[Summary]], notes: Sequence[str]) -> Block:
    rows = [row for group in groups for row in rows_of(group, own_settings(group[0].config))]
    labels = ["labels"] if rows[0].labels else []
    settings = ["settings"] if any(row.settings for row in rows) else []
    heads = ["stream", "strategy", "norm", "moments", "seeds", *labels, *rows[0].titles, *settings, "run"]
    written = [
        [
            *row.what, row.moments, str(row.seeds), *([row.labels] if labels else []), *row.scores,
            *([row.settings] if settings else []), row.run,
        ]
        for row in rows
    ]  # fmt: skip
    return Block(title, heads, written, notes)


def runs_csv(groups: Groups) -> str:
    """CSV with one line per run, kind of moments and group of labels; values are not rounded."""
    several = any(group[0].multi_label for group in groups.values())
    scores = [*SHOWN, *(SHOWN_OF_LABELS if several else ())]
    heads = ["run", "stream", "strategy", "norm", "settings", "moments", "seed", *(["labels"] if several else [])]
    rows: list[Sequence[object]] = []
    for run, group in groups.items():
        config = group[0].config
        what = [run, *described(config), format_settings(changed(config), own_settings(config))]
        for record in group:
            for moments, labels, values in _measured(record):
                place = [moments, record.seed, *([labels] if several else [])]
                rows.append([*what, *place, *(values.get(name, "") for name in scores)])
    return csv_text([*heads, *scores], rows)


def _measured(record: Record) -> Iterator[tuple[str, str, dict[str, float]]]:
    """Moments used for evaluation, group of labels, and scores by name."""
    if record.multi_label:
        for labels in GROUPS_SHOWN:
            values = {name: record.score(name, labels) for name in SHOWN_OF_LABELS}
            yield record.config.evaluate.moments, labels, values
        return
    for moments, matrix in record.evaluated.items():
        yield moments, "", {name: score(matrix, name) for name in SHOWN}
