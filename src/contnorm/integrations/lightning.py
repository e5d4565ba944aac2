"""Lightning: synchronized norms, callbacks for running moments, and checkpoints that say which norms a model has.

The classes work with ``lightning.pytorch`` and with ``pytorch_lightning``, whose classes differ although their code is
the same. Whichever of them is installed is used, and both if both are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from importlib import import_module
from statistics import fmean
from types import new_class
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.utils.data import DataLoader

from contnorm.convert.selection import Filter
from contnorm.convert.sync import convert_sync, revert_sync
from contnorm.diagnosis.measure import ByTask, Predict, diagnose
from contnorm.diagnosis.result import Diagnosis
from contnorm.integrations.extras import missing_extra
from contnorm.integrations.generators import generators_restored
from contnorm.integrations.moment_data import Batches, all_processes, check_batches, select_batches
from contnorm.model_norms import apply_norm_spec, norm_spec
from contnorm.moments.batches import Call, call_on_batch
from contnorm.moments.buffers import Frozen
from contnorm.moments.freeze import freeze_stats, released_stats
from contnorm.moments.reestimate import Reestimated, Weights, reestimate

__all__ = ["SPEC_KEY", "FreezeMoments", "NormEffect", "ReestimateMoments", "SavesNorms", "SyncNorms"]

SPEC_KEY = "contnorm_norms"  # in a checkpoint
_ROOTS = ("lightning", "pytorch_lightning")


def _packages() -> list[str]:
    """The installed packages of Lightning, which have classes of their own."""
    found, missing = [], None
    for name in ("lightning.pytorch", "pytorch_lightning"):
        try:
            import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in (name, name.partition(".")[0]):  # a dependency of Lightning is missing
                raise
            missing = error
        else:
            found.append(name)
    if not found and missing is not None:
        raise missing_extra("lightning", missing) from missing
    return found


if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.plugins import LayerSync
    from lightning.pytorch.utilities.combined_loader import CombinedLoader
else:
    _PACKAGES = _packages()
    # Each trainer checks for the class of its own package, so ours derive from both.
    Callback = new_class("Callback", tuple(import_module(name).Callback for name in _PACKAGES))
    LayerSync = new_class("LayerSync", tuple(import_module(f"{name}.plugins").LayerSync for name in _PACKAGES))
    CombinedLoader = import_module(f"{_PACKAGES[0]}.utilities.combined_loader").CombinedLoader


class SyncNorms(LayerSync):
    """Plugin that synchronizes continual and batch norms over processes: ``Trainer(plugins=[SyncNorms()])``.

    It replaces ``Trainer(sync_batchnorm=True)``, which supports only batch norm and raises an error for a model with
    other norms. The norms are converted with `contnorm.convert_sync` when fitting starts and converted back when it
    ends, so checkpoints and the trained model have the unsynchronized layers.

    Args:
        process_group: The processes whose batches are normalized together; None for all processes.
        only: The layers to synchronize, as in `contnorm.convert_norm`.
        skip: The layers not to synchronize.

    Example:
        >>> from contnorm import ContinualNorm2d
        >>> plugin = SyncNorms()
        >>> model = plugin.apply(nn.Sequential(ContinualNorm2d(64)))
        >>> type(model[0]).__name__, type(plugin.revert(model)[0]).__name__
        ('SyncContinualNorm', 'ContinualNorm2d')
    """

    def __init__(self, process_group: Any = None, *, only: Filter | None = None, skip: Filter | None = None) -> None:
        self.process_group, self.only, self.skip = process_group, only, skip
        self._synced: set[str] = set()  # layers that `apply` has replaced; others may be synchronized by the user

    def apply(self, model: nn.Module) -> nn.Module:
        norms = norm_spec(model)["norms"]
        if not any(_needs_sync(entry) for entry in norms.values()):
            return model
        model = convert_sync(model, self.process_group, only=self.only, skip=self.skip)
        after = norm_spec(model)["norms"]
        self._synced = {path for path in norms if norms[path].get("synced") is not after[path].get("synced")}
        return model

    def revert(self, model: nn.Module) -> nn.Module:
        synced, self._synced = self._synced, set()
        return revert_sync(model, only=lambda name, module: name in synced) if synced else model


def _needs_sync(entry: Mapping[str, Any]) -> bool:
    # A norm of an unknown class counts, so that `convert_sync` says what is wrong with it.
    return entry["norm"] is None or (entry["running_moments"] and not entry["constant"] and not entry["synced"])


class SavesNorms:
    """Mixin for a ``LightningModule`` whose checkpoints contain the description of its norms.

    The description (`contnorm.norm_spec`) is stored in the checkpoint under ``"contnorm_norms"``. When a checkpoint is
    loaded, by ``Trainer.fit(ckpt_path=...)`` or ``load_from_checkpoint``, the norms of the module are first converted
    to match it, and frozen where they were. Without it, the weights of a model with CN load into one with BN without
    an error, and the outputs are wrong.

    A module that overrides ``on_save_checkpoint`` or ``on_load_checkpoint`` must call ``super()``.

    Example:
        >>> from lightning.pytorch import LightningModule
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

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        names = [base.__name__ for base in cls.__mro__]
        if "LightningModule" in names and names.index("LightningModule") < names.index("SavesNorms"):
            raise TypeError(
                f"{cls.__name__}: SavesNorms must precede LightningModule among the base classes, or its methods are "
                f"not called. Write class {cls.__name__}(SavesNorms, LightningModule)."
            )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the description of the norms to a checkpoint."""
        super().on_save_checkpoint(checkpoint)  # type: ignore[misc]
        checkpoint[SPEC_KEY] = _local_spec(self)  # type: ignore[arg-type]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Convert the norms to those of a checkpoint, before its weights are loaded."""
        if SPEC_KEY in checkpoint:
            self._check_strategy(checkpoint[SPEC_KEY])
            apply_norm_spec(self, checkpoint[SPEC_KEY])  # type: ignore[arg-type]
            for averaging in _averaging_callbacks(getattr(self, "_trainer", None)):
                if averaging._average_model is not None:  # a copy that was made before
                    apply_norm_spec(averaging._average_model.module, checkpoint[SPEC_KEY])
        super().on_load_checkpoint(checkpoint)  # type: ignore[misc]

    def _check_strategy(self, spec: Mapping[str, Any]) -> None:
        """Raise if layers would have to be replaced that a strategy has wrapped, and an optimizer has, already."""
        trainer = getattr(self, "_trainer", None)
        if trainer is None or not trainer.strategy.restore_checkpoint_after_setup:
            return
        if _without_freezes(_local_spec(self)) != _without_freezes(spec):  # type: ignore[arg-type]
            raise RuntimeError(
                f"The checkpoint has other norms than {type(self).__name__}, and {type(trainer.strategy).__name__} "
                f"restores checkpoints when norms can no longer be replaced. Build the norms of the checkpoint in "
                f"__init__ or configure_model, with contnorm.apply_norm_spec or contnorm.convert_norm."
            )


