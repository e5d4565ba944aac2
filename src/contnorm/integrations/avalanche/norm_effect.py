"""The metric of the cross-task normalization effect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
from avalanche.evaluation import PluginMetric
from avalanche.evaluation.metric_results import MetricValue
from avalanche.evaluation.metric_utils import get_metric_name
from torch import Tensor, nn
from torch.utils.data import DataLoader

from contnorm.integrations.avalanche.strategy_data import batches_of, check_layers, forward_on
from contnorm.moments.reestimate import keeps_moments, reestimate

__all__ = ["NormEffect"]


class NormEffect(PluginMetric[float]):
    """Metric of the cross-task normalization effect: the accuracy that exact moments would add in each evaluation.

    The model is evaluated a second time, with exact moments of training data in place of the running moments; weights
    do not change. The effect is the accuracy with exact moments minus the accuracy of the evaluation, as fractions like
    Avalanche's accuracies, so that ``Top1_Acc_Exp`` plus the effect is the accuracy with exact moments. It is positive
    if the moments that the evaluation uses make the model forget. Those are the running moments, or, with a
    `NormPlugin`, the moments of the buffer: then the effect is what remains. It is 0 for models without moments.

    Logged values, with the names of Avalanche's metrics:

    - ``NormEffect_Exp/eval_phase/test_stream/Task000/Exp000``: effect on each evaluated experience;
    - ``NormEffect_Stream/eval_phase/test_stream/Task000``: effect over all samples of the evaluated stream.

    Nothing is logged before the first training. The training data is read once, or once for each norm layer
    if it does not fit into memory; limit it with ``samples`` if that takes too long.

    Args:
        moments: ``"all"`` for the moments of the training data of all experiences so far (BN*, as ``oracle`` in
            `contnorm.diagnose`); ``"task"`` for those of the evaluated experience's own training data (as ``own``
            there), which are logged for trained experiences only, as ``TaskNormEffect_Exp`` and
            ``TaskNormEffect_Stream``.
        samples: Number of training samples of each experience that moments are computed from, evenly spaced over its
            data; None for all.

    Example:
        >>> from avalanche.training.plugins import EvaluationPlugin
        >>> from avalanche.evaluation.metrics import accuracy_metrics
        >>> from avalanche.logging import InteractiveLogger
        >>> metrics = accuracy_metrics(experience=True, stream=True), NormEffect(samples=1000)
        >>> evaluator = EvaluationPlugin(*metrics, loggers=[InteractiveLogger()])
    """

    def __init__(self, moments: Literal["all", "task"] = "all", *, samples: int | None = None) -> None:
        super().__init__()
        if moments not in ("all", "task"):
            raise ValueError(f"NormEffect: moments={moments!r} is not allowed. Use 'all' or 'task'.")
        if samples is not None and (not isinstance(samples, int) or samples < 2):
            raise ValueError(f"NormEffect: samples={samples!r} is not allowed. Use an integer of at least 2, or None.")
        self.moments, self.samples = moments, samples
        self._data: dict[int, dict[int, Any]] = {}  # training data by experience, and by part of it in online streams
        self._new: dict[str, tuple[Tensor, Tensor]] | None = None  # moments of all data, in one evaluation
        self.reset()

    def reset(self) -> None:
        """Start a new evaluation."""
        self._new = None
        self._count = self._exact = self._used = 0
        self._correct = self._seen = 0

    def result(self) -> float | None:
        """Return the effect over the samples that were evaluated since the last reset; None if there are none."""
        return (self._exact - self._used) / self._count if self._count else None

    def __str__(self) -> str:
        return "NormEffect" if self.moments == "all" else "TaskNormEffect"

    def before_training_exp(self, strategy: Any) -> None:
        """Remember the training data of the experience, once if it is trained several times."""
        check_layers(strategy.model, "NormEffect")
        # JointTraining trains on all its experiences, and calls this for the first one only.
        for experience in getattr(strategy, "_experiences", None) or [strategy.experience]:
            parts = self._data.setdefault(_experience_id(experience), {})
            parts[int(experience.current_experience)] = _sampled(experience.dataset, self.samples)

    def before_eval(self, strategy: Any) -> None:
        """Start a new evaluation."""
        self.reset()

    def before_eval_exp(self, strategy: Any) -> None:
        """Start the count of the experience."""
        self._correct = self._seen = 0

    def after_eval_iteration(self, strategy: Any) -> None:
        """Count the correct predictions of the evaluation itself."""
        self._correct += _correct(strategy.mb_output, strategy.mb_y)
        self._seen += len(strategy.mb_y)

    def after_eval_exp(self, strategy: Any) -> list[Any] | None:
        """Evaluate the experience with exact moments, and log the effect."""
        parts = self._moment_data(strategy)
        if not parts or not self._seen:
            return None
        exact = self._correct
        if keeps_moments(strategy.model):
            with self._exact_moments(strategy, parts):
                exact = _evaluate(strategy)
        self._exact, self._used, self._count = self._exact + exact, self._used + self._correct, self._count + self._seen
        return [self._value(strategy, "Exp", (exact - self._correct) / self._seen)]

    def after_eval(self, strategy: Any) -> list[Any] | None:
        """Log the effect over the stream."""
        effect = self.result()
        return None if effect is None else [self._value(strategy, "Stream", effect)]

    def _moment_data(self, strategy: Any) -> list[Any]:
        if self.moments == "all":
            return [data for parts in self._data.values() for data in parts.values()]
        return list(self._data.get(_experience_id(strategy.experience), {}).values())

    @contextmanager
    def _exact_moments(self, strategy: Any, parts: Sequence[Any]) -> Iterator[None]:
        if self._new is not None:
            with _buffers_set(strategy.model, self._new):
                yield
            return
        batches = _Chained([batches_of(strategy, data) for data in parts])
        with reestimate(strategy.model, batches, call=forward_on(strategy.device), frozen="lift") as done:
            if self.moments == "all":  # the same for all experiences of this evaluation
                self._new = {name: (layer.new_mean, layer.new_var) for name, layer in done.moments.items()}
            yield

    def _value(self, strategy: Any, level: str, value: float) -> Any:
        name = get_metric_name(f"{self}_{level}", strategy, add_experience=level == "Exp", add_task=True)
        return MetricValue(self, name, value, strategy.clock.train_iterations)


class _Chained:
    """Batches of several data sets, one after the other."""

    def __init__(self, parts: Sequence[DataLoader[Any]]) -> None:
        self.parts = parts

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)

    def __iter__(self) -> Iterator[Any]:
        for part in self.parts:
            yield from part


def _experience_id(experience: Any) -> int:
    """Return the number of an experience; for a part of one in an online stream, that of the whole experience."""
    return int(getattr(experience, "origin_experience", experience).current_experience)


def _sampled(data: Any, samples: int | None) -> Any:
    if samples is None or len(data) <= samples:
        return data
    return data.subset(np.linspace(0, len(data) - 1, samples).astype(int).tolist())


@contextmanager
def _buffers_set(model: nn.Module, moments: Mapping[str, tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Set the running moments of layers, by name, and restore the old ones on exit."""
    layers: list[tuple[Any, tuple[Tensor, Tensor]]] = [(model.get_submodule(n), new) for n, new in moments.items()]
    old = [(layer.running_mean.clone(), layer.running_var.clone()) for layer, _ in layers]
    try:
        for layer, (mean, var) in layers:
            layer.running_mean.copy_(mean)
            layer.running_var.copy_(var)
        yield
    finally:
        for (layer, _), (mean, var) in zip(layers, old, strict=True):
            layer.running_mean.copy_(mean)
            layer.running_var.copy_(var)


def _evaluate(strategy: Any) -> int:
    """Return the number of correct predictions on the current experience, with the strategy's own forward pass."""
    before = strategy.mbatch, strategy.mb_output
    correct = 0
    try:
        with torch.random.fork_rng(devices=[]):  # the data loader draws a seed
            for batch in strategy.dataloader:
                strategy.mbatch = batch
                strategy._unpack_minibatch()
                correct += _correct(strategy.forward(), strategy.mb_y)
    finally:
        strategy.mbatch, strategy.mb_output = before
    return correct


def _correct(output: Tensor, target: Tensor) -> int:
    return int((output.argmax(1) == target).sum())
