"""Callbacks that freeze running moments, and that re-estimate them before an evaluation."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from contnorm.integrations.generators import generators_restored
from contnorm.integrations.lightning.batches import (
    OnDevice,
    batches_of,
    in_precision,
    train_dataloader_of,
    train_generators,
)
from contnorm.integrations.lightning.classes import Callback, averages_weights, averaging_callbacks, is_callback
from contnorm.integrations.moment_data import Batches, all_processes, check_batches, select_batches
from contnorm.moments.batches import Call, Weights
from contnorm.moments.freeze import freeze_stats
from contnorm.moments.layers import Frozen
from contnorm.moments.reestimate import Reestimated, reestimate

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

__all__ = ["FreezeMoments", "ReestimateMoments"]


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
        if stage == "fit" and any(is_callback(c, "StochasticWeightAveraging") for c in trainer.callbacks):
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
        if not trainer.sanity_checking and not averages_weights(trainer):
            self._reestimate("validation", trainer, pl_module)

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking and averages_weights(trainer):  # now the averaged weights are in place
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
        callbacks: list[Any] = trainer.callbacks
        for averaging in averaging_callbacks(trainer):
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
        with torch.inference_mode(False), generators_restored(*train_generators(trainer)):
            data = select_batches(self.batches, lambda: batches_of(train_dataloader_of(trainer, module)))
            self._reestimated = reestimate(
                module,
                OnDevice(data, trainer, module),
                weights=self.weights,
                call=in_precision(trainer, self.call),
                frozen=self.frozen,
                process_group=all_processes(),
            )

    def _restore(self) -> None:
        if self.restore and self._reestimated is not None:
            self._reestimated.restore()
        self._reestimated = None
