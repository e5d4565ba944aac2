"""Functions that run a model in evaluation mode restore the mode of every module."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import contnorm as cn
from contnorm.moments.freeze import evaluation_mode


class Adapted(nn.Module):
    """A linear layer with an adapter that is merged into its weight for evaluation, as in LoRA."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.eye(width), requires_grad=False)
        self.addition = nn.Parameter(torch.full((width, width), 0.5))
        self.merged = False

    def train(self, mode: bool = True) -> Adapted:
        super().train(mode)
        if mode is self.merged:
            self.base.data += -self.addition.data if mode else self.addition.data
            self.merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.base if self.merged else self.base + self.addition)


class WithoutReturn(nn.Sequential):
    """Its ``train`` returns None, which torch allows."""

    def train(self, mode: bool = True) -> None:  # type: ignore[override]
        super().train(mode)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return WithoutReturn(nn.BatchNorm1d(8), Adapted(8))


def batch() -> Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(0))


def _reestimate(model: nn.Module) -> None:
    cn.reestimate(model, [batch()])


def _diagnose(model: nn.Module) -> None:
    cn.diagnose(model, [[(batch(), torch.arange(6))]])


@pytest.mark.parametrize("function", [_reestimate, _diagnose])
def test_evaluation_mode_is_left_through_train(function: Callable[[nn.Module], None]) -> None:
    model = network()
    adapted = model[1]
    assert isinstance(adapted, Adapted)
    function(model)
    assert model.training and adapted.training and not adapted.merged
    torch.testing.assert_close(adapted.base.data, torch.eye(8))
    model(batch()).sum().backward()
    assert adapted.addition.grad is not None


def test_evaluation_mode_restores_mixed_modes_after_an_error() -> None:
    model = network()
    model[0].eval()
    with pytest.raises(KeyError), evaluation_mode(model):
        raise KeyError
    assert [module.training for module in model.modules()] == [True, False, True]


def test_evaluation_mode_restores_a_training_submodule() -> None:
    model = network()
    model.eval()
    adapted = model[1].train()
    with evaluation_mode(model):
        assert adapted.merged
    assert not adapted.merged and adapted.training and not model.training
