"""Tables of runs: one row per configuration with its scores over seeds, for the terminal, pages and CSV files.

A settings column shows the settings that tell runs apart and have no column of their own. Multi-label runs have other
scores than single-label runs and are in a separate table, with one row per group of labels.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from contnorm.bench.config.defaults import changed, run_names, varying
from contnorm.bench.config.schema import RunConfig
from contnorm.bench.config.sources import format_settings
from contnorm.bench.metrics.accuracy_matrix import score
from contnorm.bench.records import Record
from contnorm.bench.streams.tasks import STREAMS
from contnorm.paper.format import spread
from contnorm.paper.record_remarks import LABEL_FORGETTING, data_part, data_remarks, divergence_text
from contnorm.paper.scores import score_title
from contnorm.registry import find_norm
from contnorm.report.summaries import GROUPS_SHOWN, LABEL_SCORES_SHOWN, SCORES_SHOWN, Summary
from contnorm.report.text_tables import TextTable, csv_text

__all__ = [
    "LABEL_SCORE_TITLES",
    "SCORE_TITLES",
    "DivergedSeeds",
    "ScoreRow",
    "changed_keys",
    "divergence_lines",
    "keys_to_show",
    "run_blocks",
    "runs_csv",
    "score_rows",
    "unknown_names",
]

DivergedSeeds = Mapping[str, Mapping[int, str]]  # for each run hash, its diverged seeds and the reasons
Groups = Mapping[str, Sequence[Record]]
SCORE_TITLES = {name: score_title(name) for name in SCORES_SHOWN}
LABEL_SCORE_TITLES = {name: score_title(name) for name in LABEL_SCORES_SHOWN}
KEYS_IN_COLUMNS = {
    "stream.name",
    "stream.source",
    "strategy.name",
    "norm.name",
    "norm.groups",
    "norm.freeze_after",
    "train.max_steps",
    "evaluate.moments",
}


@dataclass(frozen=True)
class ScoreRow:
    """One row of the table of scores."""

    run: str
    names: tuple[str, ...]  # stream, strategy, norm
    moments: str
    seeds: int
    scores: list[str]
    settings: str
    labels: str = ""  # group of labels; empty for single-label streams

    @property
    def titles(self) -> list[str]:
        return list((LABEL_SCORE_TITLES if self.labels else SCORE_TITLES).values())


def score_rows(group: Sequence[Summary], shown_keys: Collection[str] = ()) -> list[ScoreRow]:
    """Rows of one configuration: one per kind of moments and, for multi-label streams, per group of labels."""
    c = group[0].config
    settings = format_settings(changed(c), shown_keys)
    rows = []
    for moments in dict.fromkeys(("running", c.evaluate.moments)):
        by_seed = [summary.scores[moments] for summary in group if moments in summary.scores]
        for labels in by_seed[0] if by_seed else ():
            by_score = zip(*(scores[labels] for scores in by_seed), strict=True)
            rows.append(
                ScoreRow(
                    c.hash,
                    run_names(c),
                    moments,
                    len(by_seed),
                    [spread(values) for values in by_score],
                    settings,
                    labels,
                )
            )
    return rows


def keys_to_show(configs: Sequence[RunConfig]) -> set[str]:
    """Keys of the settings to show: of one run those changed from the stream's defaults, of several those that vary."""
    if len(configs) == 1:
        return changed_keys(configs[0])
    alike: dict[tuple[str, ...], list[RunConfig]] = defaultdict(list)
    for config in configs:
        alike[(*run_names(config), config.evaluate.moments)].append(config)
    hidden = set().union(*(varying(some) for some in alike.values()))
    return hidden | (varying(configs) - KEYS_IN_COLUMNS)


def changed_keys(config: RunConfig) -> set[str]:
    """Keys of settings that are changed from the stream's defaults and have no column.

    Example:
        >>> from contnorm.bench.config.schema import from_dict
        >>> "train.lr" in changed_keys(from_dict({"train": {"lr": 0.5}})), "train.lr" in changed_keys(RunConfig())
        (True, False)
    """
    return changed(config).keys() - KEYS_IN_COLUMNS


def unknown_names(records: Iterable[Record | Summary]) -> list[str]:
    """One line for each run whose norm or stream is unknown to this version.

    Example:
        >>> unknown_names([])
        []
    """
    configs = {record.config.hash: record.config for record in records}
    lines = []
    for run, config in configs.items():
        for what, name, known in (
            ("norm", config.norm.name, config.norm.code is not None or _is_norm(config.norm.name)),
            ("stream", config.stream.name, config.stream.name in STREAMS),
        ):
            if not known:
                lines.append(f"{run}: {what} {name!r} is unknown to this version; its scores are shown as recorded.")
    return lines


