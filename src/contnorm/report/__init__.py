"""Reports: an HTML page or Markdown files with tables and figures, made from records. Needs no torch."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from contnorm.atomic_files import write_atomically
from contnorm.bench.records import Runs, is_archive, load_runs
from contnorm.bench.unfinished import unfinished_runs
from contnorm.errors import UserError
from contnorm.report.norms import Experiment, comparison, experiments_of, headline
from contnorm.report.paper import Section, claims_document, section_document, sections_of
from contnorm.report.runs import divergence_lines, run_details, score_tables
from contnorm.report.tables import MADE, Document, html_page, markdown

__all__ = ["Report", "collect_report", "write_report"]

Location = str | os.PathLike[str]


@dataclass(frozen=True)
class Report:
    """Content of a report.

    Attributes:
        runs: The runs, with the problems of records that can't be used.
        experiments: Comparisons of the norms.
        sections: Tables of the paper that some of the runs belong to.
        unfinished: Number of runs with a checkpoint but without a record.
    """

    runs: Runs
    experiments: Sequence[Experiment]
    sections: Sequence[Section]
    unfinished: int = 0

    @property
    def lead(self) -> list[str]:
        """Number of runs, and which of them are not counted."""
        records, settings = len(self.runs.records), len({record.hash for record in self.runs.records})
        what = f"{_many(records, 'run')} of {_many(settings, 'setting')}"
        lead = [f"{what}. All numbers are computed from their records."]
        if self.unfinished:
            lead.append(f"Not counted: {_many(self.unfinished, 'unfinished run')}; see contnorm resume.")
        in_tables = {(record.hash, record.seed) for section in self.sections for record in section.records}
        outside = [one.config for one in self.runs.records if (one.hash, one.seed) not in in_tables]
        if self.sections and outside:
            reasons = Counter(
                "stopped early, by --max-steps"
                if config.train.max_steps is not None
                else "on validation tasks, by which settings are chosen"
                if config.stream.part == "validate"
                else "with settings or in a precision that no table counts"
                for config in outside
            )
            why = "; ".join(f"{count} {reason}" for reason, count in reasons.most_common())
            lead.append(f"Not counted in any table: {len(outside)} of the {_many(records, 'run')} ({why}).")
        return lead

    @property
    def documents(self) -> list[Document]:
        """Documents of the report, from the first to the last."""
        runs = Document("runs", "Runs", score_tables(self.runs), [*self.lead[1:], *divergence_lines(self.runs)])
        claims = [claims_document(self.sections)] if self.sections else []
        return [comparison(self.experiments, self.lead[:1]), *claims, *map(section_document, self.sections), runs]

    def html(self) -> str:
        """The report as one HTML page."""
        several = any(len(one.best) > 1 for one in self.experiments)
        title = "contnorm: comparison of norms" if several else "contnorm: runs"
        documents = [comparison(self.experiments), *self.documents[1:], run_details(self.runs)]
        return html_page(title, self.lead, documents, [(one.title, headline(one)) for one in self.experiments])


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def collect_report(runs: Location | Sequence[Location], tables: Sequence[str] = ()) -> Report:
    """Collect the content of a report: a comparison of the norms, tables of the paper, and all runs.

    Args:
        runs: Folder or archive of records, or several.
        tables: Tables to include: names such as ``table2``, or TOML files. Default: those of the paper that some of
            the runs belong to.

    Raises:
        UserError: If there is no finished run.
    """
    roots = [Path(one) for one in ([runs] if isinstance(runs, str | os.PathLike) else runs)]
    parts = [load_runs(root) for root in roots]
    records = [record for part in parts for record in (*part.records, *part.diverged)]
    every = Runs.of(records, [problem for part in parts for problem in part.problems])
    if not every.records:
        reason = "; ".join(every.problems) or f"{', '.join(map(str, roots))}: no finished runs."
        raise UserError(f"{reason} Run some with `contnorm run` or bench.run.")
    unfinished = sum(len(unfinished_runs(root)) for root in roots if not is_archive(root))
    sections = sections_of(tables, every, roots)
    return Report(every, experiments_of(every), sections, unfinished)


def write_report(report: Report, path: Location = "report.html") -> list[Path]:
    """Write a report as an HTML page, or as Markdown.

    Args:
        report: The content, from `collect_report`.
        path: File whose name ends in ``.html`` (one page), ``.md`` (all in one file), or a folder for
            ``comparison.md`` (with all runs), ``claims.md`` and ``tables.md``.

    Returns:
        The files that were written.
    """
    target = Path(path)
    if target.suffix == ".html":
        texts = {target: report.html()}
    elif target.suffix == ".md":
        texts = {target: "\n".join([f"{MADE}\n", *map(markdown, report.documents)])}
    elif target.suffix:
        raise UserError(f"{target}: use a name in .html or .md, or a folder for Markdown files.")
    else:
        pages: dict[str, list[str]] = {}
        for one in report.documents:
            name = {"comparison": "comparison", "runs": "comparison", "claims": "claims"}.get(one.name, "tables")
            pages.setdefault(name, [f"{MADE}\n"]).append(markdown(one))
        texts = {target / f"{name}.md": "\n".join(parts) for name, parts in pages.items()}
    for file, text in texts.items():
        write_atomically(file, text.encode())
    return list(texts)
