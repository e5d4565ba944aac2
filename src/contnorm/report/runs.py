"""Tables of runs: one row per run with its scores over seeds, for the terminal, pages and files."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Sequence
from statistics import fmean

from contnorm.bench.config.defaults import FILLED_IN, changed, run_names, varying
from contnorm.bench.config.schema import RunConfig, format_settings, format_value
from contnorm.bench.data.dataset import GROUPS
from contnorm.bench.label_metrics import LabelMatrix, label_score, mean_ap
from contnorm.bench.metrics import MAIN_SCORES, AccuracyMatrix, score, score_title
from contnorm.bench.records import Record, Runs
from contnorm.bench.rng import MAX_SEEDS
from contnorm.bench.sequential import FIRST_SEED
from contnorm.bench.streams.tasks import STREAMS
from contnorm.bench.text import LABEL_FORGETTING, data_part, data_remarks, divergence_text, spread
from contnorm.report.tables import Document, Table

SCORES_SHOWN = MAIN_SCORES
LABEL_SCORES_SHOWN = ("c_f1", "o_f1", "map", "fm_c_f1", "fm_o_f1", "fm_map")
GROUPS_SHOWN = ("overall", *GROUPS)
IN_COLUMNS = {
    *("stream.name", "stream.source", "strategy.name", "norm.name", "norm.groups", "norm.freeze_after"),
    *("train.lr", "train.max_steps", "evaluate.moments"),
}
NOT_TYPED = {"stream.source", *FILLED_IN}
SCORES_NOTE = (
    "Percent, mean +- sample standard deviation over seeds. ACC: accuracy on all tasks at the end. Mean over the "
    "stream: accuracy on the tasks so far, averaged over the ends of all tasks. FM: drop from the best earlier "
    "accuracy on each task to that at the end (the paper's definition, fm). LA: accuracy on each task just after it "
    "was learned."
)
LABELS_NOTE = (
    "Percent, mean +- sample standard deviation over seeds, on the test images of all tasks at the end. C-F1: the "
    "harmonic mean of precision and recall, each a mean over classes. O-F1: F1 of all labels taken together. mAP: the "
    f"mean over classes of average precision. {LABEL_FORGETTING}"
)


def score_tables(runs: Runs) -> list[Table]:
    """Tables of scores, sorted by stream, strategy and first score: one row per run and kind of moments.

    Multi-label runs have other scores than the others, and one row per group of labels, in a table of their own.

    Example:
        >>> score_tables(Runs([]))
        []
    """
    tables = []
    for title, note, multi_label in (("", SCORES_NOTE, False), ("Several labels per image", LABELS_NOTE, True)):
        some = Runs([record for record in runs.records if record.multi_label == multi_label]).by_run()
        if not some:
            continue
        configs = [group.records[0].config for group in some.values()]
        keys = varying(configs) - IN_COLUMNS
        names = LABEL_SCORES_SHOWN if multi_label else SCORES_SHOWN
        rows = [row for group in some.values() for row in _rows(group.records, names, keys)]
        rows.sort(key=lambda row: row[0])
        labels, settings = (["labels"] if multi_label else []), (["settings"] if keys else [])
        heads = ["run", "stream", "strategy", "norm", "lr", "moments", "seeds"]
        heads += [*labels, *map(score_title, names), *settings]
        shared = {key: value for key, value in changed(configs[0]).items() if key not in keys | IN_COLUMNS | NOT_TYPED}
        notes = [f"Changed from the defaults in all runs: {format_settings(shared, shared)}."] if shared else []
        records = [record for group in some.values() for record in group.records]
        parts = dict.fromkeys(f"{record.hash}: used {part}." for record in records if (part := data_part(record)))
        tables.append(Table(title, heads, [row for _, row in rows], [note, *notes, *parts, *data_remarks(records)]))
    return tables


def _rows(
    group: Sequence[Record], names: Sequence[str], keys: Collection[str]
) -> Iterator[tuple[tuple[str, str, float], list[str]]]:
    """Rows of one run with what they are sorted by: names, and the run's best first score."""
    config = group[0].config
    by_moments: dict[str, dict[str, list[list[float]]]] = {}
    for record in group:
        for moments, counted in record.evaluated.items():
            for labels in GROUPS_SHOWN if record.multi_label else ("",):
                values = [score_of(record, counted, name, labels) for name in names]
                by_moments.setdefault(moments, {}).setdefault(labels, []).append(values)
    stream, strategy, norm = run_names(config)
    shown = by_moments.get(config.evaluate.moments) or next(iter(by_moments.values()))
    first = fmean(values[0] for values in next(iter(shown.values())))
    settings = [format_settings(changed(config), keys)] if keys else []
    for moments, by_labels in by_moments.items():
        for labels, by_seed in by_labels.items():
            scores = [spread(list(column)) for column in zip(*by_seed, strict=True)]
            identity = [config.hash, stream, strategy, norm, format_value(config.train.lr), moments, str(len(by_seed))]
            yield (stream, strategy, -first), [*identity, *([labels] if labels else []), *scores, *settings]


