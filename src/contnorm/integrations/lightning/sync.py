"""Norms that are synchronized over processes while a trainer fits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from contnorm.convert.conversion import Filter
from contnorm.convert.spec import norm_spec
from contnorm.convert.sync import convert_sync, revert_sync
from contnorm.integrations.lightning.classes import LayerSync

__all__ = ["SyncNorms"]


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
