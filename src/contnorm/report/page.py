"""One page of runs: a single HTML file that needs no network and no script, in light and dark, on a phone and on paper.

What stands on it is handed over as plain data (`Page` and its parts); this file only sets it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files

__all__ = ["Cell", "Page", "RunView", "Table", "page_html"]


@dataclass(frozen=True)
class Cell:
    """One cell of a table; a verdict is told in words and, besides, by colour."""

    text: str
    beside: str = ""  # what it is compared with
    verdict: str = ""  # agrees, above, below, or nothing


@dataclass(frozen=True)
class Table:
    """A table with a title and, where it needs one, a note."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""


@dataclass(frozen=True)
class RunView:
    """All that is told of the runs of one setting."""

    name: str
    title: str
    command: str
    facts: Sequence[tuple[str, str]]
    figures: Sequence[str] = ()  # SVG


@dataclass(frozen=True)
class Page:
    """The whole page, from top to bottom."""

    title: str
    lead: str
    tables: Sequence[Table] = ()
    figures: Sequence[str] = ()
    runs: Sequence[RunView] = field(default_factory=tuple)


def page_html(page: Page) -> str:
    """The page as one file."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = files("contnorm.report").joinpath("page.html.jinja").read_text(encoding="utf-8")
    return environment.from_string(template).render(page=page)
