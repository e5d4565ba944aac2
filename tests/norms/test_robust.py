"""Robust batch normalization: the mixture, its gradient, and the numbers of the authors' code."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import contnorm as cn
from contnorm.functional import robust_batch_norm
from tests.norms.public_numbers import wave

PUBLIC = {
    2: {
        "output": [
            [5.9510151503, 11.3458267242, -3.5493414329, -0.6723452852],
            [1.3951810158, 1.9305355065, 0.6813218459, 0.602883749],
            [1.8893096342, 0.9486468005, 1.3369091988, 0.3110275843],
        ],
        "gradient": [
            [0.2019510302, 5.4838233924, -3.8433500107, -1.5726346599],
            [0.5141821062, 3.0007460104, -2.5403280757, -0.3707077111],
            [0.9603462116, 3.4791087471, -2.479044869, 0.5077043295],
        ],
        "mean": [1.0059292813, -0.5879152902],
        "var": [4.5334396154, 1.3844670816],
        "evaluation": [
            [5.069291209, 0.2460415752, -2.5205435081, -4.6921125604],
            [-0.2795396087, -1.0095784988, -0.1507188477, -0.2391282383],
            [-0.9902869866, -0.7088492059, -0.2553172651, 0.3561996382],
        ],
    },
    1: {
        "output": [
            [6.5734107279, -4.1318310664],
            [0.1520021376, 1.0316051745],
            [1.618673763, -0.2481024785],
            [-0.7867420166, 0.8439498816],
        ],
        "gradient": [
            [1.0311643862, -0.10252915],
            [2.6518698072, -1.4497915069],
            [-0.4540676162, -1.2770093974],
            [1.8894555654, -0.9992722599],
        ],
        "mean": [0.8644318209, -0.4430509845],
        "var": [4.7941254378, 2.4217924399],
        "evaluation": [
            [5.0333689709, 0.53625873],
            [0.5020151101, -0.0855778967],
            [-0.168005343, 1.1088991981],
            [1.1101844322, 0.109651276],
        ],
    },
}


@pytest.mark.parametrize(("dim", "shape"), [(2, (3, 2, 1, 2)), (1, (4, 2))])
def test_numbers_of_the_public_implementation(dim: Any, shape: tuple[int, ...]) -> None:
    """``core/utils/bn_layers.py`` of BIT-DA/RoTTA at commit 67e34c9, run in float64 on the same input."""
    layer: Any = cn.create_norm("rbn", 2, dim=dim).double()
    assert layer.momentum == 0.05  # ALPHA of configs/adapter/rotta.yaml
    with torch.no_grad():
        for name, value in (
            ("weight", [1.5, -0.5]),
            ("bias", [0.25, 1.0]),
            ("running_mean", [0.5, -1.0]),
            ("running_var", [2.0, 0.25]),
        ):
            getattr(layer, name).copy_(torch.tensor(value))
    x = wave(shape, 0.0).requires_grad_()
    y = layer(x)
    (y * wave(shape, 5.0)).sum().backward()
    for shift in (1.0, 2.0):
        layer(wave(shape, shift))
    actual = {
        "output": y.flatten(1),
        "gradient": x.grad.flatten(1),  # type: ignore[union-attr]
        "mean": layer.running_mean,
        "var": layer.running_var,
        "evaluation": layer.eval()(wave(shape, 3.0)).flatten(1),
    }
    for name, expected in PUBLIC[dim].items():
        torch.testing.assert_close(actual[name], torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-9)


def test_evaluation_is_that_of_batch_norm() -> None:
    layer: Any = cn.RobustBatchNorm2d(3)
    for seed in range(3):
        layer(torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(seed)) + 1)
    layer.eval()
    x = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(9))
    expected = layer(x)
    torch.testing.assert_close(cn.convert_norm(copy.deepcopy(nn.Sequential(layer)), "bn")(x), expected)
    for name in ("running_mean", "running_var"):  # both are used
        moved = copy.deepcopy(layer)
        getattr(moved, name).add_(1)
        assert not torch.allclose(moved(x), expected, atol=1e-2)


def test_output_in_training_is_that_of_the_stored_moments() -> None:
    layer: Any = cn.RobustBatchNorm2d(3)
    x = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(0)) * 3 + 1
    y = layer(x)
    torch.testing.assert_close(layer.running_mean, 0.05 * x.mean((0, 2, 3)))
    torch.testing.assert_close(layer.running_var, 0.95 + 0.05 * x.var((0, 2, 3), correction=0))
    torch.testing.assert_close(layer.eval()(x), y)


def test_frozen_moments_are_mixed_and_not_replaced() -> None:
    layer: Any = cn.RobustBatchNorm2d(3)
    expected, x = copy.deepcopy(layer), torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(0)) + 1
    cn.freeze_stats(layer)
    torch.testing.assert_close(layer(x), expected(x))
    assert torch.equal(layer.running_mean, torch.zeros(3)) and layer.num_batches_tracked == 0


def test_weight_of_zero_leaves_a_batch_with_nan_out() -> None:
    x, mean, var = torch.ones(4, 2), torch.zeros(2), torch.ones(2)
    x[0, 0] = float("nan")
    y = robust_batch_norm(x, mean, var, training=True, momentum=0.0)
    assert torch.equal(mean, torch.zeros(2)) and torch.equal(var, torch.ones(2))
    torch.testing.assert_close(y[1:], torch.full((3, 2), (1 + 1e-5) ** -0.5))
