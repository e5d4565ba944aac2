"""The paper's cube diagram: which values of a feature map share moments in each norm.

Each cube is a batch of feature maps with the axes samples (N), channels (C) and positions (H, W). Blue values share
moments across samples, orange ones within a sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Outline

from contnorm.bench.figures import COLORS
from tools.svg import with_figure_style

__all__ = ["DESCRIPTION", "cubes_figure"]

SAMPLES, CHANNELS, POSITIONS = 4, 6, 5
GROUP = 3  # channels in a group
BLUE, ORANGE = COLORS[:2]
PLAIN, EDGE = (0, 0, 0, 0.06), (0, 0, 0, 0.55)  # shades of the ink, which is light in the dark scheme
DEPTH = (0.42, 0.30)  # offset of one sample to the right and up
GAP = 1.6  # between cubes
CUBE_WIDTH = CHANNELS + SAMPLES * DEPTH[0] + GAP
ROW_HEIGHT = 10.4
WIDTH, HEIGHT = 480, 350  # pixels: two rows, so that the text can be read on a phone
DESCRIPTION = (
    "Values that share moments: batch norm across samples; layer, instance and group norm within a sample; "
    "continual norm first within a sample, then across samples."
)

Corners = Sequence[tuple[float, float]]
IsPainted = Callable[[int, int], bool]  # (sample, channel) -> painted; all positions share moments in every norm
Cube = tuple[str, str, IsPainted]


def _across_samples(sample: int, channel: int) -> bool:
    return channel == CHANNELS - 1


def _group_of_first_sample(sample: int, channel: int) -> bool:
    return sample == 0 and channel >= CHANNELS - GROUP


def _channel_of_first_sample(sample: int, channel: int) -> bool:
    return sample == 0 and channel == CHANNELS - 1


def _first_sample(sample: int, channel: int) -> bool:
    return sample == 0


ROWS: tuple[tuple[tuple[str, tuple[Cube, ...]], ...], ...] = (
    (
        ("Batch (BN)", (("", BLUE, _across_samples),)),
        ("Layer (LN)", (("", ORANGE, _first_sample),)),
        ("Instance (IN)", (("", ORANGE, _channel_of_first_sample),)),
    ),
    (
        ("Group (GN)", (("", ORANGE, _group_of_first_sample),)),
        (
            "Continual (CN)",
            (("1. each sample", ORANGE, _group_of_first_sample), ("2. the batch", BLUE, _across_samples)),
        ),
    ),
)


@with_figure_style
def cubes_figure() -> Figure:
    """The diagram, with a row of norms across or within samples, and a row for continual norm."""
    figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72))
    axes = figure.add_axes((0, 0, 1, 1))
    for row, panels in enumerate(ROWS):
        left, bottom = 0.0, -row * ROW_HEIGHT
        for title, cubes in panels:
            start = left
            for number, (caption, colour, painted) in enumerate(cubes):
                if number:
                    _arrow(axes, left - 1.15, bottom)
                _cube(axes, left, bottom, colour, painted, axes_named=row == start == 0)
                axes.text(left + CHANNELS / 2, bottom - 0.4, caption, ha="center", va="top", fontsize=13)
                left += CUBE_WIDTH
            middle = (start + left - GAP) / 2
            top = bottom + POSITIONS + SAMPLES * DEPTH[1] + 0.55
            axes.text(middle, top, title, ha="center", fontsize=15, fontweight="bold")
    axes.set(xlim=(-1.9, 3 * CUBE_WIDTH - 0.9), ylim=(-ROW_HEIGHT - 2.0, POSITIONS + 3.0), aspect="equal")
    axes.axis("off")
    return figure


def _cube(axes: Axes, left: float, bottom: float, colour: str, painted: IsPainted, axes_named: bool) -> None:
    """Draw the three visible faces: first sample (front), top positions (top), last channel (right)."""
    dx, dy = DEPTH
    faces: dict[bool, list[Corners]] = {True: [], False: []}
    for channel in range(CHANNELS):
        for position in range(POSITIONS):
            faces[painted(0, channel)].append(
                [(channel, position), (channel + 1, position), (channel + 1, position + 1), (channel, position + 1)]
            )
    for sample in range(SAMPLES):
        a, b = (sample * dx, sample * dy), ((sample + 1) * dx, (sample + 1) * dy)
        for channel in range(CHANNELS):
            top = [(channel, a), (channel + 1, a), (channel + 1, b), (channel, b)]
            faces[painted(sample, channel)].append([(x + at[0], POSITIONS + at[1]) for x, at in top])
        for position in range(POSITIONS):
            side = [(position, a), (position, b), (position + 1, b), (position + 1, a)]
            faces[painted(sample, CHANNELS - 1)].append([(CHANNELS + at[0], y + at[1]) for y, at in side])
    for is_painted, some in faces.items():
        _faces(axes, left, bottom, some, colour if is_painted else PLAIN)
    if axes_named:
        axes.text(left + CHANNELS / 2, bottom - 0.25, "C", ha="center", va="top", fontsize=13)
        axes.text(left - 0.3, bottom + POSITIONS / 2, "H, W", ha="right", va="center", fontsize=13, rotation=90)
        x, y = left + CHANNELS + SAMPLES * dx / 2 + 0.35, bottom + SAMPLES * dy / 2 - 0.3
        axes.text(x, y, "N", ha="left", va="top", fontsize=13)


def _faces(axes: Axes, left: float, bottom: float, faces: Sequence[Corners], colour: Any) -> None:
    """Draw faces of one color as one path, which keeps the file small."""
    outlines = [Outline([(left + x, bottom + y) for x, y in (*face, face[0])], closed=True) for face in faces]
    outline = Outline.make_compound_path(*outlines)
    axes.add_patch(PathPatch(outline, facecolor=colour, edgecolor=EDGE, linewidth=0.7))


def _arrow(axes: Axes, x: float, bottom: float) -> None:
    axes.annotate(
        "",
        xy=(x + 0.85, bottom + POSITIONS / 2),
        xytext=(x, bottom + POSITIONS / 2),
        arrowprops={"arrowstyle": "-|>", "color": "black", "linewidth": 1.6},
    )
