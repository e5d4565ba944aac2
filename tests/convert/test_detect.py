"""Which norm a layer is: of torch, of this package, of known libraries, and declared by the user."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import contnorm as cn
from contnorm.detect import DetectedNorm, UnsupportedNorm, detect_norm
from tests.models import BatchNormAct2d, FrozenBatchNorm2d, RenamedBatchNorm2d, ScaledBatchNorm2d, UnknownNorm


class RewrittenBatchNorm2d(nn.BatchNorm2d):
    """Batch norm with its own forward, which does not count batches and ignores ``track_running_stats``."""

    def forward(self, x: Tensor) -> Tensor:
        mean, var = self.running_mean, self.running_var
        return F.batch_norm(x, mean, var, self.weight, self.bias, self.training, self.momentum or 0.0, self.eps)


class FrozenBatchNormAct2d(FrozenBatchNorm2d):
    """Stand-in for timm's: constant moments, then drop and activation."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.drop, self.act = nn.Identity(), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.act(self.drop(super().forward(x)))
        return y


class PositionNorm(nn.LayerNorm):
    """Each position of (N, C, H, W) input over its channels."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


@pytest.mark.parametrize("cls", [ScaledBatchNorm2d, RewrittenBatchNorm2d, BatchNormAct2d, UnknownNorm])
def test_layers_that_may_compute_anything_are_refused(cls: Any) -> None:
    model = nn.Sequential(nn.BatchNorm2d(8), nn.Sequential(cls(8)))
    with pytest.raises(ValueError, match=rf"'1.0' \({cls.__name__}\).*treat_as"):
        cn.convert_norm(model, "cn", num_groups=2)
    assert type(model[0]) is nn.BatchNorm2d
    assert [row.norm for row in cn.summarize(model)] == ["bn", "?"]
    cn.convert_norm(model, "cn", num_groups=2, skip="1.*")
    assert [row.norm for row in cn.summarize(model)] == ["cn", "?"]


@pytest.mark.parametrize("cls", [RewrittenBatchNorm2d, BatchNormAct2d])
def test_declared_class_is_converted_and_keeps_its_activation(cls: Any) -> None:
    model = nn.Sequential(cls(8), nn.ModuleList([RenamedBatchNorm2d(8)])[0])
    x = torch.randn(5, 8, 4, 4) * 2 + 1
    model(x)
    twin = cn.convert_norm(copy.deepcopy(model), "bn", treat_as={cls: "bn"})
    assert isinstance(twin[0], cn.BatchNorm2d)
    for training in (True, False):
        torch.testing.assert_close(twin.train(training)(x), model.train(training)(x))


def test_declared_layer_norm_of_positions() -> None:
    layer = PositionNorm(8, eps=1e-3)
    assert detect_norm(layer) is None
    detected = detect_norm(layer, {PositionNorm: "ln"})
    assert isinstance(detected, DetectedNorm) and detected.per_position and detected.channels == 8
    model = nn.Sequential(nn.Conv2d(3, 8, 1), layer)
    converted = cn.convert_norm(model, "cn", num_groups=2, treat_as={PositionNorm: "ln"})[1]
    assert isinstance(converted, cn.ContinualNorm2d) and converted.eps == 1e-3 and converted.weight is layer.weight


@pytest.mark.parametrize("cls", [FrozenBatchNorm2d, FrozenBatchNormAct2d])
@pytest.mark.parametrize("to", ["bn", "cn"])
def test_constant_batch_norm_stays_constant(cls: Any, to: str) -> None:
    model = nn.Sequential(cls(8))
    assert cn.summarize(model).rows[0].state.startswith("train, constant")
    x = torch.randn(4, 8, 5, 5)
    expected = model(x)
    cn.convert_norm(model, to, **({"num_groups": 2} if to == "cn" else {}))
    before = model[0].running_mean.clone()
    y = model.train()(x)
    if to == "bn":
        torch.testing.assert_close(y, expected)
    assert torch.equal(y, copy.deepcopy(model).eval()(x))
    assert torch.equal(model[0].running_mean, before) and not any(p.requires_grad for p in model.parameters())


def test_layers_with_extra_state_or_behaviour_are_refused() -> None:
    replaced = nn.BatchNorm2d(8)
    replaced.forward = lambda x: x  # type: ignore[method-assign]
    extra = nn.BatchNorm2d(8)
    extra.register_buffer("fisher", torch.zeros(8))

    class Pinned(nn.BatchNorm2d):
        def train(self, mode: bool = True) -> nn.Module:
            return super().train(False)

    class Doubled(cn.ContinualNorm2d):
        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            return 2 * super().forward(*args, **kwargs)

    parametrized = torch.nn.utils.parametrizations.weight_norm(nn.BatchNorm2d(8), dim=None)
    tracked = nn.InstanceNorm2d(8, track_running_stats=True)
    for layer in (replaced, extra, Pinned(8), Doubled(8, num_groups=2), parametrized, tracked, nn.LazyBatchNorm2d()):
        assert isinstance(detect_norm(layer), UnsupportedNorm), layer
    assert isinstance(detect_norm(torch.jit.script(nn.BatchNorm2d(8))), UnsupportedNorm)


def test_subclass_that_changes_nothing_is_its_base() -> None:
    class Renamed(cn.ContinualNorm2d):
        """A subclass that changes nothing."""

    assert cn.summarize(Renamed(64)).rows[0].norm == "cn"
    assert type(cn.convert_norm(nn.Sequential(Renamed(64)), "bn")[0]) is cn.BatchNorm2d
    detected = detect_norm(cn.ContinualNorm1d(8, num_groups=2, order="bn_gn", tied=True))
    assert isinstance(detected, DetectedNorm) and detected.norm == "bn_gn_tied"


def test_layer_norm_of_other_dimensions_is_no_norm_of_channels() -> None:
    for layer in (nn.LayerNorm(8), nn.LayerNorm((8, 4, 4)), PositionNorm(8)):
        assert detect_norm(layer) is None


@pytest.mark.parametrize(
    ("name", "norm"),
    [
        ("GroupNorm", "gn"),
        ("GroupNorm1", "gn"),
        ("GroupNormAct", "gn"),
        ("BatchNormAct2d", "bn"),
        ("FrozenBatchNormAct2d", "bn"),
        ("LayerNorm2d", "ln"),
        ("LayerNormAct2d", "ln"),
    ],
)
def test_layers_of_timm_are_what_they_are_taken_for(name: str, norm: str) -> None:
    """A conversion to the norm of this package leaves the output as it is."""
    layers = pytest.importorskip("timm.layers", reason="timm is not installed", exc_type=ImportError)
    layer = getattr(layers, name)(8, **({"num_groups": 4} if name in ("GroupNorm", "GroupNormAct") else {}))
    detected = detect_norm(layer)
    assert (
        isinstance(detected, DetectedNorm)
        and detected.norm == norm
        and detected.acts is name.endswith(("Act", "Act2d"))
    )
    x = torch.randn(4, 8, 3, 5)
    if not detected.per_position:  # which is no norm of this package
        expected = copy.deepcopy(layer)(x)
        torch.testing.assert_close(cn.convert_norm(nn.Sequential(nn.Conv2d(1, 1, 1), layer), norm)[1](x), expected)
