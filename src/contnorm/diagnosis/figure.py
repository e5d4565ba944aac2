"""Figure of a diagnosis: accuracy by task, drift by layer, and distances between task and running moments."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from contnorm.diagnosis.result import Diagnosis

__all__ = ["diagnosis_figure", "draw_diagnosis"]

BLUE, ORANGE, GREEN, INK = "#4477aa", "#ee7733", "#228833", "#55555a"
PANEL_SIZE = 4.6  # inches


def draw_diagnosis(result: Diagnosis, path: str | Path) -> None:
    """Plot a diagnosis to a file; its suffix sets the format. The output is deterministic."""
    import matplotlib

    style: dict[Any, Any] = {"svg.hashsalt": "contnorm", "svg.fonttype": "none"}
    with matplotlib.rc_context(style):
        metadata = {"Date": None} if str(path).endswith(".svg") else None
        diagnosis_figure(result).savefig(path, metadata=metadata, dpi=150)


def diagnosis_figure(result: Diagnosis) -> Figure:
    """Figure of a diagnosis, which notebooks show. It does not use pyplot, so the backend of a notebook stays."""
    import matplotlib
    from matplotlib.figure import Figure

    from contnorm.bench.figures import with_png  # needs numpy, which matplotlib has and torch alone has not

    panels = [_accuracies, _drift, _by_task] if result.layers else [_accuracies]
    size = (len(panels) * max(PANEL_SIZE, 0.34 * len(result.tasks)), max(PANEL_SIZE, 1.6 + 0.22 * len(result.layers)))
    with matplotlib.rc_context({"text.parse_math": False}):  # a dollar sign in a name is not a formula
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots(1, len(panels), squeeze=False)
        for panel, place in zip(panels, axes[0], strict=True):
            panel(place, result)
        figure.suptitle("\n".join(textwrap.wrap(result.sentence, 45 * len(panels))), fontsize=11)
    return with_png(figure)


def _accuracies(axes: Axes, result: Diagnosis) -> None:
    bars = [("running moments", result.running, BLUE)]
    if result.layers:
        bars += [("oracle moments", result.oracle, ORANGE), ("the task's own", result.own, GREEN)]
    width = 0.8 / len(bars)
    for number, (label, values, colour) in enumerate(bars):
        positions = [task + (number - (len(bars) - 1) / 2) * width for task in range(len(result.tasks))]
        axes.bar(positions, values, width, label=label, color=colour)
    if result.learned is not None:
        starts = [task - 0.45 for task in range(len(result.tasks))]  # across the bars of its task
        axes.hlines(result.learned, starts, [start + 0.9 for start in starts], color=INK, label="when just learned")
    axes.set(title="accuracy", xlabel="task", ylabel="percent", ylim=(0, 100))
    axes.set_xticks(range(len(result.tasks)), result.tasks, fontsize=8)
    axes.legend(fontsize=8)


def _drift(axes: Axes, result: Diagnosis) -> None:
    rows = range(len(result.layers))
    for key, label, colour, offset in (("mean_scaled", "mean", BLUE, -0.2), ("var_scaled", "variance", ORANGE, 0.2)):
        lengths = [getattr(layer.running_oracle, key) for layer in result.layers]
        axes.barh([row + offset for row in rows], lengths, 0.4, label=label, color=colour)
    axes.set(title="running to oracle moments", xlabel="distance, scaled by the layer's spread", ylabel="layer")
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(rows, [layer.layer or "(the model)" for layer in result.layers], fontsize=8)
    axes.legend(fontsize=8)


def _by_task(axes: Axes, result: Diagnosis) -> None:
    cells = [
        [float("nan") if d is None else (d.mean_scaled + d.var_scaled) / 2 for d in layer.task_running]
        for layer in result.layers
    ]
    largest = max((cell for row in cells for cell in row if cell == cell), default=0.0)
    image = axes.imshow(cells, aspect="auto", cmap="Blues", vmin=0, vmax=largest or 1.0)
    axes.set(title="each task's to running moments", xlabel="task")
    axes.set_yticks(range(len(cells)), [])  # rows are the same as in the panel to the left, which labels them
    axes.set_xticks(range(len(result.tasks)), result.tasks, fontsize=8)
    axes.figure.colorbar(image, ax=axes).set_label("scaled, of mean and variance the average", fontsize=8)
