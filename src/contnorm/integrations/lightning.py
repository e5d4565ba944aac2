"""Lightning: synchronized norms, callbacks for running moments, and checkpoints that say which norms a model has."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from statistics import fmean
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import LayerSync
from torch import nn

from contnorm.convert import convert_sync, needs_sync, norm_layers, revert_sync
from contnorm.detect import DetectedNorm
from contnorm.diagnosis.measure import ByTask, Diagnosis, diagnose
from contnorm.moments.freeze import Normalize, stats_mode
from contnorm.moments.reestimate import Call, Reestimated, call_on_batch, generators_restored, reestimate
from contnorm.spec import apply_norm_spec, norm_spec

__all__ = ["SPEC_KEY", "FreezeMoments", "NormEffect", "ReestimateMoments", "SavesNorms", "SyncNorms"]

SPEC_KEY = "contnorm_norms"  # in a checkpoint
When = Literal["validation", "test", "predict"]


class SyncNorms(LayerSync):
    """Plugin that synchronizes continual and batch norms over processes: ``Trainer(plugins=[SyncNorms()])``.

    It replaces ``Trainer(sync_batchnorm=True)``, which leaves continual norms as they are. The norms are converted with
    `contnorm.convert_sync` when fitting starts and converted back when it ends, so checkpoints and the trained model
    have the unsynchronized layers.

    Args:
        process_group: The processes whose batches are normalized together; None for all processes.

    Example:
        >>> from contnorm import ContinualNorm2d
        >>> plugin = SyncNorms()
        >>> model = plugin.apply(nn.Sequential(ContinualNorm2d(64)))
        >>> type(model[0]).__name__, type(plugin.revert(model)[0]).__name__
        ('SyncContinualNorm', 'ContinualNorm2d')
    """

    def __init__(self, process_group: Any = None) -> None:
        self.process_group = process_group
        self._synced: list[str] = []  # layers that `apply` has replaced; others may be synchronized by the user

    def apply(self, model: nn.Module) -> nn.Module:
        found = [(norm.name, norm.module, norm.detected) for norm in norm_layers(model)]
        self._synced = [n for n, module, norm in found if isinstance(norm, DetectedNorm) and needs_sync(module, norm)]
        return convert_sync(model, self.process_group, only=self._synced) if self._synced else model

    def revert(self, model: nn.Module) -> nn.Module:
        synced, self._synced = self._synced, []
        return revert_sync(model, only=synced) if synced else model


class FreezeMoments(Callback):
    """Callback that freezes running moments after some epochs of training.

    The moments follow the batches in the first ``after_epoch`` epochs and do not change afterwards. They stay frozen
    when training ends; ``contnorm.stats_mode(model)`` releases them. A resumed training freezes at the same
    epoch, or at once if that epoch is over.

    Args:
        after_epoch: The number of epochs in which the moments are updated; 0 to freeze them from the start.
        normalize: What training normalizes with after that, as in `contnorm.stats_mode`: None for the moments of the
            batch, ``"running"`` for the frozen ones, as in evaluation.
    """

    def __init__(self, after_epoch: int, normalize: Normalize = None) -> None:
        self.after_epoch, self.normalize = after_epoch, normalize

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch >= self.after_epoch:
            stats_mode(pl_module, self.normalize, update=False)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch + 1 >= self.after_epoch:  # before the checkpoint of this epoch is written
            stats_mode(pl_module, self.normalize, update=False)


class ReestimateMoments(Callback):
    """Callback that sets the running moments to exact moments of data before evaluation, with `contnorm.reestimate`.

    Args:
        batches: A number of batches of the train dataloader, in each process; batches that can be iterated repeatedly;
            or a function without arguments that returns these, called each time.
        when: When to re-estimate: before ``"validation"``, ``"test"`` or ``"predict"``, or several of these.
        restore: Whether to restore the running moments after the evaluation. By default the new moments stay, so that
            a checkpoint saved after validation has the moments that were validated. Training continues to update them.
        call: A function ``call(module, batch)`` that runs the module on a batch, if the default of `reestimate` does
            not apply, which is ``module(x)`` for a batch ``(x, y)`` and ``module(**batch)`` without labels for a dict.
        **options: Other arguments of `reestimate`, such as ``weights`` and ``frozen``.
    """

    def __init__(
        self,
        batches: int | Iterable[Any] | Callable[[], Iterable[Any]],
        *,
        when: When | Collection[When] = ("validation", "test"),
        restore: bool = False,
        call: Call | None = None,
        **options: Any,
    ) -> None:
        self.batches, self.when = batches, (when,) if isinstance(when, str) else tuple(when)
        self.restore, self.call, self.options = restore, call, options
        self._reestimated: Reestimated | None = None

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:  # after `WeightAveraging` has put averaged weights in place
            self._reestimate("validation", trainer, pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._reestimate("test", trainer, pl_module)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._reestimate("predict", trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._restore()

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._restore()

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._restore()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._restore()

    def _reestimate(self, when: When, trainer: Trainer, module: LightningModule) -> None:
        if when not in self.when:
            return
        with _undisturbed(trainer):
            data = self.batches() if callable(self.batches) else self.batches
            if isinstance(data, int):
                data = list(islice(_training_batches(trainer), data))
            self._reestimated = reestimate(
                module,
                _OnDevice(data, trainer, module),
                call=_in_precision(trainer, self.call),
                process_group=torch.distributed.group.WORLD,  # None for a single process
                **self.options,
            )

    def _restore(self) -> None:
        if self.restore and self._reestimated is not None:
            self._reestimated.restore()
        self._reestimated = None


class NormEffect(Callback):
    """Callback that measures the cross-task normalization effect with `contnorm.diagnose` and logs it.

    The names of the metrics begin with ``norm_effect/``. Accuracies are in percent and averaged over tasks:

    - ``accuracy_running``: with the running moments
    - ``accuracy_exact``: with the exact moments of the data of all tasks
    - ``recovered``: the difference of the two: the points of accuracy that wrong moments cost
    - ``last_task``: this difference for the last task

    The module itself does not change. With several processes, each measures its data, and the mean is logged.

    Args:
        batches_by_task: For each task, in training order, batches ``(x, y)`` that can be iterated repeatedly; a mapping
            from names of tasks to these; or a function without arguments that returns one of them, called each time.
        every_n_epochs: Measure at the end of every n-th epoch.
        **options: Other arguments of `diagnose`, such as ``test_by_task`` and ``predict``.

    Attributes:
        diagnosis: The last measurement; None before the first.
    """

    def __init__(
        self, batches_by_task: ByTask | Callable[[], ByTask], *, every_n_epochs: int = 1, **options: Any
    ) -> None:
        self.batches_by_task, self.every_n_epochs, self.options = batches_by_task, every_n_epochs, options
        self.diagnosis: Diagnosis | None = None

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if (trainer.current_epoch + 1) % self.every_n_epochs:
            return
        tasks = self.batches_by_task() if callable(self.batches_by_task) else self.batches_by_task
        named = tasks if isinstance(tasks, Mapping) else dict(enumerate(tasks))
        train = {task: _OnDevice(batches, trainer, pl_module) for task, batches in named.items()}
        options = {**self.options, "call": _in_precision(trainer, self.options.get("call"))}
        with _undisturbed(trainer):
            found = self.diagnosis = diagnose(pl_module, train, **options)
        metrics = {
            "norm_effect/accuracy_running": fmean(found.running),
            "norm_effect/accuracy_exact": fmean(found.oracle),
            "norm_effect/recovered": found.recovered,
            "norm_effect/last_task": found.last_task_change,
        }
        pl_module.log_dict(metrics, on_step=False, on_epoch=True, sync_dist=trainer.world_size > 1, batch_size=1)


class SavesNorms:
    """Mixin for a ``LightningModule`` whose checkpoints contain the description of its norms.

    The description (`contnorm.norm_spec`) is stored in the checkpoint under ``"contnorm_norms"``. When a checkpoint is
    loaded, by ``Trainer.fit(ckpt_path=...)`` or ``load_from_checkpoint``, the norms of the module are first converted
    to match it, and frozen where they were. Without it, the weights of a model with CN load into one with BN without
    an error, and the outputs are wrong.

    It must precede ``LightningModule`` among the base classes, and a module that overrides ``on_save_checkpoint`` or
    ``on_load_checkpoint`` must call ``super()``.

    Example:
        >>> class Net(SavesNorms, LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
        >>> from contnorm import convert_norm
        >>> checkpoint = {}
        >>> convert_norm(Net(), "cn", num_groups=4).on_save_checkpoint(checkpoint)
        >>> other = Net()
        >>> other.on_load_checkpoint(checkpoint)
        >>> other.net[1]
        ContinualNorm2d(8, num_groups=4, eps=1e-05, momentum=0.1)
    """

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the description of the norms to a checkpoint, as those of a single process."""
        super().on_save_checkpoint(checkpoint)  # type: ignore[misc]
        spec = norm_spec(self)  # type: ignore[arg-type]
        for entry in spec["norms"].values():
            if entry.get("synced") and entry["dim"] is not None:
                entry["synced"] = False
        checkpoint[SPEC_KEY] = spec

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Convert the norms to those of a checkpoint, before its weights are loaded."""
        if SPEC_KEY in checkpoint:
            apply_norm_spec(self, checkpoint[SPEC_KEY])  # type: ignore[arg-type]
            for callback in getattr(getattr(self, "_trainer", None), "callbacks", ()):
                if (averaged := getattr(callback, "_average_model", None)) is not None:  # a copy of `WeightAveraging`
                    apply_norm_spec(averaged.module, checkpoint[SPEC_KEY])
        super().on_load_checkpoint(checkpoint)  # type: ignore[misc]


# --- data of a trainer ----------------------------------------------------------------------------------------------


class _OnDevice:
    """Batches, moved to the device of a module by the hooks that also move those of an evaluation."""

    def __init__(self, batches: Iterable[Any], trainer: Trainer, module: LightningModule) -> None:
        self.batches, self.trainer, self.module = batches, trainer, module

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            converted = self.trainer.precision_plugin.convert_input(batch)
            converted = self.module._on_before_batch_transfer(converted, dataloader_idx=0)
            yield self.trainer.strategy.batch_to_device(converted, dataloader_idx=0)


def _in_precision(trainer: Trainer, call: Call | None) -> Call:
    """Return a function that runs a module in the precision of the trainer, such as autocast."""

    def run(model: nn.Module, batch: Any) -> object:
        with trainer.precision_plugin.forward_context():
            return (call or call_on_batch)(model, batch)

    return run


def _training_batches(trainer: Trainer) -> Any:
    """Return the train dataloader of the last fit, without the state of an epoch that it may be in."""
    loader = copy.copy(trainer.train_dataloader)
    if loader is None:
        raise RuntimeError("ReestimateMoments: there is no train dataloader. Give batches instead of a number.")
    if hasattr(loader, "_iterator"):
        loader._iterator = None  # persistent workers
    return loader


@contextmanager
def _undisturbed(trainer: Trainer) -> Iterator[None]:
    """Context in which a measurement does not disturb training: outside of inference mode, with generators restored."""
    loader = trainer.train_dataloader
    with torch.inference_mode(False), generators_restored(loader, getattr(loader, "sampler", None)):
        yield
