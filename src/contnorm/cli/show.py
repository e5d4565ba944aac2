"""The `show` command: prints the scores of records; the same tables for reports. Needs no torch.

Scores are printed as a table if it fits, otherwise as a few lines per run. A settings column shows the settings that
tell runs apart and have no column of their own. Multi-label runs have other scores than single-label runs and are in a
separate table, with one row per group of labels.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from rich.console import Console
from rich.table import Table

from contnorm.bench.config.defaults import changed, varying
from contnorm.bench.config.schema import RunConfig
from contnorm.bench.config.sources import format_settings
from contnorm.bench.metrics.accuracy_matrix import AccuracyMatrix, score
from contnorm.bench.metrics.multilabel import LabelMatrix, mean_ap
from contnorm.bench.records import Record, group_by_run
from contnorm.bench.streams.tasks import STREAMS
from contnorm.cli.tables import column_widths, print_columns, print_indented, print_text, safe_text
from contnorm.paper.format import spread
from contnorm.paper.scores import score_title
from contnorm.paper.tables import LABEL_FORGETTING, data_part, data_remarks, digits_remarks, divergence_text
from contnorm.registry import find_norm
from contnorm.report.summaries import GROUPS_SHOWN, LABEL_SCORES_SHOWN, SCORES_SHOWN, Summary, summarize
from contnorm.report.text_tables import TextTable, csv_text

__all__ = [
    "GROUPS_SHOWN",
    "LABEL_SCORE_TITLES",
    "SCORE_TITLES",
    "ScoreRow",
    "divergence_lines",
    "run_blocks",
    "run_names",
    "runs_csv",
    "score_rows",
    "show_diverged",
    "show_matrices",
    "show_scores",
    "show_unsealed",
    "unknown_names",
]

DivergedSeeds = Mapping[str, Mapping[int, str]]  # for each run hash, its diverged seeds and the reasons
Groups = Mapping[str, Sequence[Record]]
SCORE_TITLES = dict(zip(SCORES_SHOWN, ("ACC", "FM", "LA"), strict=True))
LABEL_SCORE_TITLES = {name: score_title(name) for name in LABEL_SCORES_SHOWN}
KEYS_IN_COLUMNS = {
    "stream.name",
    "stream.source",
    "strategy.name",
    "norm.name",
    "norm.groups",
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


def show_scores(records: Sequence[Record | Summary], console: Console) -> None:
    """Print one row per configuration, with mean and standard deviation over its seeds; nothing without records.

    Multi-label runs follow the others in a table of their own scores, with one row per group of labels.
    """
    summaries = [summarize(one) if isinstance(one, Record) else one for one in records]
    for several in (False, True):
        _show_scores([one for one in summaries if one.multi_label == several], console)
    for line in _remarks(summaries):
        print_text(line, console)


def _remarks(records: Sequence[Summary]) -> list[str]:
    """Notes below the table of scores."""
    several = [LABEL_FORGETTING] if any(record.multi_label for record in records) else []
    parts = {record.config.hash: part for record in records if (part := data_part(record))}
    return [*several, *(f"{run}: used {part}." for run, part in parts.items()), *data_remarks(records)]


def show_unsealed(records: Sequence[Record | Summary], console: Console) -> None:
    """Print which runs have records that no checksum protects."""
    unsealed = Counter(record.config.hash for record in records if not record.sealed)
    total = Counter(record.config.hash for record in records)
    for run, count in unsealed.items():
        print_text(
            f"{run}: {count} of {total[run]} records have no checksum (schema 1), so changes to them are not detected.",
            console,
        )


def show_diverged(records: Sequence[Record | Summary], diverged: DivergedSeeds, console: Console) -> None:
    """Print which runs lack seeds because they diverged."""
    for line in divergence_lines(records, diverged):
        print_text(line, console)


def divergence_lines(records: Sequence[Record | Summary], diverged: DivergedSeeds) -> list[str]:
    """One line for each run with diverged seeds.

    Example:
        >>> divergence_lines([], {"75cc28cb778a": {0: "seed 0: the loss is nan at step 9 of 60 (task 2)."}})
        ['75cc28cb778a: its only seed diverged. seed 0: the loss is nan at step 9 of 60 (task 2).']
    """
    finished = Counter(run for run, _ in {(record.config.hash, record.seed) for record in records})
    return [f"{run}: {divergence_text(reasons, finished[run])}" for run, reasons in diverged.items()]


def _show_scores(records: Sequence[Summary], console: Console) -> None:
    if not records:
        return
    groups = group_by_run(records)
    shown_keys = _choose_keys([group[0].config for group in groups.values()])
    rows = [row for group in groups.values() for row in score_rows(group, shown_keys)]
    with_settings = len(groups) > 1 and any(row.settings for row in rows)
    if _least_width(rows, with_settings) > console.width:
        for row in rows:
            _show_lines(row, console)
        return
    print_columns(*_cells(rows, with_settings), console, wrap_last=with_settings)
    if len(groups) == 1 and rows[0].settings:
        console.print(safe_text(f"changed from the stream's defaults: {rows[0].settings}"))


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


def _choose_keys(configs: Sequence[RunConfig]) -> set[str]:
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


def run_names(config: RunConfig) -> tuple[str, ...]:
    """Names of the stream, strategy and norm of a run, for tables.

    Example:
        >>> run_names(RunConfig())
        ('permuted-mnist', 'single', 'bn')
    """
    stream, usual_source = config.stream, config.stream.name.partition("-")[2]
    source = "" if stream.source in (None, "mnist", usual_source, stream.name) else f" ({stream.source})"
    capped = "" if config.train.max_steps is None else f", first {config.train.max_steps} steps"
    return stream.name + source + capped, config.strategy.name, _norm_label(config.norm.name, config.norm.groups)


@lru_cache(maxsize=256)
def _norm_label(name: str, groups: int | str) -> str:
    """Name of a norm with its number of groups; a norm unknown to this version is named as in its record.

    Example:
        >>> _norm_label("cn", 8), _norm_label("a norm of a later version", 32)
        ('cn8', 'a norm of a later version')
    """
    try:
        spec, in_name = find_norm(name)
    except ValueError:
        return name
    return f"{spec.name}{in_name or groups}" if spec.grouped else spec.name


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
            ("norm", config.norm.name, _is_norm(config.norm.name)),
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


def _cells(rows: Sequence[ScoreRow], with_settings: bool) -> tuple[list[str], list[list[str]]]:
    """Column headings and cells of the table of scores."""
    labels = ["labels"] if rows[0].labels else []
    settings = ["settings"] if with_settings else []
    heads = ["run", "stream", "strategy", "norm", "moments", "seeds", *labels, *rows[0].titles, *settings]
    cells = []
    for row in rows:
        rest = [row.settings] if with_settings else []
        group = [row.labels] if row.labels else []
        cells.append([row.run, *row.names, row.moments, str(row.seeds), *group, *row.scores, *rest])
    return heads, cells


def _least_width(rows: Sequence[ScoreRow], with_settings: bool) -> int:
    """Minimum width of the table without truncation; the settings column may wrap between settings."""
    widths = column_widths(*_cells(rows, False))
    least = sum(widths) + 2 * (len(widths) - 1)
    words = [word for row in rows for word in (*row.settings.split(), "settings")]
    return least + (2 + max(map(len, words)) if with_settings else 0)


def _show_lines(row: ScoreRow, console: Console) -> None:
    seeds = "1 seed" if row.seeds == 1 else f"{row.seeds} seeds"
    scores = "  ".join(f"{title} {value}" for title, value in zip(row.titles, row.scores, strict=True))
    how = ", ".join(filter(None, (seeds, row.moments, row.labels)))
    console.print(safe_text(f"{row.run}  {' '.join(row.names)}"))
    for line in filter(None, (f"{how}: {scores}", row.settings)):
        print_indented(line, console)


def show_matrices(records: Sequence[Record], console: Console) -> None:
    """Print the accuracy matrix of each run; for multi-label streams, the matrix of mAP."""
    for record in records:
        for title, rows in _matrices_by_task(record).items():
            heads = [f"task {j}" for j in range(len(rows))]
            heads += ["all so far"] if record.multi_label else []
            table = Table("after", *heads, title=f"{record.config.hash} seed {record.seed}{title}", box=None)
            table.pad_edge = False
            for i, row in enumerate(rows):
                table.add_row(f"task {i}", *("-" if value is None else f"{value:.1f}" for value in row))
            console.print(table, "")
    for line in digits_remarks(records):
        print_text(line, console)


def _matrices_by_task(record: Record) -> dict[str, list[list[float | None]]]:
    """Matrices measured after each task, by the suffix for their title."""
    if isinstance(record.counted, LabelMatrix):
        return {", mAP": _map_by_task(record.counted)}
    matrices = {moments: _acc_by_task(matrix) for moments, matrix in record.evaluated.items()}
    suffixes = {"running": ", running moments", "oracle": ", exact moments"}
    several = len(matrices) > 1
    return {suffixes[moments] if several or moments == "oracle" else "": rows for moments, rows in matrices.items()}


def _acc_by_task(m: AccuracyMatrix) -> list[list[float | None]]:
    tasks = range(m.tasks)
    return [[None if m.correct[i][j] is None else m.at(i, j) for j in tasks] for i in tasks]


def _map_by_task(m: LabelMatrix) -> list[list[float | None]]:
    """mAP on each task's images, and in the last column on the images of all tasks so far."""
    measured = [[*by_task, overall] for by_task, overall in zip(m.own, m.tally, strict=True)]
    return [[None if stats is None else mean_ap(stats) for stats in row] for row in measured]


SCORES_NOTE = (
    "Percent, mean +- sample standard deviation over seeds. ACC: accuracy on all tasks at the end. FM: drop from the "
    "best earlier accuracy on each task to that at the end (the paper's definition, fm). LA: accuracy on each task "
    "just after it was learned."
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
