"""Instance-aware, robust and hybrid batch normalization: numbers of the authors' code, limits, what is stored."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import contnorm as cn
from contnorm.functional import instance_aware_batch_norm, robust_batch_norm


def wave(shape: tuple[int, ...], shift: float) -> Tensor:
    """Values that any program can compute, with a first sample that differs from the others in mean and variance."""
    i = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
    x = (torch.sin(i * 1.7 + shift) * 2 + torch.cos(i * i * 0.01)).reshape(shape)
    x[0] = x[0] * 3 + 4
    return x


# --- instance-aware batch normalization -----------------------------------------------------------------------------

PUBLIC_OUTPUT = [
    [1.0983853745, 3.129468558, 0.5741652349, -0.8020191675, 0.3922239874, 0.1899941819, 1.227713822, 1.1900680087],
    [0.3581262527, -0.0021489634, -0.9972511643, -0.4980408268, 0.9942498027, 1.2771777882, 1.5051137209, 1.2282903852],
    [0.0707167725, -0.9842315443, -1.0917299002, -0.0217976865, 1.2114019293, 1.4993004963, 1.3103420011, 0.9701937836],
]
PUBLIC_GRADIENT = [
    [-2.0655630427, 0.4611877583, 1.716868459, -1.1365631531, 0.5172120678, -0.4762383014, -0.3807613802, 0.6120835494],
    [0.0412113282, 0.9082385745, 0.2852477149, -0.5240347126, -0.0819497702, -0.2721235415, 0.0299821182, 0.1916264291],
    [0.3998619773, 0.6244400106, -0.3665012695, -0.3443936448, -0.1710229782, -0.0605658619, 0.1755155688, -0.0837579],
]
PUBLIC_EVALUATION = [
    [2.0190923903, -0.6159732475, -1.0614558807, 1.6852101113, 0.5832030329, 1.5043109905, 1.1887113134, 0.3740507645],
    [0.9602790875, -1.1148935431, 0.8019912233, 2.0815756379, 1.2651808466, 1.6141614365, 0.8115764792, 0.8377614149],
    [-1.7971560015, -1.3706190621, 1.1366636574, 0.0311114062, 1.852702895, 1.1553731173, 0.4386189822, 1.0573045063],
]


def test_iabn_has_the_numbers_of_the_public_code() -> None:
    """``utils/iabn.py`` of TaesikGong/NOTE at commit a714a2a, run in float64 with k=1 on the same input."""
    layer: Any = cn.InstanceAwareBatchNorm2d(2, k=1).double()
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([1.5, -0.5]))
        layer.bias.copy_(torch.tensor([0.25, 1.0]))
    shape = (3, 2, 2, 2)
    x = wave(shape, 0.0).requires_grad_()
    y = layer(x)
    (y * wave(shape, 5.0)).sum().backward()
    for actual, expected in (
        (y.flatten(1), PUBLIC_OUTPUT),
        (x.grad.flatten(1), PUBLIC_GRADIENT),  # type: ignore[union-attr]
        (layer.running_mean, [0.2209061642, 0.2256156877]),
        (layer.running_var, [2.8307999579, 2.8179298155]),
        (layer.eval()(wave(shape, 2.0)).flatten(1), PUBLIC_EVALUATION),
    ):
        torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-9)


def test_default_k_is_that_of_the_published_runs() -> None:
    assert cn.InstanceAwareBatchNorm2d(4).k == cn.create_norm("iabn", 4, dim=1).k == 4


@pytest.mark.parametrize("training", [True, False])
def test_limits_of_k_are_instance_and_batch_norm(training: bool) -> None:
    x = torch.randn(5, 3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + 2
    mean, var = torch.zeros(3).double(), torch.full((3,), 2.0).double()
    none = instance_aware_batch_norm(x, mean.clone(), var.clone(), training=training, k=0.0)
    rows = (x - x.mean((2, 3), keepdim=True)) / (x.var((2, 3), keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(none, rows)
    far = instance_aware_batch_norm(x, mean.clone(), var.clone(), training=training, k=1e6)
    dims = (0, 2, 3)
    used = (x.mean(dims), x.var(dims)) if training else (mean, var)
    torch.testing.assert_close(far, F.batch_norm(x, *used))


def test_only_a_sample_that_differs_is_corrected() -> None:
    """With k=4 and independent normal values, other samples are normalized as in batch norm."""
    layer = cn.InstanceAwareBatchNorm2d(2, affine=False).double().eval()
    x = torch.randn(64, 2, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    x[0] = x[0] * 3 + 5
    y = layer(x)
    torch.testing.assert_close(y[1:], x[1:] / (1 + layer.eps) ** 0.5)
    # Its mean is 5 within noise, of which 4 standard errors, 4 / 8, are left; its variance 9 less 4 * sqrt(2 / 63).
    left = x[0].mean((1, 2)) - (x[0].mean((1, 2)) - 0.5)
    std = (x[0].var((1, 2)) - 4 * (2 / 63) ** 0.5).sqrt()
    torch.testing.assert_close(y[0].mean((1, 2)), left / std, rtol=1e-4, atol=1e-4)


def test_iabn_of_one_position_is_batch_norm_with_the_unbiased_variance() -> None:
    layer = cn.InstanceAwareBatchNorm1d(3, affine=False, k=0.1).double()
    x = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(layer(x), (x - x.mean(0)) / (x.var(0) + 1e-5).sqrt())
    reference = nn.BatchNorm1d(3, affine=False).double()
    reference(x)
    torch.testing.assert_close(layer.eval()(x), reference.eval()(x))


# --- robust batch normalization ---------------------------------------------------------------------------------------

PUBLIC = {
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
}


def test_rbn_has_the_numbers_of_the_public_code() -> None:
    """``core/utils/bn_layers.py`` of BIT-DA/RoTTA at commit 67e34c9, run in float64 on the same input."""
    shape = (3, 2, 1, 2)
    layer: Any = cn.create_norm("rbn", 2).double()
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
    for name, expected in PUBLIC.items():
        torch.testing.assert_close(actual[name], torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-9)


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


# --- hybrid batch normalization ---------------------------------------------------------------------------------------

HYBRID = {
    "output": [
        [1.8454415595, 4.4384827784, -0.6217910528, 0.4589610946],
        [-0.3443412597, -0.0870206393, 0.9674701727, 0.9380046687],
        [-0.1068360461, -0.5589700024, 1.2137435089, 0.8283680336],
    ],
    "gradient": [
        [-1.0416467716, 0.3666477947, -2.003891496, -0.5613324262],
        [0.0630859635, 1.1460829809, -0.647453956, 0.1514967323],
        [0.1739940707, 1.5817612303, -0.4900888532, 0.4216672476],
    ],
    "evaluation": [
        [12.9309928037, 3.7722666598, 0.029760623, -2.5685015079],
        [2.0075749207, -1.1187563601, 0.6479790831, -0.1045696429],
        [0.7989995807, -1.6698435996, 0.4688222625, 0.0544967339],
    ],
}


def test_hbn_has_the_numbers_of_the_public_code() -> None:
    """``MyBNtool.py`` of Hongyao-Chen/HybridBN at commit bd0d71f, run in float64, with moments measured before."""
    layer: Any = cn.freeze_stats(cn.HybridBatchNorm2d(2).double())
    values = {"weight": [1.5, -0.5], "bias": [0.25, 1.0], "distribution_factor": [0.7, -1.2]}
    moments = {"running_mean": [0.5, -1.0], "running_var": [2.0, 3.0]}
    layer.load_state_dict({name: torch.tensor(v) for name, v in (values | moments).items()}, strict=False)
    shape = (3, 2, 2, 1)
    x = wave(shape, 0.0).requires_grad_()
    y = layer(x)
    (y * wave(shape, 5.0)).sum().backward()
    assert x.grad is not None and layer.running_mean.tolist() == moments["running_mean"]
    for actual, expected in (
        (y.flatten(1), HYBRID["output"]),
        (x.grad.flatten(1), HYBRID["gradient"]),
        (layer.distribution_factor.grad, [-11.8211376889, 2.4096604104]),
        (layer.eval()(wave(shape, 2.0)).flatten(1), HYBRID["evaluation"]),
    ):
        torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-6)


def test_hbn_between_batch_norm_and_frozen_batch_norm() -> None:
    """A share of 1 is batch norm, with its moments; a share of 0 normalizes with the running moments of before."""
    x = torch.randn(8, 3, 4, 4, generator=torch.Generator().manual_seed(4)) * 2 + 1
    batch, layers = nn.BatchNorm2d(3), [cn.HybridBatchNorm2d(3) for _ in range(2)]
    for layer, logit in zip(layers, (100.0, -100.0), strict=True):
        nn.init.constant_(layer.distribution_factor, logit)
    for _ in range(2):
        expected = F.batch_norm(x, batch.running_mean, batch.running_var)  # before they follow this batch
        torch.testing.assert_close([layer(x) for layer in layers], [batch(x), expected])
    for layer in layers:
        torch.testing.assert_close((layer.running_mean, layer.running_var), (batch.running_mean, batch.running_var))
