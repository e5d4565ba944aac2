"""What a recipe is: a table or figure as data, none of it code.

A recipe names runs as grids of streams, strategies, norms and memory sizes, the settings they share, which scores are
shown beside which published numbers, and what the paper claims of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from contnorm.paper.published import RUNS, Published

__all__ = ["DIMENSIONS", "KINDS", "VIEWS", "Block", "Claim", "ClaimKind", "NormEntry", "Recipe", "Selected", "View"]

Kind = Literal["runs", "curves", "data", "drawing", "waiting"]
KINDS: tuple[str, ...] = get_args(Kind)
ClaimKind = Literal["above", "near", "under", "flat", "steadier"]
DIMENSIONS = (
    "stream", "strategy", "norm", "groups", "momentum", "schedule", "layers", "buffer", "tasks", "moments", "setting",
    "labels",
)  # fmt: skip


@dataclass(frozen=True)
class View:
    """One of the matrices of a record, and what it is of.

    Attributes:
        matrix: Its key in the record.
        moments: With which moments the network was evaluated.
        setting: Whether the task was known.
        labels: A group of labels, or ``"overall"``; None where images have one label each.
    """

    matrix: str
    moments: str = "running"
    setting: str | None = None
    labels: str | None = None


VIEWS: dict[str, View] = {
    "plain": View("matrix"),
    "running": View("matrix_running"),
    "oracle": View("matrix", moments="oracle"),
    "class": View("matrix", setting="class"),
    "task": View("matrix_task", setting="task"),
    **{labels: View("labels", labels=labels) for labels in ("overall", "majority", "moderate", "minority")},
}


@dataclass(frozen=True)
class NormEntry:
    """A norm of a grid: its name, and those of its settings that differ."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Block:
    """A grid of runs: every stream with every strategy, norm and memory size."""

    streams: tuple[str, ...]
    strategies: tuple[str, ...]
    norms: tuple[NormEntry, ...]
    buffers: tuple[int | None, ...] = (None,)
    views: tuple[str, ...] = ("plain",)
    published: bool = True  # whether the paper has these cells
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Selected:
    """Settings that were chosen for some cells, such as a learning rate: by `contnorm tune`, or by hand."""

    where: Mapping[str, Any]
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Claim:
    """Something a paper says of a table, in a form that runs can decide.

    Attributes:
        says: In words.
        kind: ``above``: ``score`` of the cells is above that of the cells ``than``, or above the score ``than_score``
            of the same cells; ``near``: within ``margin`` of it; ``under``: the score is under ``limit``; ``flat``: at
            the end the score is within ``margin`` of what it was after the first task; ``steadier``: its spread over
            seeds is smaller than that of the cells ``than``.
        score: One of ours; a forgetting score names its definition.
        cells: Which cells, by some of their dimensions.
        than: Which others; all else is the same.
    """

    says: str
    kind: ClaimKind
    score: str
    cells: Mapping[str, Any] = field(default_factory=dict)
    than: tuple[Mapping[str, Any], ...] = ()
    than_score: str | None = None
    margin: float = 0.0
    limit: float = 0.0


@dataclass(frozen=True)
class Recipe:
    """A table or figure.

    Attributes:
        name: Of the file.
        title: One line.
        kind: ``runs``: scores beside published numbers; ``curves``: scores task by task; ``data``: a summary of data
            sets; ``drawing``: nothing is run; ``waiting``: for something that is not there yet, which ``note`` names.
        table: The number of the published table.
        scores: Ours, by the published metric each stands beside.
        runs: Grids.
        settings: Of every run.
        selected: Chosen for some cells, over all other settings.
        claims: Of the paper.
        numbers: Published ones that the recipe brings itself.
        published_runs: Over how many runs published deviations are.
        alone: Whether runs must not go side by side, as where time is measured.
        note: What a reader should know, in one line.
        streams: Of a ``data`` recipe.
    """

    name: str
    title: str
    kind: Kind
    table: str = ""
    scores: Mapping[str, str] = field(default_factory=dict)
    runs: tuple[Block, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    selected: tuple[Selected, ...] = ()
    claims: tuple[Claim, ...] = ()
    numbers: tuple[Published, ...] = ()
    published_runs: int = RUNS
    alone: bool = False
    note: str = ""
    streams: tuple[str, ...] = ()
