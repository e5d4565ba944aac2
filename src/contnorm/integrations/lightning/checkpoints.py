"""Checkpoints that say which norms a module has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from contnorm.convert.spec import apply_norm_spec, norm_spec
from contnorm.integrations.lightning.classes import averaging_callbacks

__all__ = ["SPEC_KEY", "SavesNorms"]

SPEC_KEY = "contnorm_norms"  # in a checkpoint


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
            for averaging in averaging_callbacks(getattr(self, "_trainer", None)):
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
