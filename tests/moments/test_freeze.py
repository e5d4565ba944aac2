"""Freezing of running moments, of any layer and in any mode, and re-estimation of frozen ones."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import contnorm as cn
from contnorm.moments.freeze import stats_state
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


# --- re-estimation of frozen moments: lifted, kept or refused -------------------------------------------------------


def small(kind: str) -> nn.Sequential:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
    return cn.convert_norm(model, kind, num_groups=2) if kind == "cn" else model  # type: ignore[return-value]


DATA = list((torch.randn(20, 3, 4, 4, generator=torch.Generator().manual_seed(5)) * 3 + 2).split(6))
KINDS = pytest.mark.parametrize("kind", ["bn", "cn"])


@KINDS
def test_lift_sets_frozen_moments_and_leaves_them_frozen(kind: str) -> None:
    free, model = small(kind), small(kind)
    cn.reestimate(free, DATA)
    cn.freeze_stats(model[1])  # type: ignore[arg-type]
    done = cn.reestimate(model, DATA, frozen="lift")
    assert list(done.moments) == ["1", "4"]
    for ours, expected in zip(model.buffers(), free.buffers(), strict=True):
        assert torch.equal(ours, expected)
    assert not stats_state(model[1])[1] and stats_state(model[4])[1]  # type: ignore[arg-type]
    set_moments = model[1].running_mean.clone()  # type: ignore[operator,union-attr]
    model.train()(DATA[0])
    assert torch.equal(model[1].running_mean, set_moments)  # type: ignore[arg-type]
    done.restore()
    assert torch.equal(model[1].running_mean, torch.zeros(4)) and not stats_state(model[1])[1]  # type: ignore[arg-type]


@KINDS
def test_keep_leaves_frozen_moments_and_measures_the_rest_with_them(kind: str) -> None:
    model = small(kind)
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
    assert not stats_state(model[1])[1] and torch.equal(model[1].running_var, torch.full((4,), 9.0))  # type: ignore[arg-type]


@KINDS
def test_frozen_moments_are_refused_by_default(kind: str) -> None:
    model = cn.freeze_stats(small(kind))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"layer '1'.*frozen. Call .*freeze_stats.*frozen='lift'.*frozen='keep'"):
        cn.reestimate(model, DATA)
    with pytest.raises(ValueError, match="no norm layer with running moments"):
        cn.reestimate(model, DATA, frozen="keep")
    with pytest.raises(ValueError, match="'kept' must be"):
        cn.reestimate(model, DATA, frozen="kept")  # type: ignore[arg-type]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# --- what layers normalize with ---------------------------------------------------------------------------------------


def test_running_moments_normalize_before_they_are_updated() -> None:
    net = model()
    net(x())
    trained, expected = copy.deepcopy(net), copy.deepcopy(net).eval()(x(1))
    cn.stats_mode(net, "running")
    net = copy.deepcopy(net).train()
    torch.testing.assert_close(net(x(1)), expected, rtol=0, atol=0)
    trained[1](trained[0](x(1)))  # the layers after it have another input in training
    assert torch.equal(net[1].running_mean, trained[1].running_mean) and net[1].num_batches_tracked == 2
    after = moments(net)
    net.eval()(x(2))
    assert same(moments(net), after)


@pytest.mark.parametrize("update", [False, True])
def test_batch_moments_normalize_in_evaluation_if_asked_for(update: bool) -> None:
    net = model()
    trained = copy.deepcopy(net)
    expected, before = trained(x()), moments(net)
    with cn.stats_mode(net, "batch", update) as inside:
        torch.testing.assert_close(inside.eval()(x()), expected, rtol=0, atol=0)
    assert same(moments(net), moments(trained) if update else before)
    assert not any(module.training for module in net.modules())
    assert not torch.equal(net(x()), expected)


def test_frozen_norms_survive_modes_copies_and_files(tmp_path: Path) -> None:
    net = model()[:3]
    cn.freeze_norms(net, only=["1", "2"], skip="1")
    assert net[1].weight.requires_grad and not net[2].weight.requires_grad
    net.append(nn.GroupNorm(2, 8))
    cn.freeze_norms(net, only="3")  # it has no moments, but a weight and a bias
    assert not net.pop(3).weight.requires_grad
    cn.freeze_norms(net).train()
    before, expected = moments(net), copy.deepcopy(net).eval()(x())
    assert torch.equal(copy.deepcopy(net)(x()), expected) and torch.equal(net(x()), expected)
    assert same(moments(net), before)
    cn.save_model(net, tmp_path / "net.safetensors")
    loaded = cn.load_model(
        nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.BatchNorm2d(8)), tmp_path / "net.safetensors"
    )
    assert [row.state for row in cn.summarize(loaded.train())] == ["train, constant"] * 2
    assert torch.equal(loaded(x()), expected) and not loaded[1].weight.requires_grad
    assert cn.unfreeze_norms(loaded)[1].weight.requires_grad and not torch.equal(loaded(x()), expected)
    with pytest.raises(ValueError, match="'layer1' is no norm layer"):
        cn.stats_mode(net, only="layer1")


@pytest.mark.parametrize("layer", [nn.BatchNorm2d, cn.BatchNorm2d])
def test_gradients_are_those_of_running_moments_under_checkpointing(layer: type[nn.Module]) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), layer(8), nn.ReLU(), nn.Conv2d(8, 4, 3), layer(4))
    cn.stats_mode(net, "running")
    twin = copy.deepcopy(net)
    for seed in range(3):
        (net(x(seed)) ** 2).sum().backward()
        (checkpoint(twin, x(seed), use_reentrant=False) ** 2).sum().backward()
    for ours, expected in zip(twin.parameters(), net.parameters(), strict=True):
        assert torch.equal(ours.grad, expected.grad)
    assert same(moments(twin), moments(net))
