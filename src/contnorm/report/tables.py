"""Documents of tables, the content of a report, and their text: an HTML page, and Markdown. Needs no torch.

A report is a list of documents, a document a list of tables. A table has a title, a sentence above, figures, rows and
notes; the page and the Markdown files show the same tables. Figures are inline SVG whose text stays text, which can be
searched and read by screen readers. Series differ in marker as well as in color. The page has a light and a dark mode:
ink becomes ``currentColor``, and the colors of series become CSS variables.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from itertools import count
from math import ceil
from statistics import fmean
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import numpy as np

from contnorm.bench.figures import COLORS, MARKERS, curve_with_band
from contnorm.bench.stats import t_interval
from contnorm.errors import escape_terminal, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame

MADE = "<!-- Made from the records by `contnorm report`; a change by hand is lost when it is made again. -->"
COLORED = {"agrees", "above", "below", "holds", "does", "equivalent", "undecided", "higher", "lower"}
MOST_CURVES = 9  # in one figure; more can't be distinguished
WIDTH, HEIGHT = 440, 320  # pixels: the text of 12 stays readable where a phone shrinks them
LONGEST_NAME = 60  # characters of a name in a legend or at a row
STYLE: dict[str, Any] = {
    "svg.hashsalt": "contnorm report",  # the same figure always has the same ids
    "svg.fonttype": "none",
    "font.size": 12,
    "text.parse_math": False,  # a dollar sign in a name is not a formula
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.formatter.useoffset": False,
    "savefig.transparent": True,
    "legend.frameon": False,
}


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


# --- Figures ---------------------------------------------------------------------------------------------------------


def curves_over_tasks(curves: Mapping[str, Sequence[Sequence[float]]], title: str, ylabel: str) -> str:
    """Curves over the number of tasks learned: means over seeds, with a band of one standard deviation.

    Args:
        curves: For each name, one curve per seed; the points that all seeds have are drawn.
        title: Title of the figure.
        ylabel: Label of the value axis.
    """
    means = {name: [fmean(values) for values in zip(*some, strict=False)] for name, some in curves.items()}
    ends = ", ".join(f"{name} {some[-1]:.2f}" for name, some in means.items())

    def draw(ax: Axes) -> None:
        for index, (name, some) in enumerate(curves.items()):
            values = np.array(list(zip(*some, strict=False)), dtype=np.float64).T
            curve_with_band(ax, np.arange(1, values.shape[1] + 1), values, _short(name), index)
        tasks = max(map(len, means.values()))
        ax.set_xticks(range(1, tasks + 1, 1 if tasks <= 12 else 2 if tasks <= 24 else 5))

    return _figure(draw, title, "tasks learned", ylabel, f"At the end: {ends}.")


def score_by_rate(points: Mapping[str, Sequence[tuple[float, float, float]]], title: str, ylabel: str) -> str:
    """Curves of a score over the learning rate, on a logarithmic axis, with bands of one standard deviation.

    Args:
        points: For each name, learning rate, mean and standard deviation of the score, by increasing learning rate.
        title: Title of the figure.
        ylabel: Label of the value axis.
    """
    best = {name: max(some, key=lambda point: point[1]) for name, some in points.items()}
    highest = ", ".join(f"{name} {mean:.2f} at {rate:g}" for name, (rate, mean, _) in best.items())

    def draw(ax: Axes) -> None:
        for index, (name, some) in enumerate(points.items()):
            rates, means, deviations = np.array(some, dtype=np.float64).T
            color, marker = COLORS[index % len(COLORS)], MARKERS[index % len(MARKERS)]
            ax.fill_between(rates, means - deviations, means + deviations, color=color, alpha=0.18, linewidth=0)
            ax.plot(rates, means, color=color, marker=marker, markersize=5, linewidth=1.8, label=_short(name))
        ticks = np.unique([rate for some in points.values() for rate, _, _ in some])
        ax.set_xscale("log")
        ax.set_xticks(ticks, [f"{tick:.4g}" for tick in ticks], rotation=45 if len(ticks) > 8 else 0)
        ax.minorticks_off()

    return _figure(draw, title, "learning rate, logarithmic scale", ylabel, f"Highest: {highest}.")


def paired_differences(pairs: Mapping[str, Sequence[float]], title: str, unit: str) -> str:
    """Paired differences, one row per name: each seed as a dot, the mean as a line, its 95 % interval as a bar."""
    means = "; ".join(f"{name} {fmean(differences):+.2f}" for name, differences in pairs.items())

    def draw(ax: Axes) -> None:
        ax.axvline(0, color="#000000", linewidth=1)
        for row, differences in enumerate(pairs.values()):
            color, interval = COLORS[row % len(COLORS)], t_interval(list(differences))
            if interval is not None:
                ax.plot(list(interval), [row, row], color=color, linewidth=9, alpha=0.3, solid_capstyle="butt")
            ax.scatter(differences, [row] * len(differences), s=50, color=color, alpha=0.75, linewidths=0)
            ax.plot([fmean(differences)] * 2, [row - 0.3, row + 0.3], color=color, linewidth=3)
        ax.set_yticks(range(len(pairs)), ["\n".join(wrap(_short(name), 24)) for name in pairs])
        ax.set_ylim(len(pairs) - 0.4, -0.6)

    xlabel = f"difference in {unit}; bar: 95 % interval"
    return _figure(draw, title, xlabel, "", f"Means: {means}.", height=110 + 40 * len(pairs))


def _short(name: str) -> str:
    return shorten(escape_terminal(name), LONGEST_NAME)


def _figure(
    draw: Callable[[Axes], None], title: str, xlabel: str, ylabel: str, description: str, height: int = HEIGHT
) -> str:
    """Draw on one pair of axes, with a title and, if series have labels, a legend below."""
    import matplotlib
    from matplotlib.figure import Figure

    style: Any = {**dict(matplotlib.rcParamsDefault), **STYLE, "backend": matplotlib.rcParams["backend"]}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(WIDTH / 72, height / 72), layout="constrained")
        ax = figure.add_subplot()
        draw(ax)
        figure.suptitle("\n".join(wrap(escape_terminal(title), 56)), fontsize=12)  # wider than axes with long labels
        ax.set_xlabel(xlabel)
        ax.set_ylabel(ylabel)
        handles, names = ax.get_legend_handles_labels()
        if handles:
            columns = max(1, 56 // (8 + max(map(len, names))))
            figure.legend(handles, names, loc="outside lower center", ncols=min(columns, len(names)))
            figure.set_figheight((height + 19 * (ceil(len(names) / columns) - 1)) / 72)  # the axes keep their height
        return svg_of(figure, f"{title}. {description}")


def svg_of(figure: Figure, description: str) -> str:
    """Inline SVG of a figure in the colors of the page, with a description for screen readers."""
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None}, dpi=72)
    text = file.getvalue()
    text = re.sub(
        r"<metadata>.*?</metadata>|<!--.*?-->|\s*<style.*?</style>", "", text[text.index("<svg") :], flags=re.DOTALL
    )
    text = (
        re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", text)
        .replace("#000000", "currentColor")
        .replace("xlink:href", "href")
    )
    for number, color in enumerate(COLORS, 1):
        text = text.replace(color, f"var(--series-{number}, {color})")
    width, height = figure.get_figwidth() * 72, figure.get_figheight() * 72
    label = escape(escape_terminal(description))
    head = f'<svg role="img" aria-label="{label}" viewBox="0 0 {width:g} {height:g}" fill="currentColor">'
    return head + text[text.index(">") + 1 :]
