"""Line, bar and scatter plots as SVG. SVG is written directly, since a page may have hundreds of small plots.

Plots have a transparent background and use the page's text colour, so they work in light and dark mode. Text stays
text, which can be searched, copied and read by screen readers. Series differ in marker, dash or hatching as well as in
colour.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from textwrap import wrap

from contnorm.bench.escape import escape_html

__all__ = ["COLOURS", "Plot", "Span", "nice_steps"]

COLOURS = ("#4477aa", "#ee7733", "#228833", "#c24d8c", "#66a5c9", "#b59f2a", "#8a8a8a", "#7a5cc0", "#cc6677")
WIDTH, TOP, BOTTOM, RIGHT = 640, 30, 44, 14
LEGEND_LINE = 18
HATCH = (
    '<pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="6" height="6" fill="#ee7733"/><line x1="0" y1="0" x2="0" y2="6" stroke="#000" stroke-opacity="0.55"/>'
    "</pattern>"
)
Point = tuple[float, float]


def nice_steps(low: float, high: float, count: int = 6) -> list[float]:
    """About ``count`` round numbers between ``low`` and ``high``, for axis ticks.

    Example:
        >>> nice_steps(0, 100), nice_steps(83.2, 89.9)
        ([0.0, 20.0, 40.0, 60.0, 80.0, 100.0], [84.0, 86.0, 88.0])
    """
    rough = (high - low) / max(count - 1, 1)
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * times for times in (1, 2, 2.5, 5, 10) if unit * times >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(step * i, 10) for i in range(first, last + 1)]


@dataclass(frozen=True)
class Span:
    """Range of an axis and its ticks; ticks are computed if there are none."""

    low: float
    high: float
    marks: tuple[tuple[float, str], ...] = ()

    @classmethod
    def around(cls, values: Sequence[float], *also: float) -> Span:
        """Range of all values, with a margin of 5 %.

        Example:
            >>> Span.around([0.0, 10.0])
            Span(low=-0.5, high=10.5, marks=())
        """
        low, high = min([*values, *also]), max([*values, *also])
        room = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
        return cls(low - room, high + room)

    @classmethod
    def counted(cls, count: int, room: float = 0.3) -> Span:
        """Integers from 1 to ``count``, with a margin of ``room``; of many, only some have ticks.

        Example:
            >>> Span.counted(2)
            Span(low=0.7, high=2.3, marks=((1.0, '1'), (2.0, '2')))
        """
        step = 1 if count <= 12 else 2 if count <= 24 else 5
        return cls(1 - room, count + room, tuple((float(i), str(i)) for i in range(1, count + 1, step)))

    def at(self, value: float) -> float:
        """Position of a value within the range, from 0 to 1."""
        return (value - self.low) / (self.high - self.low)

    def marked(self) -> Sequence[tuple[float, str]]:
        return self.marks or [(step, f"{step:g}") for step in nice_steps(self.low, self.high)]


class Plot:
    """Axes to draw on; `svg` returns the complete plot.

    Example:
        >>> plot = Plot("ACC", Span(1, 3), Span(0, 100), "task", "percent")
        >>> plot.line([(1, 90), (3, 70)], 0)
        >>> 'aria-label="ACC. It falls."' in plot.svg("It falls.")
        True
    """

    def __init__(
        self, title: str, x: Span, y: Span, x_label: str, y_label: str = "", height: int = 360, left: int = 58
    ) -> None:
        self.title, self.x, self.y, self.labels = title, x, y, (x_label, y_label)
        self.height, self.left = height, left
        self._drawn: list[str] = []
        self._legend: list[tuple[str, str]] = []

    def line(self, points: Sequence[Point], number: int, dash: str = "", name: str = "", marks: bool = True) -> None:
        """Draw a line in the colour of ``number``, with its marker at each point."""
        look = f'fill="none" stroke="{_colour(number)}" stroke-width="1.8"' + (
            f' stroke-dasharray="{dash}"' if dash else ""
        )
        self._drawn.append(f'<polyline points="{self._path(points)}" {look}/>')
        if marks:
            self._drawn += [_mark(*self._place(point), number) for point in points]
        if name:
            sample = f'<path d="M0 0h22" {look}/>' + (_mark(11, 0, number) if marks else "")
            self._legend.append((name, sample))

    def band(self, low: Sequence[Point], high: Sequence[Point], number: int) -> None:
        around = self._path([*high, *reversed(low)])
        self._drawn.append(f'<polygon points="{around}" fill="{_colour(number)}" fill-opacity="0.18"/>')

    def bars(
        self, places: Sequence[float], starts: Sequence[float], ends: Sequence[float], fill: str, name: str
    ) -> None:
        """Draw vertical bars whose width is two thirds of the distance between places."""
        half = 0.33
        for place, start, end in zip(places, starts, ends, strict=True):
            (x1, y1), (x2, y2) = (
                self._place((place - half, max(start, end))),
                self._place((place + half, min(start, end))),
            )
            size = f'x="{x1:.1f}" y="{y1:.1f}" width="{x2 - x1:.1f}" height="{y2 - y1:.1f}"'
            self._drawn.append(f'<rect {size} fill="{fill}"/>')
        self._legend.append((name, f'<rect x="4" y="-6" width="14" height="12" fill="{fill}"/>'))

    def columns(self, points: Sequence[Point], spreads: Sequence[float], number: int, width: float, name: str) -> None:
        """Draw bars from zero in the colour of ``number``, with its marker on top and an error bar of ``spreads``."""
        look = f'fill="{_colour(number)}" fill-opacity="0.55"'
        for (place, value), spread in zip(points, spreads, strict=True):
            (x1, y1), (x2, y2) = (
                self._place((place - 0.45 * width, max(value, 0.0))),
                self._place((place + 0.45 * width, min(value, 0.0))),
            )
            size = f'x="{x1:.1f}" y="{y1:.1f}" width="{x2 - x1:.1f}" height="{y2 - y1:.1f}"'
            self._drawn.append(f"<rect {size} {look}/>")
            if spread:
                self.stroke((place, value - spread), (place, value + spread), None, 1.2)
            self._drawn.append(_mark(*self._place((place, value)), number))
        self._legend.append((name, f'<rect x="4" y="-6" width="14" height="12" {look}/>{_mark(11, 0, number)}'))

    def scatter(self, points: Sequence[Point], number: int, name: str, told: Sequence[str]) -> None:
        """Draw markers without a line; ``told`` are their tooltips."""
        for point, text in zip(points, told, strict=True):
            self._drawn.append(f"<g><title>{escape_html(text)}</title>{_mark(*self._place(point), number)}</g>")
        self._legend.append((name, _mark(11, 0, number)))

    def dots(self, points: Sequence[Point], number: int) -> None:
        for x, y in map(self._place, points):
            self._drawn.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{_colour(number)}" fill-opacity="0.75"/>'
            )

    def stroke(self, start: Point, end: Point, number: int | None, width: float, opacity: float = 1.0) -> None:
        """Draw a straight line; in the page's text colour if ``number`` is None."""
        colour = "currentColor" if number is None else _colour(number)
        look = f'stroke="{colour}" stroke-width="{width:g}" stroke-opacity="{opacity:g}"'
        self._drawn.append(f'<polyline points="{self._path([start, end])}" fill="none" {look}/>')

    def svg(self, says: str = "") -> str:
        """The complete plot; ``says`` is its description for screen readers."""
        lines = self._legend_lines()
        below = LEGEND_LINE * len(lines)
        label = f"{self.title}. {says}" if says else self.title
        title = "".join(
            f'<text x="{WIDTH / 2}" y="{16 + 15 * i - 15 * (len(self._title_lines()) - 1)}" font-size="14" '
            f'text-anchor="middle">{escape_html(line)}</text>'
            for i, line in enumerate(self._title_lines())
        )
        above = 15 * (len(self._title_lines()) - 1)
        view = f"0 {-above} {WIDTH} {self.height + below + above}"
        head = f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape_html(label)}" viewBox="{view}" '
        parts = [
            f'{head}font-size="12" fill="currentColor">',
            f"<defs>{HATCH}</defs>" if self._hatched() else "",
            title,
        ]
        return "\n".join(filter(None, [*parts, *self._axes(), *self._drawn, *lines, "</svg>"]))

    def _hatched(self) -> bool:
        return any("url(#hatch)" in piece for piece in self._drawn)

    def _title_lines(self) -> list[str]:
        return wrap(self.title, 84) or [""]

    def _place(self, point: Point) -> Point:
        x = self.left + self.x.at(point[0]) * (WIDTH - RIGHT - self.left)
        return x, self.height - BOTTOM - self.y.at(point[1]) * (self.height - BOTTOM - TOP)

    def _path(self, points: Sequence[Point]) -> str:
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in map(self._place, points))

    def _axes(self) -> list[str]:
        floor, right = self.height - BOTTOM, WIDTH - RIGHT
        parts = [f'<path d="M{self.left} {TOP}V{floor}H{right}" fill="none" stroke="currentColor"/>']
        for value, text in self.x.marked():
            x = self._place((value, self.y.low))[0]
            parts.append(f'<path d="M{x:.1f} {floor}v4" stroke="currentColor"/>')
            parts.append(f'<text x="{x:.1f}" y="{floor + 17}" text-anchor="middle">{escape_html(text)}</text>')
        for value, text in self.y.marked():
            parts += self._y_mark(self._place((self.x.low, value))[1], text)
        middle = min(
            (self.left + right) / 2, WIDTH - 3.2 * len(self.labels[0]) - 4
        )  # keeps a long label inside the plot
        parts.append(
            f'<text x="{middle:.1f}" y="{floor + 36}" text-anchor="middle">{escape_html(self.labels[0])}</text>'
        )
        if self.labels[1]:
            turned = f'transform="translate(14 {(TOP + floor) / 2:.1f}) rotate(-90)"'
            parts.append(f'<text {turned} text-anchor="middle">{escape_html(self.labels[1])}</text>')
        return parts

    def _y_mark(self, y: float, text: str) -> list[str]:
        lines = wrap(text, max(8, self.left // 7)) or [""]
        first = y + 4 - 7 * (len(lines) - 1)
        written = [
            f'<text x="{self.left - 7}" y="{first + 14 * i:.1f}" text-anchor="end">{escape_html(line)}</text>'
            for i, line in enumerate(lines)
        ]
        return [f'<path d="M{self.left} {y:.1f}h-4" stroke="currentColor"/>', *written]

    def _legend_lines(self) -> list[str]:
        """Legend below the axes, with as many names per line as fit."""
        lines: list[list[str]] = [[]]
        x = float(self.left)
        for name, sample in self._legend:
            wide = 34 + 6.6 * len(name) + 16
            if lines[-1] and x + wide > WIDTH:
                lines.append([])
                x = float(self.left)
            text = f'<text x="30" y="4">{escape_html(name)}</text>'
            lines[-1].append(
                f'<g transform="translate({x:.1f} {self.height + LEGEND_LINE * len(lines) - 10})">{sample}{text}</g>'
            )
            x += wide
        return ["".join(line) for line in lines if line]


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


MARKS: tuple[Callable[[float, float], str], ...] = (
    lambda x, y: f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.4"',
    lambda x, y: f'<rect x="{x - 3:.1f}" y="{y - 3:.1f}" width="6" height="6"',
    lambda x, y: f'<path d="M{x:.1f} {y - 4:.1f}l4 7h-8z"',
    lambda x, y: f'<path d="M{x:.1f} {y - 4.5:.1f}l4.5 4.5l-4.5 4.5l-4.5 -4.5z"',
    lambda x, y: f'<path d="M{x:.1f} {y + 4:.1f}l4 -7h-8z"',
    lambda x, y: f'<path d="M{x - 4:.1f} {y - 1.3:.1f}h2.7v-2.7h2.6v2.7h2.7v2.6h-2.7v2.7h-2.6v-2.7h-2.7z"',
    lambda x, y: f'<path d="M{x - 4:.1f} {y - 4:.1f}h2l2 2l2 -2h2v2l-2 2l2 2v2h-2l-2 -2l-2 2h-2v-2l2 -2l-2 -2z"',
    lambda x, y: f'<path d="M{x:.1f} {y - 5:.1f}l1.4 3.6l3.6 1.4l-3.6 1.4l-1.4 3.6l-1.4 -3.6l-3.6 -1.4l3.6 -1.4z"',
    lambda x, y: f'<rect x="{x - 4.5:.1f}" y="{y - 1.5:.1f}" width="9" height="3"',
)  # as many as colours, so that no two series share either


def _mark(x: float, y: float, number: int) -> str:
    return f'{MARKS[number % len(MARKS)](x, y)} fill="{_colour(number)}"/>'
