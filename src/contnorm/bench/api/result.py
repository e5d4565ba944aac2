"""The results of runs with the same settings, and comparisons of two of them."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load
from torch import nn

from contnorm.bench.api.stream import Stream
from contnorm.bench.comparison import scores_of
from contnorm.bench.components import Component, share_components
from contnorm.bench.config.defaults import run_names
from contnorm.bench.engine.trainer import Trainer
from contnorm.bench.figures import figure
from contnorm.bench.metrics import MAIN_SCORES, AccuracyMatrix, score_title
from contnorm.bench.records import Record, Runs, spread_over_seeds
from contnorm.errors import UserError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


class Result:
    """Results of one experiment: the same settings with several seeds.

    Scores are in percent. Recorded runs of one experiment give a result too, without `models`:
    ``Result(bench.load_runs("runs").where(norm="cn"))``.

    Args:
        records: Records with the same settings.
        diverged: Reasons of the seeds that diverged.
        stream: The stream of the runs, for `models`.
        weights: Weights of each seed, or their files, for `models`.
        objects: The network and strategy of the runs if they are Python objects, for `models`.

    Attributes:
        config: The resolved settings.
        seeds: The seeds that finished, in order.
        records: Their records.
        diverged: The seeds whose loss became infinite or NaN, with the reasons; they have no results.
        stream: The stream of the runs; None for recorded runs.
        objects: The components of the runs that are registered or passed as Python objects.

    Example:
        >>> from contnorm.bench.api.run import run
        >>> x, y = np.random.default_rng(0).normal(size=(80, 8)), np.arange(80) % 4
        >>> result = run(Stream.from_arrays(x, y, x, y, tasks=2), norm="bn", seeds=2, lanes=1)
        >>> result.seeds, result.accuracy.shape, result.acc.shape
        ([0, 1], (2, 2, 2), (2,))
        >>> result.to_frame()[["seed", "norm.name", "train.lr"]].values.tolist()
        [[0, 'bn', 0.03], [1, 'bn', 0.03]]
    """

    def __init__(
        self,
        records: Iterable[Record],
        *,
        diverged: Mapping[int, str] | None = None,
        stream: Stream | None = None,
        weights: Mapping[int, bytes | Path] | None = None,
        objects: Iterable[Component] = (),
    ) -> None:
        if isinstance(records, str | PathLike):
            raise UserError(
                f"records={str(records)!r}: use the records of one experiment, such as bench.load_runs(...).where(...)."
            )
        self.records = sorted(records, key=lambda record: record.seed)
        hashes = {record.config.hash for record in self.records}
        if len(hashes) != 1:
            raise UserError(f"a Result needs records of one experiment, not of {len(hashes)}. Use Runs.where(...).")
        self.config = self.records[0].config
        self.seeds = [record.seed for record in self.records]
        self.diverged = dict(diverged or {})
        self.stream, self._weights, self.objects = stream, dict(weights or {}), list(objects)

    @property
    def hash(self) -> str:
        """Hash that identifies the settings."""
        return self.config.hash

    @property
    def accuracy(self) -> NDArray[np.float64]:
        """Array of shape (seeds, tasks, tasks): accuracy after task i on task j, in percent; NaN if not measured."""
        self._check_accuracies()
        return np.array([_matrix_array(record.matrix) for record in self.records])

    @property
    def accuracy_by_moments(self) -> dict[str, NDArray[np.float64]]:
        """Accuracy arrays by the moments that all seeds were evaluated with, such as ``"running"`` and ``"memory"``."""
        self._check_accuracies()
        by_seed = [record.evaluated for record in self.records]
        shared = [moments for moments in by_seed[0] if all(moments in one for one in by_seed)]
        return {moments: np.array([_matrix_array(m[moments]) for m in by_seed]) for moments in shared}

    @property
    def acc(self) -> NDArray[np.float64]:
        """ACC of each seed: average accuracy on all tasks after the last one."""
        return self.score("acc")

    @property
    def aia(self) -> NDArray[np.float64]:
        """Mean over the stream of each seed: accuracy on the tasks so far, averaged over the ends of all tasks."""
        return self.score("aia")

    @property
    def fm(self) -> NDArray[np.float64]:
        """FM of each seed: forgetting measure."""
        return self.score("fm")

    @property
    def la(self) -> NDArray[np.float64]:
        """LA of each seed: learning accuracy, that of each task right after it was learned."""
        return self.score("la")

    def score(self, name: str) -> NDArray[np.float64]:
        """Return one score of each seed, by its name as in `scores`."""
        scores = self.scores()
        if name not in scores:
            raise UserError(f"there is no score {name!r} in this result. Scores are {', '.join(scores)}.")
        return scores[name]

    def scores(self) -> dict[str, NDArray[np.float64]]:
        """Return every metric by name, with one value per seed. Multi-label runs have other metrics than ACC."""
        by_seed = [scores_of(record) for record in self.records]
        return {name: np.array([scores[name] for scores in by_seed]) for name in by_seed[0]}

    def to_frame(self, by: Literal["seed", "task"] = "seed") -> pd.DataFrame:
        """Return a pandas data frame.

        Args:
            by: ``"seed"`` for one row per seed, with settings and scores as columns; ``"task"`` for one row per
                measured accuracy, with the columns ``seed``, ``after_task``, ``task`` and ``accuracy``.
        """
        if by == "seed":
            return Runs(self.records, [], []).to_frame()
        if by != "task":
            raise UserError(f"by={by!r}: use 'seed' or 'task'.")
        import pandas  # only where a table is made

        accuracy = self.accuracy
        seed, after, task = (~np.isnan(accuracy)).nonzero()
        rows = zip(np.array(self.seeds)[seed], after, task, accuracy[seed, after, task], strict=True)
        return pandas.DataFrame(rows, columns=["seed", "after_task", "task", "accuracy"])

    def models(self) -> list[nn.Module]:
        """Return the trained networks, one per seed, on the CPU and in evaluation mode.

        Raises:
            UserError: If the weights were not kept (``keep_weights=True``).
        """
        if self.stream is None:
            raise UserError("this result has no stream, so its networks can't be built. Get it from bench.run.")
        missing = [seed for seed in self.seeds if seed not in self._weights]
        if missing:
            raise UserError(f"the weights of seed {missing[0]} were not kept. Run with keep_weights=True.")
        models = []
        share_components(self.objects)
        for seed in self.seeds:
            trainer = Trainer(self.config, seed, self.stream.source, torch.device("cpu"))
            weights = self._weights[seed]
            trainer.model.load_state_dict(load(weights.read_bytes() if isinstance(weights, Path) else weights))
            models.append(trainer.model.eval())
        return models

    def plot(self, *others: Result) -> Figure:
        """Return a matplotlib figure of the accuracy curve and of the mean accuracy matrix.

        Args:
            others: Further results, whose curves are drawn in the same axes; there is a matrix for each result.

        Raises:
            UserError: For multi-label results, which have no accuracies.
        """
        results = (self, *others)
        return figure([result.accuracy for result in results], [result._title() for result in results])

    def _check_accuracies(self) -> None:
        if self.records[0].multi_label:
            raise UserError(f"{self._title()}: multi-label results have no accuracies. Use scores() or to_frame().")

    def _title(self) -> str:
        seeds = f"{len(self.seeds)} seed{'s' if len(self.seeds) > 1 else ''}"
        return f"{', '.join(run_names(self.config))} ({seeds})"

    def __repr__(self) -> str:
        parts = []
        scores = self.scores()
        for name in list(scores)[:3] if self.records[0].multi_label else MAIN_SCORES:
            values = scores[name]
            mean, spread = spread_over_seeds(values.tolist())
            parts.append(f"{name} {mean:.2f}" + (f" ± {spread:.2f}" if len(values) > 1 else ""))
        return f"Result({self._title()}: {', '.join(parts)})"

    def _repr_html_(self) -> str:
        """Show the scores and, for runs with accuracies, the figure."""
        rows = []
        for name, values in self.scores().items():
            mean, spread = spread_over_seeds(values.tolist())
            cells = f"<td>{mean:.2f}</td><td>{'' if np.isnan(spread) else f'{spread:.2f}'}</td>"
            rows.append(f"<tr><th>{html.escape(score_title(name))}</th>{cells}</tr>")
        head = "<tr><th></th><th>mean</th><th>standard deviation</th></tr>"
        table = f"<p>{html.escape(self._title())}</p><table>{head}{''.join(rows)}</table>"
        if self.records[0].multi_label:
            return table
        image = io.BytesIO()
        self.plot().savefig(image, format="png", dpi=90, bbox_inches="tight")
        encoded = base64.b64encode(image.getvalue()).decode()
        return f'{table}<img alt="accuracy by task" src="data:image/png;base64,{encoded}">'


def _matrix_array(matrix: AccuracyMatrix) -> NDArray[np.float64]:
    correct = np.array([[np.nan if count is None else count for count in row] for row in matrix.correct])
    accuracy: NDArray[np.float64] = 100 * correct / np.array(matrix.total)
    return accuracy
