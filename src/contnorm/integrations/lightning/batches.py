"""Batches as a trainer gives them to its module, outside of its loops."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.data import DataLoader

from contnorm.integrations.lightning.classes import ROOTS, CombinedLoader
from contnorm.moments.batches import Call, call_on_batch

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

__all__ = ["OnDevice", "batches_of", "in_precision", "train_dataloader_of", "train_generators"]


class OnDevice:
    """Batches, moved to the device of a module by the hooks that also move those of an evaluation."""

    def __init__(self, batches: Iterable[Any], trainer: Trainer, module: LightningModule) -> None:
        self.batches, self.trainer, self.module = batches, trainer, module

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            converted = self.trainer.precision_plugin.convert_input(batch)
            converted = self.module._on_before_batch_transfer(converted, dataloader_idx=0)
            yield self.trainer.strategy.batch_to_device(converted, dataloader_idx=0)


def in_precision(trainer: Trainer, call: Call | None) -> Call:
    """Return a function that runs a module in the precision of the trainer, such as autocast."""

    def run(model: nn.Module, batch: Any) -> object:
        with trainer.precision_plugin.forward_context():
            return (call or call_on_batch)(model, batch)

    return run


def train_dataloader_of(trainer: Trainer, module: LightningModule) -> Any:
    """Return the train dataloader: that of the last fit, or that which the data module or the module defines."""
    if trainer.train_dataloader is not None:
        return trainer.train_dataloader
    hint = "Give ReestimateMoments(batches=) a DataLoader or a list of batches instead of a number."
    for owner in (getattr(trainer, "datamodule", None), module):
        if owner is None or type(owner).train_dataloader.__module__.partition(".")[0] in ROOTS:
            continue  # not overridden
        try:
            return owner.train_dataloader()
        except Exception as error:
            raise RuntimeError(
                f"ReestimateMoments: train_dataloader() of {type(owner).__name__} failed outside of fit: "
                f"{type(error).__name__}: {error}. {hint}"
            ) from error
    raise RuntimeError(f"ReestimateMoments: there is no train dataloader to draw batches from. {hint}")


def batches_of(loader: Any) -> Iterator[Any]:
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
        return batches_of(self.loader)

    def __len__(self) -> int:
        return len(self.loader)


def train_generators(trainer: Trainer) -> tuple[object, ...]:
    """The objects of the train dataloader that may have a random generator."""
    loader = trainer.train_dataloader
    return loader, getattr(loader, "sampler", None)
