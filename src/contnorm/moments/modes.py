"""Run a model in evaluation mode for a while, and give every module its mode back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["modes_restored"]


@contextmanager
def modes_restored(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; afterwards each module is in the mode it was in.

    The way back goes through ``train()``, as the way there does: modules may do work in it, such as merging weights for
    evaluation and separating them again for training.

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
        for module, training in modes:  # where an override of train() decides otherwise
            module.training = training