def _averaging_callbacks(trainer: Trainer | None) -> list[Any]:
    """Return the callbacks that average weights while training, and put the averages in place for validation."""
    return [] if trainer is None else [c for c in trainer.callbacks if _is_a(c, "WeightAveraging")]  # type: ignore[attr-defined]


def _is_a(callback: object, name: str) -> bool:
    """Whether a callback is of a class of Lightning, which older releases may not have."""
    return any(cls.__name__ == name and cls.__module__.partition(".")[0] in _ROOTS for cls in type(callback).__mro__)


def _without_freezes(spec: Mapping[str, Any]) -> dict[str, Any]:
    norms = {path: {**entry, "frozen": None} for path, entry in spec["norms"].items()}
    return {**spec, "norms": norms}


def _local_spec(model: nn.Module) -> dict[str, Any]:
    """Describe the norms of a model as those of a single process, also while they are synchronized."""
    spec = norm_spec(model)
    for entry in spec["norms"].values():
        if entry.get("synced") and entry["dim"] is not None:
            entry["synced"] = False
    return spec


class FreezeMoments(Callback):
    """Callback that freezes running moments after some epochs of training.

    The moments follow the batches in the first ``after_epoch`` epochs and do not change afterwards. They stay frozen
    when training ends; ``contnorm.freeze_stats(model, False)`` releases them. A resumed training freezes at the same
    epoch, or at once if that epoch is over.

    Args:
        after_epoch: The number of epochs in which the moments are updated; 0 to freeze them from the start.

    Example:
        >>> FreezeMoments(after_epoch=2)
        FreezeMoments(after_epoch=2)
    """

    def __init__(self, after_epoch: int) -> None:
        if isinstance(after_epoch, bool) or not isinstance(after_epoch, int) or after_epoch < 0:
            raise ValueError(f"FreezeMoments: after_epoch={after_epoch!r} must be a whole number of epochs from 0.")
        self.after_epoch = after_epoch

    def __repr__(self) -> str:
        return f"FreezeMoments(after_epoch={self.after_epoch})"

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and any(_is_a(c, "StochasticWeightAveraging") for c in trainer.callbacks):  # type: ignore[attr-defined]
            raise ValueError(
                "FreezeMoments: StochasticWeightAveraging resets all running moments when training ends and measures "
                "them again, and frozen ones would stay reset. Use WeightAveraging instead, or no FreezeMoments."
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._freeze(pl_module, trainer.current_epoch)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._freeze(pl_module, trainer.current_epoch)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._freeze(pl_module, trainer.current_epoch + 1)  # before the checkpoint of this epoch is written

    def _freeze(self, module: nn.Module, epochs: int) -> None:
        if epochs >= self.after_epoch:
            freeze_stats(module)


When = Literal["validation", "test", "predict", "fit_end"]
_WHEN: tuple[When, ...] = ("validation", "test", "predict", "fit_end")


class ReestimateMoments(Callback):
    """Callback that sets the running moments to exact moments of data before evaluation, with `contnorm.reestimate`.

    With several processes, the data of all of them is pooled, so they all have the same moments. Random generators are
    restored, so the batches of training are the same as without the callback.

    Args:
        batches: The data: a number of batches, drawn from the train dataloader; or batches that can be iterated
            repeatedly, such as a list or a DataLoader; or a function without arguments that returns these, called
            each time. A number counts batches in each process. Batches are moved to the device of the module as in
            training.
        when: When to re-estimate: before ``"validation"``, before ``"test"``, before ``"predict"``, at ``"fit_end"``,
            or several of these.
        restore: Whether to restore the running moments after the evaluation. By default the new moments stay, so that
            a checkpoint saved after validation has the moments that were validated. Training continues to update them.
        call: A function ``call(module, batch)`` that runs the module on a batch, if the default of `reestimate` does
            not apply, which is ``module(x)`` for a batch ``(x, y)`` and ``module(**batch)`` without labels for a dict.
        weights: A function ``weights(batch)`` that returns the weight of each sample, as in `reestimate`.
        frozen: What to do with frozen layers, as in `reestimate`: ``"raise"``, ``"lift"`` or ``"keep"``.

    Example:
        >>> ReestimateMoments(64, when="test")
        ReestimateMoments(batches=64, when=('test',), restore=False)
    """

    def __init__(
        self,
        batches: int | Batches,
        *,
        when: When | Collection[When] = ("validation", "test"),
        restore: bool = False,
        call: Call | None = None,
        weights: Weights | None = None,
        frozen: Frozen = "raise",
    ) -> None:
        check_batches(batches, "ReestimateMoments: batches")
        self.batches = batches
        self.when = (when,) if isinstance(when, str) else tuple(when)
        unknown = sorted(set(self.when) - set(_WHEN))
        if unknown or not self.when:
            raise ValueError(
                f"ReestimateMoments: when={when!r}: allowed are {', '.join(map(repr, _WHEN))}, or several of these."
            )
        self.restore, self.call, self.weights, self.frozen = restore, call, weights, frozen
        self._reestimated: Reestimated | None = None

    def __repr__(self) -> str:
        what = self.batches if isinstance(self.batches, int) else type(self.batches).__name__
        return f"ReestimateMoments(batches={what}, when={self.when}, restore={self.restore})"

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and {"validation", "fit_end"} & set(self.when):
            self._check_averaging(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking and not _averages_weights(trainer):
            self._reestimate("validation", trainer, pl_module)

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking and _averages_weights(trainer):  # now the averaged weights are in place
            self._reestimate("validation", trainer, pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._reestimate("test", trainer, pl_module)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._reestimate("predict", trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._reestimate("fit_end", trainer, pl_module)
        self._reestimated = None  # there is no evaluation after which to restore

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._restore()

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._restore()

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._restore()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._restore()

    def _check_averaging(self, trainer: Trainer) -> None:
        """Raise if a callback that averages weights would undo the re-estimation."""
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        for averaging in _averaging_callbacks(trainer):
            name = type(averaging).__name__
            if callbacks.index(averaging) > callbacks.index(self):
                raise ValueError(
                    f"ReestimateMoments must come after {name} in the callbacks of the trainer, or the moments are not "
                    f"those of the averaged weights."
                )
            if self.restore and "validation" in self.when:
                raise ValueError(
                    f"ReestimateMoments: restore=True is not possible with {name}, which exchanges moments before they "
                    f"could be restored. Use restore=False."
                )

    def _reestimate(self, when: When, trainer: Trainer, module: LightningModule) -> None:
        if when not in self.when:
            return
        # Lightning evaluates in inference mode, whose tensors can't be used in training.
        with torch.inference_mode(False), generators_restored(*_train_generators(trainer)):
            data = select_batches(self.batches, lambda: _batches_of(_train_dataloader(trainer, module)))
            self._reestimated = reestimate(
                module,
                _OnDevice(data, trainer, module),
                weights=self.weights,
                call=_in_precision(trainer, self.call),
                frozen=self.frozen,
                process_group=all_processes(),
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
        call = _in_precision(trainer, self.call)
        released = released_stats(module.modules())  # frozen moments are measured too, and restored afterwards
        with torch.inference_mode(False), generators_restored(*_train_generators(trainer)), released:
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


def _averages_weights(trainer: Trainer) -> bool:
    return any(averaging._average_model is not None for averaging in _averaging_callbacks(trainer))


class _OnDevice:
    """Batches, moved to the device of a module by the hooks that also move those of an evaluation."""

    def __init__(self, batches: Iterable[Any], trainer: Trainer, module: LightningModule) -> None:
        self.batches, self.trainer, self.module = batches, trainer, module

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            converted = self.trainer.precision_plugin.convert_input(batch)
            converted = self.module._on_before_batch_transfer(converted, dataloader_idx=0)
            yield self.trainer.strategy.batch_to_device(converted, dataloader_idx=0)


def _tasks(
    batches_by_task: ByTask | Callable[[], ByTask], trainer: Trainer, module: LightningModule
) -> dict[Any, _OnDevice]:
    tasks = batches_by_task if isinstance(batches_by_task, Iterable) else batches_by_task()
    named = tasks if isinstance(tasks, Mapping) else dict(enumerate(tasks))
    return {task: _OnDevice(batches, trainer, module) for task, batches in named.items()}


def _in_precision(trainer: Trainer, call: Call | None) -> Call:
    """Return a function that runs a module in the precision of the trainer, such as autocast."""

    def run(model: nn.Module, batch: Any) -> object:
        with trainer.precision_plugin.forward_context():
            return (call or call_on_batch)(model, batch)

    return run


def _train_dataloader(trainer: Trainer, module: LightningModule) -> Any:
    """Return the train dataloader: that of the last fit, or that which the data module or the module defines."""
    if trainer.train_dataloader is not None:
        return trainer.train_dataloader
    hint = "Give ReestimateMoments(batches=) a DataLoader or a list of batches instead of a number."
    for owner in (getattr(trainer, "datamodule", None), module):
        if owner is None or type(owner).train_dataloader.__module__.partition(".")[0] in _ROOTS:
            continue  # not overridden
        try:
            return owner.train_dataloader()
        except Exception as error:
            raise RuntimeError(
                f"ReestimateMoments: train_dataloader() of {type(owner).__name__} failed outside of fit: "
                f"{type(error).__name__}: {error}. {hint}"
            ) from error
    raise RuntimeError(f"ReestimateMoments: there is no train dataloader to draw batches from. {hint}")


def _batches_of(loader: Any) -> Iterator[Any]:
    """Iterate over batches of dataloaders that may be in use, without changing the state of their iteration."""
    if isinstance(loader, DataLoader):
        loader = copy.copy(loader)
        loader._iterator = None  # persistent workers of the original may be in the middle of an epoch
    if isinstance(loader, Mapping | list | tuple):  # several dataloaders, which are combined as in training
        copies = {key: _Repeated(value) for key, value in _items(loader)}
        combined = CombinedLoader(copies if isinstance(loader, Mapping) else list(copies.values()), "max_size_cycle")
        return (batch for batch, _, _ in combined)
    return iter(loader)


def _items(loaders: Any) -> Iterable[tuple[Any, Any]]:
    return loaders.items() if isinstance(loaders, Mapping) else enumerate(loaders)


class _Repeated:
    """Batches of a dataloader, each time from a new iteration."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        return _batches_of(self.loader)

    def __len__(self) -> int:
        return len(self.loader)


def _train_generators(trainer: Trainer) -> tuple[object, ...]:
    """The objects of the train dataloader that may have a random generator."""
    loader = trainer.train_dataloader
    return loader, getattr(loader, "sampler", None)


def _mean_over_processes(trainer: Trainer, value: float) -> float:
    reduced = trainer.strategy.reduce(torch.tensor(value, device=trainer.strategy.root_device), reduce_op="mean")
    return float(reduced)
