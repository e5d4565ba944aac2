"""Reports of records: an HTML page, or Markdown, LaTeX or CSV tables. Needs no torch."""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from contnorm.bench.config.defaults import changed, run_names
from contnorm.bench.config.schema import RunConfig
from contnorm.bench.config.sources import MAX_SEEDS, format_settings, format_value
from contnorm.bench.files import write_output
from contnorm.bench.records import Record, group_by_run
from contnorm.bench.sequential import FIRST_SEED
from contnorm.bench.streams.tasks import STREAMS
from contnorm.errors import UserError, unknown, usable
from contnorm.paper.recipe import recipe_names
from contnorm.paper.record_remarks import divergence_text
from contnorm.report.comparison_views import comparison_csv, comparison_notes, comparison_sheet, comparison_view
from contnorm.report.norm_comparison import Experiment, compare_norms
from contnorm.report.page import Page, RunView, page_html
from contnorm.report.page_views import (
    MOST_OPEN,
    claim_rows,
    limited_views,
    score_tables,
    section_view,
)
from contnorm.report.paper_tables import HOW, claims_csv, claims_sheet, section_sheet, tables_csv, undecided_text
from contnorm.report.recipe_records import RecordFolders
from contnorm.report.record_figures import run_figures
from contnorm.report.run_tables import DivergedSeeds, changed_keys, run_blocks, runs_csv, unknown_names
from contnorm.report.sections import Section, UnrunRecipe, sections_of
from contnorm.report.summaries import Summary, summarize
from contnorm.report.svg import figure_style
from contnorm.report.text_tables import TextDocument, TextTable, latex, markdown

__all__ = [
    "ENDINGS",
    "FORMATS",
    "PARTS",
    "Report",
    "collect_report",
    "counted",
    "report_files",
    "report_text",
    "write_report",
]

FORMATS = ("html", "md", "latex", "csv")
PARTS = ("all", "comparison", "tables", "claims", "runs")
ENDINGS = {"html": "html", "md": "md", "latex": "tex", "csv": "csv"}
_NO_REPORTS = {".pdf", ".json", ".png", ".svg", ".docx", ".xlsx"}  # a program would not open a report of that name
MOST_DRAWN = 12  # experiments that a page shows unfolded and with figures
FILLED_IN = {
    "stream.source",
    "strategy.code",
    "memory.code",
    "model.code",
    "norm.code",
    "model.weights_hash",
}
MADE = "<!-- Made from the records by `contnorm report`; a change by hand is lost when it is made again. -->\n\n"
ANSWER = "Which norm to use when, by all runs that the project has recorded: docs/which-norm.md in contnorm's source."
Groups = Mapping[str, Sequence[Record]]
Location = str | os.PathLike[str]


@dataclass(frozen=True)
class Report:
    """Content of a report: comparisons of norms, the paper's tables with runs, those without any, and the runs."""

    sections: Sequence[Section]
    unrun: Sequence[UnrunRecipe]
    groups: Groups
    timed: Mapping[str, Groups]  # runs that are timed, by recipe
    diverged: DivergedSeeds  # seeds without a record because their loss was no longer finite
    folders: Sequence[Path] = ()  # where the records are
    problems: Sequence[str] = ()  # records that can't be read, and names that this version does not know
    experiments: Sequence[Experiment] = ()  # comparisons of the norms
    unfinished: int = 0  # runs with a folder but without a record

    @property
    def runs(self) -> int:
        return sum(len(group) for groups in (self.groups, *self.timed.values()) for group in groups.values())

    @property
    def settings(self) -> int:
        return len({run for groups in (self.groups, *self.timed.values()) for run in groups})

    def require_runs(self) -> None:
        """Raise a `UserError` if the report has no runs."""
        if not self.runs:
            none = f"{', '.join(map(str, self.folders))}: no finished runs{', all diverged' if self.diverged else ''}"
            reason = "; ".join(self.problems) or none
            raise UserError(f"{reason.removesuffix('.')}. Run some with `contnorm run` or bench.run.")


def collect_report(runs: RecordFolders | Location | Sequence[Location], tables: Sequence[str] = ()) -> Report:
    """Collect the content of a report: tables of the paper, and all runs.

    Args:
        runs: Folder or archive of records, or several.
        tables: Tables to include: names such as ``table2``, or TOML files. Default: all of the paper's.
    """
    folders = runs if isinstance(runs, RecordFolders) else RecordFolders(_paths(runs))
    sections, unrun = sections_of(list(dict.fromkeys(tables)) or recipe_names(), folders)
    unrun = unrun if tables or sections else []  # runs that belong to no table have nothing to do with the paper
    timed = {name: _grouped(records) for name, records in folders.timed.items() if records}
    problems = [*folders.problems, *unknown_names(folders.records)]
    return Report(
        sections,
        unrun,
        _grouped(folders.records),
        timed,
        folders.diverged,
        folders.roots,
        problems,
        compare_norms(folders.records, folders.diverged_runs),
        folders.unfinished,
    )


