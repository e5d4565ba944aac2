"""Run a model in evaluation mode, then restore the mode of every module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["modes_restored"]


@contextmanager
def modes_restored(model: nn.Module) -> Iterator[None]:
    """Context manager for evaluation mode; on exit, the mode of each module is restored.

    Modes are restored by calling ``train()``, because modules may override it, for example to merge weights for
    evaluation and to separate them again for training.

    Example:
        >>> model = nn.Sequential(nn.Dropout(), nn.Dropout().eval())
        >>> with modes_restored(model):
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
