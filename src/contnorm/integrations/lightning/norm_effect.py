"""A callback that measures the cross-task normalization effect."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch

from contnorm.diagnosis.measure import ByTask, Predict, diagnose
from contnorm.diagnosis.result import Diagnosis
from contnorm.integrations.generators import generators_restored
from contnorm.integrations.lightning.batches import OnDevice, in_precision, train_generators
from contnorm.integrations.lightning.classes import Callback
from contnorm.moments.batches import Call
from contnorm.moments.freeze import released_stats

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

__all__ = ["NormEffect"]


class NormEffect(Callback):
    """Callback that measures the cross-task normalization effect with `contnorm.diagnose` and logs it.

    The names of the metrics begin with ``norm_effect/``. Accuracies are in percent and averaged over tasks:

    - ``accuracy_running``: with the running moments
    - ``accuracy_exact``: with the exact moments of the data of all tasks
    - ``recovered``: the difference of the two: the points of accuracy that wrong moments cost
    - ``last_task``: this difference for the last task
    - ``drift_mean`` and ``drift_var``: the distance of the running from the exact moments, averaged over layers, in
      standard deviations and relative to the variance; see `contnorm.diagnosis.result`

    The module itself does not change. With several processes, each measures its data, and the mean is logged.

    Args:
        batches_by_task: For each task, in training order, batches ``(x, y)`` that can be iterated repeatedly; a mapping
            from names of tasks to these; or a function without arguments that returns one of them, called each time.
        test_by_task: Data for measuring accuracy, in the same form; by default ``batches_by_task``.
        every_n_epochs: Measure at the end of every n-th epoch; None to measure when training ends.
        by_task: Whether to log both accuracies also for each task, as ``accuracy_running/<task>``.
        by_layer: Whether to log both distances also for each layer, as ``drift_mean/<layer>``.
        predict: A function ``predict(module, x, task)`` that returns classes, as in `diagnose`.
        call: A function ``call(module, batch)`` that runs the module on a batch, as in `diagnose`.

    Attributes:
        diagnosis: The last measurement; None before the first.

    Example:
        >>> NormEffect({"first": [], "second": []}, every_n_epochs=5).diagnosis is None
        True
    """

    def __init__(
        self,
        batches_by_task: ByTask | Callable[[], ByTask],
        *,
        test_by_task: ByTask | Callable[[], ByTask] | None = None,
        every_n_epochs: int | None = 1,
        by_task: bool = False,
        by_layer: bool = False,
        predict: Predict | None = None,
        call: Call | None = None,
    ) -> None:
        if every_n_epochs is not None and (not isinstance(every_n_epochs, int) or every_n_epochs < 1):
            raise ValueError(f"NormEffect: every_n_epochs={every_n_epochs!r} must be a whole number from 1, or None.")
        self.batches_by_task, self.test_by_task = batches_by_task, test_by_task
        self.every_n_epochs, self.by_task, self.by_layer = every_n_epochs, by_task, by_layer
        self.predict, self.call = predict, call
        self.diagnosis: Diagnosis | None = None

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.every_n_epochs is not None and (trainer.current_epoch + 1) % self.every_n_epochs == 0:
            metrics = self._measure(trainer, pl_module)
            pl_module.log_dict(metrics, on_step=False, on_epoch=True, sync_dist=trainer.world_size > 1, batch_size=1)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.every_n_epochs is None:
            metrics = self._measure(trainer, pl_module)
            means = {name: _mean_over_processes(trainer, value) for name, value in metrics.items()}
            for logger in trainer.loggers:  # a module can't log when training has ended
                logger.log_metrics(means, step=trainer.global_step)

    def _measure(self, trainer: Trainer, module: LightningModule) -> dict[str, float]:
        train = _tasks(self.batches_by_task, trainer, module)
        test = None if self.test_by_task is None else _tasks(self.test_by_task, trainer, module)
        call = in_precision(trainer, self.call)
        released = released_stats(module.modules())  # frozen moments are measured too, and restored afterwards
        with torch.inference_mode(False), generators_restored(*train_generators(trainer)), released:
            self.diagnosis = diagnose(module, train, test_by_task=test, predict=self.predict, call=call)
        return {f"norm_effect/{name}": value for name, value in self._metrics(self.diagnosis).items()}

    def _metrics(self, diagnosis: Diagnosis) -> dict[str, float]:
        metrics = {
            "accuracy_running": fmean(diagnosis.running),
            "accuracy_exact": fmean(diagnosis.oracle),
            "recovered": diagnosis.recovered,
            "last_task": diagnosis.last_task_change,
        }
        if diagnosis.layers:
            metrics["drift_mean"] = fmean(layer.running_oracle.mean_scaled for layer in diagnosis.layers)
            metrics["drift_var"] = fmean(layer.running_oracle.var_scaled for layer in diagnosis.layers)
        if self.by_task:
            for task, running, exact in zip(diagnosis.tasks, diagnosis.running, diagnosis.oracle, strict=True):
                metrics |= {f"accuracy_running/{task}": running, f"accuracy_exact/{task}": exact}
        if self.by_layer:
            for layer in diagnosis.layers:
                distance = layer.running_oracle
                metrics[f"drift_mean/{layer.layer}"] = distance.mean_scaled
                metrics[f"drift_var/{layer.layer}"] = distance.var_scaled
        return metrics


def _tasks(
    batches_by_task: ByTask | Callable[[], ByTask], trainer: Trainer, module: LightningModule
) -> dict[Any, OnDevice]:
    tasks = batches_by_task if isinstance(batches_by_task, Iterable) else batches_by_task()
    named = tasks if isinstance(tasks, Mapping) else dict(enumerate(tasks))
    return {task: OnDevice(batches, trainer, module) for task, batches in named.items()}


def _mean_over_processes(trainer: Trainer, value: float) -> float:
    reduced = trainer.strategy.reduce(torch.tensor(value, device=trainer.strategy.root_device), reduce_op="mean")
    return float(reduced)
