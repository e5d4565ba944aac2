"""Hold running moments still, whatever mode the model is put in.

Our layers have a switch for it. Torch's batch norms obey ``track_running_stats``, whose value is stored until release.
Any other module with running moments (torch's instance norms, layers of other libraries) gets a copy of its moments
to write on while it runs, and its own back afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from contnorm.checks import check_model
from contnorm.convert.detect import Recognized, holds_moments, recognize
from contnorm.layers.base import MomentNorm

__all__ = ["FREEZING_HOOKS", "freeze_stats", "frozen_stats", "is_frozen"]

_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


def freeze_stats(model: nn.Module, frozen: bool = True) -> nn.Module:
    """Freeze (or release) the running moments of every norm in a model; the batch counters too.

    It survives ``model.train()`` and ``model.eval()``, which keep their meaning: in training a frozen layer still
    normalizes with the batch, in evaluation with the moments as they were. Copies of the model stay frozen.

    Args:
        model: The model, changed in place.
        frozen: False releases.

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
    """No running moment of the model moves inside; afterwards each layer is as it was.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.BatchNorm1d(2))
        >>> with frozen_stats(model):
        ...     _ = model(torch.tensor([[5.0, 5.0], [9.0, 9.0]]))
        >>> model[0].running_mean, model[0].num_batches_tracked.item()
        (tensor([0., 0.]), 0)
    """
    moving = [m for m in check_model(model, "frozen_stats").modules() if holds_moments(m) and not is_frozen(m)]
    for module in moving:
        _set(module, True)
    try:
        yield model
    finally:
        for module in moving:
            _set(module, False)


def is_frozen(module: nn.Module) -> bool:
    """Whether this layer's running moments are held.

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
_OBEYS: WeakKeyDictionary[type[nn.Module], bool] = WeakKeyDictionary()


def _obeys_tracking(module: nn.Module) -> bool:
    """Whether a batch norm's moments stand still while ``track_running_stats`` is False."""
    if not isinstance(module, _BatchNorm) or isinstance(module, LazyModuleMixin) or "forward" in vars(module):
        return False
    cls = type(module)
    if cls.forward in _TORCH_FORWARDS:
        return True
    if cls not in _OBEYS:  # once for a class: `frozen_stats` may be entered at each step
        found = recognize(module)
        _OBEYS[cls] = isinstance(found, Recognized) and found.obeys_tracking
    return _OBEYS[cls]


def _release(module: Any) -> None:
    """Undo whichever way a layer was frozen; one that is released already stays so."""
    if isinstance(module, MomentNorm):
        module.stats_frozen = module.use_running  # a layer whose moments are constants keeps them
    if hasattr(module, "_contnorm_tracked"):
        module.track_running_stats = module._contnorm_tracked
        del module._contnorm_tracked
    if _lend_copies in module._forward_pre_hooks.values():
        _give_back(module)
        _remove(_lend_copies, module._forward_pre_hooks)
        _remove(_take_back, module._forward_hooks, module._forward_hooks_always_called)


def _lend_copies(module: nn.Module, args: object) -> None:
    _give_back(module)  # an interrupted forward may have left its copies behind
    own = {name: module._buffers[name] for name in _BUFFERS if isinstance(module._buffers.get(name), Tensor)}
    module.__dict__["_contnorm_own"] = own
    for name, buffer in own.items():
        module._buffers[name] = None if buffer is None else buffer.clone()


def _take_back(module: nn.Module, args: object, output: object) -> None:
    _give_back(module)


def _give_back(module: nn.Module) -> None:
    module._buffers.update(module.__dict__.pop("_contnorm_own", {}))


def _remove(function: object, hooks: dict[int, Any], *marks: dict[int, bool]) -> None:
    for key in [key for key, hook in hooks.items() if hook is function]:
        for registry in (hooks, *marks):
            registry.pop(key, None)


FREEZING_HOOKS = (_lend_copies, _take_back)
