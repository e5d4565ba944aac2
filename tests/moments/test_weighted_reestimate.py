"""Weighted exact moments: against float64 arithmetic written out here, and against duplicated samples."""

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import contnorm as cn

SAMPLES, POSITIONS = 40, 9


def network(norm: str) -> nn.Sequential:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1), nn.BatchNorm2d(4))
    with torch.no_grad():
        for layer in (model[1], model[4]):
            layer.weight.uniform_(0.5, 1.5)
            layer.bias.uniform_(-1, 1)
    return cn.convert_norm(model, norm).double()  # type: ignore[return-value]


def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(2)
    x = torch.randn(SAMPLES, 3, 5, 5, dtype=torch.float64) * 2 + torch.linspace(-1, 1, SAMPLES).view(-1, 1, 1, 1)
    return x, torch.tensor([1.0, 3.0, 2.0, 0.0], dtype=torch.float64)[torch.arange(SAMPLES) % 4]


def batches(x: Tensor, weights: Tensor, size: int = 7) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(size), weights.split(size), strict=True))


def second(batch: tuple[Tensor, Tensor]) -> Tensor:
    return batch[1]


def by_hand(signal: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """Mean, biased variance and the factor of the unbiased one, of (N, C, H, W), sample by sample."""
    positions = signal.shape[2] * signal.shape[3]
    total = positions * weights.sum()
    mean = sum(w * s.sum((1, 2)) for w, s in zip(weights, signal, strict=True)) / total
    deviation = (signal - mean[:, None, None]) ** 2
    var = sum(w * d.sum((1, 2)) for w, d in zip(weights, deviation, strict=True)) / total
    effective = total**2 / (positions * (weights**2).sum())
    return mean, var, effective / (effective - 1)


@pytest.mark.parametrize("norm", ["bn", "cn4"])
def test_weighted_moments_of_two_layers_match_float64(norm: str) -> None:
    model, (x, weights) = network(norm), data()
    cn.reestimate(model, batches(x, weights), weights=second)
    groups = 4 if norm == "cn4" else None
    signal = x.numpy()
    with torch.no_grad():
        for conv, layer in ((model[0], model[1]), (model[3], model[4])):
            y = conv(torch.from_numpy(signal))
            if groups is not None:  # continual normalization tracks the moments of its group-normalized input
                parts = y.view(SAMPLES, groups, -1)
                biased = parts.var(2, unbiased=False, keepdim=True)
                y = ((parts - parts.mean(2, keepdim=True)) / (biased + layer.eps).sqrt()).view(y.shape)
            mean, var, factor = by_hand(y.numpy(), weights.numpy())
            np.testing.assert_allclose(layer.running_mean.numpy(), mean, rtol=1e-9, atol=1e-12)
            np.testing.assert_allclose(layer.running_var.numpy(), var * factor, rtol=1e-9)
            # Deeper layers see data that is normalized with the biased variance, as in training.
            column = (slice(None), None, None)
            normal = (y.numpy() - mean[column]) / np.sqrt(var[column] + layer.eps)
            affine = normal * layer.weight.numpy()[column] + layer.bias.numpy()[column]
            signal = np.maximum(affine, 0)


def test_whole_weights_equal_duplicated_samples() -> None:
    """The same mean and biased variance, so that the unbiased ones differ by the factor of their sizes alone."""
    (x, weights), models = data(), [network("bn") for _ in range(2)]
    cn.reestimate(models[0], batches(x, weights), weights=second)
    cn.reestimate(models[1], list(x.repeat_interleave(weights.long(), 0).split(11)))
    copies = POSITIONS * weights.sum()
    effective = POSITIONS * weights.sum() ** 2 / (weights**2).sum()
    for index in (1, 4):
        ours, repeated = models[0][index], models[1][index]
        torch.testing.assert_close(ours.running_mean, repeated.running_mean, rtol=1e-10, atol=1e-12)
        biased = ours.running_var * (effective - 1) / effective
        torch.testing.assert_close(biased, repeated.running_var * (copies - 1) / copies, rtol=1e-10, atol=0)


def test_one_weighted_value_has_no_variance() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2))
    with pytest.raises(ValueError, match="one value per channel with a weight above 0"):
        cn.reestimate(model, [torch.randn(3, 2)], weights=lambda batch: torch.tensor([0.0, 1.0, 0.0]))


@pytest.mark.parametrize("weights", [math.inf, -1.0, torch.ones(4, 1), torch.tensor([1.0, 2.0, 3.0]), torch.zeros(4)])
def test_wrong_weights_are_refused_and_change_nothing(weights: Any) -> None:
    model = network("bn").float()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="weight"):
        cn.reestimate(model, [torch.randn(4, 3, 5, 5)], weights=lambda batch: weights)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_weights_of_batches_equal_those_of_their_samples() -> None:
    """Exactly, for batches of unequal sizes."""
    (x, _), models = data(), [network("cn4") for _ in range(2)]
    pairs = list(zip(x.split([7, 3, 20, 10]), [0.5, 3.0, 0.0, 2.0], strict=True))
    cn.reestimate(models[0], [(part, torch.full((len(part),), w)) for part, w in pairs], weights=second)
    cn.reestimate(models[1], pairs, weights=second)
    for ours, expected in zip(models[1].buffers(), models[0].buffers(), strict=True):
        assert torch.equal(ours, expected)
