"""Heat map of the accuracy or mAP matrix. SVG is written directly, since a page has one for every run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean

from contnorm.bench.escape import escape_html
from contnorm.bench.metrics.accuracy_matrix import AccuracyMatrix
from contnorm.bench.metrics.multilabel import LabelMatrix, mean_ap
from contnorm.bench.records import Record

__all__ = ["colour_of", "matrix_heat_map"]

# Perceptually uniform from dark to light, so that it is also readable in grey.
RAMP = ("#440154", "#482878", "#3e4a89", "#31688e", "#26828e", "#1f9e89", "#35b779", "#6dcd59", "#b4de2c", "#fde725")
SIDE, LEFT, TOP, BAR = 26, 46, 30, 90
MOST_NUMBERS = 10  # with more tasks, numbers would not be readable


def matrix_heat_map(records: Sequence[Record], title: str) -> str:
    """Accuracy on each task after each task, averaged over seeds; mAP for multi-label streams."""
    values = _mean_matrix(records)
    what = "mAP" if records[0].multi_label else "accuracy"
    tasks = len(values)
    extent = tasks * SIDE
    width = max(LEFT + extent + BAR, 260)
    learned = fmean(values[i][i] or 0.0 for i in range(tasks))
    last = fmean(value or 0.0 for value in values[-1])
    says = f"{title}. {tasks} tasks; {learned:.1f} percent when just learned, {last:.1f} at the end, on average."
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape_html(says)}" '
        f'viewBox="0 0 {width} {TOP + extent + 42}" style="max-width: {1.2 * width:.0f}px" font-size="11" '
        'fill="currentColor">',
        f'<text x="{LEFT}" y="16" font-size="13">{escape_html(title)}</text>',
        *_squares(values),
        *_axes(tasks, what),
        *_bar(LEFT + extent + 24, min(extent, 160)),
        "</svg>",
    ]
    return "\n".join(parts)


def colour_of(percent: float) -> str:
    """Colour of an accuracy, interpolated from the ramp.

    Example:
        >>> colour_of(0), colour_of(50), colour_of(100)
        ('#440154', '#22908c', '#fde725')
    """
    place = max(0.0, min(percent, 100.0)) / 100 * (len(RAMP) - 1)
    first = min(int(place), len(RAMP) - 2)
    pairs = zip(_channels(RAMP[first]), _channels(RAMP[first + 1]), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * (place - first)):02x}" for a, b in pairs)


def _channels(colour: str) -> list[int]:
    return [int(colour[i : i + 2], 16) for i in (1, 3, 5)]


def _mean_matrix(records: Sequence[Record]) -> list[list[float | None]]:
    """Mean over seeds; None for cells without a measurement. With ``max_steps``, seeds may reach different tasks."""
    rows = [_percent(record.counted) for record in records]
    tasks = range(min(map(len, rows)))

    def cell(i: int, j: int) -> float | None:
        values = [value for row in rows if (value := row[i][j]) is not None]
        return fmean(values) if len(values) == len(rows) else None

    return [[cell(i, j) for j in tasks] for i in tasks]


def _percent(counted: AccuracyMatrix | LabelMatrix) -> list[list[float | None]]:
    if isinstance(counted, LabelMatrix):
        return [[None if stats is None else mean_ap(stats) for stats in row] for row in counted.own]
    tasks = range(counted.tasks)
    return [[None if counted.correct[i][j] is None else counted.at(i, j) for j in tasks] for i in tasks]


def _squares(values: list[list[float | None]]) -> Iterator[str]:
    numbers = len(values) <= MOST_NUMBERS
    for i, row in enumerate(values):
        for j, value in enumerate(row):
            if value is not None:
                x, y = LEFT + j * SIDE, TOP + i * SIDE
                yield f'<rect x="{x}" y="{y}" width="{SIDE}" height="{SIDE}" fill="{colour_of(value)}"/>'
                if numbers:
                    ink = "#fff" if value < 60 else "#000"
                    place = f'x="{x + SIDE / 2:g}" y="{y + 17}" text-anchor="middle"'
                    yield f'<text {place} fill="{ink}">{value:.0f}</text>'


def _axes(tasks: int, what: str) -> Iterator[str]:
    end = TOP + tasks * SIDE
    middle = tasks * SIDE / 2
    step = 1 if tasks <= MOST_NUMBERS else 4
    for i in range(0, tasks, step):
        at = i * SIDE + SIDE / 2
        yield f'<text x="{LEFT + at:g}" y="{end + 15}" text-anchor="middle">{i + 1}</text>'
        yield f'<text x="{LEFT - 6}" y="{TOP + at + 4:g}" text-anchor="end">{i + 1}</text>'
    yield f'<text x="{LEFT + middle:g}" y="{end + 33}" text-anchor="middle">{what} on task</text>'
    turned = f'transform="translate(14 {TOP + middle:g}) rotate(-90)"'
    yield f'<text {turned} text-anchor="middle">after task</text>'


def _bar(x: int, height: int) -> Iterator[str]:
    """Colour bar."""
    piece = height / len(RAMP)
    for number, colour in enumerate(reversed(RAMP)):
        yield f'<rect x="{x}" y="{TOP + number * piece:.1f}" width="12" height="{piece + 0.5:.1f}" fill="{colour}"/>'
    for percent in (0, 50, 100):
        y = TOP + height * (1 - percent / 100)
        yield f'<text x="{x + 17}" y="{y + 4:.1f}">{percent} %</text>'
