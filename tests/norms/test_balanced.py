"""Batch normalization with class-balanced running moments: which batches update them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import contnorm as cn
from contnorm import BatchTags, batch_tags


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


def test_cumulative_average_counts_the_balanced_batches() -> None:
    layer: Any = cn.BalancedBatchNorm2d(3, momentum=None)
    means = []
    for step in range(3):
        with batch_tags(tags(4, 4, is_extra=True)):
            layer(batch(step, size=4))
        means.append(batch(step, size=4).mean((0, 2, 3)))
        with batch_tags(tags(6, 4)):
            layer(batch(20 + step))
    torch.testing.assert_close(layer.running_mean, torch.stack(means).mean(0))


def test_requests_a_class_balanced_batch() -> None:
    assert cn.BalancedBatchNorm2d(3).replay_request == cn.ReplayRequest(size=None, balance="class")
    layer: Any = cn.create_norm("bnt", 3, balanced_size=50)
    assert layer.replay_request == cn.ReplayRequest(size=50, balance="class")
    assert repr(layer) == "BalancedBatchNorm2d(3, balanced_size=50, eps=1e-05, momentum=0.1)"
