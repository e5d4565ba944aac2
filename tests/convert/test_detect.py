"""Detection of layers of other libraries by comparison with the norm they appear to be."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

import contnorm as cn
from contnorm.convert.detect import detect_norm
from contnorm.convert.detected import DetectedNorm, UnsupportedNorm
from contnorm.convert.norm_comparison import compare_with_norm
from tests.models import BatchNormAct2d, FrozenBatchNorm2d, ScaledBatchNorm2d


class RewrittenBatchNorm2d(nn.BatchNorm2d):
    """Batch norm with its own forward, which does not count batches and ignores ``track_running_stats``."""

    def forward(self, x: Tensor) -> Tensor:
        mean, var = self.running_mean, self.running_var
        return F.batch_norm(x, mean, var, self.weight, self.bias, self.training, self.momentum or 0.0, self.eps)


class UnusedAct2d(nn.BatchNorm2d):
    """Has `drop` and `act` but does not call them."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.drop, self.act = nn.Identity(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class ActBefore2d(UnusedAct2d):
    def forward(self, x: Tensor) -> Tensor:
        return nn.BatchNorm2d.forward(self, self.act(self.drop(x)))


class LeakyOnlyInTraining2d(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return F.leaky_relu(y) if self.training else y


class BiasedVariance2d(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.running_mean.lerp_(x.mean((0, 2, 3)), self.momentum)
                self.running_var.lerp_(x.var((0, 2, 3), correction=0), self.momentum)
            return F.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)
        return super().forward(x)


class EpsOutside2d(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.training:
            return y
        shape = (1, -1, 1, 1)
        scale = self.weight / (self.running_var.sqrt() + self.eps)
        return (x - self.running_mean.reshape(shape)) * scale.reshape(shape) + self.bias.reshape(shape)


class GhostBatchNorm2d(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        return torch.cat([nn.BatchNorm2d.forward(self, part) for part in x.split(64)])


class WarmUp2d(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        late = self.num_batches_tracked is not None and int(self.num_batches_tracked) > 5_000
        return 2 * super().forward(x) if late else super().forward(x)


class DetachedMoments2d(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if not self.training:
            return y
        mean, var = x.detach().mean((0, 2, 3), keepdim=True), x.detach().var((0, 2, 3), correction=0, keepdim=True)
        shape = (1, -1, 1, 1)
        return (x - mean) / (var + self.eps).sqrt() * self.weight.reshape(shape) + self.bias.reshape(shape)


class AbsoluteWeight2d(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return torch.where(self.weight.reshape(1, -1, 1, 1) < 0, y * 1.5, y)


class Fails2d(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("only on a graphics card\nand more lines")


class NoCopy2d(nn.BatchNorm2d):
    def __deepcopy__(self, memo: dict[int, Any]) -> NoCopy2d:
        return self

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class TwoOutputs2d(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), None


class FrozenBatchNormAct2d(FrozenBatchNorm2d):
    """Stand-in for timm's: constant moments, then drop and activation."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.drop, self.act = nn.Identity(), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight * (self.running_var + self.eps).rsqrt()
        shape = (1, -1, 1, 1)
        y = x * scale.reshape(shape) + (self.bias - self.running_mean * scale).reshape(shape)
        return self.act(self.drop(y))

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        state.pop(f"{prefix}num_batches_tracked", None)
        super()._load_from_state_dict(state, prefix, *rest)


class ChannelsFirstGroupNorm(nn.GroupNorm):
    """Stand-in for timm's: other argument order, and an extra flag."""

    def __init__(self, channels: int, groups: int = 4) -> None:
        super().__init__(groups, channels)
        self._fast_norm = False

    def forward(self, x: Tensor) -> Tensor:
        return F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)


class LayerNorm2d(nn.LayerNorm):
    """Stand-in for that of timm and torchvision: each position of (N, C, H, W) input over its channels."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class ScaledLayerNorm2d(LayerNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class ChannelsLastLayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class ScaledGroupNorm(nn.GroupNorm):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class HandmadeNorm(nn.Module):
    """Not derived from torch's class; updates its moments."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.eps = 1e-5
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, None, None, self.training, 0.1, self.eps)


SAME = [RewrittenBatchNorm2d, BatchNormAct2d]
DIFFERENT = [
    (ScaledBatchNorm2d, "output"),
    (UnusedAct2d, "output"),
    (ActBefore2d, "output"),
    (LeakyOnlyInTraining2d, "training"),
    (BiasedVariance2d, "running_var"),
    (EpsOutside2d, "evaluation"),
    (GhostBatchNorm2d, "training"),
    (WarmUp2d, "output"),
    (DetachedMoments2d, "gradient"),
    (AbsoluteWeight2d, "output"),
    (TwoOutputs2d, "output"),
    (Fails2d, "RuntimeError: only on a graphics card"),
    (NoCopy2d, "shares tensors"),
]


@pytest.mark.parametrize("cls", SAME, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("channels", [1, 8])
def test_equivalent_subclass_is_converted(cls: type[nn.BatchNorm2d], channels: int) -> None:
    model = nn.Sequential(cls(channels))
    x = torch.randn(5, channels, 4, 4) * 2 + 1
    model(x)
    twin = cn.convert_norm(copy.deepcopy(model), "bn")
    assert isinstance(twin[0], cn.BatchNorm2d)
    for training in (True, False):
        torch.testing.assert_close(twin.train(training)(x), model.train(training)(x))


@pytest.mark.parametrize(("cls", "reason"), DIFFERENT, ids=[cls.__name__ for cls, _ in DIFFERENT])
def test_different_subclass_raises(cls: type[nn.BatchNorm2d], reason: str) -> None:
    model = nn.Sequential(nn.BatchNorm2d(8), nn.Sequential(cls(8)))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=reason) as caught:
        cn.convert_norm(model, "cn", num_groups=2)
    message = str(caught.value)
    assert message.count("'1.0'") == 1 and message.count(cls.__name__) == 1 and "\n" not in message
    assert type(model[0]) is nn.BatchNorm2d and type(model[1][0]) is cls
    assert [row.norm for row in cn.summarize(model)] == ["bn", "?"]
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


def test_comparison_does_not_change_layer_or_random_state() -> None:
    calls: list[object] = []
    layer = BatchNormAct2d(8)
    layer.drop = nn.Dropout(0.5)
    layer.act.register_forward_hook(lambda *args: calls.append(args))
    layer(torch.randn(3, 8, 2, 2))
    calls.clear()
    before, attributes = copy.deepcopy(layer.state_dict()), {**vars(layer)}
    state = torch.get_rng_state()
    assert isinstance(detect_norm(layer), DetectedNorm)
    assert torch.equal(torch.get_rng_state(), state) and not calls and vars(layer) == attributes
    assert layer.training and layer.weight.grad is None
    for name, value in layer.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


def test_comparison_does_not_copy_hooks() -> None:
    class Uncopyable:
        def __call__(self, *args: object) -> None:
            raise AssertionError("called")

        def __deepcopy__(self, memo: object) -> None:
            raise AssertionError("copied")

    layer = RewrittenBatchNorm2d(8)
    layer.register_forward_hook(Uncopyable())
    assert isinstance(detect_norm(layer), DetectedNorm)


def test_comparison_does_not_call_global_hooks() -> None:
    def fail(*args: object) -> None:
        raise AssertionError("called")

    handle = torch_module.register_module_forward_pre_hook(lambda m, args: fail() if type(m) in SAME else None)
    try:
        assert isinstance(detect_norm(RewrittenBatchNorm2d(8)), DetectedNorm)
    finally:
        handle.remove()


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu")])
def test_comparison_ignores_grad_mode_and_autocast(around: Any) -> None:
    layers = [BatchNormAct2d(8), RewrittenBatchNorm2d(8, momentum=0.003), DetachedMoments2d(8)]
    with around():
        result = [detect_norm(layer) for layer in layers]
    assert [type(f) for f in result] == [DetectedNorm, DetectedNorm, UnsupportedNorm]


def test_comparison_of_half_precision_and_meta_layers() -> None:
    assert isinstance(detect_norm(RewrittenBatchNorm2d(8).half()), DetectedNorm)
    assert isinstance(detect_norm(RewrittenBatchNorm2d(8).to("meta")), DetectedNorm)
    assert isinstance(detect_norm(ScaledBatchNorm2d(8).to("meta")), UnsupportedNorm)


def test_comparison_detects_other_settings() -> None:
    expected = DetectedNorm("gn", 8, None, {"eps": 1e-5, "num_groups": 4}, acts=False, constant=False)
    assert not compare_with_norm(nn.GroupNorm(4, 8), expected).reason
    assert compare_with_norm(nn.GroupNorm(2, 8), expected).reason


def test_subclasses_of_our_layers_are_compared() -> None:
    class Doubled(cn.ContinualNorm2d):
        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            return 2 * super().forward(*args, **kwargs)

    class Passed(cn.ContinualNorm1d):
        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            return super().forward(*args, **kwargs)

    assert isinstance(detect_norm(Doubled(8, num_groups=2)), UnsupportedNorm)
    result = detect_norm(Passed(8, num_groups=2, order="bn_gn"))
    assert isinstance(result, DetectedNorm) and result.norm == "bn_gn"


@pytest.mark.parametrize("to", ["bn", "cn"])
def test_constant_norm_act_layer_is_converted(to: str) -> None:
    model = nn.Sequential(FrozenBatchNormAct2d(8))
    (row,) = cn.summarize(model)
    assert (row.norm, row.state) == ("bn", "train, constant, then acts")
    x = torch.randn(4, 8, 5, 5)
    expected = model(x)
    cn.convert_norm(model, to, **({"num_groups": 2} if to == "cn" else {}))
    before = model[0].running_mean.clone()
    y = model.train()(x)
    if to == "bn":
        torch.testing.assert_close(y, expected)
    assert torch.equal(model[0].running_mean, before) and not any(p.requires_grad for p in model.parameters())
    assert cn.summarize(model).rows[0].norm == to


def test_unknown_layer_with_running_moments_is_listed_and_raises() -> None:
    model = nn.Sequential(nn.BatchNorm2d(8), HandmadeNorm(8))
    assert [row.norm for row in cn.summarize(model)] == ["bn", "?"]
    with pytest.raises(ValueError, match=r"'1' \(HandmadeNorm\): it keeps running moments"):
        cn.convert_norm(model, "cn", num_groups=2)
    cn.convert_norm(model, "cn", num_groups=2, skip="1")
    assert isinstance(model[0], cn.CN) and isinstance(model[1], HandmadeNorm)


@pytest.mark.parametrize("groups", [1, 4])
def test_group_norm_subclass_is_converted(groups: int) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), ChannelsFirstGroupNorm(8, groups))
    x = torch.randn(2, 3, 4, 4)
    expected = model(x)
    cn.convert_norm(model, "gn")
    assert isinstance(model[1], cn.GroupNorm2d) and model[1].num_groups == groups
    torch.testing.assert_close(model(x), expected)
    assert isinstance(detect_norm(ScaledGroupNorm(2, 8)), UnsupportedNorm)


def test_freeze_works_for_a_layer_that_ignores_tracking() -> None:
    layer = cn.freeze_stats(RewrittenBatchNorm2d(8))
    layer(torch.randn(4, 8, 3, 3) + 5)
    assert torch.equal(layer.running_mean, torch.zeros(8))
    new = cn.convert_norm(nn.Sequential(layer), "cn", num_groups=2)[0]
    new(torch.randn(4, 8, 3, 3) + 5)
    assert torch.equal(new.running_mean, torch.zeros(8)), "still frozen"


def test_error_about_many_layers_is_short() -> None:
    model = nn.Sequential(*(ScaledBatchNorm2d(8) for _ in range(60)))
    with pytest.raises(ValueError, match="'0', '1', '2' and 57 more") as caught:
        cn.convert_norm(model, "cn", num_groups=2)
    assert len(str(caught.value)) < 400
    mixed = nn.Sequential(ScaledBatchNorm2d(8), HandmadeNorm(8), Fails2d(8), EpsOutside2d(8), WarmUp2d(8))
    with pytest.raises(ValueError, match="and 2 more for other reasons"):
        cn.convert_norm(mixed, "cn", num_groups=2)


timm_layers = pytest.mark.parametrize("name", ["GroupNorm", "GroupNorm1", "FrozenBatchNormAct2d", "BatchNormAct2d"])


@timm_layers
def test_detect_layers_of_timm(name: str) -> None:
    layers = pytest.importorskip("timm.layers", reason="timm is not installed", exc_type=ImportError)
    assert isinstance(
        detect_norm(getattr(layers, name)(8, **({"num_groups": 4} if name == "GroupNorm" else {}))), DetectedNorm
    )


@pytest.mark.parametrize("arguments", [{}, {"bias": False}, {"elementwise_affine": False}], ids=str)
def test_layer_norm_of_positions_is_converted(arguments: dict[str, bool]) -> None:
    layer = LayerNorm2d(8, eps=1e-3, **arguments)
    detected = detect_norm(layer)
    assert isinstance(detected, DetectedNorm) and (detected.norm, detected.channels, detected.dim) == ("ln", 8, 2)
    assert detected.per_position and detected.options["eps"] == 1e-3
    converted = cn.convert_norm(nn.Sequential(nn.Conv2d(3, 8, 1), layer), "cn", num_groups=2)[1]
    assert isinstance(converted, cn.ContinualNorm2d) and converted.eps == 1e-3
    assert converted.weight is layer.weight and converted.bias is layer.bias
    assert not detect_norm(cn.LayerNorm2d(8)).per_position  # of each sample, not of each position


def test_layer_norm_of_other_dimensions_is_not_a_norm_of_channels() -> None:
    for layer in (
        nn.LayerNorm(8),
        nn.LayerNorm((8, 4, 4)),
        ScaledLayerNorm2d(8),
        ChannelsLastLayerNorm(8),
        ChannelsLastLayerNorm(2),  # as many channels as the last dimension of the random input
    ):
        assert detect_norm(layer) is None
