"""Freeze running moments in training and evaluation mode, and run a model in evaluation mode temporarily.

Layers of this package have an attribute for it. Any other module with running moments (those of torch, layers of other
libraries) trains on a copy of its moments; hooks restore the originals after each forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from contnorm.detect import holds_moments
from contnorm.norms.base import MomentNorm

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
    for module in model.modules():
        if holds_moments(module) and is_frozen(module) is not frozen:
            _set_frozen(module, frozen)
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
    unfrozen = [m for m in model.modules() if holds_moments(m) and not is_frozen(m)]
    for module in unfrozen:
        _set_frozen(module, True)
    try:
        yield model
    finally:
        for module in unfrozen:
            _set_frozen(module, False)


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
    return _lend_copies in module._forward_pre_hooks.values()


def _set_frozen(module: Any, frozen: bool) -> None:
    if isinstance(module, MomentNorm):
        module.stats_frozen = frozen or module.use_running  # constant moments stay frozen
    elif frozen:
        module.register_forward_pre_hook(_lend_copies)
        module.register_forward_hook(_take_back, always_call=True)
    else:
        _take_back(module)  # an interrupted forward may have left copies
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if hook in FREEZING_HOOKS]:
                del hooks[key]
                module._forward_hooks_always_called.pop(key, None)


def _lend_copies(module: nn.Module, args: object) -> None:
    _take_back(module)
    if module.training:
        originals = {name: module._buffers[name] for name in _BUFFERS if isinstance(module._buffers.get(name), Tensor)}
        module.__dict__["_contnorm_own"] = originals
        module._buffers.update({name: buffer.clone() for name, buffer in originals.items() if buffer is not None})


def _take_back(module: nn.Module, *args: object) -> None:
    module._buffers.update(module.__dict__.pop("_contnorm_own", {}))


# Pickled models refer to these two functions by name, so they must not be renamed.
FREEZING_HOOKS = (_lend_copies, _take_back)
