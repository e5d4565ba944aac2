"""Turns matplotlib figures into SVG files for the documentation.

Pages have light and dark mode, so ink becomes `currentColor` and the colors of series become CSS variables. Text
stays text, which can be searched, copied and read by screen readers. What a page does not need (metadata, unused ids,
clip paths, digits below a hundredth of a pixel) is removed, and the same figure always gives the same bytes.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, wraps
from importlib.resources import files
from typing import Any, ParamSpec, TypeVar

import matplotlib
from matplotlib.figure import Figure

from contnorm.bench.figures import COLORS

__all__ = ["ID_PREFIX", "SCHEMES", "figure_style", "scheme_colors", "svg_file", "svg_of", "with_figure_style"]

ID_PREFIX = "fig-"  # of the ids in a figure; the page replaces it to make ids unique
SCHEMES = ("light", "dark")  # colors of a figure that is a file of its own
WIDEST = 600  # pixels; a narrower figure has a width of its own, or its text would be huge
STYLE: dict[str, Any] = {
    "svg.hashsalt": "contnorm report",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 12,
    "text.parse_math": False,  # a dollar sign in a name is not a formula
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 14,
    "axes.formatter.useoffset": False,
    "figure.facecolor": "none",
    "figure.dpi": 72,  # one unit of the SVG is one pixel
    "savefig.facecolor": "none",
    "axes.facecolor": "none",
    "hatch.linewidth": 0.7,
    "legend.frameon": False,
    "lines.solid_capstyle": "butt",
}
STYLE_GROUPS = (
    *("axes", "figure", "font", "hatch", "legend", "lines", "patch"),
    *("path", "savefig", "scatter", "svg", "text", "xtick", "ytick"),
)
CODE = re.compile(r"<\?xml.*?\?>|<!DOCTYPE.*?>|<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", re.DOTALL)
CLIP_PATHS = re.compile(r"<clipPath.*?</clipPath>", re.DOTALL)
EMPTY = re.compile(r"<(g|defs)>\s*</\1>|<g ?/>")
LONE_GROUP = re.compile(r"<g>\s*(<(?:path|use|text)\b[^>]*(?:/>|>[^<]*</text>))\s*</g>")
TAG = re.compile(r"<[^/!][^>]*>")
USES = re.compile(r'(?:<use [^>]* style="([^"]*)"/>\s*)(?:<use [^>]* style="\1"/>\s*)+')
RECTANGLE = re.compile(r"M (\S+) (\S+) L (\S+) \2 L \3 (\S+) L \1 \4 (?:L \1 \2|z)(?: z)?$")
LETTER = re.compile(r" ?([A-Za-z]) ")
NUMBER = re.compile(r"-?\d+\.\d+")
REFERENCED = re.compile(r'(?:href="|url\()#([^")]+)')
FONT = re.compile(r"font-family: [^;]*;? ?")
COLOR = re.compile(r"#[0-9a-f]{6}\b")
INK = {"#000000": "currentColor"}
SERIES = {color: f"var(--series-{number}, {color})" for number, color in enumerate(COLORS, 1)}

P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def figure_style() -> Iterator[None]:
    """Matplotlib's defaults with the style of the report, whatever the user's matplotlibrc says.

    Entering it again inside costs nothing; entering it for each figure would take a tenth of the time of a page.
    """
    if matplotlib.rcParams["svg.hashsalt"] == STYLE["svg.hashsalt"]:
        yield
        return
    with matplotlib.rc_context(_style()):
        yield


@lru_cache(maxsize=1)
def _style() -> Any:
    defaults = {key: value for key, value in matplotlib.rcParamsDefault.items() if key.startswith(STYLE_GROUPS)}
    return {**defaults, **STYLE}


def with_figure_style(draw: Callable[P, R]) -> Callable[P, R]:
    """Decorator: draw a figure in the style of the report."""

    @wraps(draw)
    def styled(*args: P.args, **kwargs: P.kwargs) -> R:
        with figure_style():
            return draw(*args, **kwargs)

    return styled


def svg_of(figure: Figure, description: str) -> str:
    """Inline SVG of a figure.

    Args:
        figure: The figure; its facecolor should be transparent.
        description: Text for screen readers.

    Example:
        >>> from matplotlib.figure import Figure
        >>> svg_of(Figure(figsize=(2, 1)), "Nothing.").splitlines()[0][:60]
        '<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-labe'
    """
    file = io.StringIO()
    with figure_style():
        figure.savefig(file, format="svg", metadata={"Date": None}, dpi=72)
    text = CLIP_PATHS.sub("", CODE.sub("", file.getvalue()))
    references = {name: f"{ID_PREFIX}{number}" for number, name in enumerate(dict.fromkeys(REFERENCED.findall(text)))}
    text = TAG.sub(lambda match: _compact_tag(match[0], references), text)
    text = re.sub(r'<path [^>]*style="fill: none"/>', "", text)  # cells of a heat map without a value
    for _ in range(3):  # groups are nested
        text = LONE_GROUP.sub(r"\1", EMPTY.sub("", text))
    lines = [line.strip() for line in USES.sub(_share_style, text).splitlines() if line.strip()]
    width, height = figure.get_figwidth() * 72, figure.get_figheight() * 72
    widths = f"width: {1.2 * width:.0f}px; min-width: {0.85 * width:.0f}px"  # scaled so that text is readable
    narrow = f'class="narrow" style="{widths}" ' if width < WIDEST else ""
    lines[0] = (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{html.escape(description)}" '
        f'viewBox="0 0 {width:g} {height:g}" {narrow}font-size="12" fill="currentColor" stroke-linejoin="round">'
    )
    return "\n".join(lines).replace("font-size: 12px; ", "").replace(' style="font-size: 12px"', "")


@lru_cache(maxsize=2)
def scheme_colors(scheme: str) -> Mapping[str, str]:
    """Colors of the page in one of `SCHEMES`, by their CSS variable: ``ground``, ``ink``, ``series-1`` and so on.

    Example:
        >>> scheme_colors("light")["series-1"] == COLORS[0]
        True
    """
    css = files("contnorm.report").joinpath("templates", "page.css").read_text(encoding="utf-8")
    start = css.index("prefers-color-scheme: dark") if scheme == "dark" else 0
    block = css[css.index(":root {", start) : css.index("}", css.index(":root {", start))]
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))


def svg_file(figure: Figure, description: str, scheme: str = "light") -> str:
    """SVG of a figure as a file of its own, which has the colors of one scheme and a transparent background.

    Args:
        figure: The figure; its facecolor should be transparent, its ink black and its series `COLORS`.
        description: Text for screen readers.
        scheme: One of `SCHEMES`.

    Example:
        >>> from matplotlib.figure import Figure
        >>> 'width="144"' in svg_file(Figure(figsize=(2, 1)), "Nothing.", "dark")
        True
    """
    colors = scheme_colors(scheme)
    text = svg_of(figure, description)
    text = re.sub(r"var\(--([\w-]+), #\w{6}\)", lambda match: colors[match[1]], text)
    text = text.replace("currentColor", colors["ink"])
    width, height = (72 * inches for inches in (figure.get_figwidth(), figure.get_figheight()))
    size = f'width="{width:g}" height="{height:g}" font-family="system-ui, sans-serif" '
    return re.sub(r'(viewBox="[^"]*" )(?:class="narrow" style="[^"]*" )?', rf"\1{size}", text, count=1) + "\n"


def _share_style(uses: re.Match[str]) -> str:
    """Markers of one line have the same style: write it once."""
    style = f' style="{uses[1]}"'
    return f"<g{style}>{uses[0].replace(style, '')}</g>"


@lru_cache(maxsize=8192)
def _compact_style(style: str) -> str:
    style = (
        FONT.sub("", style).replace("; stroke-linejoin: miter", "").replace("; stroke-linecap: butt", "").rstrip("; ")
    )
    return COLOR.sub(lambda match: INK.get(match[0]) or SERIES.get(match[0]) or match[0], style)


def _compact_tag(tag: str, references: Mapping[str, str]) -> str:
    """Tag with short ids, only those that are referenced; with colors of the page; and with short numbers."""
    tag = re.sub(r' clip-path="[^"]*"| xmlns:xlink="[^"]*"| transform="rotate\(-0 [^"]*"', "", tag).replace(
        "xlink:href", "href"
    )
    tag = re.sub(r' id="([^"]*)"', lambda m: f' id="{references[m[1]]}"' if m[1] in references else "", tag)
    tag = re.sub(r'((?:href="|url\()#)([^")]+)', lambda m: m[1] + references[m[2]], tag)
    tag = re.sub(r' (d|x|y|transform|height|width)="([^"]*)"', _short_numbers, tag)
    tag = re.sub(r' style="([^"]*)"', lambda m: f' style="{_compact_style(m[1])}"', tag)
    return re.sub(r' style="fill: (#\w{6})"', r' fill="\1"', tag)


def _short_numbers(match: re.Match[str]) -> str:
    numbers = NUMBER.sub(lambda number: f"{float(number[0]):.2f}".rstrip("0").rstrip("."), match[2])
    numbers = " ".join(numbers.split())
    if match[1] == "d":
        numbers = LETTER.sub(r"\1", RECTANGLE.sub(r"M\1 \2H\3V\4H\1z", numbers))
    return f' {match[1]}="{numbers}"'
