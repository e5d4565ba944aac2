"""The `show` command: prints the scores of records. Needs no torch.

Scores are printed as a table if it fits, otherwise as a few lines per run. A settings column shows the settings that
tell runs apart and have no column of their own.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from rich.console import Console
from rich.table import Table

from contnorm.bench.config.defaults import changed, varying
from contnorm.bench.config.schema import RunConfig
from contnorm.bench.config.sources import format_settings
from contnorm.bench.metrics.accuracy_matrix import AccuracyMatrix
from contnorm.bench.metrics.multilabel import LabelMatrix, mean_ap
from contnorm.bench.records import Record, by_settings
from contnorm.bench.streams.tasks import STREAMS
from contnorm.cli.tables import column_widths, indented, print_columns, safe_text, say
from contnorm.paper.diverged import lost_words
from contnorm.paper.format import FM_OF_LABELS, data_remarks, digits_remarks, part_of, spread
from contnorm.registry import find_norm
from contnorm.report.summaries import GROUPS_SHOWN, LABEL_SCORES_SHOWN, SCORES_SHOWN, Summary, summarize

__all__ = [
    "GROUPS_SHOWN",
    "SHOWN",
    "SHOWN_OF_LABELS",
    "Row",
    "described",
    "lost_lines",
    "rows_of",
    "show_lost",
    "show_matrices",
    "show_scores",
    "show_unsealed",
    "unknown_names",
]

Lost = Mapping[str, Mapping[int, str]]  # for each run hash, its diverged seeds and the reasons

SHOWN = dict(zip(SCORES_SHOWN, ("ACC", "FM", "LA"), strict=True))
LABEL_TITLES = ("C-F1", "O-F1", "mAP", "FM C-F1", "FM O-F1", "FM mAP")
SHOWN_OF_LABELS = dict(zip(LABEL_SCORES_SHOWN, LABEL_TITLES, strict=True))
IN_COLUMNS = {
    "stream.name",
    "stream.source",
    "strategy.name",
    "norm.name",
    "norm.groups",
    "train.max_steps",
    "evaluate.moments",
}


@dataclass(frozen=True)
class Row:
    """One row of the table of scores."""

    run: str
    what: tuple[str, ...]  # stream, strategy, norm
    moments: str
    seeds: int
    scores: list[str]
    settings: str
    labels: str = ""  # group of labels; empty for single-label streams

    @property
    def titles(self) -> list[str]:
        return list((SHOWN_OF_LABELS if self.labels else SHOWN).values())


def show_scores(records: Sequence[Record | Summary], console: Console) -> None:
    """Print one row per configuration, with mean and standard deviation over its seeds; nothing without records.

    Multi-label runs follow the others in a table of their own scores, with one row per group of labels.
    """
    summaries = [summarize(one) if isinstance(one, Record) else one for one in records]
    for several in (False, True):
        _show_scores([one for one in summaries if one.multi_label == several], console)
    for line in _remarks(summaries):
        say(line, console)


def _remarks(records: Sequence[Summary]) -> list[str]:
    """Notes below the table of scores."""
    several = [FM_OF_LABELS] if any(record.multi_label for record in records) else []
    parts = {record.config.hash: words for record in records if (words := part_of(record))}
    return [*several, *(f"{run}: {words}." for run, words in parts.items()), *data_remarks(records)]


def show_unsealed(records: Sequence[Record | Summary], console: Console) -> None:
    """Print which runs have records that no checksum protects."""
    unsealed = Counter(record.config.hash for record in records if not record.sealed)
    total = Counter(record.config.hash for record in records)
    for run, count in unsealed.items():
        say(
            f"{run}: {count} of {total[run]} records unsealed (schema 1), so a changed count would not be noticed.",
            console,
        )


def show_lost(records: Sequence[Record | Summary], lost: Lost, console: Console) -> None:
    """Print which runs lack seeds because their loss was no longer finite."""
    for line in lost_lines(records, lost):
        say(line, console)


def lost_lines(records: Sequence[Record | Summary], lost: Lost) -> list[str]:
    """One line for each run with diverged seeds.

    Example:
        >>> lost_lines([], {"75cc28cb778a": {0: "seed 0: the loss is nan at step 9 of 60 (task 2)."}})
        ['75cc28cb778a: the only seed was lost. seed 0: the loss is nan at step 9 of 60 (task 2).']
    """
    finished = Counter(run for run, _ in {(record.config.hash, record.seed) for record in records})
    return [f"{run}: {lost_words(notes, finished[run])}" for run, notes in lost.items()]


def _show_scores(records: Sequence[Summary], console: Console) -> None:
    if not records:
        return
    groups = by_settings(records)
    worth_saying = _worth_saying([group[0].config for group in groups.values()])
    rows = [row for group in groups.values() for row in rows_of(group, worth_saying)]
    with_settings = len(groups) > 1 and any(row.settings for row in rows)
    if _least_width(rows, with_settings) > console.width:
        for row in rows:
            _show_lines(row, console)
        return
    print_columns(*_cells(rows, with_settings), console, wrap_last=with_settings)
    if len(groups) == 1 and rows[0].settings:
        console.print(safe_text(f"settings that are not the stream's own: {rows[0].settings}"))


def rows_of(group: Sequence[Summary], worth_saying: Collection[str] = ()) -> list[Row]:
    """Rows of one configuration: one per kind of moments and, for multi-label streams, per group of labels."""
    c = group[0].config
    settings = format_settings(changed(c), worth_saying)
    rows = []
    for moments in dict.fromkeys(("running", c.evaluate.moments)):
        by_seed = [summary.scores[moments] for summary in group if moments in summary.scores]
        for labels in by_seed[0] if by_seed else ():
            by_score = zip(*(scores[labels] for scores in by_seed), strict=True)
            rows.append(
                Row(
                    c.hash,
                    described(c),
                    moments,
                    len(by_seed),
                    [spread(values) for values in by_score],
                    settings,
                    labels,
                )
            )
    return rows


def _worth_saying(configs: Sequence[RunConfig]) -> set[str]:
    """Keys of the settings to show: of one run those changed from the stream's defaults, of several those that vary."""
    if len(configs) == 1:
        return own_settings(configs[0])
    alike: dict[tuple[str, ...], list[RunConfig]] = defaultdict(list)
    for config in configs:
        alike[(*described(config), config.evaluate.moments)].append(config)
    hidden = set().union(*(varying(some) for some in alike.values()))
    return hidden | (varying(configs) - IN_COLUMNS)


