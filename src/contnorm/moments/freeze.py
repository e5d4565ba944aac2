"""Freeze running moments in training and evaluation mode, and run a model in evaluation mode temporarily.

Layers of this package have an attribute for it. For torch's batch norms, ``track_running_stats`` is set to False and
its old value is stored until release. Any other module with running moments (torch's instance norms, layers of other
libraries) runs on a copy of its moments; hooks restore the originals after each forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from contnorm.checks import check_model
from contnorm.convert.detect import detect_norm, holds_moments
from contnorm.convert.detected import DetectedNorm
from contnorm.norms.base import MomentNorm

__all__ = ["FREEZING_HOOKS", "evaluation_mode", "freeze_stats", "frozen_stats", "is_frozen", "released_stats"]

_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


def freeze_stats(model: nn.Module, frozen: bool = True) -> nn.Module:
    """Freeze (or release) the running moments and batch counters of every norm in a model.

    Freezing is independent of ``model.train()`` and ``model.eval()``: in training mode a frozen layer still normalizes
    with the batch, in evaluation mode with the frozen moments. Copies of the model stay frozen.

    Args:
        model: The model, changed in place.
        frozen: True to freeze, False to release.

    Returns:
        The model.

    Example:
        >>> import torch
        >>> model = freeze_stats(nn.Sequential(nn.BatchNorm1d(2))).train()
        >>> _ = model(torch.tensor([[5.0, 5.0], [9.0, 9.0]]))
        >>> model[0].running_mean
        tensor([0., 0.])
    """
    for module in check_model(model, "freeze_stats").modules():
        if holds_moments(module) and is_frozen(module) is not frozen:
            _set(module, frozen)
    return model


@contextmanager
def frozen_stats(model: nn.Module) -> Iterator[nn.Module]:
    """Context manager that freezes the running moments of a model; on exit, layers it froze are released.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.BatchNorm1d(2))
        >>> with frozen_stats(model):
        ...     _ = model(torch.tensor([[5.0, 5.0], [9.0, 9.0]]))
        >>> model[0].running_mean, model[0].num_batches_tracked.item()
        (tensor([0., 0.]), 0)
    """
    unfrozen = [m for m in check_model(model, "frozen_stats").modules() if holds_moments(m) and not is_frozen(m)]
    for module in unfrozen:
        _set(module, True)
    try:
        yield model
    finally:
        for module in unfrozen:
            _set(module, False)


@contextmanager
def released_stats(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Context manager that releases frozen layers, so that their moments can be set; on exit they are frozen again.

    Example:
        >>> layer = freeze_stats(nn.BatchNorm1d(2))
        >>> with released_stats([layer]):
        ...     print(is_frozen(layer))
        False
        >>> is_frozen(layer)
        True
    """
    frozen = [layer for layer in layers if is_frozen(layer)]
    for layer in frozen:
        freeze_stats(layer, False)
    try:
        yield
    finally:
        for layer in frozen:
            freeze_stats(layer)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Context manager for evaluation mode; on exit, the mode of each module is restored.

    Modes are restored by calling ``train()``, because modules may override it, for example to merge weights for
    evaluation and to separate them again for training.

    Example:
        >>> model = nn.Sequential(nn.Dropout(), nn.Dropout().eval())
        >>> with evaluation_mode(model):
        ...     print([module.training for module in model.modules()])
        [False, False, False]
        >>> [module.training for module in model.modules()]
        [True, True, False]
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            if module.training is not training:
                module.train(training)
        for module, training in modes:  # an override of train() may have set another mode
            module.training = training


def is_frozen(module: nn.Module) -> bool:
    """Whether the running moments of a layer are frozen.

    Example:
        >>> is_frozen(freeze_stats(nn.BatchNorm1d(2)))
        True
    """
    if isinstance(module, MomentNorm):
        return module.stats_frozen
    return hasattr(module, "_contnorm_tracked") or _lend_copies in module._forward_pre_hooks.values()


def _set(module: nn.Module, frozen: bool) -> None:
    if frozen:
        _freeze(module)
    else:
        _release(module)


def _freeze(module: Any) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        raise ValueError("freeze_stats: a scripted or traced model can't be changed. Freeze it before it is scripted.")
    if type(module).forward is nn.Module.forward and "forward" not in vars(module):
        raise ValueError(
            f"freeze_stats: a {type(module).__name__} without a forward method holds running moments, which other code "
            f"updates and which can't be frozen here. Freeze an exported model before it is exported."
        )
    if isinstance(module, MomentNorm):
        module.stats_frozen = True
    elif _obeys_tracking(module):
        module.__dict__["_contnorm_tracked"] = module.track_running_stats
        module.track_running_stats = False
    else:
        module.register_forward_pre_hook(_lend_copies)
        module.register_forward_hook(_take_back, always_call=True)


_TORCH_FORWARDS = (_BatchNorm.forward, nn.SyncBatchNorm.forward)
_OBEYS_TRACKING: WeakKeyDictionary[type[nn.Module], bool] = WeakKeyDictionary()


def _obeys_tracking(module: nn.Module) -> bool:
    """Whether a batch norm does not update its moments while ``track_running_stats`` is False."""
    if not isinstance(module, _BatchNorm) or isinstance(module, LazyModuleMixin) or "forward" in vars(module):
        return False
    cls = type(module)
    if cls.forward in _TORCH_FORWARDS:
        return True
    if cls not in _OBEYS_TRACKING:  # cached by class, because `frozen_stats` may be entered at each step
        detected = detect_norm(module)
        _OBEYS_TRACKING[cls] = isinstance(detected, DetectedNorm) and detected.obeys_tracking
    return _OBEYS_TRACKING[cls]


def _release(module: Any) -> None:
    """Release a layer, however it was frozen; does nothing if it is not frozen."""
    if isinstance(module, MomentNorm):
        module.stats_frozen = module.use_running  # constant moments stay frozen
    if hasattr(module, "_contnorm_tracked"):
        module.track_running_stats = module._contnorm_tracked
        del module._contnorm_tracked
    if _lend_copies in module._forward_pre_hooks.values():
        _restore_buffers(module)
        _remove(_lend_copies, module._forward_pre_hooks)
        _remove(_take_back, module._forward_hooks, module._forward_hooks_always_called)


def _lend_copies(module: nn.Module, args: object) -> None:
    _restore_buffers(module)  # the copies of an interrupted forward may still be in place
    originals = {name: module._buffers[name] for name in _BUFFERS if isinstance(module._buffers.get(name), Tensor)}
    module.__dict__["_contnorm_own"] = originals
    for name, buffer in originals.items():
        module._buffers[name] = None if buffer is None else buffer.clone()


def _take_back(module: nn.Module, args: object, output: object) -> None:
    _restore_buffers(module)


def _restore_buffers(module: nn.Module) -> None:
    module._buffers.update(module.__dict__.pop("_contnorm_own", {}))


def _remove(function: object, hooks: dict[int, Any], *marks: dict[int, bool]) -> None:
    for key in [key for key, hook in hooks.items() if hook is function]:
        for registry in (hooks, *marks):
            registry.pop(key, None)


# Pickled models refer to these two functions by name, so they must not be renamed.
FREEZING_HOOKS = (_lend_copies, _take_back)
