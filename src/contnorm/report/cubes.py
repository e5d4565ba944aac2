"""The paper's cube diagram: which values of a feature map share moments in each norm.

Each cube is a batch of feature maps with the axes samples (N), channels (C) and positions (H, W). Blue values share
moments across samples, orange ones within a sample. Draw it with ``python -m contnorm.report.cubes OUT.svg``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_cubes"]

SAMPLES, CHANNELS, POSITIONS = 4, 6, 5
GROUP = 3  # channels in a group
BLUE, ORANGE, PLAIN, EDGE = "#4477aa", "#ee7733", "#f4f4f1", "#55555a"
DEPTH = (0.42, 0.30)  # offset of one sample to the right and up

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


PANELS: tuple[tuple[str, tuple[Cube, ...]], ...] = (
    ("Batch norm (BN)", (("", BLUE, _across_samples),)),
    ("Layer norm (LN)", (("", ORANGE, _first_sample),)),
    ("Instance norm (IN)", (("", ORANGE, _channel_of_first_sample),)),
    ("Group norm (GN)", (("", ORANGE, _group_of_first_sample),)),
    (
        "Continual norm (CN)",
        (
            ("1. groups of each sample", ORANGE, _group_of_first_sample),
            ("2. channels of the batch", BLUE, _across_samples),
        ),
    ),
)


def draw_cubes(path: str | Path) -> None:
    """Draw the diagram to a file, in the format of its suffix; the output is deterministic.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     draw_cubes(Path(folder) / "cubes.svg")
        ...     (Path(folder) / "cubes.svg").read_text()[:5]
        '<?xml'
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    style: dict[Any, Any] = {
        "svg.hashsalt": "contnorm",
        "svg.fonttype": "none",
        "font.family": "sans-serif",
        "font.size": 11,
    }
    with plt.rc_context(style):
        figure, axes = plt.subplots(figsize=(14.5, 3.0))
        left = 0.0
        for title, cubes in PANELS:
            start = left
            for number, (caption, colour, painted) in enumerate(cubes):
                if number:
                    _arrow(axes, left - 1.15)
                _cube(axes, left, colour, painted, axes_named=start == 0.0)
                axes.text(left + CHANNELS / 2, -1.0, caption, ha="center", va="top", fontsize=10)
                left += CHANNELS + SAMPLES * DEPTH[0] + 1.6
            middle = (start + left - 1.6) / 2
            axes.text(middle, POSITIONS + SAMPLES * DEPTH[1] + 0.6, title, ha="center", fontsize=13, fontweight="bold")
        axes.set(xlim=(-2.2, left - 1.0), ylim=(-2.2, POSITIONS + SAMPLES * DEPTH[1] + 1.8), aspect="equal")
        axes.axis("off")
        figure.subplots_adjust(left=0, right=1, bottom=0, top=1)
        metadata = {"Date": None} if str(path).endswith(".svg") else None
        figure.savefig(path, metadata=metadata, dpi=150)
        plt.close(figure)


def _cube(axes: Axes, left: float, colour: str, painted: IsPainted, axes_named: bool) -> None:
    """Draw the three visible faces: first sample (front), top positions (top), last channel (right)."""
    dx, dy = DEPTH
    for channel in range(CHANNELS):
        for position in range(POSITIONS):
            corner = [
                (channel, position),
                (channel + 1, position),
                (channel + 1, position + 1),
                (channel, position + 1),
            ]
            _face(axes, left, corner, colour if painted(0, channel) else PLAIN)
    for sample in range(SAMPLES):
        a, b = (sample * dx, sample * dy), ((sample + 1) * dx, (sample + 1) * dy)
        for channel in range(CHANNELS):
            top = [
                (channel + a[0], POSITIONS + a[1]),
                (channel + 1 + a[0], POSITIONS + a[1]),
                (channel + 1 + b[0], POSITIONS + b[1]),
                (channel + b[0], POSITIONS + b[1]),
            ]
            _face(axes, left, top, colour if painted(sample, channel) else PLAIN)
        for position in range(POSITIONS):
            side = [
                (CHANNELS + a[0], position + a[1]),
                (CHANNELS + b[0], position + b[1]),
                (CHANNELS + b[0], position + 1 + b[1]),
                (CHANNELS + a[0], position + 1 + a[1]),
            ]
            _face(axes, left, side, colour if painted(sample, CHANNELS - 1) else PLAIN)
    if axes_named:
        axes.text(left + CHANNELS / 2, -0.25, "C", ha="center", va="top")
        axes.text(left - 0.3, POSITIONS / 2, "H, W", ha="right", va="center")
        axes.text(left + CHANNELS + SAMPLES * dx / 2 + 0.35, SAMPLES * dy / 2 - 0.3, "N", ha="left", va="top")


def _face(axes: Axes, left: float, corners: Sequence[tuple[float, float]], colour: str) -> None:
    from matplotlib.patches import Polygon

    moved = [(left + x, y) for x, y in corners]
    axes.add_patch(Polygon(moved, closed=True, facecolor=colour, edgecolor=EDGE, linewidth=0.6))


def _arrow(axes: Axes, x: float) -> None:
    axes.annotate(
        "",
        xy=(x + 0.85, POSITIONS / 2),
        xytext=(x, POSITIONS / 2),
        arrowprops={"arrowstyle": "-|>", "color": EDGE, "linewidth": 1.6},
    )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m contnorm.report.cubes OUT.svg")
    draw_cubes(sys.argv[1])