def _paths(runs: Location | Sequence[Location]) -> list[Path]:
    return [Path(runs)] if isinstance(runs, str | os.PathLike) else [Path(one) for one in runs]


def counted(many: int, what: str) -> str:
    """A number with its noun, in the plural if needed.

    Example:
        >>> counted(1, "run"), counted(2, "run")
        ('1 run', '2 runs')
    """
    return f"{many} {what}{'' if many == 1 else 's'}"


def _grouped(records: Sequence[Record]) -> Groups:
    return group_by_run(sorted(records, key=lambda r: (run_names(r.config), r.config.hash, r.seed)))


def _summarized(groups: Groups) -> dict[str, list[Summary]]:
    return {run: [summarize(record) for record in group] for run, group in groups.items()}


def report_text(report: Report, form: str, part: str = "all") -> str:
    """The report or a part of it as one text. CSV has one kind of rows; ``part="all"`` means the runs."""
    if form not in FORMATS:
        raise unknown("format", form, FORMATS)
    if part not in PARTS:
        raise unknown("part", part, PARTS)
    if form == "html":
        with figure_style():  # once for all figures
            return page_html(_page(report))
    if form == "csv":
        return _csv(report, "runs" if part == "all" else part)
    write = markdown if form == "md" else latex
    return "\n".join(write(sheet) for sheet in _sheets(report, part))


def report_files(report: Report, form: str, part: str = "all") -> dict[str, str]:
    """Texts of the files of a report folder, by file name: one per table, the claims, and the runs."""
    if form == "html":
        return {"report.html": report_text(report, form)}
    if form not in FORMATS or part not in PARTS:
        report_text(report, form, part)
    if form == "csv":
        parts = [name for name in PARTS[1:] if report.sections or name in ("comparison", "runs")]
        return {f"{name}.csv": _csv(report, name) for name in (parts if part == "all" else [part])}
    write = (lambda sheet: MADE + markdown(sheet)) if form == "md" else latex
    files: dict[str, str] = {}
    for sheet in _sheets(report, part, linked=form == "md"):
        name = f"{sheet.name}.{ENDINGS[form]}"
        if name in files:
            raise UserError(f"two files of the report would be named {name}. Rename the recipe {sheet.name}.toml.")
        files[name] = write(sheet)
    return files


def _sheets(report: Report, part: str, linked: bool = False) -> Iterator[TextDocument]:
    if part in ("all", "comparison"):
        yield comparison_sheet(report.experiments, _lead(report))
    if part == "claims" or (part == "all" and (report.sections or report.unrun)):
        yield claims_sheet(report.sections, report.unrun, linked)
    if part in ("all", "tables"):
        yield from map(section_sheet, report.sections)
    if part in ("all", "runs"):
        yield _runs_sheet(run_blocks(_summarized(report.groups), report.diverged), outside(report))


def _runs_sheet(blocks: Sequence[TextTable], notes: Sequence[str]) -> TextDocument:
    """Notes on the scores are at the top if there is one table, otherwise below each table."""
    if len(blocks) == 1:
        return TextDocument("runs", "Runs", [replace(blocks[0], below=())], [*blocks[0].below, *notes])
    return TextDocument("runs", "Runs", blocks, notes)


def outside(report: Report) -> list[str]:
    """Note on the runs that no table counts, with the reasons; empty if all are counted or there is no table."""
    in_tables = {(record.config.hash, record.seed) for section in report.sections for record in section.records}
    records = [record for group in report.groups.values() for record in group]
    counts = Counter(_why_outside(one.config) for one in records if (one.config.hash, one.seed) not in in_tables)
    if not counts or not report.sections:
        return []
    total = sum(counts.values())
    reasons = "; ".join(f"{count} {why}" for why, count in counts.most_common())
    return [f"Not counted in any table: {total} of the {len(records)} runs ({reasons})."]


def _why_outside(config: RunConfig) -> str:
    """Why no table counts a run.

    Example:
        >>> _why_outside(RunConfig())
        'with settings or in a precision that no table counts'
    """
    if config.train.max_steps is not None:
        return "stopped early, by --max-steps"
    if config.stream.part == "validate":
        return "on validation tasks, by which settings are chosen"
    return "with settings or in a precision that no table counts"


