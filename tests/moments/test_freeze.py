"""Freezing of running moments: layers of this package, of torch and of other libraries, in any mode."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import contnorm as cn
from tests.models import BatchNormAct2d, ScaledBatchNorm2d


def model() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        cn.CN(8, num_groups=2),
        nn.InstanceNorm2d(8, track_running_stats=True),
        ScaledBatchNorm2d(8),
        BatchNormAct2d(8),
        cn.BatchRenorm2d(8),
        cn.SwitchNorm2d(8),
    )


def moments(net: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in net.state_dict().items() if "running" in name or "num_b" in name}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def x(seed: int = 0) -> torch.Tensor:
    return torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(seed))


def test_frozen_moments_do_not_change_until_released() -> None:
    net = model()
    net(x())
    before = moments(net)
    assert len(before) == 7 * 3
    cn.freeze_stats(net)
    for mode in (True, False, True):
        net.train(mode)
        net(x(1) * 5)
    assert same(moments(net), before)
    cn.freeze_stats(net, False)
    net.train()(x(1))
    after = moments(net)
    assert not any(torch.equal(after[name], before[name]) for name in before if "num_b" not in name)


def test_nan_does_not_reach_frozen_moments() -> None:
    net = cn.freeze_stats(model())
    before = moments(net)
    net.train()(torch.full((4, 3, 6, 6), float("nan")))
    assert same(moments(net), before)


def test_freezing_does_not_change_the_output() -> None:
    net, frozen = model(), cn.freeze_stats(model())
    frozen.load_state_dict(net.state_dict())
    for mode in (True, False):
        torch.testing.assert_close(frozen.train(mode)(x()), copy.deepcopy(net).train(mode)(x()), rtol=0, atol=0)


def test_copies_stay_frozen_and_are_released_separately() -> None:
    net = cn.freeze_stats(model())
    twin = cn.freeze_stats(copy.deepcopy(net), False)
    before = moments(net)
    twin(x()), net(x())
    assert same(moments(net), before) and not same(moments(twin), before)


def test_frozen_stats_restores_the_state_of_each_layer() -> None:
    net = model()
    cn.freeze_stats(net[1])
    before = moments(net)
    with cn.frozen_stats(net) as inside:
        assert inside is net
        net(x())
        with cn.frozen_stats(net):
            net(x(1))
        net(x(2))
    assert same(moments(net), before)
    net(x())
    assert torch.equal(net[1].running_mean, before["1.running_mean"])
    assert not torch.equal(net[2].running_mean, before["2.running_mean"])


def test_frozen_stats_releases_after_an_error() -> None:
    net = model()
    with pytest.raises(RuntimeError), cn.frozen_stats(net):
        net(torch.randn(4, 7, 6, 6))
    net(x())
    assert net[1].num_batches_tracked == net[2].num_batches_tracked == 1
    assert torch.count_nonzero(net[3].running_mean) and torch.count_nonzero(net[4].running_mean)


def test_moments_are_restored_after_a_failed_forward() -> None:
    layer = cn.freeze_stats(ScaledBatchNorm2d(8))
    own = layer.running_mean
    with pytest.raises(ValueError, match="4D"):
        layer(torch.randn(3, 8))
    assert layer.running_mean is own


def test_summary_shows_frozen() -> None:
    assert str(cn.summarize(cn.freeze_stats(nn.Sequential(nn.BatchNorm2d(4))))).count("frozen") == 1


def test_release_undoes_every_kind_of_freezing() -> None:
    net = nn.Sequential(nn.BatchNorm2d(3), cn.BatchNorm2d(3))
    with cn.frozen_stats(net):
        cn.freeze_stats(net, False)
    net(x())
    assert net[0].num_batches_tracked == net[1].num_batches_tracked == 1


def test_interrupted_forward_keeps_the_moments() -> None:
    class Interrupted(ScaledBatchNorm2d):
        armed = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            if self.armed:
                raise KeyboardInterrupt
            return y

    layer = cn.freeze_stats(Interrupted(3))
    layer.armed = True
    with pytest.raises(KeyboardInterrupt):
        layer(x())
    cn.freeze_stats(layer, False)
    assert torch.equal(layer.running_mean, torch.zeros(3))
