"""BN Tricks: which batches update the running moments. Batch renormalization: formula, schedule and gradients."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import contnorm as cn
from contnorm import BatchTags, batch_tags
from contnorm.functional import batch_renorm


def test_clipped_ratios_follow_the_formula() -> None:
    x = torch.randn(50, 4, dtype=torch.float64) * torch.tensor([1.0, 20.0, 0.01, 1.0]) + torch.tensor([0, 0, 0, 90.0])
    mean, var = torch.tensor([0.3, 0.0, 0.0, 0.0]).double(), torch.tensor([4.0, 1.0, 1.0, 1.0]).double()
    y = batch_renorm(x, mean.clone(), var.clone(), training=True, eps=1e-3, r_max=3.0, d_max=5.0)
    a, m, s = x.numpy(), mean.numpy(), np.sqrt(var.numpy())
    mu, sigma = a.mean(0), a.std(0)
    r = np.clip(sigma / s, 1 / 3, 3)
    d = np.clip((mu - m) / s, -5, 5)
    assert r[1] == 3 and np.isclose(r[2], 1 / 3) and d[3] == 5  # all limits are active in this case
    assert 1 / 3 < r[0] < 3 and -5 < d[0] < 5
    torch.testing.assert_close(y, torch.from_numpy(r * (a - mu) / (sigma + 1e-3) + d))


def test_constant_channel_has_finite_gradient() -> None:
    """Its standard deviation is zero and gets no gradient, so dx = (dy - mean of dy) / eps."""
    x = torch.full((4, 2), 7.0, dtype=torch.float64)
    x[:, 1] = torch.tensor([1.0, 2.0, 4.0, 8.0])
    x.requires_grad_()
    dy = torch.tensor([[1.0, 1.0], [2.0, 0.0], [3.0, 0.0], [6.0, 0.0]], dtype=torch.float64)
    y = batch_renorm(x, None, None, training=True, eps=1e-3)
    (dx,) = torch.autograd.grad(y, x, dy)
    torch.testing.assert_close(dx[:, 0], (dy[:, 0] - 3.0) / 1e-3)
    other = x.detach()[:, 1:].requires_grad_()  # the other channel is not affected
    (alone,) = torch.autograd.grad(batch_renorm(other, None, None, training=True, eps=1e-3), other, dy[:, 1:])
    torch.testing.assert_close(dx[:, 1:], alone)


def test_no_gradient_through_r_and_d() -> None:
    """The gradient is that of the formula with the same r and d held constant, which are not at their limits."""
    x = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    mean, var = torch.full((3,), 0.2).double(), torch.full((3,), 0.5).double()
    weight, bias, dy = torch.randn(3).double(), torch.randn(3).double(), torch.randn(6, 3).double()
    y = batch_renorm(x, mean, var, weight, bias, training=True, momentum=0.0, r_max=50.0, d_max=50.0)
    mu, sigma = x.mean(0), x.std(0, correction=0)
    r, d = (sigma / var.sqrt()).detach(), ((mu - mean) / var.sqrt()).detach()
    expected = weight * (r * (x - mu) / (sigma + 1e-3) + d) + bias
    torch.testing.assert_close(y, expected)
    for gradient in zip(torch.autograd.grad(y, x, dy), torch.autograd.grad(expected, x, dy), strict=True):
        torch.testing.assert_close(*gradient)


@pytest.mark.parametrize(
    ("batches", "r_max", "d_max"),
    [
        (5_000, 1, 0),
        (15_000, 1 + 2 * 10 / 35, 2.5),
        (25_000, 1 + 2 * 20 / 35, 5),
        (90_000, 3, 5),
    ],
)
def test_published_schedule(batches: int, r_max: float, d_max: float) -> None:
    layer = cn.BatchRenorm1d(2)
    layer.num_batches_tracked.fill_(batches)
    layer(torch.randn(4, 2))
    assert (layer.r_limit.item(), layer.d_limit.item()) == pytest.approx((r_max, d_max))


def test_total_steps_scales_the_published_schedule() -> None:
    published, scaled = cn.BatchRenorm1d(2), cn.BatchRenorm1d(2, total_steps=4_000)
    for percent in (0, 5, 12, 25, 33, 40, 99):
        published.num_batches_tracked.fill_(1_000 * percent)
        scaled.num_batches_tracked.fill_(40 * percent)
        for layer in (published, scaled):
            layer(torch.randn(4, 2))
        torch.testing.assert_close(scaled.r_limit, published.r_limit)
        torch.testing.assert_close(scaled.d_limit, published.d_limit)


def test_schedule_is_restored_from_the_counter() -> None:
    layer = cn.BatchRenorm1d(2, total_steps=100)
    for _ in range(20):
        layer(torch.randn(4, 2))
    twin = cn.BatchRenorm1d(2, total_steps=100)
    twin.load_state_dict(layer.state_dict())
    x = torch.randn(4, 2)
    torch.testing.assert_close(twin(x), layer(x), rtol=0, atol=0)
    assert twin.r_limit.item() > 1


@pytest.mark.parametrize("total_steps", [None, 30, 100])
def test_corrected_share_counts_batches_after_ramp_start(total_steps: int | None) -> None:
    """Computed from the formula: the running standard deviation before a batch, and the clipped ratio to it."""
    torch.manual_seed(0)
    layer = cn.BatchRenorm1d(3, total_steps=total_steps)
    free = []
    for _ in range(30):
        x, spread = torch.randn(8, 3), layer.running_var.sqrt()
        ratio = x.std(0, correction=0) / spread
        layer(x)
        free.append(bool((ratio.clamp(1 / layer.r_limit, layer.r_limit) != 1).any()))
    assert layer.corrected_share() == sum(free) / 30
    assert any(free) == (total_steps is not None)


@pytest.mark.slow
def test_compiled_gradients_with_open_limits() -> None:
    """The compiled backward pass uses the r of the forward pass, not one of the updated running moments."""
    plain = cn.BatchRenorm2d(4, momentum=0.3, total_steps=10)
    twin = cn.BatchRenorm2d(4, momentum=0.3, total_steps=10)
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    for seed in range(6):
        x = torch.randn(4, 4, 3, 3, generator=torch.Generator().manual_seed(seed)) * 2 + 1
        gradients = []
        for layer in (plain, compiled):
            leaf = x.clone().requires_grad_()
            layer(leaf).square().mul(x).sum().backward()
            gradients.append(leaf.grad)
        torch.testing.assert_close(*gradients)
    assert plain.r_limit > 1


# --- running moments of class-balanced batches ------------------------------------------------------------------------


def batch(seed: int, size: int = 6) -> Tensor:
    return torch.randn(size, 3, 4, 4, generator=torch.Generator().manual_seed(seed)) * 2 + seed


def tags(size: int, extra_size: int, is_extra: bool = False) -> BatchTags:
    return BatchTags(torch.zeros(size, dtype=torch.bool), torch.zeros(size, dtype=torch.int64), is_extra, extra_size)


def test_only_the_balanced_batch_updates_moments() -> None:
    """As a batch norm that sees the balanced batches alone; outputs in training are those of batch norm."""
    layer: Any = cn.BalancedBatchNorm2d(3)
    stored: Any = nn.BatchNorm2d(3)
    for step in range(3):
        extra = batch(10 + step, size=4)
        with torch.no_grad(), batch_tags(tags(4, 4, is_extra=True)):
            layer(extra)
        stored(extra)
        x = batch(step)
        with batch_tags(tags(len(x), 4)):
            y = layer(x)
        assert torch.equal(y, nn.BatchNorm2d(3)(x))
    assert torch.equal(layer.running_mean, stored.running_mean)
    assert torch.equal(layer.running_var, stored.running_var)
    assert layer.num_batches_tracked == 3
    assert torch.equal(layer.eval()(x), stored.eval()(x))


@pytest.mark.parametrize("tagged", [True, False])
def test_training_batches_update_moments_if_there_is_no_balanced_one(tagged: bool) -> None:
    layer: Any = cn.BalancedBatchNorm2d(3)
    stock: Any = nn.BatchNorm2d(3)
    for step in range(3):
        x = batch(step)
        with batch_tags(tags(len(x), 0) if tagged else None):
            assert torch.equal(layer(x), stock(x))
    assert torch.equal(layer.running_mean, stock.running_mean) and torch.equal(layer.running_var, stock.running_var)


def test_requests_a_class_balanced_batch() -> None:
    assert cn.BalancedBatchNorm2d(3).replay_request == cn.ReplayRequest(size=None, balance="class")
    layer: Any = cn.create_norm("bnt", 3, balanced_size=50)
    assert layer.replay_request == cn.ReplayRequest(size=50, balance="class")
    assert repr(layer) == "BalancedBatchNorm2d(3, balanced_size=50, eps=1e-05, momentum=0.1)"