def _csv(report: Report, part: str) -> str:
    if part == "runs":
        return runs_csv(report.groups)
    if part == "comparison":
        return comparison_csv(report.experiments)
    return {"tables": tables_csv, "claims": claims_csv}[part](report.sections)


def _lead(report: Report) -> list[str]:
    """Number of runs; unfinished ones are named with the command that resumes them."""
    what = f"{counted(report.runs, 'run')} of {counted(report.settings, 'setting')}"
    lead = [f"{what}. All numbers are computed from their records."]
    if report.unfinished:
        runs = f"{counted(report.unfinished, 'run')} {'is' if report.unfinished == 1 else 'are'}"
        lead.append(f"{runs} not finished and not counted; contnorm resume continues stopped runs.")
    return lead


def _page(report: Report) -> Page:
    summaries = _summarized(report.groups)
    timed = [(group, name) for name, groups in report.timed.items() for group in groups.values()]
    views = limited_views(_views(report, timed), len(report.groups) + len(timed))
    several = any(len(one.best) > 1 for one in report.experiments)
    return Page(
        "contnorm: comparison of norms" if several else "contnorm: runs",
        " ".join([*_lead(report), *outside(report)]),
        [row for section in report.sections for row in claim_rows(section)],
        [section_view(section) for section in report.sections],
        [(one.title, one.command, one.why) for one in report.unrun],
        [
            table
            for block in run_blocks(summaries, report.diverged)
            for table in score_tables(block, _scores_title(block))
        ],
        views.views,
        views.note,
        fold_runs=len(views.views) > MOST_OPEN,
        comparisons=[
            comparison_view(experiment, number, is_folded=number > MOST_DRAWN)
            for number, experiment in enumerate(report.experiments, 1)
        ],
        comparison_notes=_comparison_notes(report.experiments),
        claims_lead=undecided_text(report.sections),
        claims_note=HOW,
        answer=ANSWER,
    )


def _comparison_notes(experiments: Sequence[Experiment]) -> list[str]:
    notes = comparison_notes(experiments)
    if len(experiments) > MOST_DRAWN:
        notes.append(
            f"Figures are drawn of the first {MOST_DRAWN} of {len(experiments)} experiments; the others are folded."
        )
    return notes


def _views(report: Report, timed: Sequence[tuple[Sequence[Record], str]]) -> Iterator[tuple[RunView, Iterator[str]]]:
    """View of each configuration, and a lazy iterator of its figures."""
    for run, group in report.groups.items():
        yield _run_view(group, diverged=report.diverged.get(run, {})), run_figures(group)
    for group, name in timed:
        yield _run_view(group, name), iter(())


def _scores_title(block: TextTable) -> str:
    return f"Scores of all runs{f': {block.title.lower()}' if block.title else ''}"


def _run_view(group: Sequence[Record], timed: str = "", diverged: Mapping[int, str] | None = None) -> RunView:
    first = group[0]
    facts = [*_facts(group), *([("diverged", divergence_text(diverged, len(group)))] if diverged else [])]
    title = " ".join(run_names(first.config)) + (f", timed for {timed}" if timed else "")
    settings = format_settings(changed(first.config), {*changed_keys(first.config), "evaluate.moments"})
    return RunView(first.config.hash, title, settings, _command(group), facts)


def _command(group: Sequence[Record]) -> str:
    """Command that repeats the runs."""
    config: RunConfig = group[0].config
    rest = {key: value for key, value in changed(config).items() if key not in FILLED_IN}
    stream = STREAMS.get(config.stream.name)  # None if this version has no such stream
    if config.stream.source not in (
        None,
        *(stream.sources[:1] if stream else ()),
    ):  # the default source need not be named
        rest["stream.source"] = config.stream.source
    for key in ("stream.name", "strategy.name", "norm.name"):
        rest.pop(key, None)
    names = {"--stream": config.stream.name, "--strategy": config.strategy.name, "--norm": config.norm.name}
    named = " ".join(f"{flag} {shlex.quote(name)}" for flag, name in names.items())
    typed = ["contnorm run", named, _seeds([record.seed for record in group]), *_device_flags(group[0])]
    return " ".join([*typed, *(f"--set {shlex.quote(f'{k}={format_value(v)}')}" for k, v in rest.items())])


def _device_flags(record: Record) -> list[str]:
    """Flags that change results slightly: the device and, on a CPU, the number of threads if above 1."""
    device = record.raw.get("device") or {}
    if device.get("kind") == "cuda":
        return ["--device cuda"]
    threads = device.get("threads")
    return [f"--threads {threads}"] if isinstance(threads, int) and threads > 1 else []