def score_of(record: Record, counted: AccuracyMatrix | LabelMatrix, name: str, labels: str = "overall") -> float:
    """Score of an evaluation; for a multi-label run over one group of classes."""
    if isinstance(counted, LabelMatrix):
        return label_score(counted, name, record.classes_of(labels))
    return score(counted, name)


def divergence_lines(runs: Runs) -> list[str]:
    """One line for each run with diverged seeds.

    Example:
        >>> divergence_lines(Runs([]))
        []
    """
    return [
        f"{run}: {divergence_text({one.seed: one.reason for one in some.diverged}, len(some.records))}"
        for run, some in runs.by_run().items()
        if some.diverged
    ]


def accuracy_tables(records: Sequence[Record]) -> Iterator[Table]:
    """The accuracy on each task after each task, of each record and kind of moments; for multi-label runs the mAP."""
    for record in records:
        matrices = {f"{moments} moments": _percent(matrix) for moments, matrix in record.evaluated.items()}
        if record.matrix_task is not None:
            matrices["task known"] = _percent(record.matrix_task)
        for what, matrix in matrices.items():
            heads = ["after", *(f"task {task}" for task in range(len(matrix)))]
            rows = [
                [f"task {after}", *("-" if value is None else f"{value:.1f}" for value in row)]
                for after, row in enumerate(matrix)
            ]
            of_labels = ", mAP" if record.multi_label else ""
            name = ", ".join(run_names(record.config))
            yield Table(f"{name}: {record.hash} seed {record.seed}{of_labels}, {what}", heads, rows)


def _percent(counted: AccuracyMatrix | LabelMatrix) -> list[list[float | None]]:
    if isinstance(counted, LabelMatrix):
        return [[None if stats is None else mean_ap(stats) for stats in row] for row in counted.own]
    tasks = range(counted.tasks)
    return [[None if counted.correct[i][j] is None else counted.at(i, j) for j in tasks] for i in tasks]


def run_details(runs: Runs) -> Document:
    """Settings, command, versions and device of each run, and the accuracy matrix, which is a mean over seeds."""
    tables = []
    for run, group in runs.by_run().items():
        if not group.records:
            continue
        config, first = group.records[0].config, group.records[0]
        matrices = [_percent(record.counted) for record in group.records]
        side = min(map(len, matrices))
        heads, rows = ["after", *(f"task {task + 1}" for task in range(side))], []
        for after in range(side):
            known = [[value for one in matrices if (value := one[after][j]) is not None] for j in range(side)]
            means = [f"{fmean(values):.1f}" if len(values) == len(matrices) else "" for values in known]
            rows.append([f"task {after + 1}", *means])
        reached = first.raw.get("reached")
        facts = {
            "Command": _command(group.records),
            "Seeds": ", ".join(str(record.seed) for record in group.records),
            "Tasks": f"first {reached['tasks']} of {reached['of']}, by --max-steps" if reached else "",
            "Device": " / ".join(dict.fromkeys(str(record.device.get("name")) for record in group.records)),
            "Versions": ", ".join(f"{name} {version}" for name, version in first.versions.items() if version),
            "Data": f"{first.source.get('name', '')} {first.source.get('fingerprint', '')}".strip(),
            "Commit": " / ".join(dict.fromkeys(str(record.raw.get("commit")) for record in group.records)),
        }
        notes = [f"{name}: {value}" for name, value in facts.items() if value]
        what = "mAP" if first.multi_label else "accuracy"
        title = f"{' '.join(run_names(config))}, lr {config.train.lr:g}, {run}: {what} after each task, mean over seeds"
        tables.append(Table(title, heads, rows, notes, folded=True))
    return Document("details", "Details of each run", tables)


def _command(group: Sequence[Record]) -> str:
    """Command that repeats the runs."""
    config: RunConfig = group[0].config
    names = {"--stream": config.stream.name, "--strategy": config.strategy.name, "--norm": config.norm.name}
    rest = {key: value for key, value in changed(config).items() if key not in NOT_TYPED}
    stream = STREAMS.get(config.stream.name)  # None if this version has no such stream
    if config.stream.source not in (None, *(stream.sources[:1] if stream else ())):
        rest["stream.source"] = config.stream.source
    seeds = [record.seed for record in group]
    counted = [seed for seed in seeds if seed < FIRST_SEED]
    which = f"--seeds {max(counted) + 1}" if counted and max(seeds) < MAX_SEEDS else f"--seed {min(seeds)}"
    device = group[0].device
    flags = ["--device cuda"] if device.get("kind") == "cuda" else []
    flags += [f"--threads {device['threads']}"] if not flags and device.get("threads", 1) != 1 else []
    named = [f"{flag} {shlex.quote(name)}" for flag, name in names.items()]
    sets = [
        f"--set {shlex.quote(f'{key}={format_value(value)}')}"
        for key, value in rest.items()
        if key not in ("stream.name", "strategy.name", "norm.name")
    ]
    return " ".join(["contnorm run", *named, which, *flags, *sets])
