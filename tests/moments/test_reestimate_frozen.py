"""Re-estimation of models with frozen moments: lifted, kept or refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import contnorm as cn
from contnorm.moments.freeze import is_frozen


def network(kind: str) -> nn.Sequential:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
    return cn.convert_norm(model, kind, num_groups=2) if kind == "cn" else model  # type: ignore[return-value]


DATA = list((torch.randn(20, 3, 4, 4, generator=torch.Generator().manual_seed(5)) * 3 + 2).split(6))
KINDS = pytest.mark.parametrize("kind", ["bn", "cn"])


@KINDS
def test_lift_sets_frozen_moments_and_leaves_them_frozen(kind: str) -> None:
    free, model = network(kind), network(kind)
    cn.reestimate(free, DATA)
    cn.freeze_stats(model[1])  # type: ignore[arg-type]
    done = cn.reestimate(model, DATA, frozen="lift")
    assert list(done.moments) == ["1", "4"]
    for ours, expected in zip(model.buffers(), free.buffers(), strict=True):
        assert torch.equal(ours, expected)
    assert is_frozen(model[1]) and not is_frozen(model[4])  # type: ignore[arg-type]
    set_moments = model[1].running_mean.clone()  # type: ignore[operator,union-attr]
    model.train()(DATA[0])
    assert torch.equal(model[1].running_mean, set_moments)  # type: ignore[arg-type]
    done.restore()
    assert torch.equal(model[1].running_mean, torch.zeros(4)) and is_frozen(model[1])  # type: ignore[arg-type]


@KINDS
def test_keep_leaves_frozen_moments_and_measures_the_rest_with_them(kind: str) -> None:
    model = network(kind)
    with torch.no_grad():
        model[1].running_var.fill_(9.0)  # type: ignore[operator,union-attr]
        model[1].running_mean.fill_(0.5)  # type: ignore[operator,union-attr]
    cn.freeze_stats(model[1])  # type: ignore[arg-type]
    with cn.reestimate(model, DATA, frozen="keep") as done:
        assert list(done.moments) == ["4"]
        with torch.no_grad():
            inner = model[:4].eval()(torch.cat(DATA))
        if kind != "cn":
            torch.testing.assert_close(done.moments["4"].new_mean, inner.mean((0, 2, 3)))
            torch.testing.assert_close(done.moments["4"].new_var, inner.transpose(0, 1).flatten(1).var(1))
    assert is_frozen(model[1]) and torch.equal(model[1].running_var, torch.full((4,), 9.0))  # type: ignore[arg-type]


@KINDS
def test_frozen_moments_are_refused_by_default(kind: str) -> None:
    model = cn.freeze_stats(network(kind))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"layer '1'.*frozen. Call .*freeze_stats.*frozen='lift'.*frozen='keep'"):
        cn.reestimate(model, DATA)
    with pytest.raises(ValueError, match="no norm layer with running moments"):
        cn.reestimate(model, DATA, frozen="keep")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@KINDS
def test_error_restores_lifted_moments_and_their_freeze(kind: str) -> None:
    model = cn.freeze_stats(network(kind))
    with torch.no_grad():
        model[3].weight.fill_(torch.nan)  # type: ignore[index]
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with pytest.raises(ValueError, match="'4' are NaN or infinite"):
        cn.reestimate(model, DATA, frozen="lift")
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert is_frozen(model[1]) and is_frozen(model[4])  # type: ignore[index]