def _seeds(seeds: Sequence[int]) -> str:
    """Flag for the seeds of a run, diverged ones included, without fresh ones; for large seeds only the first.

    Example:
        >>> _seeds([0, 1, 2, 4]), _seeds([3]), _seeds([0, 4000000000]), _seeds([0, 1, 100]), _seeds([100, 101])
        ('--seeds 5', '--seed 3', '--seed 0', '--seeds 2', '--seed 100')
    """
    alone = len(seeds) == 1 and seeds[0] > 0
    if alone or max(seeds) >= MAX_SEEDS or min(seeds) >= FIRST_SEED:
        return f"--seed {min(seeds)}"
    return f"--seeds {max(seed for seed in seeds if seed < FIRST_SEED) + 1}"


def _facts(group: Sequence[Record]) -> list[tuple[str, str]]:
    """Facts on the runs of all seeds; where seeds differ, each value once."""
    each = [_of_one(record) for record in group]
    facts = {key: " / ".join(dict.fromkeys(one[key] for one in each)) for key in each[0]}
    settings = ", ".join(f"{key}={format_value(value)}" for key, value in changed(group[0].config).items())
    seeds = ", ".join(str(record.seed) for record in group)
    return [(name, value) for name, value in {"seeds": seeds, "settings": settings, **facts}.items() if value]


def _of_one(record: Record) -> dict[str, str]:
    raw = record.raw
    versions, device, source, reached = (raw.get(key) or {} for key in ("versions", "device", "source", "reached"))
    return {
        "tasks": f"first {reached.get('tasks')} of {reached.get('of')}, by --max-steps" if reached else "",
        "device": f"{device.get('name', 'unknown')} ({device.get('kind', '?')}, {device.get('threads', '?')} threads)",
        "precision": f"{raw.get('precision')}, {'deterministic' if raw.get('deterministic') else 'not deterministic'}",
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
        "data": f"{source.get('name')} {source.get('fingerprint', '')}",
        "commit": str(raw.get("commit") or "unknown"),
        "record": "sealed" if record.sealed else "unsealed (schema 1)",
    }


def write_report(
    runs: Report | Location | Sequence[Location],
    path: Location | None = None,
    *,
    form: str = "html",
    part: str = "all",
    tables: Sequence[str] = (),
) -> list[Path]:
    """Write a report of recorded runs: an HTML page, or tables as Markdown, LaTeX or CSV.

    It opens with a comparison of the norms in these runs: the best setting of each norm, paired differences and curves.
    Tables of the paper follow if some of the runs belong to them.

    Args:
        runs: Folder or archive of records, or several; or a report from `collect_report`.
        path: File to write. A path without a suffix, or of an existing folder, is a folder with one file per table.
            Default: ``report`` with the suffix of the format.
        form: Format: ``html``, ``md``, ``latex`` or ``csv``.
        part: Part to write: ``all``, ``comparison``, ``tables``, ``claims`` or ``runs``. HTML always has all.
        tables: Tables to include, as in `collect_report`.

    Returns:
        The files that were written.

    Raises:
        UserError: If there are no runs, or a file can't be written.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_report(folder, f"{folder}/report.html")
        Traceback (most recent call last):
        contnorm.errors.UserError: ...: no finished runs. Run some with `contnorm run` or bench.run.
    """
    report = runs if isinstance(runs, Report) else collect_report(runs, tables)
    report.require_runs()
    if form not in FORMATS:
        raise unknown("format", form, FORMATS)
    target = Path(f"report.{ENDINGS[form]}" if path is None else path)
    if not target.is_dir():
        _check_ending(target, form)
    if target.is_dir() or not target.suffix:
        texts = {target / name: text for name, text in report_files(report, form, part).items()}
    else:
        texts = {target: report_text(report, form, part)}
    for file, text in texts.items():
        with usable(file, "it can't be written", "Use another path."):
            write_output(file, text.encode())
    return list(texts)


def _check_ending(path: Path, form: str) -> None:
    """Raise a `UserError` if the suffix of a file belongs to another format."""
    suffix = path.suffix.lower()
    suffix_format = {f".{ending}": name for name, ending in ENDINGS.items()}.get(suffix, form)
    if suffix_format != form:
        raise UserError(
            f"{path}: is not the name of a {form} file. Use form={suffix_format!r} (--format {suffix_format}), or "
            f"another name."
        )
    if suffix in _NO_REPORTS:
        raise UserError(
            f"{path}: a report can't be a {suffix[1:]} file. Use a name that ends in .{ENDINGS[form]}; the formats are "
            f"{', '.join(FORMATS)}."
        )
