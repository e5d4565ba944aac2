"""The figure of a diagnosis: accuracies by task, drift by layer, and how far each task's moments lie from the running.

Drawn from the plain numbers of `Diagnosis.as_dict`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contnorm.bench.escape import escape_terminal, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_effect"]

BLUE, ORANGE, GREEN, INK = "#4477aa", "#ee7733", "#228833", "#55555a"
BARS = (("running", "running moments", BLUE), ("oracle", "oracle moments", ORANGE), ("own", "the task's own", GREEN))
PANEL = 4.6  # inches
ABOVE = 36  # points from a panel to its title: two lines of a legend
LETTER = 0.075  # of a name, inches
LONGEST_NAME = 48  # characters; a longer one would leave no room for the panels


def draw_effect(found: Mapping[str, Any], path: str | Path) -> None:
    """Draw a diagnosis to a file, in the format its ending says; the same bits every time.

    Args:
        found: What `Diagnosis.as_dict` gives.
        path: Where.

    Example:
        >>> import tempfile
        >>> plain = {"tasks": ["0"], "running": [50.0], "oracle": [50.0], "own": [50.0], "learned": None}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     draw_effect({**plain, "layers": [], "sentence": "Nothing."}, Path(folder) / "effect.svg")
        ...     (Path(folder) / "effect.svg").read_text()[:5]
        '<?xml'
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    style: dict[Any, Any] = {"svg.hashsalt": "contnorm", "svg.fonttype": "none", "font.family": "sans-serif"}
    style["text.parse_math"] = False  # a dollar in a name is no formula
    found = _visible(found)
    panels = [_accuracies, _drift, _by_task] if found["layers"] else [_accuracies]
    wide, tall = max(PANEL, 0.34 * len(found["tasks"])), max(PANEL, 1.6 + 0.22 * len(found["layers"]))  # room for names
    aside = LETTER * max((len(layer["layer"]) for layer in found["layers"]), default=0)
    with plt.rc_context(style):
        figure, axes = plt.subplots(
            1, len(panels), figsize=(wide * len(panels) + aside, tall), squeeze=False, layout="constrained"
        )
        for panel, place in zip(panels, axes[0], strict=True):
            panel(place, found)
        figure.suptitle("\n".join(textwrap.wrap(found["sentence"], 45 * len(panels))), fontsize=11)
        figure.savefig(path, metadata={"Date": None} if str(path).endswith(".svg") else None, dpi=150)
        plt.close(figure)


def _visible(found: Mapping[str, Any]) -> dict[str, Any]:
    """With the names of tasks and layers, which are users' own, escaped."""
    layers = [{**layer, "layer": shorten(escape_terminal(layer["layer"]), LONGEST_NAME)} for layer in found["layers"]]
    tasks = [shorten(escape_terminal(task), LONGEST_NAME) for task in found["tasks"]]
    return {**found, "tasks": tasks, "layers": layers, "sentence": escape_terminal(found["sentence"])}


def _accuracies(axes: Axes, found: Mapping[str, Any]) -> None:
    bars = BARS if found["layers"] else BARS[:1]
    width = 0.8 / len(bars)
    for number, (key, label, colour) in enumerate(bars):
        places = [task + (number - (len(bars) - 1) / 2) * width for task in range(len(found["tasks"]))]
        axes.bar(places, found[key], width, label=label, color=colour)
    if found["learned"] is not None:
        ends = [(task - 0.45, task + 0.45) for task in range(len(found["tasks"]))]  # across the bars of its task
        axes.hlines(found["learned"], *zip(*ends, strict=True), color=INK, label="when just learned")
    axes.set(xlabel="task", ylabel="percent", ylim=(0, 100))
    _name_tasks(axes, found)
    _entitle(axes, "accuracy")


def _drift(axes: Axes, found: Mapping[str, Any]) -> None:
    rows = range(len(found["layers"]))
    for key, label, colour, off in (("mean_scaled", "mean", BLUE, -0.2), ("var_scaled", "variance", ORANGE, 0.2)):
        lengths = [layer["running_oracle"][key] for layer in found["layers"]]
        axes.barh([row + off for row in rows], lengths, 0.4, label=label, color=colour)
    axes.set(xlabel="distance, scaled by the layer's spread", ylabel="layer", ylim=(len(rows) - 0.5, -0.5))
    axes.set_yticks(rows, [layer["layer"] or "(the model)" for layer in found["layers"]], fontsize=8)
    _entitle(axes, "running to oracle moments")


def _by_task(axes: Axes, found: Mapping[str, Any]) -> None:
    empty = float("nan")
    cells = [
        [empty if d is None else (d["mean_scaled"] + d["var_scaled"]) / 2 for d in layer["task_running"]]
        for layer in found["layers"]
    ]
    largest = max((cell for row in cells for cell in row if cell == cell), default=0.0)
    image = axes.imshow(cells, aspect="auto", cmap="Blues", vmin=0, vmax=largest or 1.0)
    axes.set(xlabel="task")
    axes.set_title("each task's to running moments", pad=ABOVE)
    axes.set_yticks(range(len(cells)), [])  # the rows are those of the panel beside it, which names them
    _name_tasks(axes, found)
    axes.figure.colorbar(image, ax=axes).set_label("scaled, of mean and variance the average", fontsize=8)


def _entitle(axes: Axes, title: str) -> None:
    """A title and, between it and the panel, the legend: inside, bars reach everywhere; below, names may be long."""
    axes.set_title(title, pad=ABOVE)
    axes.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)


def _name_tasks(axes: Axes, found: Mapping[str, Any]) -> None:
    crowded = max(map(len, found["tasks"])) * len(found["tasks"]) * LETTER > PANEL - 1.4 and len(found["tasks"]) > 1
    turned: dict[str, Any] = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"} if crowded else {}
    axes.set_xticks(range(len(found["tasks"])), found["tasks"], fontsize=8, **turned)
