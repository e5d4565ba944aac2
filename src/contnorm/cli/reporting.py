"""Records as a page, or as tables for a paper of one's own; needs no torch."""

from __future__ import annotations

import csv
import io
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from contnorm.cli.settings import changed, word
from contnorm.cli.showing import SHOWN, described, rows_of
from contnorm.config import RunConfig
from contnorm.errors import unknown
from contnorm.report import figures
from contnorm.report.page import Cell, Page, RunView, Table, page_html
from contnorm.results import Record, by_settings

__all__ = ["FORMATS", "report"]

Groups = Mapping[str, Sequence[Record]]
FILLED_IN = {"stream.source", "strategy.code", "model.code", "model.weights_hash"}


def report(records: Sequence[Record], form: str) -> str:
    """All records as one text: a page, or the table of their scores."""
    if form not in FORMATS:
        raise unknown("format", form, FORMATS)
    return FORMATS[form](by_settings(sorted(records, key=lambda r: (described(r.config), r.config.hash, r.seed))))


def _heads() -> list[str]:
    return ["stream", "strategy", "norm", "moments", "seeds", *SHOWN.values(), "run"]


def _score_rows(groups: Groups) -> list[list[str]]:
    """A row for each setting and way of evaluation."""
    rows = [row for group in groups.values() for row in rows_of(group)]
    return [[*row.what, row.moments, str(row.seeds), *row.scores, row.run] for row in rows]


def _html(groups: Groups) -> str:
    table = Table(
        "Scores",
        _heads(),
        [[Cell(text) for text in row] for row in _score_rows(groups)],
        "Percent, mean +- sample standard deviation over seeds. ACC: accuracy on all tasks at the end. FM: forgotten "
        "since each task was known best, up to the last row but one (the paper's definition). LA: accuracy on each "
        "task just after it was learned.",
    )
    lead = f"{sum(map(len, groups.values()))} runs of {len(groups)} settings, all numbers from their records."
    page = Page("contnorm: runs", lead, [table], _compared(groups), [_run_view(group) for group in groups.values()])
    return page_html(page)


def _compared(groups: Groups) -> list[str]:
    """For each stream, the accuracy over tasks of all its settings."""
    by_stream: dict[str, dict[str, Sequence[Record]]] = defaultdict(dict)
    for name, group in groups.items():
        stream, strategy, norm = described(group[0].config)
        exact = ", exact moments" if group[0].config.evaluate.moments == "oracle" else ""
        by_stream[stream][f"{strategy} {norm}{exact} ({name[:4]})"] = group
    return [figures.accuracy_over_tasks(found, stream) for stream, found in by_stream.items() if len(found) > 1]


def _run_view(group: Sequence[Record]) -> RunView:
    first = group[0]
    title = " ".join(described(first.config))
    drawn = [figures.matrix_heat_map(group, "Accuracy, mean over seeds")]
    if all(record.drift.get("by_task") for record in group) and len(first.drift["by_task"][0]) <= 4:
        drawn.append(figures.drift_over_tasks(group, "Running moments drift from exact ones"))
    if all("matrix_running" in record.raw for record in group) and first.matrix.tasks > 1:
        drawn.append(figures.forgetting_split(group, "Forgotten at the end"))
    return RunView(first.config.hash, title, _command(first.config, len(group)), _facts(group), drawn)


def _command(config: RunConfig, seeds: int) -> str:
    """What to type to make the runs again."""
    rest = {key: value for key, value in changed(config).items() if key not in FILLED_IN}
    for key in ("stream.name", "strategy.name", "norm.name"):
        rest.pop(key, None)
    named = f"--stream {config.stream.name} --strategy {config.strategy.name} --norm {config.norm.name}"
    return " ".join(["contnorm run", named, f"--seeds {seeds}", *(f"--set {k}={word(v)}" for k, v in rest.items())])


def _facts(group: Sequence[Record]) -> list[tuple[str, str]]:
    raw = group[0].raw
    versions, device, source = (raw.get(key) or {} for key in ("versions", "device", "source"))
    facts = {
        "seeds": ", ".join(str(record.seed) for record in group),
        "settings": ", ".join(f"{key}={word(value)}" for key, value in changed(group[0].config).items()),
        "device": f"{device.get('name', 'unknown')} ({device.get('kind', '?')}, {device.get('threads', '?')} threads)",
        "precision": f"{raw.get('precision')}, {'deterministic' if raw.get('deterministic') else 'not deterministic'}",
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
        "data": f"{source.get('name')} {source.get('fingerprint', '')}",
        "commit": str(raw.get("commit") or "unknown"),
    }
    return [(name, value) for name, value in facts.items() if value]


def _markdown(groups: Groups) -> str:
    lines = [_heads(), ["---"] * len(_heads()), *_score_rows(groups)]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _latex(groups: Groups) -> str:
    def set_(cells: Sequence[str]) -> str:
        return " & ".join(cell.replace("_", r"\_").replace("+-", r"$\pm$") for cell in cells) + r" \\"

    lines = [rf"\begin{{tabular}}{{{'l' * len(_heads())}}}", r"\toprule", set_(_heads()), r"\midrule"]
    return "\n".join([*lines, *map(set_, _score_rows(groups)), r"\bottomrule", r"\end{tabular}"]) + "\n"


def _csv(groups: Groups) -> str:
    """One line a run and score, unrounded: for other tools."""
    written = io.StringIO()
    writer = csv.writer(written, lineterminator="\n")
    writer.writerow(["run", "stream", "strategy", "norm", "moments", "seed", *SHOWN])
    for name, group in groups.items():
        for record in group:
            moments = record.config.evaluate.moments
            writer.writerow([name, *described(record.config), moments, record.seed, *map(record.score, SHOWN)])
    return written.getvalue()


FORMATS: dict[str, Callable[[Groups], str]] = {"html": _html, "md": _markdown, "latex": _latex, "csv": _csv}
