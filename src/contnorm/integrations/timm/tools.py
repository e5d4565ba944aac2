"""timm's functions for batch norms, replaced by ones that treat the layers of this package correctly."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import timm.layers
import timm.utils.model  # its functions are replaced too
from torch import nn

from contnorm import convert_sync
from contnorm.moments.freeze import freeze_stats
from contnorm.norms.base import MomentNorm
from contnorm.norms.batch import BatchNorm2d
from contnorm.norms.continual import ContinualNormBase

__all__ = ["replace_functions", "swap_functions"]


def replace_functions() -> dict[Any, Any]:
    """Replace the functions in timm; return timm's by ours, for `swap_functions`."""
    wrappers = {
        timm.layers.freeze_batch_norm_2d: _freeze_batch_norm_2d,
        timm.layers.unfreeze_batch_norm_2d: _unfreeze_batch_norm_2d,
        timm.layers.convert_sync_batchnorm: _convert_sync_batchnorm,
        timm.layers.convert_splitbn_model: _convert_splitbn_model,
    }
    # A new function for each, with the name and the docstring of timm's.
    replacements = {original: _bound(wrapper, original) for original, wrapper in wrappers.items()}
    swap_functions(replacements)
    return {new: original for original, new in replacements.items()}


def _bound(wrapper: Callable[..., nn.Module], original: Any) -> Any:
    @functools.wraps(original)
    def function(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        return wrapper(original, module, *args, **kwargs)

    return function


def swap_functions(replacements: Mapping[Any, Any]) -> None:
    """Replace functions in all modules of timm that have imported them."""
    modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == "timm"]
    for old, new in replacements.items():
        attribute = str(old.__name__)
        for module in modules:
            if vars(module).get(attribute) is old:
                setattr(module, attribute, new)


def _freeze_batch_norm_2d(original: Callable[..., nn.Module], module: nn.Module) -> nn.Module:
    """Freeze: a layer of this package uses its running moments in training too, and its parameters are constant.

    timm's function calls itself for the children of a module, so each layer arrives here.
    """
    if not isinstance(module, MomentNorm):
        return original(module)
    _check_moments(module, "freeze_batch_norm_2d")
    freeze_stats(module)
    module.use_running = True
    return module.requires_grad_(False)


def _unfreeze_batch_norm_2d(original: Callable[..., nn.Module], module: nn.Module) -> nn.Module:
    if not isinstance(module, MomentNorm):
        return original(module)
    if module.use_running:
        module.use_running = False
        freeze_stats(module, False)
        module.requires_grad_(True)
    return module


def _check_moments(module: MomentNorm, caller: str) -> None:
    if module.running_mean is None:
        raise ValueError(
            f"{caller}: a {type(module).__name__} has no running moments that could be used in training. Build it "
            f"with track_running_stats=True."
        )


def _convert_sync_batchnorm(
    original: Callable[..., nn.Module], module: nn.Module, process_group: Any = None
) -> nn.Module:
    for layer in module.modules():  # before anything is changed
        if isinstance(layer, MomentNorm) and not isinstance(layer, ContinualNormBase | BatchNorm2d):
            raise ValueError(
                f"convert_sync_batchnorm: {type(layer).__name__} has no synchronised form. Convert it to 'bn' or 'cn' "
                f"with contnorm.convert_norm first. The model is unchanged."
            )
    return convert_sync(module, process_group) if isinstance(module, MomentNorm) else original(module, process_group)


def _convert_splitbn_model(original: Callable[..., nn.Module], module: nn.Module, num_splits: int = 2) -> nn.Module:
    for layer in module.modules():
        if isinstance(layer, MomentNorm) and (not isinstance(layer, BatchNorm2d) or "act" in layer._modules):
            also = "applies an activation" if isinstance(layer, BatchNorm2d) else "is more than a batch norm"
            raise TypeError(
                f"convert_splitbn_model would drop a part of {type(layer).__name__}, which {also}. Split only models "
                f"with plain batch norms. The model is unchanged."
            )
    return original(module, num_splits)
