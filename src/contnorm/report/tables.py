"""Documents of tables, the content of a report, and their text: an HTML page, and Markdown. Needs no torch.

A report is a list of documents, a document a list of tables. A table has a title, a sentence above, figures, rows and
notes; the page and the Markdown files show the same tables.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import count
from typing import TYPE_CHECKING, Any

from contnorm.bench.escape import escape_terminal

if TYPE_CHECKING:
    from pandas import DataFrame

MADE = "<!-- Made from the records by `contnorm report`; a change by hand is lost when it is made again. -->"
COLORED = {"agrees", "above", "below", "holds", "does", "equivalent", "undecided", "higher", "lower"}


@dataclass(frozen=True)
class Table:
    """A table with a title.

    Attributes:
        title: Title; empty for the only table of a document.
        heads: Names of the columns.
        rows: Cells; all are text.
        notes: Sentences below.
        lead: Sentence above.
        figures: Functions that draw a figure as SVG, for the page.
        folded: Whether the page shows the title only until it is opened.
        name: Name to link to.
    """

    title: str
    heads: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    notes: Sequence[str] = ()
    lead: str = ""
    figures: Sequence[Callable[[], str]] = ()
    folded: bool = False
    name: str = ""

    @property
    def frame(self) -> DataFrame:
        """The rows as a pandas table, for LaTeX and notebooks."""
        import pandas as pd

        return pd.DataFrame(list(self.rows), columns=list(self.heads))


@dataclass(frozen=True)
class Document:
    """Tables that belong together: a section of the page, or one Markdown file.

    Attributes:
        name: Name of the file, without its suffix.
        title: Title.
        tables: Its tables.
        notes: Sentences at the top.
        command: Commands that make the runs, one per line.
    """

    name: str
    title: str
    tables: Sequence[Table]
    notes: Sequence[str] = ()
    command: str = ""


def markdown(document: Document) -> str:
    r"""Write a document as Markdown.

    Example:
        >>> print(markdown(Document("runs", "Runs", [Table("", ["norm", "ACC"], [["a|b", "1.00"]])])))
        # Runs
        <BLANKLINE>
        | norm | ACC |
        |---|---|
        | a\|b | 1.00 |
        <BLANKLINE>
    """
    parts = [f"# {_escaped(document.title)}", *map(_escaped, document.notes)]
    parts += [f"```bash\n{line}\n```" for line in document.command.splitlines()]
    for table in document.tables:
        parts += [f"## {_escaped(table.title)}"] if table.title else []
        parts += [_escaped(table.lead)] if table.lead else []
        if table.rows:
            lines = [f"| {' | '.join(map(_escaped, cells))} |" for cells in (table.heads, *table.rows)]
            parts.append("\n".join([lines[0], "|" + "---|" * len(table.heads), *lines[1:]]))
        parts += ["\n".join(f"- {_escaped(note)}" for note in table.notes)] if table.notes else []
    return "\n\n".join(parts) + "\n"


def _escaped(text: str) -> str:
    """Escape what Markdown and HTML would interpret within a line."""
    plain = escape_terminal(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return "".join(f"\\{letter}" if letter in "\\`*|~$" else letter for letter in plain).replace("](", "]\\(")


def html_page(
    title: str, lead: Sequence[str], documents: Sequence[Document], headlines: Sequence[tuple[str, str]]
) -> str:
    """Write documents as one HTML file without scripts, for light and dark mode, phones and print.

    Args:
        title: Title of the page.
        lead: Sentences below the title.
        documents: The documents.
        headlines: For each experiment the name of its table and a sentence, for the list at the top.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("contnorm.report", "templates"),
        autoescape=True,
        finalize=_visible,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["color"] = lambda cell: word if (word := cell.partition(" ")[0].strip(":,")) in COLORED else ""
    environment.filters["figure"] = _unique_ids()
    style = files("contnorm.report").joinpath("templates", "page.css").read_text(encoding="utf-8")
    page = environment.get_template("page.html.jinja")
    return page.render(title=title, lead=lead, documents=documents, headlines=headlines, style=style)


def _visible(value: Any) -> Any:
    """Make control characters of text visible, and typeset its signs; autoescape escapes the rest."""
    return escape_terminal(value).replace("+-", "±") if type(value) is str else value


def _unique_ids() -> Callable[[str], Any]:
    """Filter for the figures of one page: numbers their ids, since all elements of a page share one set of ids."""
    from markupsafe import Markup

    figures = count(1)

    def renamed(svg: str) -> Markup:
        return Markup(re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>f{next(figures)}-", svg))

    return renamed
