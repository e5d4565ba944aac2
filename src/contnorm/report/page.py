"""One page: a single HTML file that needs no network and no script, in light and dark, on a phone and on paper.

What stands on it is handed over as plain data (`Page` and its parts); this file only sets it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files

from contnorm.bench.escape import escape_terminal

__all__ = ["Cell", "ClaimRow", "Page", "Rows", "RunView", "SectionView", "Table", "page_html"]


@dataclass(frozen=True)
class Cell:
    """One cell of a table; a verdict is told in words and, besides, by colour."""

    text: str
    beside: str = ""  # what it is compared with
    apart: str = ""  # how far it is from that
    verdict: str = ""  # in words; the first one, such as agrees, above or below, is also its colour

    @property
    def kind(self) -> str:
        """The class of its colour."""
        return "not" if self.text in ("not run", "lost") else self.verdict.partition(" ")[0].strip(":,")


@dataclass(frozen=True)
class Rows:
    """Rows under one heading of their own; the heading may be empty."""

    title: str
    rows: Sequence[Sequence[Cell]]


@dataclass(frozen=True)
class Table:
    """A table with a title and, where it needs them, notes; a folded one is opened by its title."""

    title: str
    heads: Sequence[str]
    groups: Sequence[Rows]
    notes: Sequence[str] = ()
    folded: bool = False


@dataclass(frozen=True)
class ClaimRow:
    """A claim, what became of it, and the case that speaks least for it."""

    says: str
    outcome: str  # holds, does not hold or undecided
    beside: str  # by which score, and of what
    section: str  # where it is told in full
    where: str
    cases: str
    numbers: Sequence[str]  # case, difference, interval, effect, pairs
    measured: bool = True  # whether any case of it is run


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
    """All that is told of the runs of one setting; the settings in words are those its title does not show."""

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
    unrun: Sequence[tuple[str, str, str]] = ()  # title, what to type, why it can't be run yet
    scores: Sequence[Table] = ()
    figures: Sequence[str] = ()
    runs: Sequence[RunView] = field(default_factory=tuple)
    runs_note: str = ""  # what is left out of the runs
    fold_runs: bool = False  # whether the list of runs is opened by its title

    @property
    def counted(self) -> list[tuple[str, int]]:
        """How many claims came out how; those of which nothing is run apart from those that runs left open."""
        outcomes = [claim.outcome if claim.measured else "not run" for claim in self.claims]
        return [(outcome, outcomes.count(outcome)) for outcome in ("holds", "does not hold", "undecided", "not run")]


def page_html(page: Page) -> str:
    """The page as one file."""
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
    style = files("contnorm.report").joinpath("templates", "page.css").read_text(encoding="utf-8")
    return environment.get_template("page.html.jinja").render(page=page, style=style)


def _finalize(value: object) -> object:
    """What the template prints; autoescape does the rest, and what is markup already passes."""
    return escape_terminal(value) if type(value) is str else value
