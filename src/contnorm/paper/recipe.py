"""Recipes: tables and figures of a paper as data.

A recipe defines runs as grids of streams, strategies, norms and memory sizes, their shared settings, the scores to
compare with published numbers, and the claims of the paper.
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
    """One of the matrices of a record and its meaning.

    Attributes:
        matrix: Its key in the record.
        moments: Moments that the network was evaluated with.
        setting: ``"task"`` if the task was known in evaluation, ``"class"`` if not; None for the stream's scenario.
        labels: Group of labels, or ``"overall"``; None for single-label data.
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
    """A norm of a grid: its name and the settings that differ from the defaults."""

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
    published: bool = True  # whether the paper reports these cells
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Selected:
    """Settings selected for some cells, such as a learning rate: by `contnorm tune` or by hand."""

    where: Mapping[str, Any]
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Claim:
    """A claim of a paper about a table, in a form that runs can test.

    Attributes:
        says: The claim as text.
        kind: ``above``: ``score`` of the cells is above that of the cells ``than``, or above the score ``than_score``
            of the same cells; ``near``: within ``margin`` of it; ``under``: the score is below ``limit``; ``flat``: the
            final score is within ``margin`` of the score after the first task; ``steadier``: its variance over seeds is
            smaller than that of the cells ``than``.
        score: Name of a score; forgetting scores are named by their definition.
        cells: Selects the cells by some of their dimensions.
        than: Selects the cells to compare with; all other dimensions are equal.
        than_score: Score of the same cells to compare with.
        margin: Bound of ``near`` and ``flat``.
        limit: Bound of ``under``.
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
        name: Name of the file.
        title: One-line title.
        kind: ``runs``: scores and published numbers; ``curves``: scores after each task; ``data``: a summary of data
            sets; ``drawing``: nothing is run; ``waiting``: not available yet, ``note`` gives the reason.
        table: Number of the published table.
        scores: Names of our scores by published metric.
        runs: Grids of runs.
        settings: Settings of every run.
        selected: Settings of some cells, which override all others.
        claims: Claims of the paper.
        numbers: Published numbers in the recipe itself.
        published_runs: Number of runs behind the published standard deviations.
        alone: Whether runs must not run in parallel, as for time measurements.
        note: One-line note for the reader.
        streams: Streams of a ``data`` recipe.
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
