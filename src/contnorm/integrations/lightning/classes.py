"""Base classes from the installed packages of Lightning, and which callbacks of Lightning a trainer has."""

from __future__ import annotations

from importlib import import_module
from types import new_class
from typing import TYPE_CHECKING, Any

from contnorm.integrations.extras import missing_extra

__all__ = [
    "ROOTS",
    "Callback",
    "CombinedLoader",
    "LayerSync",
    "averages_weights",
    "averaging_callbacks",
    "installed_packages",
    "is_callback",
]

ROOTS = ("lightning", "pytorch_lightning")


def installed_packages() -> list[str]:
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
    from lightning.pytorch import Callback, Trainer
    from lightning.pytorch.plugins import LayerSync
    from lightning.pytorch.utilities.combined_loader import CombinedLoader
else:
    PACKAGES = installed_packages()
    # Each trainer checks for the class of its own package, so ours derive from both.
    Callback = new_class("Callback", tuple(import_module(name).Callback for name in PACKAGES))
    LayerSync = new_class("LayerSync", tuple(import_module(f"{name}.plugins").LayerSync for name in PACKAGES))
    CombinedLoader = import_module(f"{PACKAGES[0]}.utilities.combined_loader").CombinedLoader


def averaging_callbacks(trainer: Trainer | None) -> list[Any]:
    """Return the callbacks that average weights while training, and put the averages in place for validation."""
    return [] if trainer is None else [c for c in trainer.callbacks if is_callback(c, "WeightAveraging")]


def is_callback(callback: object, name: str) -> bool:
    """Whether a callback is of a class of Lightning, which older releases may not have."""
    return any(cls.__name__ == name and cls.__module__.partition(".")[0] in ROOTS for cls in type(callback).__mro__)


def averages_weights(trainer: Trainer) -> bool:
    return any(averaging._average_model is not None for averaging in averaging_callbacks(trainer))
