"""Renders a report as one self-contained HTML file without scripts, for light and dark mode, phones and print.

The content is passed as plain data (`Page` and its parts); this module only renders it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from itertools import count

from contnorm.bench.escape import escape_terminal
from contnorm.paper.claims import OUTCOMES
from contnorm.report.svg import ID_PREFIX

__all__ = [
    "ClaimRow",
    "ComparisonView",
    "Page",
    "RowGroup",
    "RunView",
    "SectionView",
    "Table",
    "TableCell",
    "page_html",
]

ID = re.compile(rf'( id="| href="#|url\(#){ID_PREFIX}')


@dataclass(frozen=True)
class TableCell:
    """One cell of a table; a verdict is shown in words and by colour."""

    text: str
    reference: str = ""  # the value that it is compared with
    difference: str = ""  # the difference from that value
    verdict: str = ""  # text; its first word, such as agrees, above or below, selects the colour
    color: str = ""  # CSS class of the colour, if the text does not select it

    @property
    def kind(self) -> str:
        """CSS class of the cell's colour."""
        if self.color:
            return self.color
        return "not" if self.text in ("not run", "diverged") else self.verdict.partition(" ")[0].strip(":,")


@dataclass(frozen=True)
class RowGroup:
    """Rows under a common heading, which may be empty."""

    title: str
    rows: Sequence[Sequence[TableCell]]


@dataclass(frozen=True)
class Table:
    """A table with a title and notes; a folded table is opened by a click on its title."""

    title: str
    heads: Sequence[str]
    groups: Sequence[RowGroup]
    notes: Sequence[str] = ()
    folded: bool = False


@dataclass(frozen=True)
class ClaimRow:
    """A claim, its outcome, and its least favourable case."""

    text: str
    outcome: str  # holds, holds in part, equivalent, does not hold or undecided
    basis: str  # the score it is judged by, and the settings
    section: str  # name of the section with the details
    where: str
    cases: str
    numbers: Sequence[str]  # case, difference, interval, seeds
    measured: bool = True  # whether any of its cases was run
    evidence: str = ""  # kind of evidence and number of seeds
    ours: bool = False  # whether it is a question of our own


@dataclass(frozen=True)
class ComparisonView:
    """Comparison of the norms of one experiment; a folded one is opened by a click on its title."""

    name: str
    title: str
    headline: str
    short_headline: str  # for the list of all experiments
    tables: Sequence[Table]
    figures: Sequence[str]  # SVG
    folded_tables: Sequence[Table] = ()
    is_folded: bool = False


@dataclass(frozen=True)
class SectionView:
    """A table or figure of the paper."""

    name: str
    title: str
    notes: Sequence[str]
    tables: Sequence[Table]
    figures: Sequence[str]  # SVG
    command: str
    folded_figures: Sequence[str] = ()


@dataclass(frozen=True)
class RunView:
    """Details of the runs of one configuration; ``settings`` are those that the title does not show."""

    name: str
    title: str
    settings: str
    command: str
    facts: Sequence[tuple[str, str]]
    figures: Sequence[str] = ()  # SVG


@dataclass(frozen=True)
class Page:
    """The whole page, from top to bottom."""

    title: str
    lead: str
    claims: Sequence[ClaimRow] = ()
    sections: Sequence[SectionView] = ()
    unrun: Sequence[tuple[str, str, str]] = ()  # title, command, and the reason why it can't be run yet
    scores: Sequence[Table] = ()
    runs: Sequence[RunView] = field(default_factory=tuple)
    runs_note: str = ""  # note on the runs that are left out
    fold_runs: bool = False  # whether the list of runs is folded
    comparisons: Sequence[ComparisonView] = ()
    comparison_notes: Sequence[str] = ()
    claims_lead: str = ""  # number of undecided claims
    answer: str = ""  # where the recommendations of the documentation are
    claims_note: str = ""  # how claims are decided

    @property
    def measured_claims(self) -> list[ClaimRow]:
        """Claims of the paper with at least one run."""
        return [claim for claim in self.claims if claim.measured and not claim.ours]

    @property
    def questions(self) -> list[ClaimRow]:
        """Questions of our own with at least one run."""
        return [claim for claim in self.claims if claim.measured and claim.ours]

    @property
    def claim_counts(self) -> list[tuple[str, int]]:
        """Number of claims by outcome; claims without any run are counted as not run, not as undecided."""
        outcomes = [claim.outcome if claim.measured else "not run" for claim in self.claims if not claim.ours]
        rare = ("holds in part", "equivalent")
        counts = [(outcome, outcomes.count(outcome)) for outcome in (*OUTCOMES, "not run")]
        return [(outcome, count) for outcome, count in counts if count or outcome not in rare]


def page_html(page: Page) -> str:
    """Render the page as the text of one HTML file."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("contnorm.report", "templates"),
        autoescape=True,
        finalize=_finalize,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["typeset"] = lambda text: str(text).replace("+-", "±")
    environment.filters["with_unique_ids"] = _with_unique_ids()
    style = files("contnorm.report").joinpath("templates", "page.css").read_text(encoding="utf-8")
    return environment.get_template("page.html.jinja").render(page=page, style=style)


def _with_unique_ids() -> Callable[[str], str]:
    """Filter for the figures of one page: numbers their ids, since all elements of a page share one set of ids."""
    figures = count(1)

    def renamed(svg: str) -> str:
        return ID.sub(rf"\g<1>f{next(figures)}-", svg)

    return renamed


def _finalize(value: object) -> object:
    """Make control characters of printed strings visible; autoescape escapes HTML, and markup passes unchanged."""
    return escape_terminal(value) if type(value) is str else value
