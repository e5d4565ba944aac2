"""Moments blended with old ones (`mix`), against float64 arithmetic written out here."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import contnorm as cn

EPS, MIX = 1e-5, 0.3


def network() -> nn.Sequential:
    """Two batch norms whose old moments are of other data."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 4), nn.BatchNorm1d(4)).double()
    model.train()(torch.randn(50, 3).double() * 3 - 1)
    return model


def data() -> tuple[Tensor, Tensor]:
    x = torch.randn(24, 3, generator=torch.Generator().manual_seed(2)).double() + torch.arange(24).view(-1, 1) / 10
    return x, torch.tensor([1.0, 2.0, 4.0]).double().repeat(8)


def blended(layer: Any, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
    return (1 - MIX) * layer.running_mean + MIX * mean, (1 - MIX) * layer.running_var + MIX * var


def behind(model: nn.Sequential, x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    """The input of the second norm, behind a first one with these moments, of weight 1 and bias 0."""
    return model[1:3]((x - mean) / (var + EPS).sqrt()).detach()


def moments(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


@pytest.mark.parametrize("weighted", [False, True])
def test_exact_moments_are_blended_layer_by_layer(weighted: bool) -> None:
    model, (x, weights) = network(), data()
    weights = weights if weighted else torch.ones_like(weights)
    old, before = copy.deepcopy(model), moments(model)
    effective = weights.sum() ** 2 / (weights**2).sum()

    def of(values: Tensor) -> tuple[Tensor, Tensor]:
        mean = (weights[:, None] * values).sum(0) / weights.sum()
        return mean, (weights[:, None] * (values - mean) ** 2).sum(0) / weights.sum()

    batches = list(zip(x.split(7), weights.split(7), strict=True))
    done = cn.reestimate(model, batches, mix=MIX, weights=(lambda batch: batch[1]) if weighted else None)
    signal = x
    for number in (0, 3):
        mean, var = of(signal)
        new = blended(old[number], mean, var * effective / (effective - 1))
        for ours, expected in zip((model[number].running_mean, model[number].running_var), new, strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
        signal = behind(old, signal, *blended(old[number], mean, var)) if number == 0 else signal
    done.restore()
    assert all(torch.equal(value, before[name]) for name, value in moments(model).items())


def test_approximate_moments_of_a_generator_normalize_as_alpha_bn() -> None:
    model, (x, _) = network(), data()
    old = copy.deepcopy(model)
    cn.reestimate(model, (part for part in x.split(8)), mix=MIX, exact=False)
    seconds = [behind(old, part, *blended(old[0], part.mean(0), part.var(0, False))) for part in x.split(8)]
    for number, values in ((0, x), (3, torch.cat(seconds))):
        mean, var = blended(old[number], values.mean(0), values.var(0))
        torch.testing.assert_close(model[number].running_mean, mean, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(model[number].running_var, var, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("exact", [True, False])
def test_ends_of_the_scale_and_frozen_layers(exact: bool) -> None:
    model, (x, _) = network(), data()
    before, full = moments(model), copy.deepcopy(model)
    with cn.reestimate(model, [x], mix=0, exact=exact):
        torch.testing.assert_close(moments(model), before, rtol=1e-12, atol=0)
    cn.reestimate(full, [x], exact=exact)
    with cn.reestimate(model, [x], mix=1, exact=exact):
        assert all(torch.equal(value, moments(full)[name]) for name, value in moments(model).items())
    cn.freeze_norms(model)
    done = cn.reestimate(model, [x], mix=MIX, exact=exact, frozen="lift")
    torch.testing.assert_close(done.moments["0"].new_mean, blended(network()[0], x.mean(0), x.mean(0))[0])
    for mix in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match=r"mix=.*from 0 to 1"):
            cn.reestimate(full, [x], mix=mix)


def test_stale_moments_are_not_blended_with() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).train()
    model(data()[0].float())
    cn.convert_norm(model, "cn", num_groups=2)
    with pytest.raises(ValueError, match="layer '1' are stale"):
        cn.reestimate(model, [data()[0].float()], mix=0.5)
    cn.reestimate(model, [data()[0].float()])
    cn.reestimate(model, [data()[0].float()], mix=0.5)