def own_settings(config: RunConfig) -> set[str]:
    """Keys of settings that are changed from the stream's defaults and have no column.

    Example:
        >>> from contnorm.bench.config.schema import from_dict
        >>> "train.lr" in own_settings(from_dict({"train": {"lr": 0.5}})), "train.lr" in own_settings(RunConfig())
        (True, False)
    """
    return changed(config).keys() - IN_COLUMNS


def described(config: RunConfig) -> tuple[str, ...]:
    """Names of the stream, strategy and norm of a run, for tables.

    Example:
        >>> described(RunConfig())
        ('permuted-mnist', 'single', 'bn')
    """
    stream, usual_source = config.stream, config.stream.name.partition("-")[2]
    source = "" if stream.source in (None, "mnist", usual_source, stream.name) else f" ({stream.source})"
    capped = "" if config.train.max_steps is None else f", first {config.train.max_steps} steps"
    return stream.name + source + capped, config.strategy.name, _norm_words(config.norm.name, config.norm.groups)


@lru_cache(maxsize=256)
def _norm_words(name: str, groups: int | str) -> str:
    """Name of a norm with its number of groups; a norm unknown to this version is named as in its record.

    Example:
        >>> _norm_words("cn", 8), _norm_words("a norm of a later version", 32)
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
                lines.append(f"{run}: {what} {name!r} is not one of this version's; its scores are shown as recorded.")
    return lines


@lru_cache(maxsize=256)
def _is_norm(name: str) -> bool:
    try:
        find_norm(name)
    except ValueError:
        return False
    return True


def _cells(rows: Sequence[Row], with_settings: bool) -> tuple[list[str], list[list[str]]]:
    """Column headings and cells of the table of scores."""
    labels = ["labels"] if rows[0].labels else []
    settings = ["settings"] if with_settings else []
    heads = ["run", "stream", "strategy", "norm", "moments", "seeds", *labels, *rows[0].titles, *settings]
    cells = []
    for row in rows:
        rest = [row.settings] if with_settings else []
        group = [row.labels] if row.labels else []
        cells.append([row.run, *row.what, row.moments, str(row.seeds), *group, *row.scores, *rest])
    return heads, cells


def _least_width(rows: Sequence[Row], with_settings: bool) -> int:
    """Minimum width of the table without truncation; the settings column may wrap between settings."""
    widths = column_widths(*_cells(rows, False))
    least = sum(widths) + 2 * (len(widths) - 1)
    words = [word for row in rows for word in (*row.settings.split(), "settings")]
    return least + (2 + max(map(len, words)) if with_settings else 0)


def _show_lines(row: Row, console: Console) -> None:
    seeds = "1 seed" if row.seeds == 1 else f"{row.seeds} seeds"
    scores = "  ".join(f"{title} {value}" for title, value in zip(row.titles, row.scores, strict=True))
    how = ", ".join(filter(None, (seeds, row.moments, row.labels)))
    console.print(safe_text(f"{row.run}  {' '.join(row.what)}"))
    for line in filter(None, (f"{how}: {scores}", row.settings)):
        indented(line, console)


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
        say(line, console)


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