@lru_cache(maxsize=256)
def _is_norm(name: str) -> bool:
    try:
        find_norm(name)
    except ValueError:
        return False
    return True


def divergence_lines(records: Sequence[Record | Summary], diverged: DivergedSeeds) -> list[str]:
    """One line for each run with diverged seeds.

    Example:
        >>> divergence_lines([], {"75cc28cb778a": {0: "seed 0: the loss is nan at step 9 of 60 (task 2)."}})
        ['75cc28cb778a: its only seed diverged. seed 0: the loss is nan at step 9 of 60 (task 2).']
    """
    finished = Counter(run for run, _ in {(record.config.hash, record.seed) for record in records})
    return [f"{run}: {divergence_text(reasons, finished[run])}" for run, reasons in diverged.items()]


SCORES_NOTE = (
    "Percent, mean +- sample standard deviation over seeds. ACC: accuracy on all tasks at the end. Mean over the "
    "stream: accuracy on the tasks so far, averaged over the ends of all tasks. FM: drop from the best earlier "
    "accuracy on each task to that at the end (the paper's definition, fm). LA: accuracy on each task just after it "
    "was learned."
)
LABELS_NOTE = (
    "Percent, mean +- sample standard deviation over seeds, on the test images of all tasks at the end. C-F1: the "
    "harmonic mean of precision and recall, each a mean over classes. O-F1: F1 of all labels taken together. mAP: the "
    "mean over classes of average precision."
)


def run_blocks(groups: Mapping[str, Sequence[Summary]], diverged: DivergedSeeds) -> list[TextTable]:
    """One row per configuration, kind of moments and group of labels; notes on diverged seeds below.

    Example:
        >>> run_blocks({}, {})
        []
    """
    one, several = ([g for g in groups.values() if g[0].multi_label == kind] for kind in (False, True))
    blocks = [_block("One label per image" if several else "", one, (SCORES_NOTE, *_data_notes(one)))] if one else []
    notes = (LABELS_NOTE, LABEL_FORGETTING, *_data_notes(several))
    blocks += [_block("Several labels per image" if one else "", several, notes)] if several else []
    lines = divergence_lines([record for group in groups.values() for record in group], diverged)
    return [*blocks[:-1], replace(blocks[-1], below=(*blocks[-1].below, *lines))] if lines and blocks else blocks


def _data_notes(groups: Iterable[Sequence[Summary]]) -> list[str]:
    """Notes on incomplete published data sets, and on runs of one data set that used different data."""
    records = [record for group in groups for record in group]
    parts = dict.fromkeys(part for record in records if (part := data_part(record)))
    return [*(f"Some runs used {part}." for part in parts), *data_remarks(records)]


def _block(title: str, groups: Iterable[Sequence[Summary]], notes: Sequence[str]) -> TextTable:
    rows = [row for group in groups for row in score_rows(group, changed_keys(group[0].config))]
    labels = ["labels"] if rows[0].labels else []
    settings = ["settings"] if any(row.settings for row in rows) else []
    heads = ["stream", "strategy", "norm", "moments", "seeds", *labels, *rows[0].titles, *settings, "run"]
    written = [
        [
            *row.names, row.moments, str(row.seeds), *([row.labels] if labels else []), *row.scores,
            *([row.settings] if settings else []), row.run,
        ]
        for row in rows
    ]  # fmt: skip
    return TextTable(title, heads, written, notes)


def runs_csv(groups: Groups) -> str:
    """CSV with one line per run, kind of moments and group of labels; values are not rounded."""
    several = any(group[0].multi_label for group in groups.values())
    scores = [*SCORE_TITLES, *(LABEL_SCORE_TITLES if several else ())]
    heads = ["run", "stream", "strategy", "norm", "settings", "moments", "seed", *(["labels"] if several else [])]
    rows: list[Sequence[object]] = []
    for run, group in groups.items():
        config = group[0].config
        names = [run, *run_names(config), format_settings(changed(config), changed_keys(config))]
        for record in group:
            for moments, labels, values in _measured(record):
                place = [moments, record.seed, *([labels] if several else [])]
                rows.append([*names, *place, *(values.get(name, "") for name in scores)])
    return csv_text([*heads, *scores], rows)


def _measured(record: Record) -> Iterator[tuple[str, str, dict[str, float]]]:
    """Moments used for evaluation, group of labels, and scores by name."""
    if record.multi_label:
        for labels in GROUPS_SHOWN:
            values = {name: record.score(name, labels) for name in LABEL_SCORE_TITLES}
            yield record.config.evaluate.moments, labels, values
        return
    for moments, matrix in record.evaluated.items():
        yield moments, "", {name: score(matrix, name) for name in SCORE_TITLES}
