"""Figure of a diagnosis: accuracy by task, drift by layer, and distances between task and running moments.

It is drawn from the plain numbers of `Diagnosis.as_dict`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contnorm.bench.escape import escape_terminal, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["diagnosis_figure", "draw_diagnosis"]

BLUE, ORANGE, GREEN, INK = "#4477aa", "#ee7733", "#228833", "#55555a"
BARS = (("running", "running moments", BLUE), ("oracle", "oracle moments", ORANGE), ("own", "the task's own", GREEN))
PANEL_SIZE = 4.6  # inches
TITLE_PAD = 36  # points between a panel and its title, for two lines of legend
CHARACTER_WIDTH = 0.075  # width of a character of a name, in inches
LONGEST_NAME = 48  # characters; a longer name would leave no room for the panels


def draw_diagnosis(result: Mapping[str, Any], path: str | Path) -> None:
    """Plot a diagnosis to a file; its suffix sets the format. The output is deterministic.

    Args:
        result: Result of `Diagnosis.as_dict`.
        path: Output file.

    Example:
        >>> import tempfile
        >>> plain = {"tasks": ["0"], "running": [50.0], "oracle": [50.0], "own": [50.0], "learned": None}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     draw_diagnosis({**plain, "layers": [], "sentence": "Nothing."}, Path(folder) / "effect.svg")
        ...     (Path(folder) / "effect.svg").read_text()[:5]
        '<?xml'
    """
    import matplotlib

    style: dict[Any, Any] = {"svg.hashsalt": "contnorm", "svg.fonttype": "none"}
    with matplotlib.rc_context(style):
        metadata = {"Date": None} if str(path).endswith(".svg") else None
        diagnosis_figure(result).savefig(path, metadata=metadata, dpi=150)


def diagnosis_figure(result: Mapping[str, Any]) -> Figure:
    """Figure of a diagnosis, which notebooks show. It does not use pyplot, so the backend of a notebook stays.

    Args:
        result: Result of `Diagnosis.as_dict`.

    Example:
        >>> plain = {"tasks": ["0"], "running": [50.0], "oracle": [50.0], "own": [50.0], "learned": None}
        >>> len(diagnosis_figure({**plain, "layers": [], "sentence": "Nothing."}).axes)
        1
    """
    import matplotlib
    from matplotlib.figure import Figure

    from contnorm.bench.figures import with_png  # needs numpy, which matplotlib has and torch alone has not

    diagnosis = _escape_names(result)
    panels = [_accuracies, _drift, _by_task] if diagnosis["layers"] else [_accuracies]
    wide, tall = (
        max(PANEL_SIZE, 0.34 * len(diagnosis["tasks"])),
        max(PANEL_SIZE, 1.6 + 0.22 * len(diagnosis["layers"])),
    )  # room for names
    aside = CHARACTER_WIDTH * max((len(layer["layer"]) for layer in diagnosis["layers"]), default=0)
    style: dict[Any, Any] = {"font.family": "sans-serif"}
    style["text.parse_math"] = False  # a dollar sign in a name is not a formula
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(wide * len(panels) + aside, tall), layout="constrained")
        axes = figure.subplots(1, len(panels), squeeze=False)
        for panel, place in zip(panels, axes[0], strict=True):
            panel(place, diagnosis)
        figure.suptitle("\n".join(textwrap.wrap(diagnosis["sentence"], 45 * len(panels))), fontsize=11)
    return with_png(figure)


def _escape_names(diagnosis: Mapping[str, Any]) -> dict[str, Any]:
    """Escape the names of tasks and layers, which come from the user."""
    layers = [
        {**layer, "layer": shorten(escape_terminal(layer["layer"]), LONGEST_NAME)} for layer in diagnosis["layers"]
    ]
    tasks = [shorten(escape_terminal(task), LONGEST_NAME) for task in diagnosis["tasks"]]
    return {**diagnosis, "tasks": tasks, "layers": layers, "sentence": escape_terminal(diagnosis["sentence"])}


def _accuracies(axes: Axes, diagnosis: Mapping[str, Any]) -> None:
    bars = BARS if diagnosis["layers"] else BARS[:1]
    width = 0.8 / len(bars)
    for number, (key, label, colour) in enumerate(bars):
        positions = [task + (number - (len(bars) - 1) / 2) * width for task in range(len(diagnosis["tasks"]))]
        axes.bar(positions, diagnosis[key], width, label=label, color=colour)
    if diagnosis["learned"] is not None:
        ends = [(task - 0.45, task + 0.45) for task in range(len(diagnosis["tasks"]))]  # across the bars of its task
        axes.hlines(diagnosis["learned"], *zip(*ends, strict=True), color=INK, label="when just learned")
    axes.set(xlabel="task", ylabel="percent", ylim=(0, 100))
    _name_tasks(axes, diagnosis)
    _set_title(axes, "accuracy")


def _drift(axes: Axes, diagnosis: Mapping[str, Any]) -> None:
    rows = range(len(diagnosis["layers"]))
    for key, label, colour, offset in (("mean_scaled", "mean", BLUE, -0.2), ("var_scaled", "variance", ORANGE, 0.2)):
        lengths = [layer["running_oracle"][key] for layer in diagnosis["layers"]]
        axes.barh([row + offset for row in rows], lengths, 0.4, label=label, color=colour)
    axes.set(xlabel="distance, scaled by the layer's spread", ylabel="layer", ylim=(len(rows) - 0.5, -0.5))
    axes.set_yticks(rows, [layer["layer"] or "(the model)" for layer in diagnosis["layers"]], fontsize=8)
    _set_title(axes, "running to oracle moments")


def _by_task(axes: Axes, diagnosis: Mapping[str, Any]) -> None:
    empty = float("nan")
    cells = [
        [empty if d is None else (d["mean_scaled"] + d["var_scaled"]) / 2 for d in layer["task_running"]]
        for layer in diagnosis["layers"]
    ]
    largest = max((cell for row in cells for cell in row if cell == cell), default=0.0)
    image = axes.imshow(cells, aspect="auto", cmap="Blues", vmin=0, vmax=largest or 1.0)
    axes.set(xlabel="task")
    axes.set_title("each task's to running moments", pad=TITLE_PAD)
    axes.set_yticks(range(len(cells)), [])  # rows are the same as in the panel to the left, which labels them
    _name_tasks(axes, diagnosis)
    axes.figure.colorbar(image, ax=axes).set_label("scaled, of mean and variance the average", fontsize=8)


def _set_title(axes: Axes, title: str) -> None:
    """Set the title, and put the legend between title and panel, where neither bars nor long names overlap it."""
    axes.set_title(title, pad=TITLE_PAD)
    axes.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)


def _name_tasks(axes: Axes, diagnosis: Mapping[str, Any]) -> None:
    crowded = (
        max(map(len, diagnosis["tasks"])) * len(diagnosis["tasks"]) * CHARACTER_WIDTH > PANEL_SIZE - 1.4
        and len(diagnosis["tasks"]) > 1
    )
    rotation: dict[str, Any] = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"} if crowded else {}
    axes.set_xticks(range(len(diagnosis["tasks"])), diagnosis["tasks"], fontsize=8, **rotation)
