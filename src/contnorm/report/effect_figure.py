"""The figure of a diagnosis: accuracies by task, drift by layer, and how far each task's moments lie from the running.

Drawn from the plain numbers of `Diagnosis.as_dict`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_effect"]

BLUE, ORANGE, GREEN, INK = "#4477aa", "#ee7733", "#228833", "#55555a"
BARS = (("running", "running moments", BLUE), ("oracle", "oracle moments", ORANGE), ("own", "the task's own", GREEN))
PANEL = 4.6  # inches


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
    panels = [_accuracies, _drift, _by_task] if found["layers"] else [_accuracies]
    wide, tall = max(PANEL, 0.34 * len(found["tasks"])), max(PANEL, 1.6 + 0.22 * len(found["layers"]))  # room for names
    with plt.rc_context(style):
        figure, axes = plt.subplots(1, len(panels), figsize=(wide * len(panels), tall), squeeze=False)
        for panel, place in zip(panels, axes[0], strict=True):
            panel(place, found)
        figure.suptitle("\n".join(textwrap.wrap(found["sentence"], 45 * len(panels))), fontsize=11)
        figure.tight_layout()
        figure.savefig(path, metadata={"Date": None} if str(path).endswith(".svg") else None, dpi=150)
        plt.close(figure)


def _accuracies(axes: Axes, found: Mapping[str, Any]) -> None:
    bars = BARS if found["layers"] else BARS[:1]
    width = 0.8 / len(bars)
    for number, (key, label, colour) in enumerate(bars):
        places = [task + (number - (len(bars) - 1) / 2) * width for task in range(len(found["tasks"]))]
        axes.bar(places, found[key], width, label=label, color=colour)
    if found["learned"] is not None:
        axes.plot(found["learned"], "_", color=INK, markersize=18, label="when just learned")
    axes.set(title="accuracy", xlabel="task", ylabel="percent", ylim=(0, 100))
    _name_tasks(axes, found)
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)  # bars reach everywhere inside


def _drift(axes: Axes, found: Mapping[str, Any]) -> None:
    rows = range(len(found["layers"]))
    for key, label, colour, off in (("mean_scaled", "mean", BLUE, -0.2), ("var_scaled", "variance", ORANGE, 0.2)):
        lengths = [layer["running_oracle"][key] for layer in found["layers"]]
        axes.barh([row + off for row in rows], lengths, 0.4, label=label, color=colour)
    axes.set(title="running to oracle moments", xlabel="distance, scaled by the layer's spread")
    _name_layers(axes, found)
    axes.invert_yaxis()
    axes.legend(fontsize=8)


def _by_task(axes: Axes, found: Mapping[str, Any]) -> None:
    empty = float("nan")
    cells = [
        [empty if d is None else (d["mean_scaled"] + d["var_scaled"]) / 2 for d in layer["task_running"]]
        for layer in found["layers"]
    ]
    image = axes.imshow(cells, aspect="auto", cmap="Blues", vmin=0)
    axes.set(title="each task's to running moments", xlabel="task")
    _name_tasks(axes, found)
    _name_layers(axes, found)
    axes.figure.colorbar(image, ax=axes, label="scaled distance, mean and variance averaged")


def _name_tasks(axes: Axes, found: Mapping[str, Any]) -> None:
    axes.set_xticks(range(len(found["tasks"])), found["tasks"], fontsize=8)


def _name_layers(axes: Axes, found: Mapping[str, Any]) -> None:
    names = [layer["layer"] or "(the model)" for layer in found["layers"]]
    axes.set_yticks(range(len(names)), names, fontsize=8)
